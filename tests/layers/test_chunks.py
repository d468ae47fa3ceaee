"""Rounds and chunks of a routing: each choice is served once, and outputs and gradients are those of one chunk."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng, weights
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.moe import MoE
from lingvo_moe.tasks.mt.mt_config import MtConfig

LAYER = MoE(model_dim=4, hidden_dim=8, num_experts=4, num_groups=2, capacity_factor=1.0)  # C = 3


def test_three_slots_in_two_chunks_by_hand():
  weight_GSR = tf.constant([[[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]]])
  slot_GSR = tf.constant([[[0, 1], [1, 2], [2, 7]]])  # the last choice has no slot
  whole = Routing(tf.zeros([1, 3, 2], tf.int32), slot_GSR, weight_GSR, num_experts=2, capacity=3, stats=None)
  assert whole.chunks(1) == [whole]
  first, second = whole.chunks(2)
  assert first.capacity == second.capacity == 2
  # Slots 0 and 1, then slot 2 and one that no choice has.
  np.testing.assert_array_equal(first.weight_GSR, [[[0.75, 0.25], [0.5, 0], [0, 0]]])
  np.testing.assert_array_equal(second.weight_GSR, [[[0, 0], [0, 0.5], [1, 0]]])
  assert [r.slot_GSR[r.weight_GSR > 0].numpy().tolist() for r in (first, second)] == [[0, 1, 1], [0, 0]]


def values_and_gradients(layer):
  theta = weights.initialize(layer.weights(), seed=1)
  x_BTM = tf.random.stateless_normal([4, 6, 4], [0, 1])
  with tf.GradientTape() as tape:
    tape.watch([theta, x_BTM])
    y_BTM, _ = layer(theta, x_BTM, tf.zeros([4, 6]), prng.key(0))
    value = tf.reduce_sum(tf.sin(y_BTM))
  return [y_BTM, *map(tf.convert_to_tensor, tf.nest.flatten(tape.gradient(value, [theta, x_BTM])))]


@pytest.mark.parametrize('dropout', [0.0, 0.3])
@pytest.mark.parametrize('chunks', [2, 3, 5])
@pytest.mark.parametrize('dispatch', ['einsum', 'gather', 'grouped'])
def test_outputs_and_gradients_do_not_depend_on_the_number_of_chunks(dispatch, chunks, dropout):
  whole = dataclasses.replace(LAYER, dispatch=dispatch, expert_dropout=dropout)
  parts = dataclasses.replace(whole, capacity_chunks=chunks)
  for ours, theirs in zip(values_and_gradients(parts), values_and_gradients(whole), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_chunks_are_of_a_capacity():
  with pytest.raises(
    UserError, match='capacity_chunks must be 1 with capacity_factor = None, which takes slots in rou'
  ):
    MtConfig(capacity_chunks=2, capacity_factor=None)
