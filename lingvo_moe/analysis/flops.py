"""FLOPs of a model by formula: the multiplications and additions of its matrix products.

A product of [a, b] and [b, c] counts as 2 a b c. Everything else (normalisations, softmaxes, updates, copies) is left
out: it is small, and bound by memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from lingvo_moe.analysis.parts import PARTS
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.weights import Specs
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.recurrent_stack import RecurrentStack
from lingvo_moe.layers.stack import Stack
from lingvo_moe.layers.transformer import Layer
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.task import task_of
from lingvo_moe.tasks.transformer_config import ModelConfig, TransformerConfig

Parts = dict[str, int]  # by the names of PARTS


def train_step(config: ModelConfig) -> Parts:
  """FLOPs of a train step on a full batch, over all devices: every product once forward and twice backward.

  The one-hot masks of einsum dispatch have no gradient of their own; other kinds of dispatch copy rows and add two per
  token, which is left out. All slots of the experts count, whether taken or empty, computed or not (see MoE).
  Rematerialised products count once more, except the last one of a block, whose result no gradient needs.
  """
  batch = task_of(config).batch_shapes()
  rows, length = next(batch[name] for name in ('tgt_labels', 'labels') if name in batch).shape
  source_length = batch['src_ids'].shape[1] if 'src_ids' in batch else 0
  parts = dict.fromkeys(PARTS, 0)
  for name, stack in vars(config.model()).items():
    if isinstance(stack, Stack):
      _add_layers(parts, config, stack, rows, source_length if name == 'encoder' else length, source_length)
    elif isinstance(stack, RecurrentStack):
      _add_recurrent(parts, config, stack, rows * length)
  parts['softmax'] = 3 * _scores(config, rows * length)
  return parts


def _add_layers(
  parts: Parts, config: TransformerConfig, stack: Stack, rows: int, length: int, source_length: int
) -> None:
  """Adds the FLOPs of Transformer layers in training, on rows of `length` that may attend to a source."""
  tokens, blocks, again = rows * length, config.remat == 'block', config.remat != 'none'
  for layer, is_last in _layers(stack):
    specs = layer.attention.weights()
    to_itself, to_source = (tokens, length), (rows * source_length, source_length)
    for others, attended in (to_itself, to_source) if layer.cross_attention else (to_itself,):
      parts['attention'] += (3 + again) * _attention(config, tokens, attended)
      queries, keys = specs['wq'].size + specs['wo'].size, specs['wk'].size + specs['wv'].size
      # The last projection is not recomputed where attention alone is.
      last = (again and not blocks) * specs['wo'].size
      parts['projections'] += 2 * (tokens * ((3 + again) * queries - last) + others * (3 + again) * keys)
    if layer.is_moe:
      _add_experts(parts, config, layer.ffn, tokens, config.dispatch, again=blocks)
    else:
      specs = layer.ffn.weights()
      made = (3 + blocks) * _matrices(specs) - (blocks and is_last) * specs['wo'].size
      parts['feed-forward'] += 2 * tokens * made


def _add_recurrent(parts: Parts, config: ModelConfig, stack: RecurrentStack, tokens: int) -> None:
  """Adds the FLOPs of two LSTMs and the layer between them in training."""
  parts['other'] += 2 * 3 * 2 * tokens * _matrices(stack.lstm.weights())
  if stack.moe:
    _add_experts(parts, config, stack.moe, tokens, config.dispatch, again=False)
  else:
    parts['feed-forward'] += 3 * 2 * tokens * _matrices(stack.ffn.weights())


def moe_layer(config: MtConfig, dispatch: str) -> Parts:
  """FLOPs of the first MoE layer, forward and backward, on one side of a full batch; see `train_step`."""
  parts = dict.fromkeys(PARTS, 0)
  tokens = config.batcher().rows(config.max_length) * config.max_length
  _add_experts(parts, config, first_moe(config), tokens, dispatch, again=False)
  return parts


def first_moe(config: MtConfig) -> MoE:
  """The first MoE layer of the encoder, or of the decoder where the encoder has none; a model of experts has one."""
  model = config.model()
  return next(layer.ffn for stack in (model.encoder, model.decoder) for layer, _ in _layers(stack) if layer.is_moe)


def decode(config: MtConfig, rows: int) -> Parts:
  """FLOPs of flat beam search on rows of max_length tokens for as many steps.

  Experts count for the tokens that visit them, not for empty slots; attention counts for the positions written so far.
  A program with static shapes computes more.
  """
  length, width, heads = config.max_length, config.beam_size, config.num_heads * config.head_dim
  sources, symbols = rows * length, rows * width * length
  projection = lambda tokens: 2 * tokens * config.model_dim * heads
  parts = dict.fromkeys(PARTS, 0)
  model = config.model()
  for layer, _ in _layers(model.encoder):
    parts['attention'] += _attention(config, sources, length)
    parts['projections'] += 4 * projection(sources)
    _add_feed_forward(parts, config, layer, sources)
  for layer, _ in _layers(model.decoder):
    parts['projections'] += 2 * projection(sources)  # keys and values of the encoder's output
    parts['projections'] += (4 + 2) * projection(symbols)  # self-attention, cross-attention
    written = width * length * (length + 1) // 2  # positions that a hypothesis attends to, summed over the steps
    parts['attention'] += 2 * 2 * rows * width * (written + length * length) * heads
    _add_feed_forward(parts, config, layer, symbols)
  parts['softmax'] = _scores(config, symbols)
  return parts


def _layers(stack: Stack) -> Iterator[tuple[Layer, bool]]:
  """Yields (layer, True if it is the last layer of a rematerialised block)."""
  for number, layer in enumerate(stack.layers.values()):
    yield layer, (number + 1) % stack.period == 0


def _attention(config: TransformerConfig, tokens: int, length: int) -> int:
  """FLOPs of attention without its projections: the scores of `length` positions, and their weighted sum."""
  return 2 * 2 * tokens * length * config.num_heads * config.head_dim


def _matrices(specs: Specs) -> int:
  """Size of the matrices of a layer, without its biases."""
  return sum(spec.size for name, spec in specs.items() if name.startswith('w'))


def _scores(config: ModelConfig, tokens: int) -> int:
  return 2 * tokens * config.model_dim * config.model().target_embedding.vocab_size


def _add_experts(parts: Parts, config: ModelConfig, layer: MoE, tokens: int, dispatch: str, *, again: bool) -> None:
  """Adds the FLOPs of a MoE layer in training, forward and backward."""
  factor = config.capacity_factor or config.round_capacity_factor  # dropless: of one round
  group_size = tokens // config.num_groups
  capacity = layer.gate.capacity(group_size, config.num_experts, factor)
  slots = config.num_experts * capacity  # for one group
  masks = 2 * tokens * slots * config.model_dim if dispatch == 'einsum' else 0
  parts['gating'] += (3 + again) * 2 * tokens * _gate_size(layer)
  parts['experts'] += (3 + again) * 2 * config.num_groups * slots * _expert_size(layer)
  parts['feed-forward'] += (3 + again) * 2 * tokens * _shared_size(layer)
  # Dispatch has one gradient, for the tokens; combine has two, for the experts' outputs and for the gates.
  parts['dispatch/combine'] += (2 + again + 3) * masks


def _add_feed_forward(parts: Parts, config: MtConfig, layer: Layer, tokens: int) -> None:
  """Adds the forward FLOPs of a layer's feed-forward, dense or MoE, at inference."""
  if not layer.is_moe:
    parts['feed-forward'] += 2 * 2 * tokens * config.model_dim * config.ff_dim
    return
  visits = tokens * layer.ffn.gate.experts_per_token(config.num_experts)
  parts['experts'] += round(2 * visits * _expert_size(layer.ffn))
  parts['gating'] += 2 * tokens * _gate_size(layer.ffn)
  parts['feed-forward'] += 2 * tokens * _shared_size(layer.ffn)


def _expert_size(layer: MoE) -> int:
  """Weights of one expert."""
  return weights_lib.count(layer.experts.weights()) // layer.num_experts


def _gate_size(layer: MoE) -> int:
  """Weights of a gate that a token is multiplied with."""
  return layer.gate.products_per_token(layer.model_dim, layer.num_experts)


def _shared_size(layer: MoE) -> int:
  """Weights of the matrices of shared experts."""
  return weights_lib.count(layer.shared.weights()) if layer.shared else 0
