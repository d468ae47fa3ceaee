"""Mixture-of-experts layer against a dense sum over each token's two experts."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng, weights
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend, cpu, xla
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.cpu import grouped_ffn

LAYER = MoE(model_dim=6, hidden_dim=8, num_experts=4, num_groups=2)
THETA = {**weights.initialize(LAYER.weights(), seed=3), 'gate': tf.random.stateless_normal([6, 4], [0, 9])}


def some_input(rows=4, length=5, seed=0):
  return tf.random.stateless_normal([rows, length, 6], [seed, 1])


def dense_sum(x_BTM, theta=THETA):
  """Layer by a plain loop: every token through both of its experts."""
  gate, wi, wo = (theta[name].numpy() for name in ('gate', 'wi', 'wo'))
  out = np.zeros_like(x_BTM)
  for position in np.ndindex(*x_BTM.shape[:2]):
    x = x_BTM[position].numpy()
    p = np.exp(x @ gate)
    first, second = np.argsort(-p)[:2]
    for e in (first, second):
      out[position] += p[e] / (p[first] + p[second]) * (np.maximum(x @ wi[e], 0) @ wo[e])
  return out


def test_owns_a_gate_and_two_matrices_of_every_expert():
  specs = LAYER.weights()
  assert {name: (spec.shape, spec.factored) for name, spec in specs.items()} == {
    'gate': ((6, 4), 'MJ'),
    'wi': ((4, 6, 8), 'MH'),
    'wo': ((4, 8, 6), 'HM'),
  }
  assert weights.count(specs) == 6 * 4 + 4 * 2 * 6 * 8


CPU = Backend('cpu', cpu.OVERRIDES, 'grouped')


def under(in_force, f):
  """Function that runs f under a backend."""

  def run(*args):
    with backend.use(in_force):
      return f(*args)

  return run


def reference(layer):
  """Inference by the reference backend."""
  return lambda x, paddings, theta=THETA: layer(theta, x, paddings)


@functools.cache  # one program for all tests
def on_cpu(layer):
  """Inference as the local runtime traces it on a CPU."""
  weights_of = {name: tf.TensorSpec(spec.shape) for name, spec in layer.weights().items()}
  any_shape = [tf.TensorSpec([None, None, 6]), tf.TensorSpec([None, None]), weights_of]
  traced = tf.function(under(cpu.backend(training=False), reference(layer)), input_signature=any_shape)
  return lambda x, paddings, theta=THETA: traced(x, paddings, theta)


@functools.cache
def by_xla(layer):
  """Inference compiled by XLA."""
  compiled = tf.function(under(xla.BACKEND, reference(layer)), jit_compile=True)
  return lambda x, paddings, theta=THETA: compiled(x, paddings, theta)


WAYS = pytest.mark.parametrize('way', [reference, on_cpu, by_xla])


@WAYS
def test_inference_is_the_weighted_sum_of_two_experts(way):
  x = some_input()
  y, routing = way(LAYER)(x, tf.zeros([4, 5]))
  np.testing.assert_allclose(y, dense_sum(x), atol=1e-5)
  assert float(routing.stats.dropped_R[0] + routing.stats.dropped_R[1] + routing.stats.skipped) == 0


@WAYS
def test_inference_drops_nothing_even_where_all_want_one_expert(way):
  theta = {**THETA, 'gate': THETA['gate'] * [[1, 0, 0, 0]] + [[9, 0, 0, 0]]}
  x = tf.abs(some_input())
  y, routing = way(LAYER)(x, tf.zeros([4, 5]), theta)
  assert int(tf.reduce_max(routing.stats.tokens_E)) == 20
  np.testing.assert_allclose(y, dense_sum(x, theta), atol=1e-5)


@WAYS
def test_inference_depends_on_the_token_alone(way):
  x, infer = some_input(), way(LAYER)
  together = infer(x, tf.zeros([4, 5]))[0].numpy()
  alone = [infer(x[b : b + 1, t : t + 1], tf.zeros([1, 1]))[0][0, 0] for b, t in np.ndindex(4, 5)]
  np.testing.assert_allclose(together.reshape(20, 6), alone, atol=1e-6)
  other_groups = way(dataclasses.replace(LAYER, num_groups=1))(x, tf.zeros([4, 5]))[0]
  np.testing.assert_allclose(together, other_groups, atol=1e-6)
  padded = tf.pad(x, [[0, 2], [0, 3], [0, 0]], constant_values=7)
  paddings = tf.pad(tf.zeros([4, 5]), [[0, 2], [0, 3]], constant_values=1)
  y = infer(padded, paddings)[0]
  np.testing.assert_allclose(y[:4, :5], together, atol=1e-6)
  np.testing.assert_array_equal(y[4:], tf.zeros([2, 8, 6]))


@WAYS
def test_inference_on_padding_alone_gives_zeros(way):
  y, routing = way(LAYER)(some_input(), tf.ones([4, 5]))
  np.testing.assert_array_equal(y, tf.zeros([4, 5, 6]))
  assert float(tf.reduce_sum(routing.stats.tokens_E)) == 0


def test_with_room_for_all_training_equals_inference_but_for_skipped_second_choices():
  roomy = dataclasses.replace(LAYER, capacity_factor=8.0)
  x, paddings, key = some_input(), tf.zeros([4, 5]), prng.key(0)
  y, routing = roomy(THETA, x, paddings, key)
  assert float(routing.stats.dropped_R[0] + routing.stats.dropped_R[1]) == 0
  assert 0 < float(routing.stats.skipped) < 20
  changed = np.any(np.abs(y - dense_sum(x)) > 1e-5, axis=-1)
  assert np.sum(changed) == float(routing.stats.skipped)


def test_groups_change_nothing_but_the_competition_for_slots():
  x, paddings, key = some_input(), tf.zeros([4, 5]), prng.key(0)
  layer = lambda groups, factor: dataclasses.replace(LAYER, num_groups=groups, capacity_factor=factor)
  run = lambda groups, factor: layer(groups, factor)(THETA, x, paddings, key)
  roomy = [run(groups, 8.0) for groups in (1, 2, 4)]
  for y, routing in roomy[1:]:
    np.testing.assert_allclose(y, roomy[0][0], atol=1e-6)
    assert float(routing.stats.skipped) == float(roomy[0][1].stats.skipped)
  tight = [run(groups, 0.8) for groups in (1, 4)]
  assert np.any(np.abs(tight[0][0] - tight[1][0]) > 1e-3)
  assert all(float(routing.stats.dropped_R[0]) > 0 for _, routing in tight)


def test_a_group_is_whole_rows_that_other_groups_do_not_touch():
  x, key = some_input(), prng.key(0)
  tight = dataclasses.replace(LAYER, capacity_factor=0.8)
  y = tight(THETA, x, tf.zeros([4, 5]), key)[0]
  disturbed = tf.concat([x[:2], -x[2:]], axis=0)
  np.testing.assert_allclose(tight(THETA, disturbed, tf.zeros([4, 5]), key)[0][:2], y[:2], atol=1e-6)


def test_the_key_decides_which_second_choices_are_skipped():
  x = some_input()
  skipped = lambda seed: LAYER(THETA, x, tf.zeros([4, 5]), prng.key(seed))[0].numpy()
  np.testing.assert_array_equal(skipped(1), skipped(1))
  assert np.any(skipped(1) != skipped(2))


def train(layer, x, paddings, key):
  """Output, dropped first choices, and gradients with respect to the input and every weight."""
  with tf.GradientTape() as tape:
    tape.watch([x, THETA])
    y, routing = layer(THETA, x, paddings, key)
    value = tf.reduce_sum(tf.square(y)) + routing.stats.aux_loss
  gradients = map(tf.convert_to_tensor, tf.nest.flatten(tape.gradient(value, [x, THETA])))
  return y, routing.stats.dropped_R[0], *gradients


@pytest.mark.parametrize('dispatch, in_force', [('einsum', xla.BACKEND), ('gather', xla.BACKEND)])
def test_either_dispatch_compiled_trains_as_the_reference(dispatch, in_force):
  tight = dataclasses.replace(LAYER, capacity_factor=0.8)
  x, paddings = some_input(), tf.constant([[0.0] * 5] * 3 + [[0.0] * 2 + [1.0] * 3])
  expected = train(tight, x, paddings, prng.key(0))
  assert float(expected[1]) > 0
  layer = dataclasses.replace(tight, dispatch=dispatch)
  step = tf.function(under(in_force, lambda x, p: train(layer, x, p, prng.key(0))), jit_compile=True)
  for a, b in zip(step(x, paddings), expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


TIGHT = dataclasses.replace(LAYER, capacity_factor=0.8)


@functools.cache
def traced_training(dispatch, name):
  """Training for any shape, traced once for all inputs."""
  in_force = {b.name: b for b in (CPU, backend.REFERENCE)}[name]
  any_shape = [tf.TensorSpec([None, None, 6]), tf.TensorSpec([None, None])]
  layer = dataclasses.replace(TIGHT, dispatch=dispatch)
  return tf.function(under(in_force, lambda x, p: train(layer, x, p, prng.key(0))), any_shape)


def paddings_after(real):
  return tf.reshape(tf.cast(tf.range(20) >= real, tf.float32), [4, 5])


@functools.cache
def trained(real):
  return train(TIGHT, some_input(), paddings_after(real), prng.key(0))


@pytest.mark.parametrize('dispatch', ['auto', 'grouped', 'gather', 'einsum'])
@pytest.mark.parametrize('in_force', [CPU, backend.REFERENCE], ids=lambda b: b.name)
@pytest.mark.parametrize('real', [20, 12, 1, 0])
def test_every_dispatcher_trains_as_the_reference(dispatch, in_force, real):
  x, paddings = some_input(), paddings_after(real)
  expected = trained(real)
  assert (float(expected[1]) > 0) == (real > 1)
  for a, b in zip(traced_training(dispatch, in_force.name)(x, paddings), expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('most', [1, 4])
def test_training_on_grouped_rows_takes_bfloat16_activations(most, monkeypatch):
  monkeypatch.setattr(grouped_ffn, '_MAX_UNROLLED', most)
  monkeypatch.setattr(grouped_ffn, '_MAX_MULTIPLIED', most)
  x, paddings = tf.cast(some_input(), tf.bfloat16), tf.zeros([4, 5])
  halves = {'gate': THETA['gate'], **{name: tf.cast(THETA[name], tf.bfloat16) for name in ('wi', 'wo')}}

  def step(x, paddings):
    with tf.GradientTape() as tape:
      tape.watch([x, halves])
      y, _ = LAYER(halves, x, paddings, prng.key(0))
      value = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
    return y, *map(tf.convert_to_tensor, tf.nest.flatten(tape.gradient(value, [x, halves])))

  any_shape = [tf.TensorSpec([None, None, 6], tf.bfloat16), tf.TensorSpec([None, None])]
  got, expected = tf.function(under(CPU, step), any_shape)(x, paddings), step(x, paddings)
  assert [t.dtype for t in got] == [tf.bfloat16, tf.bfloat16, tf.float32, tf.bfloat16, tf.bfloat16]
  for a, b in zip(got, expected, strict=True):
    b = tf.cast(b, tf.float32)
    np.testing.assert_allclose(tf.cast(a, tf.float32), b, atol=0.03 * np.max(np.abs(b)))


def test_the_gate_is_computed_in_float32_whatever_the_tokens_are():
  # Logits 1 and 1 + 2^-10: bfloat16, with 8 bits, would make them equal and send the token to expert 0.
  layer = MoE(model_dim=2, hidden_dim=3, num_experts=2)
  theta = {name: tf.cast(value, tf.bfloat16) for name, value in weights.initialize(layer.weights(), seed=3).items()}
  theta['gate'] = tf.constant([[1.0, 1.0], [0.0, 2**-10]])
  for key in None, prng.key(0):
    _, routing = layer(theta, tf.ones([1, 1, 2], tf.bfloat16), tf.zeros([1, 1]), key)
    np.testing.assert_array_equal(routing.expert_GSR[0, 0], [1, 0])
    assert routing.weight_GSR.dtype == tf.float32
    np.testing.assert_allclose(routing.weight_GSR[0, 0, 0], 1 / (1 + np.exp(-(2.0**-10))), rtol=1e-6)


@pytest.mark.parametrize('dispatch', ['einsum', 'gather'])
def test_inference_compiled_with_static_shapes_equals_that_of_any_shape(dispatch):
  layer = dataclasses.replace(LAYER, dispatch=dispatch)
  x, paddings = some_input(), tf.constant([[0.0] * 5] * 3 + [[0.0] * 2 + [1.0] * 3])
  expected, expected_routing = on_cpu(LAYER)(x, paddings)
  for way in (by_xla, on_cpu):
    got, routing = way(layer)(x, paddings)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_array_equal(routing.stats.tokens_E, expected_routing.stats.tokens_E)


def test_inference_takes_any_number_of_rows():
  x = some_input(rows=3)
  np.testing.assert_allclose(LAYER(THETA, x, tf.zeros([3, 5]))[0], dense_sum(x), atol=1e-5)


def test_training_needs_rows_that_the_groups_divide():
  with pytest.raises(ValueError, match='num_groups=2 must divide the rows of a batch, which has 3: batch a multiple'):
    LAYER(THETA, some_input(rows=3), tf.zeros([3, 5]), prng.key(0))
