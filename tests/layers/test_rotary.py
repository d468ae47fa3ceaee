"""Rotary positions: angles by hand, and scores that depend on distances alone."""

import math

import numpy as np
import tensorflow as tf

from lingvo_moe.layers.positions import rotate


def test_one_pair_turns_by_its_position_in_radians():
  x = tf.constant([[[[1.0, 0.0], [1.0, 0.0], [3.0, 4.0]]]])  # [B=1, N=1, T=3, K=2]
  got = rotate(x, tf.constant([[0, 1, 2]]))
  s, c = math.sin(2), math.cos(2)
  np.testing.assert_allclose(got[0, 0], [[1, 0], [math.cos(1), math.sin(1)], [3 * c - 4 * s, 4 * c + 3 * s]], rtol=1e-5)


def test_pairs_are_features_i_and_i_plus_half_and_the_second_pair_turns_slower():
  x = tf.constant([[[[1.0, 1.0, 0.0, 0.0]]]])
  got = rotate(x, tf.constant([[5]]), base=100.0)[0, 0, 0]  # rates 1 and 100^(-1/2)
  np.testing.assert_allclose(got, [math.cos(5), math.cos(0.5), math.sin(5), math.sin(0.5)], rtol=1e-5)


def test_scores_depend_on_the_distance_of_positions_and_lengths_are_kept():
  q, k = (tf.random.stateless_normal([2, 3, 4, 6], [seed, 1]) for seed in (0, 1))
  at = lambda x, shift: rotate(x, tf.range(4)[tf.newaxis] + shift)
  scores = lambda shift: tf.einsum('BNTK,BNUK->BNTU', at(q, shift), at(k, shift))
  np.testing.assert_allclose(scores(0), scores(1000), atol=2e-3)
  apart = tf.einsum('BNTK,BNUK->BNTU', at(q, 3), at(k, 0))
  assert np.max(np.abs(apart - scores(0))) > 0.1
  np.testing.assert_allclose(tf.norm(at(q, 7), axis=-1), tf.norm(q, axis=-1), rtol=1e-5)


def test_rows_have_positions_of_their_own_with_or_without_an_axis_of_shared_heads():
  x = tf.random.stateless_normal([2, 3, 2, 4, 6], [0, 1])
  positions = tf.constant([[0, 1, 2, 3], [9, 10, 11, 12]])
  got = rotate(x, positions)
  for row, shared in np.ndindex(2, 2):
    np.testing.assert_allclose(
      got[row, :, shared], rotate(x[row : row + 1, :, shared], positions[row : row + 1])[0], atol=1e-6
    )
