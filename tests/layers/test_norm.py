"""Normalisation by hand; LayerNorm's hand-written gradient against the one that TensorFlow derives."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.layers.norm import LayerNorm, RMSNorm

NORM = LayerNorm(4)


def plain(x, scale, bias):
  mean, variance = tf.nn.moments(x, [-1], keepdims=True)
  return (x - mean) * tf.math.rsqrt(variance + NORM.epsilon) * scale + bias


def test_two_features_by_hand():
  theta = {'scale': tf.constant([2.0, 3.0]), 'bias': tf.constant([10.0, 20.0])}
  got = LayerNorm(2, epsilon=0.0)(theta, tf.constant([[[5.0, 9.0]]]))  # mean 7, standard deviation 2
  np.testing.assert_allclose(got, [[[8.0, 23.0]]], rtol=1e-6)


@pytest.mark.parametrize('traced', [False, True])
def test_value_and_gradients_are_those_of_the_plain_formula(traced):
  x, scale, bias, pull = (tf.random.normal(shape) for shape in ([2, 3, 4], [4], [4], [2, 3, 4]))

  def value_and_gradients(f):
    def run(*args):
      with tf.GradientTape() as tape:
        tape.watch(args)
        y = f(*args)
        total = tf.reduce_sum(y * pull)
      return y, *tape.gradient(total, args)

    return (tf.function(run) if traced else run)(x, scale, bias)

  ours = value_and_gradients(lambda x, scale, bias: NORM({'scale': scale, 'bias': bias}, x))
  for a, b in zip(ours, value_and_gradients(plain), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_equal_features_become_the_bias_and_have_a_finite_gradient():
  theta = {'scale': tf.ones([4]), 'bias': tf.constant([1.0, 2.0, 3.0, 4.0])}
  x = tf.fill([1, 1, 4], 7.0)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = NORM(theta, x)
  np.testing.assert_array_equal(y[0, 0], theta['bias'])
  assert np.all(np.isfinite(tape.gradient(y, x)))


def test_the_root_mean_square_of_zeros_divides_nothing():
  theta, x = {'scale': tf.ones([4])}, tf.zeros([1, 1, 4])
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = RMSNorm(4)(theta, x)
  np.testing.assert_array_equal(y, x)
  assert np.all(np.isfinite(tape.gradient(y, x)))


def test_bfloat16_in_bfloat16_out_computed_in_float32():
  theta = {'scale': tf.ones([4]), 'bias': tf.zeros([4])}
  x = tf.constant([[[256.0, 258.0, 260.0, 262.0]]], tf.bfloat16)
  got = NORM(theta, x)
  assert got.dtype == tf.bfloat16
  np.testing.assert_allclose(tf.cast(got, tf.float32), [[[-1.3416, -0.4472, 0.4472, 1.3416]]], rtol=1e-2)


def test_rms_norm_of_two_features_by_hand():
  got = RMSNorm(2, epsilon=0.0)({'scale': tf.constant([2.0, 3.0])}, tf.constant([[[1.0, 7.0]]]))  # mean square 25
  np.testing.assert_allclose(got, [[[2 * 1 / 5, 3 * 7 / 5]]], rtol=1e-6)


def test_rms_norm_has_a_scale_alone_and_keeps_the_type_of_its_input():
  assert list(RMSNorm(4).weights()) == ['scale']
  theta, x = {'scale': tf.ones([4])}, tf.constant([[[256.0, 258.0, 260.0, 262.0]]])
  got = RMSNorm(4)(theta, tf.cast(x, tf.bfloat16))
  assert got.dtype == tf.bfloat16
  np.testing.assert_allclose(tf.cast(got, tf.float32), RMSNorm(4)(theta, x), rtol=1e-2)
