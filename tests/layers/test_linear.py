"""Products with weights, and their hand-written gradients, against einsum and what TensorFlow derives from it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.layers.linear import linear
from lingvo_moe.layers.linear import product
from lingvo_moe.layers.linear import sum_to_features
from lingvo_moe.ops import cores


def value_and_gradients(f, *args):
  """f's value, and the gradients of a weighted sum of it."""
  with tf.GradientTape() as tape:
    tape.watch(args)
    y = f(*args)
    pull = tf.reshape(tf.sin(tf.range(tf.size(y), dtype=tf.float32)), y.shape)
    total = tf.reduce_sum(y * pull)
  return [y, *tape.gradient(total, args)]


def assert_equal(ours, theirs):
  for a, b in zip(ours, theirs, strict=True):
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_two_features_by_hand():
  x, weight, bias = tf.constant([[[1.0, 2.0]]]), tf.constant([[3.0, -1.0], [0.5, -4.0]]), tf.constant([1.0, 1.0])
  np.testing.assert_array_equal(linear(x, weight), [[[4.0, -9.0]]])
  np.testing.assert_array_equal(linear(x, weight, bias), [[[5.0, -8.0]]])
  np.testing.assert_array_equal(linear(x, weight, bias, tf.nn.relu), [[[5.0, 0.0]]])


@pytest.mark.parametrize(
  'x_shape, weight_shape, inputs, equation',
  [
    ((2, 3, 4), (4, 5), 1, 'BTM,MH->BTH'),
    ((2, 3, 4), (4, 2, 5), 1, 'BTM,MNK->BTNK'),
    ((2, 3, 2, 5), (2, 5, 4), 2, 'BTNK,NKM->BTM'),
  ],
)
@pytest.mark.parametrize('traced', [False, True])
def test_linear_is_einsum_and_a_bias(x_shape, weight_shape, inputs, equation, traced):
  x, weight = tf.random.normal(x_shape), tf.random.normal(weight_shape)
  bias = tf.random.normal(weight_shape[inputs:])
  ours = lambda x, weight, bias: linear(x, weight, bias, tf.nn.relu, inputs)
  if traced:  # with sizes left open, as a runtime traces it
    open_x = tf.TensorSpec([None] * (len(x_shape) - inputs) + list(x_shape[len(x_shape) - inputs :]))
    ours = tf.function(ours, [open_x, tf.TensorSpec(weight_shape), tf.TensorSpec(bias.shape)], autograph=False)
  plain = lambda x, weight, bias: tf.nn.relu(tf.einsum(equation, x, weight) + bias)
  assert_equal(value_and_gradients(ours, x, weight, bias), value_and_gradients(plain, x, weight, bias))


@pytest.mark.parametrize('equation', ['EGCM,EMH->EGCH', 'EGCH,EHM->EGCM', 'BTM,VM->BTV', 'GSM,ME->GSE'])
def test_product_is_einsum_forward_and_backward(equation):
  sizes = dict(zip('BTMVSGECH', (2, 3, 4, 7, 3, 2, 5, 3, 6), strict=True))
  x, weight = (tf.random.normal([sizes[a] for a in axes]) for axes in equation.split('->')[0].split(','))
  ours = value_and_gradients(lambda x, weight: product(equation, x, weight), x, weight)
  assert_equal(ours, value_and_gradients(lambda x, weight: tf.einsum(equation, x, weight), x, weight))


@pytest.mark.parametrize('experts, products', [(6, 3), (5, 1)])  # three parts; or one, where three are not to be had
def test_parts_of_the_experts_are_computed_side_by_side(experts, products, monkeypatch):
  monkeypatch.setattr(cores, 'side_by_side', lambda: 3)
  x, weight = tf.random.normal([experts, 1, 4, 2]), tf.random.normal([experts, 2, 3])
  specs = [tf.TensorSpec([experts, None, None, 2]), tf.TensorSpec([experts, 2, 3])]
  traced = tf.function(lambda x, weight: product('EGCM,EMH->EGCH', x, weight), specs, autograph=False)
  einsums = [op for op in traced.get_concrete_function().graph.get_operations() if op.type == 'Einsum']
  assert len(einsums) == products
  want = value_and_gradients(lambda x, weight: tf.einsum('EGCM,EMH->EGCH', x, weight), x, weight)
  assert_equal(value_and_gradients(traced, x, weight), want)


@pytest.mark.parametrize('equation', ['EGCM,EMH->EGCH', 'BTM,VM->BTV'])
def test_a_gradient_for_the_weight_transposes_nothing(equation):
  sizes = dict(zip('BTMVGECH', (2, 3, 4, 7, 1, 5, 3, 6), strict=True))
  shapes = [[sizes[a] for a in axes] for axes in equation.split('->')[0].split(',')]

  @tf.function(input_signature=[tf.TensorSpec(shape) for shape in shapes])
  def gradient(x, weight):
    with tf.GradientTape() as tape:
      tape.watch(weight)
      y = product(equation, x, weight)
    return tape.gradient(y, weight)

  einsums = [op for op in gradient.get_concrete_function().graph.get_operations() if op.type == 'Einsum']
  weight_axes = equation.split('->')[0].split(',')[1]
  (of_weight,) = [e for e in (op.get_attr('equation').decode() for op in einsums) if e.endswith('->' + weight_axes)]
  first, second = of_weight.split('->')[0].split(',')
  kept = [a for a in first if a not in second] + [a for a in second if a not in first]
  assert [a for a in weight_axes if a in kept] == kept


def test_sum_to_features_keeps_the_last_axis():
  np.testing.assert_array_equal(sum_to_features(tf.ones([2, 3, 4])), [6.0] * 4)
