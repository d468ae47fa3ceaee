"""Products with weights and their hand-written gradients, against einsum and its derived gradients."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.ops import backend, cpu, reference
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.cpu import kernels
from lingvo_moe.ops.cpu.linear import linear, product, trained_linear, trained_product
from lingvo_moe.ops.vjp import sum_to_features


def value_and_gradients(f, *args):
  """Value of f, and the gradients of a weighted sum of it."""
  with tf.GradientTape() as tape:
    tape.watch(args)
    y = f(*args)
    pull = tf.reshape(tf.sin(tf.range(tf.size(y), dtype=tf.float32)), y.shape)
    total = tf.reduce_sum(y * pull)
  return [y, *map(tf.convert_to_tensor, tape.gradient(total, args))]


def assert_equal(ours, theirs):
  for a, b in zip(ours, theirs, strict=True):
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('linear', [linear, trained_linear, reference.linear])
def test_two_features_by_hand(linear):
  x, weight, bias = tf.constant([[[1.0, 2.0]]]), tf.constant([[3.0, -1.0], [0.5, -4.0]]), tf.constant([1.0, 1.0])
  np.testing.assert_array_equal(linear(x, weight), [[[4.0, -9.0]]])
  np.testing.assert_array_equal(linear(x, weight, bias), [[[5.0, -8.0]]])
  np.testing.assert_array_equal(linear(x, weight, bias, tf.nn.relu), [[[5.0, 0.0]]])


def test_the_gradient_of_a_bias_in_bfloat16_is_not_summed_in_bfloat16():
  x, weight = tf.ones([4096, 2], tf.bfloat16), tf.ones([2, 3], tf.bfloat16)
  with tf.GradientTape() as tape:
    tape.watch(bias := tf.zeros([3], tf.bfloat16))
    total = tf.reduce_sum(tf.cast(trained_linear(x, weight, bias), tf.float32))
  np.testing.assert_array_equal(tf.cast(tape.gradient(total, bias), tf.float32), [4096.0] * 3)


@pytest.mark.parametrize('linear', [linear, trained_linear])
def test_in_bfloat16_a_product_is_not_fused_with_a_bias(linear):
  specs = [tf.TensorSpec(shape, tf.bfloat16) for shape in ([None, None, 2], [2, 3], [3])]
  relu = lambda x, weight, bias: linear(x, weight, bias, tf.nn.relu)
  ops = tf.function(relu, specs, autograph=False).get_concrete_function().graph.get_operations()
  readers = {reader.type for op in ops if op.type == 'MatMul' for reader in op.outputs[0].consumers()}
  assert readers and not readers & {'Add', 'AddV2', 'BiasAdd'}


def test_a_relu_of_bits_is_that_of_numbers_and_so_is_its_gradient():
  x = tf.constant([-np.inf, -2.5, -1e-30, -0.0, 0.0, 1e-30, 3.0, np.inf], tf.bfloat16)
  dy = tf.constant([1.0, -2.0, np.inf, 4.0, -5.0, -6.0, 7.0, -8.0], tf.bfloat16)
  got = kernels.relu(x), kernels.relu_gradient(dy, kernels.relu(x))
  for bits, want in zip(got, (tf.nn.relu(x), [0.0, 0, 0, 0, 0, -6, 7, -8]), strict=True):
    np.testing.assert_array_equal(tf.cast(bits, tf.float32), tf.cast(want, tf.float32))


def test_a_weight_that_is_not_a_number_reaches_the_gradient_of_the_input():
  x, bias = tf.ones([2, 3], tf.bfloat16), tf.zeros([2], tf.bfloat16)
  weight = tf.constant([[np.nan, 1.0]] * 3, tf.bfloat16)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = trained_linear(x, weight, bias, tf.nn.relu)
  assert np.all(np.isnan(tf.cast(tape.gradient(y, x), tf.float32)))


def test_output_scores_of_bfloat16_activations_are_exact_at_inference():
  x, weight = tf.ones([1, 1, 2], tf.bfloat16), tf.constant([[1.0, 2.0**-12]])
  of = lambda product: float(product('BTM,VM->BTV', x, weight)[0, 0, 0])
  assert (of(product), of(trained_product)) == (1.0 + 2.0**-12, 1.0)


@pytest.mark.parametrize('experts, products', [(6, 3), (5, 1)])  # three parts; or one, as 3 does not divide 5
def test_parts_of_the_experts_are_computed_side_by_side(experts, products):
  x, weight = tf.random.normal([experts, 1, 4, 2]), tf.random.normal([experts, 2, 3])
  specs = [tf.TensorSpec([experts, None, None, 2]), tf.TensorSpec([experts, 2, 3])]

  def in_three(x, weight):
    with backend.use(Backend('cpu', cpu.OVERRIDES, sub_batches=3)):
      return product('EGCM,EMH->EGCH', x, weight)

  traced = tf.function(in_three, specs, autograph=False)
  einsums = [op for op in traced.get_concrete_function().graph.get_operations() if op.type == 'Einsum']
  assert len(einsums) == products
  want = value_and_gradients(lambda x, weight: tf.einsum('EGCM,EMH->EGCH', x, weight), x, weight)
  got = tf.function(lambda x, weight: value_and_gradients(in_three, x, weight), autograph=False)(x, weight)
  assert_equal(got, want)


@pytest.mark.parametrize('equation', ['EGCM,EMH->EGCH', 'BTM,VM->BTV'])
def test_a_gradient_for_the_weight_transposes_nothing(equation):
  sizes = dict(zip('BTMVGECH', (2, 3, 4, 7, 1, 5, 3, 6), strict=True))
  shapes = [[sizes[a] for a in axes] for axes in equation.split('->')[0].split(',')]

  @tf.function(input_signature=[tf.TensorSpec(shape) for shape in shapes])
  def gradient(x, weight):
    with tf.GradientTape() as tape:
      tape.watch(weight)
      y = product(equation, x, weight)
    return tf.convert_to_tensor(tape.gradient(y, weight))

  einsums = [op for op in gradient.get_concrete_function().graph.get_operations() if op.type == 'Einsum']
  weight_axes = equation.split('->')[0].split(',')[1]
  equations = [op.get_attr('equation').decode() for op in einsums]
  of_weight = equations[-1]  # for experts 'ECM,ECH->EMH', with rows flattened
  assert of_weight.endswith('->' + weight_axes)
  first, second = of_weight.split('->')[0].split(',')
  kept = [a for a in first if a not in second] + [a for a in second if a not in first]
  assert [a for a in weight_axes if a in kept] == kept


def test_sum_to_features_keeps_the_last_axis():
  np.testing.assert_array_equal(sum_to_features(tf.ones([2, 3, 4])), [6.0] * 4)
