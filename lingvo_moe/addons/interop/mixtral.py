"""Mixtral (arXiv 2401.04088): a language model whose every layer has SwiGLU experts, of which a token visits two."""

from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_moe.addons.interop import vocabulary
from lingvo_moe.addons.interop.config_keys import ACTIVATIONS, FLAG, NUMBER, SHARE, SIZE, TOKEN, Keys, of, one_of
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.addons.interop.tensor_table import (
  Imported,
  Symbols,
  TensorEntry,
  linear,
  norm,
  ours_of,
  their_activation,
  theirs_of,
)
from lingvo_moe.storage.json_files import OBJECT, Kind, optional

_OF_ROPE = ({'rope_theta'}, {'rope_theta', 'rope_type'})
_ROPE = Kind(
  "an object of rope_theta, a number, and rope_type 'default'",
  lambda value: (
    OBJECT.fits(value)
    and {*value} in _OF_ROPE
    and NUMBER.fits(value['rope_theta'])
    and value.get('rope_type', 'default') == 'default'
  ),
)
CLASSES = {
  'MixtralForCausalLM': Keys(
    'mixtral',
    ('LlamaTokenizer',),
    of(SIZE, vocab_size=32_000, hidden_size=4096, intermediate_size=14_336, num_attention_heads=32)
    | of(SIZE, num_experts_per_tok=2, num_local_experts=8, num_hidden_layers=32)
    | of(optional(SIZE), num_key_value_heads=8, head_dim=None)
    | of(one_of(*(name for name, (_, gated) in ACTIVATIONS.items() if gated)), hidden_act='silu')
    | of(NUMBER, rms_norm_eps=1e-5, rope_theta=1e6, router_aux_loss_coef=0.001)
    | of(FLAG, tie_word_embeddings=False)
    | of(SHARE, attention_dropout=0.0)
    | of(TOKEN, eos_token_id=2)
    | of(optional(_ROPE), rope_parameters=None),  # of transformers 5, in place of rope_theta
    only={'is_encoder_decoder': False, 'rope_scaling': None, 'partial_rotary_factor': 1.0},
    inert='max_position_embeddings initializer_range router_jitter_noise output_router_logits pad_token_id '
    'decoder_start_token_id',
  )
}
TOKENISER = ('tokenizer.model', 'tokenizer.json')

_NAMES = {
  'hidden_size': 'model_dim',
  'intermediate_size': 'ff_dim',
  'num_hidden_layers': 'num_layers',
  'num_attention_heads': 'num_heads',
  'rms_norm_eps': 'norm_epsilon',
  'tie_word_embeddings': 'tied_output',
  'num_local_experts': 'num_experts',
  'num_experts_per_tok': 'choices',
  'attention_dropout': 'attention_dropout',
}


def convert(folder: HubFolder, config: Mapping[str, Any]) -> Imported:
  (path,) = folder.need(TOKENISER[0])
  base, size = vocabulary.read(path), config['vocab_size']
  ids = vocabulary.ids({piece.piece: i for i, piece in enumerate(base.pieces)}, config, begin=())
  vocabulary.check_added(folder, ids)
  pieces = [*ids]
  pieces += [''] * (size - len(pieces))
  pad = pieces.index('<pad>') if '<pad>' in pieces else -1
  symbols = Symbols((pad, *map(pieces.index, ('<s>', '</s>', '<unk>'))), size)
  return Imported(
    model='lm.mixtral.Mixtral8x7B',
    values=values(config),
    entries=list(entries(config)),
    symbols=symbols,
    vocabularies={'vocab': vocabulary.reordered(base, [pieces[i] for i in symbols.theirs], {})},
    tokeniser=TOKENISER,
    unused=['model.layers.*.self_attn.rotary_emb.inv_freq'],
  )


def values(config: Mapping[str, Any]) -> dict[str, Any]:
  heads, choices = config['num_attention_heads'], config['num_experts_per_tok']
  return ours_of(config, _NAMES) | dict(
    num_kv_heads=(config['num_key_value_heads'] or heads) % heads,
    head_dim=config['head_dim'] or config['hidden_size'] // heads,
    rotary_base=(config['rope_parameters'] or config)['rope_theta'],
    embedding_scale=1.0,
    scan_layers=False,
    remat='none',
    activation_dtype='float32',
    dispatch='auto',
    moe_every=1,
    gate='top_k',
    expert=ACTIVATIONS[config['hidden_act']][1],
    # Theirs is of all layers together, and `choices` where all experts have an equal share; here the sum of layers, 1.
    aux_loss_weight=config['router_aux_loss_coef'] * choices / config['num_hidden_layers'],
  )


def form(ours: Any, models: Mapping[str, bytes]) -> dict[str, Any]:
  """Files of a folder without weights, by a configuration and a vocabulary here: the inverse of `convert`."""
  config = theirs_of(ours, _NAMES) | dict(
    architectures=[*CLASSES],
    model_type='mixtral',
    num_key_value_heads=ours.num_kv_heads or ours.num_heads,
    rope_theta=ours.rotary_base,
    head_dim=ours.head_dim,
    hidden_act=their_activation(ours.expert)[1],
    max_position_embeddings=ours.window,
    router_aux_loss_coef=ours.aux_loss_weight * ours.num_layers / ours.choices,
  )
  tokeniser = {'tokenizer_class': 'LlamaTokenizer', 'legacy': False}
  return {'config.json': config, 'tokenizer_config.json': tokeniser, 'tokenizer.model': models['vocab']}


def entries(config: Mapping[str, Any]) -> Iterator[TensorEntry]:
  tied = config['tie_word_embeddings']
  copies = ('lm_head.weight',) * tied
  yield TensorEntry('model.embed_tokens.weight', 'target_embedding/table', 'symbols', copies=copies)
  if not tied:
    yield TensorEntry('lm_head.weight', 'output_embedding/table', 'symbols')
  for i in range(config['num_hidden_layers']):
    theirs, ours = f'model.layers.{i}', f'decoder/layer_{i:02d}'
    yield from norm(f'{theirs}.input_layernorm', f'{ours}/attention/norm', bias=False)
    for part in 'qkvo':
      yield from linear(f'{theirs}.self_attn.{part}_proj', f'{ours}/attention', f'w{part}')
    yield from norm(f'{theirs}.post_attention_layernorm', f'{ours}/moe/norm', bias=False)
    yield from linear(f'{theirs}.block_sparse_moe.gate', f'{ours}/moe', 'gate')
    for e in range(config['num_local_experts']):
      for name, weight in (('w1', 'wg'), ('w3', 'wi'), ('w2', 'wo')):
        yield from linear(f'{theirs}.block_sparse_moe.experts.{e}.{name}', f'{ours}/moe', weight, expert=e)
  yield from norm('model.norm', 'decoder/norm', bias=False)
