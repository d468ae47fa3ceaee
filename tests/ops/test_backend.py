"""The backend in force while a function is traced."""

import tensorflow as tf

from lingvo_moe.core import progress
from lingvo_moe.ops import backend


def test_what_is_traced_is_said_by_the_scope_of_the_newest_operation():
  said = []

  @tf.function
  def gradient(x):
    with backend.use(backend.REFERENCE):
      said.append(progress._now_doing())
      with tf.GradientTape() as tape, tf.name_scope('decoder'), tf.name_scope('layer_03'), tf.name_scope('attention'):
        tape.watch(x)
        y = tf.exp(x)
        said.append(progress._now_doing())
      y = tape.gradient(y, x)
      said.append(progress._now_doing())
      return y

  gradient(tf.constant(3.0))
  assert said == ['tracing, 0 s', 'tracing decoder/layer_03, 0 s', 'tracing gradients of decoder/layer_03, 0 s']
  assert progress._now_doing() == ''


def test_nothing_is_said_to_be_traced_where_operations_run_at_once():
  with backend.use(backend.REFERENCE):
    assert progress._now_doing() == ''
