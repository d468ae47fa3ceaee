"""Soft mixture of experts: every expert answers (Jacobs, Jordan, Nowlan and Hinton, 'Adaptive Mixtures of Local Experts', 1991)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe.core.shapes import Size
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.routing import Routing


@dataclasses.dataclass(frozen=True)
class SoftMixture(gate.LinearGate):
  """Soft gate: y = sum_i p_i o_i over all experts, p = softmax(x W). Capacity is ignored: every expert has room for all."""

  def choices(self, num_experts: int) -> float:
    return num_experts

  def __call__(
    self,
    theta: Theta,
    x_GSM: tf.Tensor,
    paddings_GS: tf.Tensor,
    keys_GS: tf.Tensor | None = None,
    capacity: Size | None = None,
  ) -> Routing:
    """Sends each token to every expert, choice r to expert r; see Gate."""
    del keys_GS, capacity
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    groups, size, num_experts = sizes(logits_GSE)
    real_GS, gates_GSE = gate.real_tokens(paddings_GS), tf.nn.softmax(logits_GSE)
    taken_GSE = tf.broadcast_to(real_GS[..., tf.newaxis], [groups, size, num_experts])
    stats = gate.statistics(logits_GSE, gates_GSE, real_GS)
    position_GS = tf.cast(tf.cumsum(real_GS, axis=1, exclusive=True), tf.int32)
    return Routing(
      expert_GSR=tf.broadcast_to(tf.range(num_experts), [groups, size, num_experts]),
      slot_GSR=tf.broadcast_to(position_GS[..., tf.newaxis], [groups, size, num_experts]),
      weight_GSR=gates_GSE * taken_GSE,
      margin_GS=tf.ones([groups, size]),  # nothing is decided
      num_experts=num_experts,
      capacity=size,
      stats=stats._replace(tokens_E=tf.reduce_sum(taken_GSE, axis=[0, 1])),
      every_expert=True,
    )


def competitive_loss(gates_BE: tf.Tensor, outputs_BEM: tf.Tensor, target_BM: tf.Tensor) -> tf.Tensor:
  """Competitive loss -log sum_i p_i exp(-1/2 ||d - o_i||^2) [B], equation 1.3: each expert learns the cases it fits best."""
  log_p_BE = tf.math.log(tf.maximum(gates_BE, 1e-30))
  return -tf.reduce_logsumexp(log_p_BE - 0.5 * _distances(outputs_BEM, target_BM), axis=-1)


def cooperative_loss(gates_BE: tf.Tensor, outputs_BEM: tf.Tensor, target_BM: tf.Tensor) -> tf.Tensor:
  """Cooperative loss ||d - sum_i p_i o_i||^2 [B], equation 1.1: each expert cancels the error that the others leave."""
  y_BM = tf.einsum('BE,BEM->BM', gates_BE, outputs_BEM)
  return tf.reduce_sum(tf.square(target_BM - y_BM), axis=-1)


def _distances(outputs_BEM: tf.Tensor, target_BM: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(tf.square(target_BM[:, tf.newaxis] - outputs_BEM), axis=-1)
