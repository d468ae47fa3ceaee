"""Noisy top-k gate: zero weights at first, its noise, importance and load losses by hand and by sampling."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng, weights
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.gates import noisy_top_k
from lingvo_moe.layers.gates.noisy_top_k import NoisyTopK

X_GSM = tf.random.stateless_normal([2, 9, 6], [0, 1])
THETA = {'gate': tf.random.stateless_normal([6, 5], [0, 2]), 'gate_noise': tf.random.stateless_normal([6, 5], [0, 3])}
KEYS_GS = prng.bits(prng.key(1), [2, 9])


def softplus(x):
  return np.log1p(np.exp(x))


def test_both_weights_begin_at_zero_and_load_is_then_spread_evenly():
  theta = weights.initialize(NoisyTopK().weights(8, 16), seed=0)
  assert all(float(tf.norm(weight)) == 0 for weight in theta.values())
  x = tf.random.stateless_normal([1, 4000, 8], [0, 4])
  stats = NoisyTopK()(theta, x, tf.zeros([1, 4000]), prng.bits(prng.key(3), [1, 4000])).stats
  np.testing.assert_allclose(stats.tokens_E, 500, rtol=0.15)


def test_choices_are_the_top_of_noisy_logits_and_weights_a_softmax_over_those_kept():
  routing = NoisyTopK(3)(THETA, X_GSM, tf.zeros([2, 9]), KEYS_GS)
  clean = X_GSM.numpy() @ THETA['gate'].numpy()
  noise = prng.normal(prng.fold(KEYS_GS, 'noise'), [2, 9, 5]).numpy()
  noisy = clean + noise * (softplus(X_GSM.numpy() @ THETA['gate_noise'].numpy()) + 1e-2)
  order = np.argsort(-noisy, axis=-1)[..., :3]
  np.testing.assert_array_equal(routing.expert_GSR, order)
  kept = np.exp(np.take_along_axis(noisy, order, -1))
  np.testing.assert_allclose(routing.weight_GSR, kept / kept.sum(-1, keepdims=True), rtol=1e-5)
  assert np.any(order[..., 0] != clean.argmax(-1))  # noise decided some


def test_at_inference_there_is_no_noise():
  routing = NoisyTopK()(THETA, X_GSM, tf.zeros([2, 9]))
  clean = X_GSM.numpy() @ THETA['gate'].numpy()
  np.testing.assert_array_equal(routing.expert_GSR, np.argsort(-clean, axis=-1)[..., :2])


def test_load_is_the_chance_to_be_kept_if_the_noise_of_one_expert_is_drawn_again():
  logits, raw = X_GSM @ THETA['gate'], X_GSM @ THETA['gate_noise']
  load = noisy_top_k.noisy_top_k(logits, raw, KEYS_GS, 2).load_GSE.numpy()
  stddev = softplus(raw.numpy()) + 1e-2
  noisy = logits.numpy() + prng.normal(prng.fold(KEYS_GS, 'noise'), logits.shape).numpy() * stddev
  rng = np.random.default_rng(0)
  for g, s, e in [(0, 0, 0), (0, 3, 2), (1, 5, 4), (1, 8, 1)]:
    drawn = logits.numpy()[g, s, e] + stddev[g, s, e] * rng.normal(size=20_000)
    second = np.sort(np.delete(noisy[g, s], e))[-2]
    assert load[g, s, e] == pytest.approx(np.mean(drawn > second), abs=0.015)


def test_loss_is_the_squared_variation_of_importance_and_load_over_all_groups():
  paddings = tf.constant([[0.0] * 9, [0.0] * 4 + [1.0] * 5])
  stats = NoisyTopK()(THETA, X_GSM, paddings, KEYS_GS).stats
  noisy = noisy_top_k.noisy_top_k(X_GSM @ THETA['gate'], X_GSM @ THETA['gate_noise'], KEYS_GS, 2)
  real = 1 - paddings.numpy()[..., np.newaxis]
  variation = lambda x: np.var(x) / np.mean(x) ** 2
  expected = sum(variation(np.sum(x.numpy() * real, axis=(0, 1))) for x in (noisy.gates_GSE, noisy.load_GSE))
  np.testing.assert_allclose(stats.aux_loss / stats.groups, expected, rtol=1e-5)
  np.testing.assert_allclose(tf.reduce_sum(noisy.load_GSE * real), 2 * 13, rtol=0.2)  # about k a token


def test_squared_variation_by_hand_and_finite_at_perfect_balance():
  np.testing.assert_allclose(noisy_top_k.squared_variation(tf.constant([1.0, 3.0])), 1 / 4, rtol=1e-6)
  for x in (tf.fill([4], 7.0), tf.zeros([4])):
    with tf.GradientTape() as tape:
      tape.watch(x)
      value = noisy_top_k.squared_variation(x)
    assert float(value) == 0
    np.testing.assert_array_equal(tape.gradient(value, x), np.zeros(4))


def test_gradients_are_finite_where_weights_are_zero_and_reach_both():
  theta = weights.initialize(NoisyTopK().weights(6, 5), seed=0)
  with tf.GradientTape() as tape:
    tape.watch(theta)
    routing = NoisyTopK()(theta, X_GSM, tf.zeros([2, 9]), KEYS_GS)
    value = routing.stats.aux_loss + tf.reduce_sum(tf.square(routing.weight_GSR))
  for gradient in tape.gradient(value, theta).values():
    assert np.all(np.isfinite(gradient)) and float(tf.norm(gradient)) > 0


def test_the_normal_distribution_function():
  np.testing.assert_allclose(
    noisy_top_k._normal_cdf(tf.constant([-math.inf, 0.0, 1.0, math.inf])), [0, 0.5, 0.841345, 1], rtol=1e-5
  )


def test_one_choice_is_refused():
  with pytest.raises(UserError, match=r'saw 1: the softmax over one kept expert is 1, without a gradient'):
    NoisyTopK(1).check(5)


def test_as_many_choices_as_experts_are_refused():
  with pytest.raises(UserError, match=r'choices must be less than num_experts=5'):
    NoisyTopK(5).check(5)
