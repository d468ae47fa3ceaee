"""T5, T5 v1.1 and mT5 (arXiv 1910.10683, 2010.11934), and Switch Transformers (arXiv 2101.03961)."""

from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_moe.interop import vocabulary
from lingvo_moe.interop.hub_folder import HubFolder
from lingvo_moe.interop.table import Entry, Imported, Symbols, linear, norm, ours_of, theirs_of

ARCHITECTURES = tuple(f'{name}ForConditionalGeneration' for name in ('T5', 'MT5', 'SwitchTransformers'))
_TOKENISER = ('spiece.model',)
_SENTINELS = 100  # of T5's tokeniser, where its configuration does not say how many
_ACTIVATIONS = {'relu': 'relu', 'gated-gelu': 'geglu', 'gelu_new': 'gelu', 'gated-silu': 'swiglu'}

_NAMES = {
  'd_model': 'model_dim',
  'd_ff': 'ff_dim',
  'd_kv': 'head_dim',
  'num_heads': 'num_heads',
  'num_layers': 'encoder_layers',
  'num_decoder_layers': 'decoder_layers',
  'layer_norm_epsilon': 'norm_epsilon',
  'relative_attention_num_buckets': 'relative_buckets',
  'relative_attention_max_distance': 'relative_distance',
  'dropout_rate': 'residual_dropout',
}


def convert(folder: HubFolder) -> Imported:
  """The folder's model as a run here: text to text, as one language to another."""
  (path,) = folder.need(*_TOKENISER)
  base = vocabulary.read(path)
  pieces = [piece.piece for piece in base.pieces]
  sentinels = folder.json_if_any('tokenizer_config.json').get('extra_ids', _SENTINELS)
  pieces += [f'<extra_id_{i}>' for i in reversed(range(sentinels if '▁<extra_id_0>' not in pieces else 0))]
  pieces += [''] * (folder.config['vocab_size'] - len(pieces))
  special = (*vocabulary.pad_and_begin(folder.config), pieces.index('</s>'), pieces.index('<unk>'))
  symbols = Symbols(special, folder.config['vocab_size'])
  names = [pieces[i] for i in symbols.theirs]
  model = vocabulary.reordered(base, names, {}, [name for name in names if name.startswith('<extra_id_')])
  return Imported(
    model='mt.t5.Base',
    values={**values(folder.config), 'tag_target': False},
    entries=list(entries(folder.config)),
    symbols=symbols,
    vocabularies={'source_vocab': model, 'target_vocab': model},
    tokeniser=_TOKENISER,
    computed=('embed_tokens.weight', *(['lm_head.weight'] if folder.config.get('tie_word_embeddings', True) else [])),
  )


def values(config: Mapping[str, Any]) -> dict[str, Any]:
  activation = _ACTIVATIONS[_projection(config)]
  tied = config.get('tie_word_embeddings', True)
  common = ours_of(config, _NAMES) | dict(
    norm='rms',
    bias=False,
    activation=activation,
    positions='relative',
    shared_relative=True,
    attention_scale=1.0,
    embedding_scale=1.0,
    tied_output=tied,
    logit_scale=config['d_model'] ** -0.5 if tied else 1.0,
    input_dropout=config['dropout_rate'],
    attention_dropout=config['dropout_rate'],
    ffn_dropout=config['dropout_rate'],
    shared_vocab=True,
  )
  if 'num_experts' not in config:
    return common | {'num_experts': 0}
  if config['encoder_sparse_step'] > 2:
    raise ValueError(f'encoder_sparse_step={config["encoder_sparse_step"]}, whose layers are others than here')
  sparse = config['num_sparse_encoder_layers']  # there, losses are means of the layers of a stack, here their sums
  return common | dict(
    num_experts=config['num_experts'],
    moe_every=config['encoder_sparse_step'],
    gate='switch',
    expert=activation,
    aux_loss_weight=config['router_aux_loss_coef'] / sparse,
    router_z_loss_weight=config['router_z_loss_coef'] / sparse,
  )


def form(ours: Any, models: Mapping[str, bytes]) -> dict[str, Any]:
  """Files of a folder without weights, by a configuration and a vocabulary here: the inverse of `convert`."""
  config = theirs_of(ours, _NAMES) | dict(
    architectures=[ARCHITECTURES[2 if ours.num_experts else 0]],
    model_type='switch_transformers' if ours.num_experts else 't5',
    feed_forward_proj={kind: name for name, kind in _ACTIVATIONS.items()}.get(ours.activation, 'relu'),
    tie_word_embeddings=ours.tied_output,
  )
  if ours.num_experts:
    stacks, sparse = ('encoder', 'decoder'), ours.encoder_layers // max(ours.moe_every, 1)
    config |= {f'num_sparse_{stack}_layers': sparse for stack in stacks}
    config |= {f'{stack}_sparse_step': ours.moe_every for stack in stacks}
    config |= {'num_experts': ours.num_experts, 'expert_capacity': ours.max_length}
    config |= {'router_aux_loss_coef': ours.aux_loss_weight * sparse}
    config |= {'router_z_loss_coef': ours.router_z_loss_weight * sparse}
  tokeniser = {'tokenizer_class': 'T5Tokenizer', 'extra_ids': 0, 'legacy': False}
  return {'config.json': config, 'tokenizer_config.json': tokeniser, 'spiece.model': models['source_vocab']}


def entries(config: Mapping[str, Any]) -> Iterator[Entry]:
  yield Entry('shared.weight', 'target_embedding/table', 'symbols')
  if not config.get('tie_word_embeddings', True):
    yield Entry('lm_head.weight', 'output_embedding/table', 'symbols')
  for stack, count in (('encoder', config['num_layers']), ('decoder', config['num_decoder_layers'])):
    every = config.get(f'{stack}_sparse_step')
    bias = f'{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
    yield Entry(bias, f'{stack}/relative')
    for i in range(count):
      theirs, ours = f'{stack}.block.{i}.layer', f'{stack}/layer_{i:02d}'
      blocks = {'attention': 'SelfAttention'} | ({'cross_attention': 'EncDecAttention'} if stack == 'decoder' else {})
      for number, (own, name) in enumerate(blocks.items()):
        for part in 'qkvo':
          yield from linear(f'{theirs}.{number}.{name}.{part}', f'{ours}/{own}', f'w{part}')
        yield from norm(f'{theirs}.{number}.layer_norm', f'{ours}/{own}/norm', bias=False)
      last, is_moe = f'{theirs}.{len(blocks)}', every == 1 or (bool(every) and i % every == 1)
      ffn = 'moe' if is_moe else 'ffn'
      yield from norm(f'{last}.layer_norm', f'{ours}/{ffn}/norm', bias=False)
      if is_moe:
        yield from linear(f'{last}.mlp.router.classifier', f'{ours}/moe', 'gate')
        for e in range(config['num_experts']):
          yield from _feed_forward(config, f'{last}.mlp.experts.expert_{e}', f'{ours}/moe', e)
      else:
        yield from _feed_forward(config, f'{last}.{"mlp" if every else "DenseReluDense"}', f'{ours}/ffn')
    yield from norm(f'{stack}.final_layer_norm', f'{stack}/norm', bias=False)


def _feed_forward(config, theirs: str, ours: str, expert: int | None = None) -> Iterator[Entry]:
  gated = _projection(config).startswith('gated')
  for name, weight in {'wi_0': 'wg', 'wi_1': 'wi', 'wo': 'wo'}.items() if gated else (('wi', 'wi'), ('wo', 'wo')):
    yield from linear(f'{theirs}.{name}', ours, weight, expert=expert)


def _projection(config) -> str:
  return config.get('feed_forward_proj') or config['dense_act_fn']
