"""FLOPs of a model by formula: the multiplications and additions of its matrix products.

A product of [a, b] and [b, c] counts as 2 a b c. Everything else (normalisations, softmaxes, updates, copies) is left
out: it is small, and bound by memory.
"""

from collections.abc import Iterator

from lingvo_moe.addons.analysis.parts import PARTS
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.weights import Specs
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
  Rematerialised products count once more, except the last one of a block, whose result no gradient needs.
  """
  batch = task_of(config).batch_shapes()
  rows, length = next(batch[name] for name in ('tgt_labels', 'labels') if name in batch).shape
  source_length = batch['src_ids'].shape[1] if 'src_ids' in batch else 0
  parts = dict.fromkeys(PARTS, 0)
  for name, stack in vars(config.model()).items():
    if isinstance(stack, Stack):
      blocks, again = config.remat == 'block', config.remat != 'none'
      stack_length = source_length if name == 'encoder' else length
      tokens = rows * stack_length
      for layer, is_last in _layers(stack):
        attended = [(rows * n, tokens * n) for n in (stack_length, source_length)[: 1 + layer.cross_attention]]
        _add_attention(parts, config, layer, tokens, attended, 3 + again)
        if again and not blocks:  # of attention that alone is rematerialised the last product is not recomputed
          parts['projections'] -= 2 * tokens * layer.attention.weights()['wo'].size * len(attended)
        if layer.is_moe:
          _add_experts(parts, config, layer.ffn, tokens, config.dispatch, again=blocks)
        else:
          specs = layer.ffn.weights()
          made = (3 + blocks) * _matrices(specs) - (blocks and is_last) * specs['wo'].size
          parts['feed-forward'] += 2 * tokens * made
    elif isinstance(stack, RecurrentStack):  # two LSTMs and a layer between them
      parts['other'] += 2 * 3 * 2 * rows * length * _matrices(stack.lstm.weights())
      if stack.moe:
        _add_experts(parts, config, stack.moe, rows * length, config.dispatch)
      else:
        parts['feed-forward'] += 3 * 2 * rows * length * _matrices(stack.ffn.weights())
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
  parts: Parts, config: ModelConfig, layer: MoE, tokens: int, dispatch: str, *, again: bool = False
) -> None:
  """Adds the FLOPs of a MoE layer in training, forward and backward."""
  factor = config.slots_factor or config.round_capacity_factor  # dropless: of one round
  slots = config.num_experts * layer.gate.capacity(tokens // config.num_groups, config.num_experts, factor)  # a group's
  _add_moe(parts, layer, tokens, config.num_groups * slots, 3 + again)
  # Dispatch has one gradient, for the tokens; combine has two, for the experts' outputs and for the gates.
  parts['dispatch/combine'] += (2 + again + 3) * 2 * tokens * slots * config.model_dim * (dispatch == 'einsum')


def _add_moe(parts: Parts, layer: MoE, tokens: int, visits: float, times: int = 1) -> None:
  """Adds the FLOPs of gate, experts on so many rows, and shared experts."""
  expert = weights_lib.count(layer.experts.weights()) // layer.num_experts
  parts['gating'] += times * 2 * tokens * layer.gate.products_per_token(layer.model_dim, layer.num_experts)
  parts['experts'] += round(times * 2 * visits * expert)
  parts['feed-forward'] += times * 2 * tokens * (weights_lib.count(layer.shared.weights()) if layer.shared else 0)
