"""Hierarchical noisy top-k gate: two levels, for very many experts (Shazeer et al., arXiv 1701.06538, appendix B)."""

import dataclasses
import functools

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.config import fields
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Constant, Specs, WeightSpec
from lingvo_moe.layers import dispatch
from lingvo_moe.layers.experts import LinearExperts
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.noisy_top_k import check_kept, noisy_top_k, squared_variation
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.ops import loops
from lingvo_moe.ops.remat import unkept


@dataclasses.dataclass(frozen=True)
class Hierarchical(gate.Gate):
  """Two noisy top-k gates: the first chooses k of the groups of experts, the second k experts in each of these.

  y = sum_i sum_j G(x)_i G_i(x)_j o_ij (equation 12). A token is compared with the experts of the chosen groups alone,
  so the gate costs M (groups + k E / groups) products a token where a flat one costs M E: what makes 131,072 experts
  possible. Each group has a second gate of its own, which gets the tokens that chose it as an expert gets its tokens,
  through a dispatcher and without drops. On a mesh, groups of experts are split as experts are.

  The loss is CV(importance)^2 + CV(load)^2 over all experts (equations 13 and 14), over the whole batch; with
  micro-batches, over each. Entropy and z-loss are those of the first gate.
  """

  groups_of_experts: int  # divides the number of experts
  choices: int = 2  # k of each level; a token visits k * k experts
  dispatch: str = 'auto'  # to the second gates; see dispatch.DISPATCHERS

  joint_loss = True

  def check(self, num_experts: int) -> None:
    check_kept(self, 'hierarchical')
    groups = self.groups_of_experts
    if groups <= self.choices or num_experts % groups or num_experts // groups <= self.choices:
      rule = (
        f"a divisor of num_experts={num_experts} with gate='hierarchical', such that there are more than "
        f'choices={self.choices} groups, and more than that many experts in each'
      )
      fields.refuse(self, 'groups_of_experts', rule)

  def weights(self, model_dim: int, num_experts: int) -> Specs:
    groups, within = self.groups_of_experts, num_experts // self.groups_of_experts
    first = WeightSpec((model_dim, groups), 'MJ', Constant(0.0), factored='MJ', float32=True)
    return {'gate': first, 'gate_noise': first, **self._second_weights((groups, model_dim, within))}

  def _second_weights(self, shape: tuple[int, int, int]) -> Specs:
    spec = WeightSpec(tuple(shape), 'EMJ', Constant(0.0), factored='MJ', float32=True)
    return {'gate_within': spec, 'gate_within_noise': spec}

  def experts_per_token(self, num_experts: int) -> float:
    return self.choices**2

  def products_per_token(self, model_dim: int, num_experts: int) -> int:
    """Multiplications of a token with the first gate, and with the second gates of the chosen groups."""
    groups, within = self.groups_of_experts, num_experts // self.groups_of_experts
    return 2 * model_dim * (groups + self.choices * within)

  def __call__(self, theta, x_GSM, paddings_GS, keys_GS=None, capacity=None) -> Routing:
    """Chooses k experts in each of k groups for each token; see Gate. Expert j of group i has number i * within + j."""
    within, real_GS = theta['gate_within'].shape[-1], gate.real_tokens(paddings_GS)
    num_experts = self.groups_of_experts * within
    logits_GSE = gate.gate_logits(theta['gate'], x_GSM)
    raw_noise_GSE = None if keys_GS is None else gate.gate_logits(theta['gate_noise'], x_GSM)
    first = noisy_top_k(logits_GSE, raw_noise_GSE, keys_GS, self.choices)

    chosen, weights, margins, importance, load, visits = [], [], [first.margin_GS], 0.0, 0.0, 0.0
    for rank in range(self.choices):
      group_GS = first.expert_GSR[..., rank]
      keys = None if keys_GS is None else prng.fold(keys_GS, rank + 1)
      logits, raw_noise = self._second_logits(theta, x_GSM, group_GS, real_GS, training=keys_GS is not None)
      second = noisy_top_k(logits, raw_noise, keys, self.choices)
      weight_GS = first.weight_GSR[..., rank]
      chosen.append(group_GS[..., tf.newaxis] * within + second.expert_GSR)
      weights.append(weight_GS[..., tf.newaxis] * second.weight_GSR)
      margins.append(second.margin_GS)
      # By group and expert of the group: sums over tokens.
      hot_GSE = tf.one_hot(group_GS, self.groups_of_experts) * real_GS[..., tf.newaxis]
      importance += tf.einsum('GSE,GSJ->EJ', hot_GSE * weight_GS[..., tf.newaxis], second.gates_GSE)
      load += tf.einsum('GSE,GSJ->EJ', hot_GSE, second.load_GSE)
      visits += tf.reduce_sum(hot_GSE, axis=[0, 1])
    first_load_E = tf.reduce_sum(first.load_GSE * real_GS[..., tf.newaxis], axis=[0, 1])
    load *= (first_load_E / tf.maximum(visits, 1.0))[:, tf.newaxis]
    stats = gate.statistics(logits_GSE, tf.nn.softmax(logits_GSE), real_GS)
    stats = stats._replace(aux_loss=stats.groups * (squared_variation(importance) + squared_variation(load)))
    expert_GSR, weight_GSR = tf.concat(chosen, axis=-1), tf.concat(weights, axis=-1)
    taken_GSR = tf.stack([real_GS] * self.choices**2, axis=-1)
    margin_GS = tf.reduce_min(tf.stack(margins, axis=-1), axis=-1)
    return gate.route(expert_GSR, weight_GSR, taken_GSR, num_experts, capacity, stats, margin_GS)

  def _second_logits(self, theta, x_GSM, group_GS, real_GS, training):
    """Logits [G, S, J] of the second gate of each token's group, and raw noise [G, S, J] in training, else None."""
    names = ['gate_within', 'gate_within_noise'] if training else ['gate_within']
    specs = {name: spec for name, spec in self._second_weights(theta['gate_within'].shape).items() if name in names}
    second, within = LinearExperts(specs), theta['gate_within'].shape[-1]
    group_GS1, real_GS1 = group_GS[..., tf.newaxis], real_GS[..., tf.newaxis]
    slot_GS1, length_GE = ops.queue_positions(group_GS1, real_GS1 > 0, self.groups_of_experts)
    weights = {name: tf.cast(theta[name], x_GSM.dtype) for name in names}
    longest = tf.maximum(1, tf.reduce_max(length_GE))
    routing = Routing(group_GS1, slot_GS1, real_GS1, self.groups_of_experts, longest, stats=None)
    slots = ops.slots_per_round(gate.expert_capacity(sizes(x_GSM)[1], self.groups_of_experts, 2.0))
    if slots is None:
      y_GSJ = self._through_gates(x_GSM, weights, routing, second)
    else:
      body = functools.partial(self._round, routing=routing, second=second, slots=slots)
      features = len(names) * within
      rounds = (longest + slots - 1) // slots
      y_GSJ = loops.summed(rounds, body, x_GSM, weights, real_GS1, features=features, scope='rounds')
    y_GSJ = tf.cast(y_GSJ, tf.float32)
    return (y_GSJ[..., :within], y_GSJ[..., within:]) if training else (y_GSJ, None)

  def _round(self, number, x_GSM, weights, weight_GS1, *, routing, second, slots):
    routing = routing._replace(weight_GSR=weight_GS1).round(number, slots)
    return self._through_gates(x_GSM, weights, routing, second)

  def _through_gates(self, x_GSM, weights, routing, second):
    """Outputs [G, S, J] of the second gate of each token's group."""
    dispatcher = dispatch.make(self.dispatch, routing)
    with unkept():  # queues differ in length between the blocks of a scanned stack
      tokens = dispatcher.dispatch(x_GSM)
      return dispatcher.combine((second.rows if isinstance(tokens, dispatch.GroupedRows) else second)(weights, tokens))
