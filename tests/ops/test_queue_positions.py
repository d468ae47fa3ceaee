"""Queue positions, by counting and by sorting, against a loop; and the stable sort."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from lingvo_moe.core import sorting
from lingvo_moe.ops import reference
from lingvo_moe.ops.cpu import kernels


def by_counting(expert_GSR, taken_GSR, num_experts):
  return reference.queue_positions(tf.constant(expert_GSR, tf.int32), tf.constant(taken_GSR), num_experts)


@tf.function(
  input_signature=[tf.TensorSpec([None] * 3, tf.int32), tf.TensorSpec([None] * 3, tf.bool), tf.TensorSpec([], tf.int32)]
)
def _of_any_size(expert_GSR, taken_GSR, num_experts):
  return kernels.queue_positions(expert_GSR, taken_GSR, num_experts)


def by_sorting(expert_GSR, taken_GSR, num_experts):
  return _of_any_size(tf.constant(expert_GSR, tf.int32), tf.constant(taken_GSR), num_experts)


def by_hand(expert_GSR, taken_GSR, num_experts):
  groups, size, ranks = expert_GSR.shape
  position_GSR, length_GE = np.zeros([groups, size, ranks], int), np.zeros([groups, num_experts], int)
  for g in range(groups):
    for r in range(ranks):
      for s in range(size):
        if taken_GSR[g, s, r]:
          position_GSR[g, s, r] = length_GE[g, expert_GSR[g, s, r]]
          length_GE[g, expert_GSR[g, s, r]] += 1
  return position_GSR, length_GE


@pytest.mark.parametrize('positions', [by_counting, by_sorting])
def test_second_choices_stand_behind_all_first_ones(positions):
  expert_GSR = np.array([[[0, 1], [1, 0], [0, 1]]])
  position_GSR, length_GE = positions(expert_GSR, np.full([1, 3, 2], True), 3)
  np.testing.assert_array_equal(position_GSR, [[[0, 1], [0, 2], [1, 2]]])
  np.testing.assert_array_equal(length_GE, [[3, 3, 0]])


@hypothesis.given(
  st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 3)),
  st.integers(1, 9),
  st.floats(0, 1),
  st.integers(0, 99),
)
@hypothesis.settings(deadline=None, max_examples=40)
def test_both_ways_agree_with_a_loop(shape, num_experts, share, seed):
  rng = np.random.default_rng(seed)
  expert_GSR, taken_GSR = rng.integers(num_experts, size=shape), rng.random(shape) < share
  want = by_hand(expert_GSR, taken_GSR, num_experts)
  for positions in (by_counting, by_sorting):
    for got, exact in zip(positions(expert_GSR, taken_GSR, num_experts), want, strict=True):
      assert got.dtype == tf.int32
      np.testing.assert_array_equal(got, exact)


def test_sort_keeps_the_order_of_a_kind_and_puts_kinds_beyond_last():
  found = sorting.sort(tf.constant([2, 0, 3, 2, 0, 2]), 3)
  np.testing.assert_array_equal(found.order, [1, 4, 0, 3, 5, 2])
  np.testing.assert_array_equal(found.place, [2, 0, 5, 3, 1, 4])
  np.testing.assert_array_equal(found.offsets, [0, 2, 2, 5])
