"""Hierarchical gate: two levels against a plain loop, its loss, and the sizes that it makes possible."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng, weights
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.gates import noisy_top_k
from lingvo_moe.layers.gates.hierarchical import Hierarchical
from lingvo_moe.ops import backend, cpu, xla

GATE = Hierarchical(groups_of_experts=4)
NAMES = {'gate': [6, 4], 'gate_noise': [6, 4], 'gate_within': [4, 6, 3], 'gate_within_noise': [4, 6, 3]}
THETA = {name: tf.random.stateless_normal(shape, [7, i]) for i, (name, shape) in enumerate(NAMES.items())}
X_GSM = tf.random.stateless_normal([2, 8, 6], [0, 1])
PADDINGS_GS = tf.constant([[0.0] * 8, [0.0] * 5 + [1.0] * 3])


def softmax(x):
  return np.exp(x) / np.sum(np.exp(x))


def plain():
  """Experts and weights [G, S, 4] by a loop over tokens, and sums of importance and load [4, 3], at inference."""
  gate, within = THETA['gate'].numpy(), THETA['gate_within'].numpy()
  experts, values = np.zeros([2, 8, 4], int), np.zeros([2, 8, 4])
  importance, load, visits, first_load = np.zeros([4, 3]), np.zeros([4, 3]), np.zeros(4), np.zeros(4)
  for g, s in np.ndindex(2, 8):
    x, real = X_GSM[g, s].numpy(), 1 - PADDINGS_GS[g, s].numpy()
    groups = np.argsort(-(x @ gate))[:2]
    p = softmax((x @ gate)[groups])
    for i, a in enumerate(groups):
      inner = np.argsort(-(x @ within[a]))[:2]
      q = softmax((x @ within[a])[inner])
      visits[a] += real
      first_load[a] += real
      for j, b in enumerate(inner):
        experts[g, s, 2 * i + j], values[g, s, 2 * i + j] = a * 3 + b, p[i] * q[j] * real
        importance[a, b] += p[i] * q[j] * real
        load[a, b] += real
  return experts, values, importance, load * (first_load / np.maximum(visits, 1))[:, np.newaxis]


@pytest.mark.parametrize(
  ('dispatch', 'in_force', 'jit'),
  [
    ('einsum', backend.REFERENCE, False),
    ('grouped', cpu.backend(training=False), False),
    ('gather', xla.BACKEND, True),
  ],
  ids=['reference', 'cpu', 'xla'],
)
def test_two_levels_by_a_plain_loop(dispatch, in_force, jit):
  @tf.function(jit_compile=jit, autograph=False)
  def route(x_GSM):
    with backend.use(in_force):
      routing = Hierarchical(4, dispatch=dispatch)(THETA, x_GSM, PADDINGS_GS)
    return routing.expert_GSR, routing.weight_GSR, routing.stats

  expert_GSR, weight_GSR, stats = route(X_GSM)
  experts, values, importance, load = plain()
  np.testing.assert_array_equal(np.where(values, expert_GSR, 0), np.where(values, experts, 0))
  np.testing.assert_allclose(weight_GSR, values, atol=1e-6)
  variation = lambda x: np.var(x) / np.mean(x) ** 2
  np.testing.assert_allclose(stats.aux_loss / stats.groups, variation(importance) + variation(load), rtol=1e-5)
  np.testing.assert_allclose(stats.tokens_E, np.sum(load > 0) and np.bincount(experts[values > 0], minlength=12))


def test_loss_and_margin_of_a_training_step_by_a_plain_loop():
  keys, gates = prng.bits(prng.key(2), [2, 8]), [THETA[name].numpy() for name in NAMES]
  real = 1 - PADDINGS_GS.numpy()
  first = noisy_top_k.noisy_top_k(X_GSM @ gates[0], X_GSM @ gates[1], keys, 2)
  importance, load, visits, margin = np.zeros([4, 3]), np.zeros([4, 3]), np.zeros(4), first.margin_GS.numpy()
  for g, s, rank in np.ndindex(2, 8, 2):
    a, at = int(first.expert_GSR[g, s, rank]), (slice(g, g + 1), slice(s, s + 1))
    within, noise = (X_GSM[at] @ gate[a] for gate in gates[2:])
    second = noisy_top_k.noisy_top_k(within, noise, prng.fold(keys[at], rank + 1), 2)
    importance[a] += real[g, s] * first.weight_GSR[g, s, rank].numpy() * second.gates_GSE[0, 0].numpy()
    load[a] += real[g, s] * second.load_GSE[0, 0].numpy()
    visits[a] += real[g, s]
    margin[g, s] = min(margin[g, s], second.margin_GS[0, 0])
  load *= (np.sum(first.load_GSE * real[..., np.newaxis], axis=(0, 1)) / visits)[:, np.newaxis]  # equation 14
  routing = GATE(THETA, X_GSM, PADDINGS_GS, keys)
  expected = sum(np.var(x) / np.mean(x) ** 2 for x in (importance, load))
  np.testing.assert_allclose(routing.stats.aux_loss / routing.stats.groups, expected, rtol=1e-5)
  np.testing.assert_allclose(routing.margin_GS * real, margin * real, atol=1e-6)


def test_weights_of_a_token_sum_to_one_and_noise_changes_choices():
  keys = prng.bits(prng.key(2), [2, 8])
  noisy = GATE(THETA, X_GSM, PADDINGS_GS, keys)
  np.testing.assert_allclose(tf.reduce_sum(noisy.weight_GSR, axis=-1), 1 - PADDINGS_GS, atol=1e-6)
  assert np.any(noisy.expert_GSR != GATE(THETA, X_GSM, PADDINGS_GS).expert_GSR)
  assert len(np.unique(noisy.expert_GSR[0, 0])) == 4


def test_gradients_reach_the_gates_of_both_levels():
  keys = prng.bits(prng.key(2), [2, 8])
  with tf.GradientTape() as tape:
    tape.watch(THETA)
    routing = GATE(THETA, X_GSM, PADDINGS_GS, keys)
    pull = tf.random.stateless_normal(routing.weight_GSR.shape, [0, 5])
    value = tf.reduce_sum(pull * routing.weight_GSR) + routing.stats.aux_loss
  for name, gradient in tape.gradient(value, THETA).items():
    assert np.all(np.isfinite(gradient)) and float(tf.norm(gradient)) > 0, name


def test_131072_experts_take_a_gate_whose_cost_a_token_is_that_of_their_groups():
  specs = Hierarchical(groups_of_experts=256).weights(512, 131_072)
  assert specs['gate'].shape == (512, 256) and specs['gate_within'].shape == (256, 512, 512)
  assert specs['gate_within'].dims.startswith('E')  # groups of experts are split over devices as experts are
  assert weights.count(specs) == 2 * 512 * (256 + 131_072)


@pytest.mark.parametrize('groups, experts, k', [(1, 12, 2), (5, 12, 2), (6, 12, 2), (4, 12, 1), (4, 12, 3)])
def test_levels_without_a_choice_are_refused(groups, experts, k):
  with pytest.raises(UserError, match=r"(groups_of_experts|choices) must be .* with gate='hierarchical'"):
    Hierarchical(groups, k).check(experts)
