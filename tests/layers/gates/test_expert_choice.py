"""Expert choice: which tokens an expert takes, by hand and against sorting, and what a row's output depends on."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_moe.core import prng, weights
from lingvo_moe.layers.gates import expert_choice
from lingvo_moe.layers.gates.expert_choice import ExpertChoice
from lingvo_moe.layers.moe import MoE


def route(probabilities, paddings=None, factor=1.0):
  """Routing of one group whose softmax is given: an identity gate of its logarithms."""
  x_GSM = tf.math.log(tf.constant([probabilities], tf.float32))
  paddings = tf.constant([paddings or [0.0] * len(probabilities)])
  return ExpertChoice(factor)({'gate': tf.eye(x_GSM.shape[-1])}, x_GSM, paddings)


def test_four_tokens_by_hand():
  # Each of two experts takes ceil(1 * 4 / 2) = 2 tokens.
  routing = route([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
  np.testing.assert_allclose(routing.weight_GSR[0], [[0.9, 0], [0.8, 0], [0, 0.3], [0, 0.4]], rtol=1e-6)
  np.testing.assert_array_equal(routing.slot_GSR[0, :2, 0], [0, 1])
  np.testing.assert_array_equal(routing.slot_GSR[0, 2:, 1], [0, 1])
  assert routing.capacity == 2 and routing.every_expert
  np.testing.assert_array_equal(routing.stats.tokens_E, [2, 2])
  np.testing.assert_array_equal(routing.stats.dropped_R, [0])
  # Distances: of 0.9 and 0.8 from the best refused, 0.7; of 0.7 and 0.6 from the last taken, 0.8; the same for expert
  # 1.
  np.testing.assert_allclose(routing.margin_GS[0], [0.2, 0.1, 0.1, 0.2], atol=1e-6)


def test_a_token_may_be_taken_by_all_or_none():
  routing = route([[0.5, 0.5], [0.45, 0.55], [0.5, 0.5], [0.1, 0.9]], factor=0.5)
  np.testing.assert_array_equal(routing.weight_GSR[0] > 0, [[1, 0], [0, 0], [0, 0], [0, 1]])  # of equal ones the first
  np.testing.assert_array_equal(routing.stats.dropped_R, [2])


def test_padding_is_never_taken_and_takes_no_share():
  padded = route([[0.9, 0.1], [1.0, 1.0], [0.8, 0.2], [1.0, 1.0]], paddings=[0.0, 1.0, 0.0, 1.0])
  alone = route([[0.9, 0.1], [0.8, 0.2]])
  np.testing.assert_allclose(padded.weight_GSR[0, ::2], alone.weight_GSR[0], rtol=1e-6)
  np.testing.assert_array_equal(padded.weight_GSR[0, 1::2], np.zeros([2, 2]))
  np.testing.assert_array_equal(route([[0.5, 0.5]] * 3, paddings=[1.0] * 3).weight_GSR, np.zeros([1, 3, 2]))


@pytest.mark.parametrize('value', [0.1, np.nextafter(np.float32(0.1), np.float32(0))])  # the last bit is 1, and 0
def test_a_tie_gives_an_expert_k_tokens_and_no_more(value):
  found = expert_choice.largest(tf.fill([1, 5, 2], tf.constant(value, tf.float32)), tf.ones([1, 5]), tf.constant([3]))
  np.testing.assert_array_equal(found[0], [[True, True]] * 3 + [[False, False]] * 2)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 25), st.integers(0, 10**6), st.booleans())
def test_the_largest_are_those_of_a_stable_sort(size, experts, k, seed, ties):
  rng = np.random.default_rng(seed)
  values = rng.random([2, size, experts]).astype(np.float32)
  if ties:
    values = np.round(values, 1)
  real = (rng.random([2, size]) < 0.8).astype(np.float32)
  k_G = np.minimum(k, real.sum(axis=1)).astype(np.int32)
  expected = np.zeros([2, size, experts], bool)
  for g, e in np.ndindex(2, experts):
    order = [s for s in np.argsort(-values[g, :, e], kind='stable') if real[g, s]]
    expected[g, order[: k_G[g]], e] = True
  found = expert_choice.largest(tf.constant(values), tf.constant(real), tf.constant(k_G))
  np.testing.assert_array_equal(found, expected)


def test_at_inference_a_row_depends_on_itself_alone():
  layer = MoE(model_dim=6, hidden_dim=8, num_experts=4, num_groups=1, gate=ExpertChoice())
  theta = {**weights.initialize(layer.weights(), seed=3), 'gate': tf.random.stateless_normal([6, 4], [0, 9])}
  x, paddings = (
    tf.random.stateless_normal([3, 7, 6], [0, 1]),
    tf.constant([[0.0] * 7, [0.0] * 5 + [1.0] * 2, [0.0] * 7]),
  )
  together = layer(theta, x, paddings)[0]
  for b, length in enumerate([7, 5, 7]):
    alone = layer(theta, x[b : b + 1, :length], tf.zeros([1, length]))[0]
    np.testing.assert_allclose(together[b, :length], alone[0], atol=1e-6)
  # In training the rows of a group compete.
  assert not np.allclose(layer(theta, x, paddings, prng.key(0))[0], together, atol=1e-3)


def test_gradients_reach_the_gate():
  layer = MoE(model_dim=6, hidden_dim=8, num_experts=4, gate=ExpertChoice())
  theta = weights.initialize(layer.weights(), seed=3)
  with tf.GradientTape() as tape:
    tape.watch(theta)
    y, _ = layer(theta, tf.random.stateless_normal([2, 5, 6], [0, 1]), tf.zeros([2, 5]), prng.key(0))
  assert all(float(tf.norm(g)) > 0 for g in tape.gradient(y, theta).values())
