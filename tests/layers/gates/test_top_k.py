"""Top-k and Switch gates: choices, weights and losses by hand, and against top-2."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.gates import gate
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.layers.gates.top_k import Switch, TopK, TopKUnnormalised
from lingvo_moe.layers.moe import MoE

PROBABILITIES = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.6, 0.1, 0.1, 0.2]]


def route(layer, probabilities=PROBABILITIES, paddings=None, capacity=None):
  """Routing of one group whose softmax is given: an identity gate of its logarithms."""
  x_GSM = tf.math.log(tf.constant([probabilities], tf.float32))
  num_experts = x_GSM.shape[-1]
  return layer(
    {'gate': tf.eye(num_experts)}, x_GSM, tf.constant([paddings or [0.0] * len(probabilities)]), None, capacity
  )


def test_three_choices_by_hand():
  routing = route(TopK(3))
  np.testing.assert_array_equal(routing.expert_GSR[0], [[0, 1, 2], [3, 2, 1], [0, 3, 1]])
  np.testing.assert_allclose(
    routing.weight_GSR[0], [[4 / 9, 3 / 9, 2 / 9], [4 / 9, 3 / 9, 2 / 9], [6 / 9, 2 / 9, 1 / 9]], rtol=1e-6
  )
  # Expert 1 is second choice of token 0 and third of tokens 1 and 2.
  np.testing.assert_array_equal(routing.slot_GSR[0], [[0, 0, 1], [0, 0, 1], [1, 1, 2]])
  np.testing.assert_array_equal(routing.stats.tokens_E, [2, 3, 2, 2])
  # 4 * sum of (share of the nine choices) * (mean probability).
  mean = np.mean(PROBABILITIES, axis=0)
  np.testing.assert_allclose(routing.stats.aux_loss, 4 * np.dot([2 / 9, 3 / 9, 2 / 9, 2 / 9], mean), rtol=1e-6)
  # Token 2 has experts 1 and 2 at the border: equal.
  np.testing.assert_allclose(routing.margin_GS[0], [0.1, 0.1, 0.0], atol=1e-6)


def test_weights_that_are_not_normalised_are_the_softmax():
  np.testing.assert_allclose(route(TopKUnnormalised(2)).weight_GSR[0], [[0.4, 0.3], [0.4, 0.3], [0.6, 0.2]], rtol=1e-6)


def test_drops_are_counted_for_every_rank():
  routing = route(TopK(3), capacity=1)
  np.testing.assert_array_equal(routing.weight_GSR[0] > 0, [[1, 1, 0], [1, 1, 0], [0, 0, 0]])
  np.testing.assert_array_equal(routing.stats.dropped_R, [1, 1, 3])
  np.testing.assert_array_equal(routing.stats.tokens_E, [1, 1, 1, 1])
  assert float(routing.stats.skipped) == 0


def test_two_choices_are_those_of_the_top_2_gate():
  theta, x = {'gate': tf.random.normal([6, 5])}, tf.random.normal([3, 8, 6])
  paddings = tf.cast(tf.random.uniform([3, 8]) < 0.2, tf.float32)
  ours, theirs = (g(theta, x, paddings, None, 3) for g in (TopK(2), Top2('always')))
  for field in ('expert_GSR', 'slot_GSR', 'weight_GSR', 'margin_GS'):
    np.testing.assert_allclose(getattr(ours, field), getattr(theirs, field), rtol=1e-6, err_msg=field)


def test_all_experts_may_be_chosen():
  routing = route(TopKUnnormalised(4))
  np.testing.assert_allclose(tf.reduce_sum(routing.weight_GSR, axis=-1), [[1, 1, 1]], rtol=1e-6)
  np.testing.assert_array_equal(routing.stats.tokens_E, [3, 3, 3, 3])


def test_switch_sends_a_token_to_one_expert_with_its_probability():
  routing = route(Switch(), paddings=[0.0, 0.0, 1.0])
  np.testing.assert_array_equal(routing.expert_GSR[0, :2, 0], [0, 3])
  np.testing.assert_allclose(routing.weight_GSR[0, :, 0], [0.4, 0.4, 0.0], rtol=1e-6)
  # Equations 4 to 6: N sum f P, f = [1/2, 0, 0, 1/2], P = [0.25, 0.25, 0.25, 0.25].
  np.testing.assert_allclose(routing.stats.aux_loss, 4 * (0.5 * 0.25 + 0.5 * 0.25), rtol=1e-6)


@pytest.mark.parametrize('factor, slots, dropped', [(1.0, 2, 4), (1.25, 3, 3), (2.0, 4, 2)])
def test_capacity_factors_of_the_switch_paper(factor, slots, dropped):
  # Six of eight tokens want expert 0 of four.
  probabilities = [[0.7, 0.1, 0.1, 0.1]] * 6 + [[0.1, 0.7, 0.1, 0.1]] * 2
  capacity = gate.expert_capacity(8, 4, factor)
  assert capacity == slots
  assert float(route(Switch(), probabilities, capacity=capacity).stats.dropped_R[0]) == dropped


def test_the_switch_router_gets_a_gradient_from_its_output():
  theta, x = {'gate': tf.random.stateless_normal([6, 4], [0, 1])}, tf.random.stateless_normal([1, 8, 6], [0, 2])
  with tf.GradientTape() as tape:
    tape.watch(theta['gate'])
    weight_GSR = Switch()(theta, x, tf.zeros([1, 8])).weight_GSR
    value = tf.reduce_sum(weight_GSR * tf.random.stateless_normal(weight_GSR.shape, [0, 3]))
  assert float(tf.norm(tape.gradient(value, theta['gate']))) > 0.1


def test_one_normalised_choice_is_refused():
  with pytest.raises(UserError, match=r"choices must be 2 or more with gate='top_k'; saw 1: .*use gate='switch'"):
    TopK(1).check(4)
  Switch().check(4)
  TopKUnnormalised(1).check(4)


def test_more_choices_than_experts_are_refused():
  with pytest.raises(UserError, match=r'choices must be at most num_experts=4; saw 5: add experts, or choose fewer'):
    MoE(8, 8, 4, gate=TopK(5))
  with pytest.raises(UserError, match='chooses among 2 experts or more; saw num_experts=1'):
    MoE(8, 8, 1, gate=Switch())
