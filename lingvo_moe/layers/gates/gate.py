"""Base class of gates, and what they share: logits, top choices, slots of the chosen, statistics, balance loss."""

import abc
import dataclasses
import fractions
import math

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.core.weights import Glorot, Specs, Theta, WeightSpec
from lingvo_moe.layers.gates.routing import Routing, RoutingStats
from lingvo_moe.ops.remat import keep


class Gate(abc.ABC):
  """Gate of a MoE layer: a frozen dataclass, whose fields a configuration sets by fields of the same names."""

  experts_choose: bool = False  # whether experts choose tokens, by all tokens of a group, later ones too
  has_balance_loss: bool = True  # whether aux_loss_weight has an effect
  has_capacity: bool = True  # whether its experts have as many slots as a capacity factor says
  joint_loss: bool = False  # whether its balance loss is of all groups together, not a sum over groups
  tasks: int = 0  # number of tasks, of which it reads a one-hot in place of a token; 0: it reads tokens
  # Fewest experts to choose among, so that others may be pruned; None: it needs all those of its training.
  least_experts: int | None = None

  def check(self, num_experts: int) -> None:
    """Raises a UserError unless the fields fit each other and the number of experts."""
    least = self.least_experts or 1
    if num_experts < least:
      raise UserError(f'this gate chooses among {least} experts or more; saw num_experts={num_experts}: add experts')

  @abc.abstractmethod
  def weights(self, model_dim: int, num_experts: int) -> Specs:
    """Weights, whose names begin with 'gate'; axis J has the experts.

    Those whose spec says float32 stay so where activations are bfloat16, in which logits tie.
    """

  @abc.abstractmethod
  def experts_per_token(self, num_experts: int) -> float:
    """Experts that a token visits; a mean where it varies."""

  def auto_capacity_factor(self, num_experts: int) -> float | None:
    """The capacity factor for 'auto': GShard's 2 or, where a token has more choices, as many. None: dropless alone."""
    return max(2.0, float(self.experts_per_token(num_experts)))

  def capacity(self, group_size: Size | tf.Tensor, num_experts: int, factor: float) -> Size:
    """C, slots of an expert for each group."""
    return expert_capacity(group_size, num_experts, factor)

  def products_per_token(self, model_dim: int, num_experts: int) -> int:
    """Multiplications of a token with weights, at inference and in training."""
    return weights_lib.count(self.weights(model_dim, num_experts))

  @abc.abstractmethod
  def __call__(
    self,
    theta: Theta,
    x_GSM: tf.Tensor,
    paddings_GS: tf.Tensor,
    keys_GS: tf.Tensor | None = None,
    capacity: Size | None = None,
  ) -> Routing:
    """Chooses experts for each token.

    Args:
      x_GSM: tokens, in the type in which logits are computed; of a gate by task its one-hot.
      paddings_GS: 1.0 at padding, which takes no slot and counts in no statistic.
      keys_GS: random key of each token in training; None at inference.
      capacity: C, slots of an expert for each group; None: as many as the longest queue needs, so that none is dropped.
    """


def is_gate_weight(name: str) -> bool:
  """Whether the weight of this name within a layer belongs to the gate."""
  return name.startswith('gate')


@dataclasses.dataclass(frozen=True)
class LinearGate(Gate):
  """Gate with one weight [M, E]; base of gates that differ in how they choose."""

  gate_init_scale: float = dataclasses.field(default=1.0, kw_only=True)  # factor of the initial weights

  def weights(self, model_dim: int, num_experts: int) -> Specs:
    return {'gate': gate_weight(model_dim, num_experts, self.gate_init_scale)}


def gate_weight(model_dim: int, num_experts: int, scale: float = 1.0) -> WeightSpec:
  """Weight [M, E] of a linear gate, with `scale` times Glorot's uniform initial values.

  The columns are candidates, axis J: every token needs all of them, so they are not split like the experts, E.
  """
  init = Glorot(model_dim, num_experts, scale)
  return WeightSpec((model_dim, num_experts), 'MJ', init, factored='MJ', float32=True)


def gate_logits(weight_ME: tf.Tensor, x_GSM: tf.Tensor) -> tf.Tensor:
  """Logits [G, S, E] of a linear gate, float32, by a product in x's type: in bfloat16 they tie, and ties misroute."""
  return tf.cast(keep(ops.product('GSM,ME->GSE', x_GSM, tf.cast(weight_ME, x_GSM.dtype)), 'GSE'), tf.float32)


def expert_capacity(group_size: Size | tf.Tensor, num_experts: int, capacity_factor: float) -> Size:
  """Capacity C = ceil(capacity_factor * S / E), from 1 to S: a Python int if S is one, else an int32 tensor.

  More than S slots would stay empty, as a token takes one slot of an expert at most.
  """
  # In whole numbers: 1.1 * 100 / 2 is 55, but 55.00000000000001 in floating point, and 56 slots.
  factor = fractions.Fraction(capacity_factor).limit_denominator(10_000)
  size = group_size if isinstance(group_size, int) else tf.cast(group_size, tf.int64)
  slots = -(-size * factor.numerator // (factor.denominator * num_experts))
  if isinstance(size, int):
    return max(1, min(size, slots))
  return tf.cast(tf.maximum(tf.constant(1, tf.int64), tf.minimum(size, slots)), tf.int32)


def top_choices(logits_GSE: tf.Tensor, k: int, ties_GSE: tf.Tensor | None = None) -> tf.Tensor:
  """Indices [G, S, k] of the k largest entries, largest first; of equal ones that with the largest tie, or the first.

  By argmax and one-hot, k times: XLA would gather the whole tensor on every device for a top_k.
  """
  num_experts, chosen = logits_GSE.shape[-1], []
  for _ in range(k):
    best_GSE = logits_GSE
    if ties_GSE is not None:
      is_best_GSE = logits_GSE == tf.reduce_max(logits_GSE, axis=-1, keepdims=True)
      best_GSE = tf.where(is_best_GSE, ties_GSE, -math.inf)
    chosen.append(tf.argmax(best_GSE, axis=-1, output_type=tf.int32))
    hot_GSE = tf.one_hot(chosen[-1], num_experts, on_value=True, off_value=False)
    logits_GSE = tf.where(hot_GSE, -math.inf, logits_GSE)
  return keep(tf.stack(chosen, axis=-1), 'GSR')


def at_choices(values_GSE: tf.Tensor, expert_GSR: tf.Tensor) -> tf.Tensor:
  """Values [G, S, R] at the chosen experts; 0 where the expert is -1."""
  hots_GSE = [tf.one_hot(expert_GS, values_GSE.shape[-1]) for expert_GS in tf.unstack(expert_GSR, axis=-1)]
  return tf.stack([tf.reduce_sum(values_GSE * hot_GSE, axis=-1) for hot_GSE in hots_GSE], axis=-1)


def real_tokens(paddings_GS: tf.Tensor) -> tf.Tensor:
  """Mask of real tokens, float32: 1.0 at tokens, 0.0 at padding."""
  return 1.0 - tf.cast(paddings_GS, tf.float32)


def route(
  expert_GSR: tf.Tensor,
  weight_GSR: tf.Tensor,
  taken_GSR: tf.Tensor,
  num_experts: int,
  capacity: Size | None,
  stats: RoutingStats,
  margin_GS: tf.Tensor,
) -> Routing:
  """Routes choices in the order of their ranks: gives each a slot while its expert has one, and counts drops.

  GShard, Algorithm 1, lines 5-11 and 21-22: every first choice takes the next position in the queue of its expert, even
  beyond the capacity, and second choices queue behind all first choices of their group. Groups do not interact, so with
  G sharded no communication is needed.

  Args:
    expert_GSR, num_experts, capacity, margin_GS: see Routing; a capacity of None gives the longest queue room.
    weight_GSR: weights of the experts' outputs before drops; they are not rescaled after.
    taken_GSR: 1.0 where a choice is taken; 0.0 where it is skipped, and at padding.
    stats: statistics, of which those of slots are filled in here.
  """
  with tf.name_scope('cumsum'):
    slot_GSR, length_GE = ops.queue_positions(expert_GSR, taken_GSR > 0, num_experts)
  slot_GSR, kept_GSR = keep(slot_GSR, 'GSR'), taken_GSR
  if capacity is not None:
    kept_GSR *= tf.cast(slot_GSR < capacity, tf.float32)
    length_GE = tf.minimum(length_GE, capacity)
  else:
    capacity = tf.maximum(1, tf.reduce_max(length_GE))
  taken_R, kept_R = tf.reduce_sum(taken_GSR, axis=[0, 1]), tf.reduce_sum(kept_GSR, axis=[0, 1])
  return Routing(
    expert_GSR=expert_GSR,
    slot_GSR=slot_GSR,
    weight_GSR=weight_GSR * kept_GSR,
    margin_GS=tf.stop_gradient(margin_GS),
    num_experts=num_experts,
    capacity=capacity,
    stats=stats._replace(
      dropped_R=taken_R - kept_R,
      skipped=tf.reduce_sum(stats.tokens - taken_R),
      tokens_E=tf.reduce_sum(tf.cast(length_GE, tf.float32), axis=0),
    ),
  )


routing = route  # its name until 0.1


def route_to_every_expert(
  gates_GSE: tf.Tensor, taken_GSE: tf.Tensor, capacity: Size, stats: RoutingStats, margin_GS: tf.Tensor
) -> Routing:
  """Routes choice r of each token to expert r, for gates by which no queue is longer than the capacity; see `route`.

  A token visits the experts where taken_GSE is 1.0; their outputs have the weights gates_GSE.
  """
  num_experts = gates_GSE.shape[-1]
  return Routing(
    expert_GSR=tf.broadcast_to(tf.range(num_experts), sizes(gates_GSE)),
    slot_GSR=tf.cast(tf.cumsum(taken_GSE, axis=1, exclusive=True), tf.int32),
    weight_GSR=gates_GSE * taken_GSE,
    margin_GS=tf.stop_gradient(margin_GS),
    num_experts=num_experts,
    capacity=capacity,
    stats=stats._replace(tokens_E=tf.reduce_sum(taken_GSE, axis=[0, 1])),
    every_expert=True,
  )


def statistics(logits_GSE: tf.Tensor, gates_GSE: tf.Tensor, real_GS: tf.Tensor) -> RoutingStats:
  """Statistics of a softmax gate without a balance loss, before any slot is given."""
  # log Z from the largest gate, exp(largest logit - log Z), which is at least 1 / E.
  log_z_GS = tf.reduce_max(logits_GSE, axis=-1) - tf.math.log(tf.reduce_max(gates_GSE, axis=-1))
  entropy_GS = log_z_GS - tf.reduce_sum(gates_GSE * logits_GSE, axis=-1)
  tokens_G = tf.reduce_sum(real_GS, axis=1)
  return RoutingStats(
    aux_loss=tf.zeros([]),
    groups=tf.reduce_sum(tf.cast(tokens_G > 0, tf.float32)),
    tokens=tf.reduce_sum(tokens_G),
    dropped_R=tf.zeros([1]),
    skipped=tf.zeros([]),
    tokens_E=tf.zeros([logits_GSE.shape[-1]]),
    entropy=tf.stop_gradient(tf.reduce_sum(entropy_GS * real_GS)),
    z_loss=tf.reduce_sum(tf.square(log_z_GS) * real_GS),
    rounds=tf.ones([]),
  )


def balance_loss(gates_GSE: tf.Tensor, expert_GSR: tf.Tensor, real_GS: tf.Tensor, over: str = 'group') -> tf.Tensor:
  """Balance loss E * sum_e c_e m_e of each group, summed: c_e is the share of choices, m_e the mean gate, of expert e.

  GShard, Algorithm 1, line 13 times E^2, so 1 at perfect balance whatever E is; with one choice that of Switch
  Transformers (equations 4 to 6). Both means are over the n real tokens; Lingvo divides by S, padding included, so this
  is (S / n)^2 times its loss. No gradient passes through c_e. A group of padding only has loss 0.

  With `over='batch'`, c_e and m_e are to be of all groups of a batch together (Qiu et al., arXiv 2501.11873), and this
  is [2 E]: the sums of m and of c over the real tokens, from which models/losses.py makes the loss.
  """
  num_experts, ranks = gates_GSE.shape[-1], expert_GSR.shape[-1]
  gates_GE = tf.reduce_sum(gates_GSE * real_GS[..., tf.newaxis], axis=1)
  hots_GSE = [tf.one_hot(tf.where(real_GS > 0, expert_GSR[..., rank], -1), num_experts) for rank in range(ranks)]
  chosen_GE = tf.stop_gradient(tf.reduce_sum(sum(hots_GSE[1:], hots_GSE[0]), axis=1))
  if over == 'batch':
    return tf.concat([tf.reduce_sum(gates_GE, axis=0), tf.reduce_sum(chosen_GE, axis=0)], axis=0)
  size_G1 = tf.maximum(tf.reduce_sum(real_GS, axis=1), 1.0)[:, tf.newaxis]
  return tf.reduce_sum(num_experts * tf.reduce_sum(gates_GE / size_G1 * (chosen_GE / (ranks * size_G1)), axis=-1))


def margin(values_GSE: tf.Tensor, expert_GSR: tf.Tensor) -> tf.Tensor:
  """Margin of choosing: smallest difference of values next to each other in rank, down to the best not chosen."""
  num_experts, ranks = values_GSE.shape[-1], expert_GSR.shape[-1]
  value_GSR = at_choices(values_GSE, expert_GSR)
  gaps = [value_GSR[..., r] - value_GSR[..., r + 1] for r in range(ranks - 1)]
  if ranks < num_experts:
    others_GSE = values_GSE
    for rank in range(ranks):
      chosen_GSE = tf.one_hot(expert_GSR[..., rank], num_experts, on_value=True, off_value=False)
      others_GSE = tf.where(chosen_GSE, -math.inf, others_GSE)
    gaps.append(value_GSR[..., -1] - tf.reduce_max(others_GSE, axis=-1))
  return tf.reduce_min(tf.stack(gaps, axis=-1), axis=-1) if gaps else tf.ones(sizes(expert_GSR)[:2])
