"""Choices of experts by part of the text."""

import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import weights
from lingvo_moe.layers.gates import table
from lingvo_moe.layers.gates.routing import Decisions, Routed, RoutingStats
from lingvo_moe.layers.moe import MoE
from lingvo_moe.models import losses

MEMBER_BP = tf.constant([[1, 0], [0, 1], [0, 1], [0, 0]])  # the last row is of neither part


def test_choices_are_counted_in_the_rows_of_a_part():
  expert_GSR = tf.constant([[[0, 1], [2, 1], [1, 0], [1, 2]], [[2, 0], [2, 1], [0, 1], [0, 1]]])  # two rows a group
  weight_GSR = tf.where(tf.constant([[[1, 1], [1, 0], [1, 1], [0, 0]], [[1, 1], [1, 1], [1, 1], [1, 1]]]) > 0, 0.5, 0.0)
  stats = RoutingStats(*[tf.zeros([])] * 9)._replace(tokens_E=tf.zeros([3]))
  routed = Routed(stats, Decisions(expert_GSR, weight_GSR, tf.zeros([2, 4])))
  found = losses.choices_by_subset('pair', {'encoder/layer_01': routed}, MEMBER_BP)
  # Row 0: 0, 1, 2. Row 1: 1, 0. Row 2: 2, 0, 2, 1.
  np.testing.assert_array_equal(found['choices_by_pair']['encoder/layer_01'], [[1, 1, 1], [2, 2, 2]])
  assert losses.choices_by_subset('pair', {}, MEMBER_BP) == {}


@pytest.mark.parametrize('name', table.GATES)
def test_choices_of_any_gate_add_up_to_its_loads(name):
  gate = table.make(name, types.SimpleNamespace(capacity_factor=1.5, groups_of_experts=3))
  layer = MoE(model_dim=6, hidden_dim=4, num_experts=9, num_groups=2, gate=gate)
  theta = weights.initialize(layer.weights(), seed=3)
  theta |= {n: tf.random.stateless_normal(w.shape, [0, i]) for i, (n, w) in enumerate(theta.items()) if 'gate' in n}
  paddings = tf.constant([[0.0] * 5, [0.0, 1.0, 0.0, 0.0, 1.0], [0.0] * 5, [1.0] * 5])
  _, routing = layer(theta, tf.random.stateless_normal([4, 5, 6], [0, 1]), paddings)
  found = losses.choices_by_subset('pair', {'layer': routing.routed}, MEMBER_BP)
  choices_PE = found['choices_by_pair']['layer']
  assert choices_PE.shape == [2, 9] and np.sum(choices_PE[0]) > 0
  np.testing.assert_array_equal(np.sum(choices_PE, axis=0), routing.stats.tokens_E)  # the row of neither is padding
