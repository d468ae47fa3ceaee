"""Top-k gate, any k, with capacity or dropless, and the Switch gate, which is the top-1 of it."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe.core.shapes import Size
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.routing import Routing


@dataclasses.dataclass(frozen=True)
class TopK(gate.LinearGate):
  """Top-k gate: each token goes to its k likeliest experts; p = softmax(x W).

  Attributes:
    k: choices of a token.
    normalised: weights p_i / (sum of the chosen p), as in Mixtral (arXiv 2401.04088); otherwise p_i, as in Switch. The
      balance loss counts all k choices.
  """

  k: int = 2
  normalised: bool = True

  def __post_init__(self):
    if self.k == 1 and self.normalised:
      raise ValueError(
        'a top-1 gate normalised over its choice has weight 1 and gets no gradient; saw k=1, normalised=True: '
        'use normalised=False (the switch gate), or k=2'
      )

  def choices(self, num_experts: int) -> float:
    del num_experts
    return self.k

  def __call__(
    self,
    theta: Theta,
    x_GSM: tf.Tensor,
    paddings_GS: tf.Tensor,
    keys_GS: tf.Tensor | None = None,
    capacity: Size | None = None,
  ) -> Routing:
    """Chooses k experts for each token; see Gate."""
    del keys_GS
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    num_experts = logits_GSE.shape[-1]
    gate.check_choices(f'top-{self.k}', self.k, num_experts, capacity)
    real_GS, gates_GSE = gate.real_tokens(paddings_GS), tf.nn.softmax(logits_GSE)
    expert_GSR = gate.top_choices(logits_GSE, self.k)
    weight_GSR = gate.at_choices(gates_GSE, expert_GSR)
    if self.normalised:
      weight_GSR /= tf.reduce_sum(weight_GSR, axis=-1, keepdims=True)
    aux_loss = gate.balance_loss(gates_GSE, expert_GSR, real_GS)
    return gate.routing(
      expert_GSR,
      weight_GSR,
      tf.stack([real_GS] * self.k, axis=-1),
      num_experts,
      capacity,
      gate.statistics(logits_GSE, gates_GSE, real_GS)._replace(aux_loss=aux_loss),
      gate.margin(gates_GSE, expert_GSR),
    )


def switch(scale: float = 1.0) -> TopK:
  """Switch gate (Fedus et al., arXiv 2101.03961): top-1 with weight p, so that the router gets a gradient.

  Its loss is E sum_e f_e P_e (equations 4 to 6), alpha being the configuration's aux_loss_weight; its logits are
  float32 ('selective precision'); capacity factors of 1.0, 1.25 and 2.0 are the paper's; 0.1 is its scale of initial
  weights (section 2.4).
  """
  return TopK(k=1, normalised=False, scale=scale)
