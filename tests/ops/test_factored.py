"""Factored gradients: their product, norm and padding, and that TensorFlow accepts them as gradients."""

import numpy as np
import pytest
import tensorflow as tf
from ancestors import ancestors

from lingvo_moe.ops.cpu import factored
from lingvo_moe.ops.cpu.factored import FactoredGradient
from lingvo_moe.ops.cpu.linear import product


def some(*shape):
  return tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)


@pytest.mark.parametrize(
  'rows, padded', [(0, 4), (1, 4), (4, 4), (5, 6), (9, 12), (33, 48), (48, 48), (64, 64), (65, None)]
)
def test_rows_are_padded_to_one_of_a_few_numbers_or_are_not_few(rows, padded):
  grad = FactoredGradient(some(3, rows, 8), some(3, rows, 6))
  assert bool(grad.has_few_rows) == (padded is not None)
  want = np.einsum('ECM,ECH->EMH', grad.x_ECM, grad.dy_ECH)
  np.testing.assert_allclose(grad.multiplied(), want, atol=1e-5)
  np.testing.assert_allclose(grad.norm(), np.linalg.norm(want), rtol=1e-5)
  np.testing.assert_allclose(grad.scaled(0.5).multiplied(), want / 2, atol=1e-5)
  np.testing.assert_allclose(tf.convert_to_tensor(grad), want, atol=1e-5)
  if padded:
    assert [grad.padded().x_ECM.shape, grad.padded().dy_ECH.shape] == [(3, padded, 8), (3, padded, 6)]
    np.testing.assert_allclose(grad.padded().multiplied(), want, atol=1e-5)


@pytest.mark.parametrize('rows, has_few', [(32, True), (33, False)])
def test_a_product_in_bfloat16_pays_with_fewer_rows(rows, has_few):
  x, dy = (tf.cast(some(3, rows, size), tf.bfloat16) for size in (8, 6))
  assert bool(FactoredGradient(x, dy).has_few_rows) == has_few


def gradient_of(f):
  """Gradient for the weight of f(weight, x) as a tensor, and its type on the tape."""
  kinds = []

  @tf.function(autograph=False)
  def run(weight, x):
    with tf.GradientTape() as tape:
      tape.watch(weight)
      y = f(weight, x)
    grad = tape.gradient(y, weight)
    kinds.append(type(grad))
    return tf.convert_to_tensor(grad)

  return run(some(3, 2, 4), some(3, 1, 5, 2)), kinds[0]


def use(weight, x):
  return product('EGCM,EMH->EGCH', x, weight)


def plain(weight, x):
  return tf.einsum('EGCM,EMH->EGCH', x, weight)


def test_the_gradient_of_a_weight_used_once_comes_as_factors():
  grad, kind = gradient_of(use)
  assert kind is FactoredGradient
  np.testing.assert_allclose(grad, gradient_of(plain)[0], rtol=1e-5)


@pytest.mark.parametrize(
  'f',
  [
    lambda weight, x, use: use(weight, x) + use(weight, 2.0 * x),  # added up
    lambda weight, x, use: use(weight, x) + tf.reduce_sum(weight),
    lambda weight, x, use: use(3.0 * weight, x),  # goes on through another operation
    lambda weight, x, use: tf.cast(use(tf.cast(weight, tf.bfloat16), tf.cast(x, tf.bfloat16)), tf.float32),
  ],
)
def test_gradients_that_go_on_or_add_up_are_right(f):
  got, want = (gradient_of(lambda weight, x, way=way: f(weight, x, way))[0] for way in (use, plain))
  np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2)


def test_factors_are_computed_after_the_gradient_for_the_input():
  found = []

  @tf.function(input_signature=[tf.TensorSpec([3, 1, None, 2]), tf.TensorSpec([3, 2, 4])], autograph=False)
  def run(x, weight):
    with tf.GradientTape() as tape:
      tape.watch([x, weight])
      y = product('EGCM,EMH->EGCH', x, weight)
    dx, grad = tape.gradient(y, [x, weight])
    found.extend([dx, grad.x_ECM, grad.dy_ECH])
    return dx

  run.get_concrete_function()
  dx, *factors = found
  for factor in factors:
    assert dx.op.name in [op.name for op in ancestors([factor.op])]


def test_gradients_of_parts_of_a_batch_add_up_and_factored_ones_stay_factored():
  x, dy = tf.random.normal([3, 5, 4]), tf.random.normal([3, 5, 6])
  whole = FactoredGradient(x, dy)
  got = factored.add_gradients(FactoredGradient(x[:, :2], dy[:, :2]), FactoredGradient(x[:, 2:], dy[:, 2:]))
  assert isinstance(got, FactoredGradient)
  np.testing.assert_allclose(got.multiplied(), whole.multiplied(), rtol=1e-5, atol=1e-6)
  rows = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 2]), tf.constant([3, 4]))
  more = tf.IndexedSlices(tf.fill([1, 4], 5.0), tf.constant([2]), tf.constant([3, 4]))
  np.testing.assert_array_equal(tf.convert_to_tensor(factored.add_gradients(rows, more))[:, 0], [1, 0, 6])
  np.testing.assert_array_equal(factored.add_gradients(tf.ones([2]), tf.ones([2])), [2, 2])
