"""Expert choice gate: each expert takes its top tokens (Zhou et al., arXiv 2202.09368)."""

import dataclasses

import tensorflow as tf

from lingvo_moe.config import fields
from lingvo_moe.core.shapes import sizes
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.routing import Routing


@dataclasses.dataclass(frozen=True)
class ExpertChoice(gate.LinearGate):
  """Expert choice: of n tokens of a group, each expert takes the k = ceil(capacity_factor * n / E) it likes most.

  S = softmax(x W) over experts (equation 1); expert e takes the tokens of the k largest S[:, e], each with that weight.
  A token visits capacity_factor experts in the mean, from none to all. Loads are equal, so there is no balance loss.
  The choice depends on later tokens too, so it has no place in a causal decoder.
  """

  capacity_factor: float | None = 2.0
  experts_choose = True
  has_balance_loss = False

  def check(self, num_experts: int) -> None:
    if self.capacity_factor is None:
      rule = "a number with gate='expert_choice': an expert takes that many * tokens / E"
      fields.refuse(self, 'capacity_factor', rule)

  def auto_capacity_factor(self, num_experts: int) -> float:
    return 2.0

  def experts_per_token(self, num_experts: int) -> float:
    return min(self.capacity_factor, num_experts)

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None) -> Routing:
    """Lets each expert choose tokens, in training and at inference alike; choice r of a token is expert r. See Gate."""
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    _, size, num_experts = sizes(logits_GSE)
    real_GS, gates_GSE = gate.real_tokens(paddings_GS), tf.nn.softmax(logits_GSE)
    tokens_G = tf.cast(tf.reduce_sum(real_GS, axis=1), tf.int32)
    taken_GSE = largest(gates_GSE, real_GS, gate.expert_capacity(tokens_G, num_experts, self.capacity_factor))
    unchosen = tf.reduce_sum(real_GS * tf.cast(~tf.reduce_any(taken_GSE, axis=-1), tf.float32))
    stats = gate.statistics(logits_GSE, gates_GSE, real_GS)._replace(dropped_R=unchosen[tf.newaxis])
    margin_GS = _margin(gates_GSE, taken_GSE, real_GS)
    capacity = gate.expert_capacity(size, num_experts, self.capacity_factor)
    return gate.route_to_every_expert(gates_GSE, tf.cast(taken_GSE, tf.float32), capacity, stats, margin_GS)


def largest(values_GSE: tf.Tensor, real_GS: tf.Tensor, k_G: tf.Tensor) -> tf.Tensor:
  """Mask [G, S, E] of the k largest values of each column over S; of equal ones the first. Padding is not chosen.

  Args:
    values_GSE: float32, not negative.
    real_GS: 0.0 at padding.
    k_G: int32 number for each group; one of fewer tokens gives all.

  The k-th largest value is found bit by bit: floats that are not negative are in the order of their bits as integers,
  and each step asks whether k values are as large as the bits found so far with one more set. These are elementwise
  operations and sums, which XLA partitions whatever axis is split; it would gather all logits for a top_k.
  """
  bits_GSE = tf.where(real_GS[..., tf.newaxis] > 0, tf.bitcast(tf.stop_gradient(values_GSE), tf.int32), -1)
  k_G11 = k_G[:, tf.newaxis, tf.newaxis]
  kth_G1E = tf.zeros_like(bits_GSE[:, :1])
  for bit in range(30, -1, -1):
    higher_G1E = kth_G1E | (1 << bit)
    kth_G1E = tf.where(_count(bits_GSE >= higher_G1E) >= k_G11, higher_G1E, kth_G1E)
  above_GSE, equal_GSE = bits_GSE > kth_G1E, bits_GSE == kth_G1E
  place_GSE = tf.cumsum(tf.cast(equal_GSE, tf.int32), axis=1, exclusive=True)
  return above_GSE | (equal_GSE & (place_GSE < k_G11 - _count(above_GSE)))


def _count(mask_GSE: tf.Tensor) -> tf.Tensor:
  """Number of tokens of each group and expert at which a mask is True, [G, 1, E]."""
  return tf.reduce_sum(tf.cast(mask_GSE, tf.int32), axis=1, keepdims=True)


def _margin(gates_GSE: tf.Tensor, taken_GSE: tf.Tensor, real_GS: tf.Tensor) -> tf.Tensor:
  """Margin: distance of a token's gate from the last taken (or the first refused), the smallest over experts."""
  refused_GSE = ~taken_GSE & (real_GS[..., tf.newaxis] > 0)
  last_G1E = tf.reduce_min(tf.where(taken_GSE, gates_GSE, 2.0), axis=1, keepdims=True)
  first_G1E = tf.reduce_max(tf.where(refused_GSE, gates_GSE, -1.0), axis=1, keepdims=True)
  return tf.reduce_min(tf.where(taken_GSE, gates_GSE - first_G1E, last_G1E - gates_GSE), axis=-1)
