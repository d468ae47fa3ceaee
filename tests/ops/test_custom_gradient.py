"""Name scopes of operations in hand-written gradients, by which tools group compiled operations by layer."""

import pytest
import tensorflow as tf

from lingvo_moe.layers.dispatch import DISPATCHERS
from lingvo_moe.layers.gates.top2 import top2_gating
from lingvo_moe.ops import backend, cpu, xla
from lingvo_moe.ops.backend import Backend

CPU = Backend('cpu', cpu.OVERRIDES)


@pytest.mark.parametrize('in_force', [CPU, xla.BACKEND], ids=lambda b: b.name)
@pytest.mark.parametrize('way', ['einsum', 'gather'])
def test_gradients_are_named_after_the_scopes_of_what_they_are_gradients_of(way, in_force):
  routing = top2_gating(tf.random.stateless_normal([3, 10, 4], [0, 1]), tf.zeros([3, 10]), capacity=3)

  @tf.function
  def gradient(x_GSM):
    with backend.use(in_force), tf.GradientTape() as tape:
      tape.watch(x_GSM)
      dispatcher = DISPATCHERS[way](routing)
      with tf.name_scope('layer_01/dispatch'):
        x_EGCM = dispatcher.dispatch(x_GSM)
      with tf.name_scope('layer_01/combine'):
        y_GSM = dispatcher.combine(x_EGCM)
    return tape.gradient(y_GSM, x_GSM)

  made = gradient.get_concrete_function(tf.TensorSpec([3, 10, 5])).graph.get_operations()
  scopes = {op.name.rpartition('layer_01/')[0] for op in made if op.type in ('GatherV2', 'Einsum')}
  assert scopes == {'', 'gradient_tape/'}
  assert all('layer_01/' in op.name for op in made if op.type in ('GatherV2', 'Einsum'))
