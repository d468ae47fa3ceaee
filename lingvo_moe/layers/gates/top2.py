"""Top-2 gate with capacity: GShard (arXiv 2006.16668), Algorithm 1."""

from __future__ import annotations

import fractions
import math

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.shapes import Size
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.gates.routing import RoutingStats


def expert_capacity(group_size: Size, num_experts: int, capacity_factor: float) -> Size:
  """Capacity C = max(1, ceil(capacity_factor * S / E)): a Python int if S is one, else an int32 scalar."""
  # In whole numbers: 1.1 * 100 / 2 is 55, but 55.00000000000001 in floating point, and 56 slots.
  factor = fractions.Fraction(capacity_factor).limit_denominator(10_000)
  slots = lambda size: -(-size * factor.numerator // (factor.denominator * num_experts))
  if isinstance(group_size, int):
    return max(1, slots(group_size))
  return tf.maximum(1, tf.cast(slots(tf.cast(group_size, tf.int64)), tf.int32))


def top2_gating(
  logits_GSE: tf.Tensor,
  paddings_GS: tf.Tensor,
  *,
  capacity: Size | None = None,
  noise_GS: tf.Tensor | None = None,
) -> Routing:
  """Top-2 gating: sends each token to its two likeliest experts, while they have free slots.

  GShard, Algorithm 1. Groups do not interact, so with G sharded no communication is needed. It uses argmax and
  one-hot, as XLA would gather the whole gate tensor on every device for a top_k.

  Args:
    logits_GSE: float32 scores. bfloat16 makes ties, and ties misroute.
    paddings_GS: 1.0 at padding, which takes no slot and counts in no statistic.
    capacity: C, slots of an expert for each group; None: as many as the longest queue needs, so that none is dropped.
    noise_GS: uniform [0, 1); the second choice is kept where 2 * gate > noise. None keeps every one.

  Returns:
    A Routing with R=2. A token's weights sum to 1 before drops and are not rescaled after.

  Raises:
    ValueError: with fewer than 2 experts or no slot; the message names both and the way out.
  """
  num_experts = logits_GSE.shape[-1]
  if num_experts < 2 or (isinstance(capacity, int) and capacity < 1):
    raise ValueError(
      f'top-2 gating needs 2 experts and 1 slot or more; saw num_experts={num_experts}, '
      f'capacity={capacity}: add experts, or raise capacity_factor'
    )
  logits_GSE = tf.cast(logits_GSE, tf.float32)
  real_GS = 1.0 - tf.cast(paddings_GS, tf.float32)

  # Lines 3-4, 14-15: the softmax and its two largest entries, normalised over the chosen two.
  gates_GSE = tf.nn.softmax(logits_GSE)
  first_GS = tf.argmax(logits_GSE, axis=-1, output_type=tf.int32)
  rest_GSE = tf.where(tf.one_hot(first_GS, num_experts, on_value=True, off_value=False), -math.inf, logits_GSE)
  second_GS = tf.argmax(rest_GSE, axis=-1, output_type=tf.int32)
  one_hot = lambda expert_GS: tf.one_hot(tf.where(real_GS > 0, expert_GS, -1), num_experts)  # zeros at padding
  gate_of = lambda mask_GSE: tf.reduce_sum(gates_GSE * mask_GSE, axis=-1)
  first_GSE = one_hot(first_GS)
  gate1_GS, gate2_GS = gate_of(first_GSE), gate_of(one_hot(second_GS))
  total_GS = gate1_GS + gate2_GS + tf.cast(real_GS == 0, tf.float32)  # padding divides by 1, not by 0
  gate1_GS, gate2_GS = gate1_GS / total_GS, gate2_GS / total_GS

  # Lines 18-20: the second choice is taken with probability 2 * gate. A skipped one takes no slot: a departure from
  # line 22, as in Lingvo, since skipping is meant to save slots.
  taken2_GS = real_GS
  if noise_GS is not None:
    taken2_GS *= tf.cast(2.0 * gate2_GS > noise_GS, tf.float32)

  # Lines 5-11, 21-22: every first choice takes the next position in the queue of its expert, even beyond the capacity,
  # and second choices queue behind all first choices of their group.
  expert_GSR = tf.stack([first_GS, second_GS], axis=-1)
  taken_GSR = tf.stack([real_GS, taken2_GS], axis=-1)
  with tf.name_scope('cumsum'):
    slot_GSR, served_GE = ops.queue_positions(expert_GSR, taken_GSR > 0, num_experts)
  kept_GSR = taken_GSR
  if capacity is not None:
    kept_GSR *= tf.cast(slot_GSR < capacity, tf.float32)
    served_GE = tf.minimum(served_GE, capacity)
  else:
    capacity = tf.maximum(1, tf.reduce_max(served_GE))

  # log Z from the largest gate, exp(largest logit - log Z), which is at least 1 / E.
  log_z_GS = tf.reduce_max(logits_GSE, axis=-1) - tf.math.log(tf.reduce_max(gates_GSE, axis=-1))
  tokens_G = tf.reduce_sum(real_GS, axis=1)
  tokens, taken2 = tf.reduce_sum(tokens_G), tf.reduce_sum(taken2_GS)
  kept_R = tf.reduce_sum(kept_GSR, axis=[0, 1])
  stats = RoutingStats(
    aux_loss=_auxiliary_loss(gates_GSE, first_GSE, real_GS, tokens_G),
    groups=tf.reduce_sum(tf.cast(tokens_G > 0, tf.float32)),
    tokens=tokens,
    first_dropped=tokens - kept_R[0],
    second_dropped=taken2 - kept_R[1],
    second_skipped=tokens - taken2,
    tokens_E=tf.reduce_sum(tf.cast(served_GE, tf.float32), axis=0),
    entropy=_entropy(logits_GSE, gates_GSE, log_z_GS, real_GS),
    z_loss=tf.reduce_sum(tf.square(log_z_GS) * real_GS),
    rounds=tf.ones([]),
  )
  return Routing(
    expert_GSR=expert_GSR,
    slot_GSR=slot_GSR,
    weight_GSR=tf.stack([gate1_GS, gate2_GS], axis=-1) * kept_GSR,
    margin_GS=_margin(gates_GSE, first_GS, second_GS, gate2_GS, noise_GS),
    num_experts=num_experts,
    capacity=capacity,
    stats=stats,
  )


def _margin(gates_GSE, first_GS, second_GS, gate2_GS, noise_GS) -> tf.Tensor:
  """Margin: smallest difference of first and second gate, second and third, and (with noise) twice the second and its noise."""
  num_experts = gates_GSE.shape[-1]
  gate_of = lambda expert_GS: tf.reduce_sum(gates_GSE * tf.one_hot(expert_GS, num_experts), axis=-1)
  others_GSE = gates_GSE * (1.0 - tf.one_hot(first_GS, num_experts) - tf.one_hot(second_GS, num_experts))
  margin_GS = tf.minimum(
    gate_of(first_GS) - gate_of(second_GS), gate_of(second_GS) - tf.reduce_max(others_GSE, axis=-1)
  )
  if noise_GS is not None:
    margin_GS = tf.minimum(margin_GS, tf.abs(2.0 * gate2_GS - noise_GS))
  return tf.stop_gradient(margin_GS)


def _auxiliary_loss(gates_GSE, first_GSE, real_GS, tokens_G) -> tf.Tensor:
  """Auxiliary loss, line 13 times E^2: E * sum_e (c_e / S)(m_e), so 1 at perfect balance whatever E is (as in Lingvo)."""
  num_experts = gates_GSE.shape[-1]
  size_G1 = tf.maximum(tokens_G, 1.0)[:, tf.newaxis]
  m_GE = tf.reduce_sum(gates_GSE * real_GS[..., tf.newaxis], axis=1) / size_G1
  c_GE = tf.reduce_sum(first_GSE, axis=1) / size_G1
  loss_G = num_experts * tf.reduce_sum(m_GE * tf.stop_gradient(c_GE), axis=-1)
  return tf.reduce_sum(loss_G)  # a group of padding only has loss 0


def _entropy(logits_GSE, gates_GSE, log_z_GS, real_GS) -> tf.Tensor:
  entropy_GS = log_z_GS - tf.reduce_sum(gates_GSE * logits_GSE, axis=-1)
  return tf.stop_gradient(tf.reduce_sum(entropy_GS * real_GS))
