"""Soft mixture of experts (Jacobs, Jordan, Nowlan and Hinton, 'Adaptive Mixtures of Local Experts', 1991)."""

import dataclasses

import tensorflow as tf

from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.routing import Routing


@dataclasses.dataclass(frozen=True)
class SoftMixture(gate.LinearGate):
  """Soft gate: y = sum_i p_i o_i over all experts, p = softmax(x W). Every expert has room for all tokens."""

  has_balance_loss = False
  has_capacity = False

  def experts_per_token(self, num_experts: int) -> float:
    return num_experts

  def auto_capacity_factor(self, num_experts: int) -> float:
    return 2.0  # without effect

  def capacity(self, group_size: Size | tf.Tensor, num_experts: int, factor: float) -> Size:
    return group_size

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None) -> Routing:
    """Sends each token to every expert, choice r to expert r; see Gate."""
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    real_GS, gates_GSE = gate.real_tokens(paddings_GS), tf.nn.softmax(logits_GSE)
    taken_GSE = tf.broadcast_to(real_GS[..., tf.newaxis], sizes(gates_GSE))
    stats = gate.statistics(logits_GSE, gates_GSE, real_GS)
    margin_GS = tf.ones_like(real_GS)  # nothing is decided
    return gate.route_to_every_expert(gates_GSE, taken_GSE, sizes(x_GSM)[1], stats, margin_GS)
