"""FLOPs of a model by formula: the multiplications and additions of its matrix products.

A product of [a, b] and [b, c] counts as 2 a b c. Everything else (normalisations, softmaxes, updates, copies) is left
out: it is small, and bound by memory.
"""

import math
from collections.abc import Iterator

from lingvo_moe.addons.analysis.parts import PARTS
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.weights import Specs
from lingvo_moe.layers import moe
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.recurrent_stack import RecurrentStack
from lingvo_moe.layers.stack import Stack
from lingvo_moe.layers.transformer import Layer
from lingvo_moe.tasks.model_config import ModelConfig
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.tasks.task import task_of
from lingvo_moe.tasks.transformer_config import TransformerConfig

Parts = dict[str, int]  # by the names of PARTS


def train_step(config: ModelConfig) -> Parts:
  """FLOPs of a train step on a full batch, over all devices: every product once forward and twice backward.

  The one-hot masks of einsum dispatch have no gradient of their own; other kinds of dispatch copy rows and add two per
  token, which is left out. All slots of the experts count, whether taken or empty, computed or not (see MoE).
  Dropless, every visit of a token to an expert counts. Rematerialised products count once more, except the last one of
  a block, whose result no gradient needs. In micro-batches whose balance loss is of the batch (balance_over='batch'),
  all that leads to the last gate also counts once more.
  """
  batch = task_of(config).batch_shapes()
  rows, length = next(batch[name] for name in ('tgt_labels', 'labels') if name in batch).shape
  source_length = batch['src_ids'].shape[1] if 'src_ids' in batch else 0
  parts, model = dict.fromkeys(PARTS, 0), config.model()
  stacks = {name: stack for name, stack in vars(model).items() if isinstance(stack, Stack | RecurrentStack)}
  gates_left = 0  # gates of a first run of each micro-batch, which tells their choices
  if config.micro_batches > 1 and moe.balances_batch(model):
    gates_left = sum(_number_of_gates(stack) for stack in stacks.values())
  for name, stack in stacks.items():
    if isinstance(stack, RecurrentStack):  # two LSTMs and a layer between them
      parts['other'] += (2 * 3 + bool(gates_left)) * 2 * rows * length * _matrices(stack.lstm.weights())
      if stack.moe:
        _add_experts(parts, config, stack.moe, rows * length, config.dispatch, first=bool(gates_left))
      else:
        parts['feed-forward'] += 3 * 2 * rows * length * _matrices(stack.ffn.weights())
      continue
    blocks, again = config.remat == 'block', config.remat != 'none'
    stack_length = source_length if name == 'encoder' else length
    tokens = rows * stack_length
    for layer, is_last in _layers(stack):
      attended = [(rows * n, tokens * n) for n in (stack_length, source_length)[: 1 + layer.cross_attention]]
      first = bool(gates_left)
      _add_attention(parts, config, layer, tokens, attended, 3 + again + first)
      if again and not blocks:  # of attention that alone is rematerialised the last product is not recomputed
        parts['projections'] -= 2 * tokens * layer.attention.weights()['wo'].size * len(attended)
      if layer.is_moe:
        gates_left -= first
        _add_experts(parts, config, layer.ffn, tokens, config.dispatch, again=blocks, first=first, ends=not gates_left)
      else:
        specs = layer.ffn.weights()
        made = (3 + blocks + first) * _matrices(specs) - (blocks and is_last) * specs['wo'].size
        parts['feed-forward'] += 2 * tokens * made
  parts['softmax'] = 3 * _scores(config, rows * length)
  return parts


def moe_layer(config: MtConfig, dispatch: str) -> Parts:
  """FLOPs of the first MoE layer, forward and backward, on one side of a full batch; see `train_step`."""
  parts = dict.fromkeys(PARTS, 0)
  tokens = config.batcher().rows(config.max_length) * config.max_length
  _add_experts(parts, config, first_moe(config), tokens, dispatch)
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
  length, width = config.max_length, config.beam_size
  sources, symbols = rows * length, rows * width * length
  written = width * length * (length + 1) // 2  # positions that a hypothesis attends to, summed over the steps
  to_itself, to_source = (symbols, rows * width * written), (sources, symbols * length)
  parts, model = dict.fromkeys(PARTS, 0), config.model()
  for stack, tokens, attended in (
    (model.encoder, sources, [(sources, sources * length)]),
    (model.decoder, symbols, [to_itself, to_source]),
  ):
    for layer, _ in _layers(stack):
      _add_attention(parts, config, layer, tokens, attended)
      if layer.is_moe:
        visits = tokens * layer.ffn.gate.experts_per_token(config.num_experts)
        _add_moe(parts, layer.ffn, tokens, visits)
      else:
        parts['feed-forward'] += 2 * tokens * _matrices(layer.ffn.weights())
  parts['softmax'] = _scores(config, symbols)
  return parts


def _number_of_gates(stack: Stack | RecurrentStack) -> int:
  return bool(stack.moe) if isinstance(stack, RecurrentStack) else sum(layer.is_moe for layer in stack.layers.values())


def _layers(stack: Stack) -> Iterator[tuple[Layer, bool]]:
  """Yields (layer, True if it is the last layer of a rematerialised block)."""
  for number, layer in enumerate(stack.layers.values()):
    yield layer, (number + 1) % stack.period == 0


def _matrices(specs: Specs) -> int:
  """Size of the matrices of a layer, without its biases."""
  return sum(spec.size for name, spec in specs.items() if name.startswith('w'))


def _scores(config: ModelConfig, tokens: int) -> int:
  softmaxes = getattr(config, 'output_experts', 0) or 1
  return 2 * softmaxes * tokens * config.model_dim * config.model().target_embedding.vocab_size


def _add_attention(
  parts: Parts, config: TransformerConfig, layer: Layer, tokens: int, attended: list[tuple[int, int]], times: int = 1
) -> None:
  """Adds the FLOPs of a layer's attentions, to itself and to a source where it has one, with products made `times`.

  There are `tokens` with queries; `attended` has for each attention the tokens with keys and values, and the pairs of a
  query and a key.
  """
  specs = layer.attention.weights()
  queries, keys = specs['wq'].size + specs['wo'].size, specs['wk'].size + specs['wv'].size
  for others, pairs in attended:
    parts['attention'] += times * 2 * 2 * pairs * config.num_heads * config.head_dim  # scores, and weighted sums
    parts['projections'] += times * 2 * (tokens * queries + others * keys)


def _add_experts(
  parts: Parts,
  config: ModelConfig,
  layer: MoE,
  tokens: int,
  dispatch: str,
  *,
  again: bool = False,
  first: bool = False,
  ends: bool = True,
) -> None:
  """Adds the FLOPs of a MoE layer in training, forward and backward.

  `again`: forward once more; `first`: a run forward before these, which `ends` with this layer's gate.
  """
  factor = config.slots_factor or config.round_capacity_factor  # dropless: of one round
  slots = config.num_experts * layer.gate.capacity(tokens // config.num_groups, config.num_experts, factor)  # a group's
  visits, rounds = config.num_groups * slots, 1
  if not config.slots_factor:
    visits = tokens * layer.gate.experts_per_token(config.num_experts)
    rounds = math.ceil(visits / (config.num_groups * slots))
  to_the_end = first and not ends
  _add_moe(parts, layer, tokens, visits, 3 + again + to_the_end)
  parts['gating'] += (first and ends) * _gating(layer, tokens)
  # Dispatch has one gradient, for the tokens; combine has two, for the experts' outputs and for the gates.
  masks = (2 + again + 3 + 2 * to_the_end) * (dispatch == 'einsum')
  parts['dispatch/combine'] += masks * 2 * tokens * rounds * slots * config.model_dim


def _add_moe(parts: Parts, layer: MoE, tokens: int, visits: float, times: int = 1) -> None:
  """Adds the FLOPs of gate, experts on `visits` rows in all, and shared experts."""
  expert = weights_lib.count(layer.experts.weights()) // layer.num_experts
  parts['gating'] += times * _gating(layer, tokens)
  parts['experts'] += round(times * 2 * visits * expert)
  parts['feed-forward'] += times * 2 * tokens * (weights_lib.count(layer.shared.weights()) if layer.shared else 0)


def _gating(layer: MoE, tokens: int) -> int:
  return 2 * tokens * layer.gate.products_per_token(layer.model_dim, layer.num_experts)
