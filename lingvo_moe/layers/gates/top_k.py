"""Top-k gate, any k, with capacity or dropless, normalised or not, and the Switch gate."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.config import fields
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.routing import Routing


@dataclasses.dataclass(frozen=True)
class TopK(gate.LinearGate):
  """Top-k gate: each token goes to its k likeliest experts, weighted by p_i / (sum of the chosen p), p = softmax(x W).

  Mixtral's (arXiv 2401.04088). The balance loss counts all k choices.
  """

  choices: int = 2  # k
  normalised: ClassVar[bool] = True

  def check(self, num_experts: int) -> None:
    if self.choices > num_experts:
      fields.refuse(self, 'choices', f'at most num_experts={num_experts}', 'add experts, or choose fewer')
    super().check(num_experts)
    if self.normalised and self.choices == 1:
      way_out = "its one weight would be 1, without a gradient: use gate='switch'"
      fields.refuse(self, 'choices', "2 or more with gate='top_k'", way_out)

  @property
  def least_experts(self) -> int:
    return max(self.choices, 2)

  def experts_per_token(self, num_experts: int) -> float:
    return self.choices

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None) -> Routing:
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    num_experts = logits_GSE.shape[-1]
    real_GS, gates_GSE = gate.real_tokens(paddings_GS), tf.nn.softmax(logits_GSE)
    expert_GSR = gate.top_choices(logits_GSE, self.choices)
    weight_GSR = gate.at_choices(gates_GSE, expert_GSR)
    if self.normalised:
      weight_GSR /= tf.reduce_sum(weight_GSR, axis=-1, keepdims=True)
    aux_loss = gate.balance_loss(gates_GSE, expert_GSR, real_GS)
    stats = gate.statistics(logits_GSE, gates_GSE, real_GS)._replace(aux_loss=aux_loss)
    taken_GSR, margin_GS = tf.stack([real_GS] * self.choices, axis=-1), gate.margin(gates_GSE, expert_GSR)
    return gate.route(expert_GSR, weight_GSR, taken_GSR, num_experts, capacity, stats, margin_GS)


@dataclasses.dataclass(frozen=True)
class TopKUnnormalised(TopK):
  """Top-k gate whose weights are p_i, as those of Switch and Grok-1."""

  normalised: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Switch(TopKUnnormalised):
  """Switch gate (Fedus et al., arXiv 2101.03961): top-1 with weight p, so that the router gets a gradient.

  Its loss is E sum_e f_e P_e (equations 4 to 6), alpha being the configuration's aux_loss_weight; its logits are
  float32 ('selective precision'); capacity factors of 1.0, 1.25 and 2.0 are the paper's; 0.1 is its gate_init_scale
  (section 2.4).
  """

  choices: int = dataclasses.field(default=1, init=False)
