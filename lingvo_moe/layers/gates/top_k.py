"""Top-k gate, any k, with capacity or dropless, normalised or not, and the Switch gate."""

import dataclasses
from typing import ClassVar

import tensorflow as tf

from lingvo_moe.config import fields
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Constant, Specs, WeightSpec
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.routing import Routing

_LOWEST = -1e30  # score of an expert that is not to be chosen; finite, as it is multiplied by 0


@dataclasses.dataclass(frozen=True)
class TopK(gate.LinearGate):
  """Top-k gate: each token goes to its k likeliest experts, weighted by p_i / (sum of the chosen p), p = softmax(x W).

  Mixtral's (arXiv 2401.04088). The balance loss counts all k choices.

  DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) has three options of its own. Scores are sigmoids of the logits in place
  of the softmax. A bias per expert is added to them where experts are chosen, and nowhere else; training moves it by
  `router_bias_update_rate` towards equal loads (loss-free balancing, arXiv 2408.15664). A token chooses among the
  experts of `chosen_groups` groups alone, those with the largest sums of their two best scores.
  """

  choices: int = 2  # k
  router_score: str = dataclasses.field(default='softmax', kw_only=True)  # or 'sigmoid'
  router_bias_update_rate: float = dataclasses.field(default=0.0, kw_only=True)  # u; 0: no bias
  groups_of_experts: int = dataclasses.field(default=0, kw_only=True)  # divides the experts; 0: choice among all
  chosen_groups: int = dataclasses.field(default=1, kw_only=True)  # of a token
  balance_over: str = dataclasses.field(default='group', kw_only=True)
  normalised: ClassVar[bool] = True

  def check(self, num_experts: int) -> None:
    if self.choices > num_experts:
      fields.refuse(self, 'choices', f'at most num_experts={num_experts}', 'add experts, or choose fewer')
    super().check(num_experts)
    if self.normalised and self.choices == 1:
      way_out = "its one weight would be 1, without a gradient: use gate='switch'"
      fields.refuse(self, 'choices', "2 or more with gate='top_k'", way_out)
    if groups := self.groups_of_experts:
      if num_experts % groups or num_experts < 2 * groups:
        rule = f'0, or a divisor of num_experts={num_experts} that leaves a group two experts or more'
        fields.refuse(self, 'groups_of_experts', rule)
      if not 1 <= self.chosen_groups <= groups or self.choices > self.chosen_groups * (num_experts // groups):
        rule = f'at most groups_of_experts={groups}, and so many that they have choices={self.choices} experts'
        fields.refuse(self, 'chosen_groups', rule)

  def weights(self, model_dim: int, num_experts: int) -> Specs:
    weights = super().weights(model_dim, num_experts)
    if self.router_bias_update_rate:
      rate = self.router_bias_update_rate
      weights['gate_bias'] = WeightSpec((num_experts,), 'J', Constant(0.0), float32=True, balance_rate=rate)
    return weights

  @property
  def least_experts(self) -> int:
    return max(self.choices, 2)

  def experts_per_token(self, num_experts: int) -> float:
    return self.choices

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None) -> Routing:
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    num_experts = logits_GSE.shape[-1]
    real_GS, softmax_GSE = gate.real_tokens(paddings_GS), tf.nn.softmax(logits_GSE)
    is_sigmoid = self.router_score == 'sigmoid'
    scores_GSE = tf.sigmoid(logits_GSE) if is_sigmoid else softmax_GSE
    # Shares of scores are softmaxes of these, finite where all scores of a token underflow to 0.
    log_scores_GSE = tf.math.log_sigmoid(logits_GSE) if is_sigmoid else logits_GSE
    candidates_GSE, group_margin_GS = scores_GSE, None
    if self.router_bias_update_rate:
      candidates_GSE += theta['gate_bias']
    if self.groups_of_experts:
      groups = self.groups_of_experts, self.chosen_groups
      candidates_GSE, group_margin_GS = best_groups(candidates_GSE, *groups, logits_GSE)
    # Logits tie less than scores, in the same order.
    by_logits = candidates_GSE is scores_GSE
    expert_GSR = gate.top_choices(logits_GSE if by_logits else candidates_GSE, self.choices, logits_GSE)
    margin_GS = gate.margin(candidates_GSE, expert_GSR)
    margin_GS = margin_GS if group_margin_GS is None else tf.minimum(margin_GS, group_margin_GS)
    weight_GSR = gate.at_choices(scores_GSE, expert_GSR)
    if self.normalised:
      weight_GSR = tf.nn.softmax(gate.at_choices(log_scores_GSE, expert_GSR))
    taken_GSR = tf.stack([real_GS] * self.choices, axis=-1)
    if self.router_bias_update_rate and keys_GS is not None:
      weight_GSR = with_loads(weight_GSR, theta['gate_bias'], expert_GSR, taken_GSR)
    shares_GSE = tf.nn.softmax(log_scores_GSE) if is_sigmoid else softmax_GSE
    aux_loss = gate.balance_loss(shares_GSE, expert_GSR, real_GS, self.balance_over)
    stats = gate.statistics(logits_GSE, softmax_GSE, real_GS)._replace(aux_loss=aux_loss)
    return gate.route(expert_GSR, weight_GSR, taken_GSR, num_experts, capacity, stats, margin_GS)


def best_groups(scores_GSE: tf.Tensor, groups: int, chosen: int, ties_GSE: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Scores of the experts in the `chosen` best groups, lowest at all others, and margins [G, S] of the groups.

  A group is of experts next to each other, and as good as the sum of its two best scores (DeepSeek-V3); of groups that
  are equally good, that with the larger sum of the same experts' ties is the better.
  """
  shape_GS = sizes(scores_GSE)[:2]
  within = scores_GSE.shape[-1] // groups
  by_group = [tf.reshape(x_GSE, [shape_GS[0], shape_GS[1] * groups, within]) for x_GSE in (scores_GSE, ties_GSE)]
  two_best = gate.top_choices(by_group[0], 2, by_group[1])
  of_two = lambda x: tf.reshape(tf.reduce_sum(gate.at_choices(x, two_best), axis=-1), [*shape_GS, groups])
  group_GSJ, tie_GSJ = map(of_two, by_group)
  best_GSR = gate.top_choices(group_GSJ, chosen, tie_GSJ)
  is_chosen_GSJ = tf.reduce_sum(tf.one_hot(best_GSR, groups), axis=-2)
  is_chosen_GSE = tf.repeat(is_chosen_GSJ, within, axis=-1) > 0
  return tf.where(is_chosen_GSE, scores_GSE, _LOWEST), gate.margin(group_GSJ, best_GSR)


def with_loads(weight_GSR: tf.Tensor, bias_E: tf.Tensor, expert_GSR: tf.Tensor, taken_GSR: tf.Tensor) -> tf.Tensor:
  """The weights, and the load of every expert as the gradient of its bias, whatever is made of the weights.

  Loads so add up over groups, micro-batches and devices as gradients do; an update moves the bias by them
  (optim/updates.py).
  """
  hots_GSE = [
    tf.one_hot(expert_GS, bias_E.shape[-1]) * taken_GS[..., tf.newaxis]
    for expert_GS, taken_GS in zip(tf.unstack(expert_GSR, axis=-1), tf.unstack(taken_GSR, axis=-1), strict=True)
  ]
  load_E = tf.stop_gradient(tf.reduce_sum(tf.add_n(hots_GSE), axis=[0, 1]))

  @tf.custom_gradient
  def loaded(weight_GSR, bias_E, load_E):
    del bias_E
    return tf.identity(weight_GSR), lambda upstream: (upstream, load_E, None)

  return loaded(weight_GSR, bias_E, load_E)


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
