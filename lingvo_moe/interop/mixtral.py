"""Mixtral (arXiv 2401.04088): a language model whose every layer has SwiGLU experts, of which a token visits two."""

from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_moe.interop import vocabulary
from lingvo_moe.interop.hub_folder import HubFolder
from lingvo_moe.interop.table import Entry, Imported, Symbols, linear, norm, ours_of, theirs_of

ARCHITECTURES = ('MixtralForCausalLM',)
_TOKENISER = ('tokenizer.model',)

_NAMES = {
  'hidden_size': 'model_dim',
  'intermediate_size': 'ff_dim',
  'num_hidden_layers': 'num_layers',
  'num_attention_heads': 'num_heads',
  'rope_theta': 'rotary_base',
  'rms_norm_eps': 'norm_epsilon',
  'tie_word_embeddings': 'tied_output',
  'num_local_experts': 'num_experts',
  'num_experts_per_tok': 'choices',
}


def convert(folder: HubFolder) -> Imported:
  (path,) = folder.need(*_TOKENISER)
  base, size = vocabulary.read(path), folder.config['vocab_size']
  pieces = [piece.piece for piece in base.pieces] + [''] * (size - len(base.pieces))
  pad = pieces.index('<pad>') if '<pad>' in pieces else -1
  symbols = Symbols((pad, *map(pieces.index, ('<s>', '</s>', '<unk>'))), size)
  return Imported(
    model='lm.mixtral.Mixtral8x7B',
    values=values(folder.config),
    entries=list(entries(folder.config)),
    symbols=symbols,
    vocabularies={'vocab': vocabulary.reordered(base, [pieces[i] for i in symbols.theirs], {})},
    tokeniser=_TOKENISER,
  )


def values(config: Mapping[str, Any]) -> dict[str, Any]:
  heads, choices = config['num_attention_heads'], config['num_experts_per_tok']
  return ours_of(config, _NAMES) | dict(
    num_kv_heads=config['num_key_value_heads'] % heads,
    head_dim=config.get('head_dim') or config['hidden_size'] // heads,
    embedding_scale=1.0,
    scan_layers=False,
    remat='none',
    activation_dtype='float32',
    dispatch='auto',
    moe_every=1,
    gate='top_k',
    expert='swiglu',
    # Theirs is of all layers together, and `choices` where all experts have an equal share; here the sum of layers, 1.
    aux_loss_weight=config['router_aux_loss_coef'] * choices / config['num_hidden_layers'],
  )


def form(ours: Any, models: Mapping[str, bytes]) -> dict[str, Any]:
  """Files of a folder without weights, by a configuration and a vocabulary here: the inverse of `convert`."""
  config = theirs_of(ours, _NAMES) | dict(
    architectures=[*ARCHITECTURES],
    model_type='mixtral',
    num_key_value_heads=ours.num_kv_heads or ours.num_heads,
    head_dim=ours.head_dim,
    max_position_embeddings=ours.window,
    router_aux_loss_coef=ours.aux_loss_weight * ours.num_layers / ours.choices,
  )
  tokeniser = {'tokenizer_class': 'LlamaTokenizer', 'legacy': False}
  return {'config.json': config, 'tokenizer_config.json': tokeniser, 'tokenizer.model': models['vocab']}


def entries(config: Mapping[str, Any]) -> Iterator[Entry]:
  yield Entry('model.embed_tokens.weight', 'target_embedding/table', 'symbols')
  if not config['tie_word_embeddings']:
    yield Entry('lm_head.weight', 'output_embedding/table', 'symbols')
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
