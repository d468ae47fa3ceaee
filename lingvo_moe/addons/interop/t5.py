"""T5, T5 v1.1 and mT5 (arXiv 1910.10683, 2010.11934), and Switch Transformers (arXiv 2101.03961)."""

from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_moe.addons.interop import sparse_layers, vocabulary
from lingvo_moe.addons.interop.config_keys import ACTIVATIONS, FLAG, NUMBER, SHARE, SIZE, TOKEN, Keys, of, one_of, whole
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
from lingvo_moe.storage.json_files import optional

TOKENISER = ('spiece.model', 'tokenizer.json')
_SENTINELS = 100  # of T5's tokeniser, where its configuration does not say how many
_PROJECTIONS = [f'{gated}{name}' for gated in ('', 'gated-') for name in (*ACTIVATIONS, 'gelu')]
_HONOURED = (
  of(SIZE, vocab_size=32_128, d_model=512, d_kv=64, d_ff=2048, num_heads=8, num_layers=6)
  | of(SIZE, relative_attention_num_buckets=32, relative_attention_max_distance=128)
  | of(optional(SIZE), num_decoder_layers=None)
  | of(SHARE, dropout_rate=0.1)
  | of(NUMBER, layer_norm_epsilon=1e-6)
  | of(TOKEN, decoder_start_token_id=None, pad_token_id=0, eos_token_id=1)
)
_DENSE = (
  of(FLAG, tie_word_embeddings=True)
  | of(one_of(*_PROJECTIONS), feed_forward_proj='relu')
  | of(one_of(*ACTIVATIONS), dense_act_fn=...)
  | of(FLAG, is_gated_act=...)
)
_ONLY, _INERT = {'is_encoder_decoder': True}, 'initializer_factor classifier_dropout'
_ALIASES = {'hidden_size': 'd_model', 'num_attention_heads': 'num_heads', 'num_hidden_layers': 'num_layers'}
_T5 = Keys(
  't5',
  ('T5Tokenizer',),
  _HONOURED | _DENSE | of(FLAG, scale_decoder_outputs=...),
  _ONLY,
  _INERT,
  _ALIASES | {'head_dim': 'd_kv'},
)
_MT5 = Keys(
  'mt5',
  ('T5Tokenizer', 'MT5Tokenizer'),
  _HONOURED
  | _DENSE
  | of(SIZE, vocab_size=250_112, d_ff=1024, num_heads=6, num_layers=8)
  | of(one_of(*_PROJECTIONS), feed_forward_proj='gated-gelu')
  | of(FLAG, tie_word_embeddings=False)
  | of(TOKEN, decoder_start_token_id=0),
  _ONLY,
  _INERT,
  _T5.aliases,
)
_SWITCH = Keys(
  'switch_transformers',
  ('T5Tokenizer',),
  _HONOURED
  | of(SIZE, d_model=768, num_heads=12, num_layers=12, num_experts=8)
  | of(optional(SIZE), num_decoder_layers=12)
  | of(one_of(*ACTIVATIONS), dense_act_fn='relu', feed_forward_proj=...)  # which the class does not read
  | of(TOKEN, num_sparse_encoder_layers=3, num_sparse_decoder_layers=3)
  | of(TOKEN, encoder_sparse_step=..., decoder_sparse_step=...)
  | of(whole(64), expert_capacity=64)  # so many tokens of a text find room there, and all do here
  | of(NUMBER, router_aux_loss_coef=0.001, router_z_loss_coef=0.001),
  # Without ties the class reads two tables of embeddings more.
  _ONLY | {'tie_word_embeddings': True, 'router_bias': False, 'router_dtype': 'float32', 'is_gated_act': False},
  'initializer_factor router_jitter_noise router_ignore_padding_tokens add_router_probs',
  _ALIASES,
)
CLASSES = {
  'T5ForConditionalGeneration': _T5,
  'T5WithLMHeadModel': _T5,
  'MT5ForConditionalGeneration': _MT5,
  'SwitchTransformersForConditionalGeneration': _SWITCH,
}

_NAMES = {
  'd_model': 'model_dim',
  'd_ff': 'ff_dim',
  'd_kv': 'head_dim',
  'num_heads': 'num_heads',
  'num_layers': 'encoder_layers',
  'layer_norm_epsilon': 'norm_epsilon',
  'relative_attention_num_buckets': 'relative_buckets',
  'relative_attention_max_distance': 'relative_distance',
  'dropout_rate': 'residual_dropout',
}


def convert(folder: HubFolder, config: Mapping[str, Any]) -> Imported:
  """The folder's model as a run here: text to text, as one language to another."""
  (path,) = folder.need(TOKENISER[0])
  base, size = vocabulary.read(path), config['vocab_size']
  pieces = [piece.piece for piece in base.pieces]
  stated = vocabulary.settings(folder).get('extra_ids')
  sentinels = _SENTINELS if stated is None else stated
  pieces += [f'<extra_id_{i}>' for i in reversed(range(sentinels if '▁<extra_id_0>' not in pieces else 0))]
  if stated is None:
    del pieces[max(size, len(base.pieces)) :]  # MADLAD-400 has no room for sentinels
  found = {piece: i for i, piece in enumerate(pieces)}
  ids = vocabulary.ids(found, config, begin=('<pad>', '<s>', '<unk>'), pad=('<pad>', '<s>'))
  vocabulary.check_added(folder, ids, [name for name in pieces if name.lstrip('▁').startswith('<extra_id_')])
  pieces += [''] * (size - len(pieces))
  symbols = Symbols((*vocabulary.pad_and_begin(config), ids['</s>'], ids['<unk>']), size)
  names = [pieces[i] for i in symbols.theirs]
  model = vocabulary.reordered(base, names, {}, [name for name in names if name.startswith('<extra_id_')])
  return Imported(
    model='mt.t5.Base',
    values={**values(config), 'tag_target': False},
    entries=list(entries(config)),
    symbols=symbols,
    vocabularies={'source_vocab': model, 'target_vocab': model},
    tokeniser=TOKENISER,
    unused=['decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'],
  )


def values(config: Mapping[str, Any]) -> dict[str, Any]:
  gated, name = _activation(config)
  activation, (tied, scaled) = ACTIVATIONS.get(name, (None, None))[gated], _output(config)
  if not activation:
    raise ValueError(f'feed-forward layers with {"a gated " if gated else ""}{name}')
  layers = _layers(config)
  common = ours_of(config, _NAMES) | dict(
    decoder_layers=layers['decoder'],
    num_kv_heads=0,
    norm='rms',
    bias=False,
    activation=activation,
    positions='relative',
    shared_relative=True,
    attention_scale=1.0,
    embedding_scale=1.0,
    tied_output=tied,
    logit_scale=config['d_model'] ** -0.5 if scaled else 1.0,
    input_dropout=config['dropout_rate'],
    attention_dropout=config['dropout_rate'],
    ffn_dropout=config['dropout_rate'],
    shared_vocab=True,
  )
  sparse = _sparse(config)
  if not any(sparse.values()):
    return common | {'num_experts': 0}
  count = max(map(len, sparse.values()))  # there, losses are means of the layers of a stack, here their sums
  return common | dict(
    num_experts=config['num_experts'],
    **sparse_layers.fields(sparse, layers),
    gate='switch',
    expert=activation,
    aux_loss_weight=config['router_aux_loss_coef'] / count,
    router_z_loss_weight=config['router_z_loss_coef'] / count,
  )


def form(ours: Any, models: Mapping[str, bytes]) -> dict[str, Any]:
  """Files of a folder without weights, by a configuration and a vocabulary here: the inverse of `convert`."""
  gated, name = their_activation(ours.activation)
  config = theirs_of(ours, _NAMES) | dict(
    architectures=['SwitchTransformersForConditionalGeneration' if ours.num_experts else 'T5ForConditionalGeneration'],
    model_type='switch_transformers' if ours.num_experts else 't5',
    num_decoder_layers=ours.decoder_layers,
    dense_act_fn=name,
    is_gated_act=gated,
    tie_word_embeddings=ours.tied_output,
  )
  if ours.num_experts:
    sparse = ours.encoder_layers // max(ours.moe_every, 1)
    config |= {f'num_sparse_{stack}_layers': sparse for stack in sparse_layers.STACKS} | sparse_layers.steps(ours)
    config |= {'num_experts': ours.num_experts, 'expert_capacity': max(64, ours.max_length)}
    config |= {'router_aux_loss_coef': ours.aux_loss_weight * sparse}
    config |= {'router_z_loss_coef': ours.router_z_loss_weight * sparse}
  else:
    config['feed_forward_proj'] = f'gated-{name}' if gated else name
  tokeniser = {'tokenizer_class': 'T5Tokenizer', 'extra_ids': 0, 'legacy': False}
  return {'config.json': config, 'tokenizer_config.json': tokeniser, 'spiece.model': models['source_vocab']}


def entries(config: Mapping[str, Any]) -> Iterator[TensorEntry]:
  copies = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
  tied, _ = _output(config)
  copies += ('lm_head.weight',) * tied
  yield TensorEntry('shared.weight', 'target_embedding/table', 'symbols', copies=copies)
  if not tied:
    yield TensorEntry('lm_head.weight', 'output_embedding/table', 'symbols')
  sparse, dense = _sparse(config), 'mlp' if 'num_experts' in config else 'DenseReluDense'
  for stack, count in _layers(config).items():
    bias = f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
    yield TensorEntry(bias, f'{stack}/relative')
    for i in range(count):
      theirs, ours = f'{stack}.block.{i}.layer', f'{stack}/layer_{i:02d}'
      blocks = {'attention': 'SelfAttention'} | ({'cross_attention': 'EncDecAttention'} if stack == 'decoder' else {})
      for place, (block, name) in enumerate(blocks.items()):
        for part in 'qkvo':
          yield from linear(f'{theirs}.{place}.{name}.{part}', f'{ours}/{block}', f'w{part}')
        yield from norm(f'{theirs}.{place}.layer_norm', f'{ours}/{block}/norm', bias=False)
      last, is_moe = f'{theirs}.{len(blocks)}', i in sparse[stack]
      ffn = 'moe' if is_moe else 'ffn'
      yield from norm(f'{last}.layer_norm', f'{ours}/{ffn}/norm', bias=False)
      if is_moe:
        yield from linear(f'{last}.mlp.router.classifier', f'{ours}/moe', 'gate')
        for e in range(config['num_experts']):
          yield from _feed_forward(config, f'{last}.mlp.experts.expert_{e}', f'{ours}/moe', e)
      else:
        yield from _feed_forward(config, f'{last}.{dense}', f'{ours}/ffn')
    yield from norm(f'{stack}.final_layer_norm', f'{stack}/norm', bias=False)


def _feed_forward(config, theirs: str, ours: str, expert: int | None = None) -> Iterator[TensorEntry]:
  gated, _ = _activation(config)
  for name, weight in {'wi_0': 'wg', 'wi_1': 'wi', 'wo': 'wo'}.items() if gated else (('wi', 'wi'), ('wo', 'wo')):
    yield from linear(f'{theirs}.{name}', ours, weight, expert=expert)


def _activation(config: Mapping[str, Any]) -> tuple[bool, str]:
  """Whether feed-forward layers are gated, and their activation: as feed_forward_proj says, or a key of its own."""
  proj = config.get('feed_forward_proj', 'relu')
  derived = 'gelu_new' if proj == 'gated-gelu' else proj.removeprefix('gated-')
  return config.get('is_gated_act', proj.startswith('gated-')), config.get('dense_act_fn', derived)


def _output(config: Mapping[str, Any]) -> tuple[bool, bool]:
  """Whether the output's table is that of the embeddings, and whether logits are scaled by d_model^-0.5.

  In transformers 4 both are tie_word_embeddings. transformers 5 writes that as true always, reads lm_head.weight where
  there is one, and scales as scale_decoder_outputs says; MT5's class there has no such key and never scales.
  """
  tied = config['tie_word_embeddings']
  of_5 = 'scale_decoder_outputs' in config or (config['model_type'] == 'mt5' and config['is_of_5'])
  scaled = config.get('scale_decoder_outputs', tied and not of_5)
  if scaled and not tied:
    raise ValueError('scale_decoder_outputs without tie_word_embeddings')
  return 'lm_head.weight' not in config['tensors'] if of_5 else tied, scaled


def _layers(config: Mapping[str, Any]) -> dict[str, int]:
  """Layers by stack."""
  return {'encoder': config['num_layers'], 'decoder': config['num_decoder_layers'] or config['num_layers']}


def _sparse(config: Mapping[str, Any]) -> dict[str, list[int]]:
  """Layers that have experts, by stack."""
  sparse_fields = {}
  for stack, count in _layers(config).items():
    step = config.get(f'{stack}_sparse_step', count // (config.get(f'num_sparse_{stack}_layers') or 1))
    is_sparse = lambda i, step=step: step == 1 or (step > 0 and i % step == 1)
    sparse_fields[stack] = [i for i in range(count) if 'num_experts' in config and is_sparse(i)]
  return sparse_fields
