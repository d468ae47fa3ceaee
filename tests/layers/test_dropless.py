"""Dropless MoE layer: rounds under XLA's static shapes against a layer with room for all, on skewed routings."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng, weights
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend, cpu, xla

ROWS, LENGTH, EXPERTS = 4, 8, 8
LAYER = MoE(model_dim=EXPERTS, hidden_dim=5, num_experts=EXPERTS, num_groups=2, capacity_factor=None)
THETA = {**weights.initialize(LAYER.weights(), seed=3), 'gate': 9 * tf.eye(EXPERTS)}
KINDS = ['random', 'one expert', 'two experts', 'one token an expert', 'padding only', 'some padding', 'zipf']


def inputs_of(kind, seed=0):
  """Tokens x_BTM whose largest features are the experts that they choose, as the gate is diagonal; and paddings."""
  rng = np.random.default_rng(seed)
  x_BTM = rng.normal(size=[ROWS, LENGTH, EXPERTS])
  paddings_BT = np.zeros([ROWS, LENGTH])
  if kind == 'one expert':
    x_BTM[..., 3] += 9
  elif kind == 'two experts':
    x_BTM[..., [1, 6]] += [9, 8]
  elif kind == 'one token an expert':
    paddings_BT[:, 4:] = 1
    first_BT = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    x_BTM = 0.1 * x_BTM + 3 * np.eye(EXPERTS)[first_BT % EXPERTS] + 2 * np.eye(EXPERTS)[(first_BT + 4) % EXPERTS]
  elif kind == 'padding only':
    paddings_BT[:] = 1
  elif kind == 'some padding':
    paddings_BT[:] = rng.random([ROWS, LENGTH]) < 0.6
  elif kind == 'zipf':
    x_BTM += 3 / np.arange(1, EXPERTS + 1)
  return tf.constant(x_BTM, tf.float32), tf.constant(paddings_BT, tf.float32)


def run(layer, kind, in_force, key, jit=False, seed=0):
  """Outputs, gradients of tokens and weights, and the statistics of routing."""
  x_BTM, paddings_BT = inputs_of(kind, seed)
  known = (layer, in_force.name, jit, key is None)  # compiled once for all kinds of inputs
  if known not in _PROGRAMS:
    _PROGRAMS[known] = _values_and_gradients(layer, in_force, jit)
  return _PROGRAMS[known](THETA, x_BTM, paddings_BT, key)


_PROGRAMS = {}


def _values_and_gradients(layer, in_force, jit):
  pull_BTM = tf.random.stateless_normal([ROWS, LENGTH, EXPERTS], [1, 2])

  @tf.function(jit_compile=jit, autograph=False)
  def values_and_gradients(theta, x_BTM, paddings_BT, key):
    with backend.use(in_force), tf.GradientTape() as tape:
      tape.watch([theta, x_BTM])
      y_BTM, routing = layer(theta, x_BTM, paddings_BT, key)
      loss = tf.reduce_sum(y_BTM * pull_BTM) + routing.stats.aux_loss
    grads = tape.gradient(loss, [x_BTM, theta['gate'], theta['wi'], theta['wo']])
    return [y_BTM, *map(tf.convert_to_tensor, grads)], routing.stats

  return values_and_gradients


def assert_same(got, expected):
  for a, b in zip(got, expected, strict=True):
    # Where one expert's probability rounds to 1, its gradient is of a difference that rounding decides: 1.1e-5 or 0.
    np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.max(np.abs(b))))


WAYS = ('einsum', 'gather', 'grouped')
# All in training; at inference each kind of input in one way, each way for two kinds or more.
CASES = [
  pytest.param(kind, way, training, marks=[] if training or i % 3 == j else pytest.mark.slow)
  for i, kind in enumerate(KINDS)
  for j, way in enumerate(WAYS)
  for training in (True, False)
]


@pytest.mark.parametrize('kind, way, training', CASES)
def test_rounds_and_blocks_equal_a_layer_with_room_for_all(kind, way, training, monkeypatch):
  monkeypatch.setattr(xla, 'BLOCK', 5)
  key = prng.key(0) if training else None
  roomy = dataclasses.replace(LAYER, dispatch='einsum', capacity_factor=float(EXPERTS))
  expected, stats = run(roomy, kind, backend.REFERENCE, key)
  assert float(stats.dropped_R[0] + stats.dropped_R[1]) == 0
  got, of_rounds = run(dataclasses.replace(LAYER, dispatch=way), kind, xla.BACKEND, key, jit=True)
  assert_same(got, expected)
  np.testing.assert_array_equal(of_rounds.tokens_E, stats.tokens_E)
  assert float(of_rounds.dropped_R[0] + of_rounds.dropped_R[1]) == 0
  assert way != 'grouped' or float(of_rounds.rounds) == 1


@pytest.mark.parametrize('factor', [0.5, 1.0, 2.0])
def test_blocks_leave_out_what_found_no_slot(factor, monkeypatch):
  monkeypatch.setattr(xla, 'BLOCK', 3)
  dropping = dataclasses.replace(LAYER, capacity_factor=factor)
  expected, stats = run(dataclasses.replace(dropping, dispatch='einsum'), 'zipf', backend.REFERENCE, prng.key(0))
  assert float(tf.reduce_sum(stats.dropped_R)) > 0
  assert_same(
    run(dataclasses.replace(dropping, dispatch='grouped'), 'zipf', xla.BACKEND, prng.key(0), jit=True)[0], expected
  )


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('training', [True, False], ids=['training', 'inference'])
def test_grouped_rows_equal_a_layer_with_room_for_all(kind, training):
  key = prng.key(0) if training else None
  roomy = dataclasses.replace(LAYER, dispatch='einsum', capacity_factor=float(EXPERTS))
  expected, _ = run(roomy, kind, backend.REFERENCE, key)
  got, stats = run(LAYER, kind, cpu.backend(training=True), key)
  assert_same(got, expected)
  assert float(stats.rounds) == 1


@pytest.mark.parametrize(
  ('kind', 'factor', 'rounds'),
  [
    # Groups of 16 tokens. All first choices are one expert's: a queue of 16 in slots of ceil(factor * 16 / 8).
    ('one expert', 2.0, 4),
    ('one expert', 1.0, 8),
    ('one expert', 3.0, 3),
    ('one expert', 0.1, 16),
    ('one expert', 100.0, 1),
    ('two experts', 2.0, 4),
    # 8 tokens a group (the others are padding), each expert the first choice of one and the second of another.
    ('one token an expert', 1.0, 1),
    ('one token an expert', 0.5, 2),
    ('padding only', 2.0, 1),
  ],
)
def test_as_many_rounds_as_the_longest_queue_needs(kind, factor, rounds):
  layer = dataclasses.replace(LAYER, round_capacity_factor=factor)
  for in_force, expected in ((xla.BACKEND, rounds), (backend.REFERENCE, 1)):
    with backend.use(in_force):
      assert float(layer(THETA, *inputs_of(kind))[1].stats.rounds) == expected


@pytest.mark.parametrize('seed', range(3))
def test_second_choices_skipped_at_random_stay_skipped(seed):
  key = prng.key(seed)
  _, stats = run(LAYER, 'random', xla.BACKEND, key, jit=True, seed=seed)
  _, dropping = run(dataclasses.replace(LAYER, capacity_factor=1.0), 'random', backend.REFERENCE, key, seed=seed)
  assert float(stats.skipped) == float(dropping.skipped) > 0
  assert float(dropping.dropped_R[0]) > 0 == float(stats.dropped_R[0])


@pytest.mark.compiled
def test_bfloat16_gradients_are_summed_over_rounds_in_float32():
  theta = {name: w if name == 'gate' else tf.cast(w, tf.bfloat16) for name, w in THETA.items()}
  x_BTM, paddings_BT = inputs_of('one expert')

  def gradient(factor):
    @tf.function(jit_compile=True, autograph=False)
    def run(x_BTM):
      layer = dataclasses.replace(LAYER, round_capacity_factor=factor)
      with backend.use(xla.BACKEND), tf.GradientTape() as tape:
        tape.watch(theta['wo'])
        y_BTM, routing = layer(theta, tf.cast(x_BTM, tf.bfloat16), paddings_BT)
      return tape.gradient(y_BTM, theta['wo']), routing.stats.rounds

    dwo, rounds = run(x_BTM)
    assert dwo.dtype == tf.bfloat16
    return tf.cast(dwo, tf.float32), float(rounds)

  (many, rounds), (one, alone) = gradient(0.1), gradient(8.0)
  assert (rounds, alone) == (16, 1)
  np.testing.assert_allclose(many, one, rtol=2**-7, atol=1e-3)
