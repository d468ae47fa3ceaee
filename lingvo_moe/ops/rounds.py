"""Rounds: no choice of an expert is dropped under static shapes, and a fixed number of slots is computed at a time.

The longest queue of an expert is known only when the program runs, but XLA needs the sizes of tensors while it
compiles. A loop takes the choices of a queue C at a time, until none waits. Memory is that of one round, and the cost
is proportional to the longest queue: to the imbalance. Room for the longest queue that is possible would be S slots for
every expert and group, E / 2 times as many as there are choices.
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_moe.ops.custom_gradient import pull_back
from lingvo_moe.ops.loops import counted


def sum_over_rounds(function, x_GSM, theta, routing, slots, width=None):
  """Sum over rounds of `slots` choices of each queue, in a loop; see reference.sum_over_rounds.

  The number of rounds is that of the longest queue on any device, so all devices run as many. The gradient is a second
  loop, which runs each round again and differentiates it.
  """
  inputs = routing.weight_GSR, x_GSM, theta
  rounds = (routing.capacity + slots - 1) // slots
  scope = '/'.join(filter(None, [tf.get_current_name_scope(), 'rounds']))

  def one_round(number, *flat):
    weight_GSR, x_GSM, theta = tf.nest.pack_sequence_as(inputs, flat)
    return function(x_GSM, theta, routing._replace(weight_GSR=weight_GSR).round(number, slots))

  @tf.custom_gradient
  def run(*args):
    def grad(dy_GSM):
      def backward(number, *sums):
        grads = pull_back(lambda *args: one_round(number, *args), args, [dy_GSM])
        return [total + tf.cast(g, total.dtype) for total, g in zip(sums, grads, strict=True)]

      sums = counted(rounds, backward, *(_zeros(a, tf.float32) for a in args), scope=scope)
      return [tf.cast(total, a.dtype) for total, a in zip(sums, args, strict=True)]

    x_GSM = args[1]
    zeros_GSM = _zeros(x_GSM, x_GSM.dtype)
    if width is not None:
      zeros_GSM = tf.broadcast_to(zeros_GSM[..., :1], [*x_GSM.shape[:-1], width])
    add_round = lambda number, y_GSM: [y_GSM + one_round(number, *args)]
    return counted(rounds, add_round, zeros_GSM, scope=scope)[0], grad

  return run(*tf.nest.flatten(inputs)), tf.cast(rounds, tf.float32)


def _zeros(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Zeros of x's shape and sharding. TensorFlow folds `tf.zeros_like` of a whole tensor into a constant of its size."""
  return tf.cast(x * 0, dtype)
