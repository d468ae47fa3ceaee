"""XLA backend: all sizes are static, and a mesh may split every tensor."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.ops import vjp
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.custom_gradient import pull_back
from lingvo_moe.ops.loops import counted


def grouped_ffn(*args: Any) -> tf.Tensor:
  """Raises UserError: the number of rows of an expert is known only when the program runs."""
  raise UserError(
    "dispatch='grouped' gives every expert the rows of its own tokens, whose number XLA cannot know while it compiles: "
    "bind dispatch = 'auto', 'gather' or 'einsum'"
  )


def write_cache(buffer: tf.Tensor, x_BNWK: tf.Tensor, start: tf.Tensor, layer: tf.Tensor | None = None) -> tf.Tensor:
  """Elementwise select by position, which XLA fuses and partitions. U and start must be multiples of W.

  Of one layer of several, a dynamic-update-slice of the new positions alone, which XLA makes in place inside a loop.
  """
  if layer is not None:
    return xla_sharding.update_slice(buffer, x_BNWK[tf.newaxis], [layer, 0, 0, start, 0])
  rows, num_heads, num_positions, head_dim = sizes(buffer)
  width = x_BNWK.shape[2]
  buffer_BNTWK = tf.reshape(buffer, [rows, num_heads, num_positions // width, width, head_dim])
  at_T11 = (tf.range(0, num_positions, width) == start)[:, tf.newaxis, tf.newaxis]
  return tf.reshape(tf.where(at_T11, x_BNWK[:, :, tf.newaxis], buffer_BNTWK), sizes(buffer))


def loop_bound(limit_B: tf.Tensor, most: int) -> Size:
  """Largest possible bound, as the buffers of a loop need a static size; the loop may end earlier."""
  return most


def sum_over_rounds(function, x_GSM, theta, routing, slots, width=None):
  """Sum over rounds of `slots` choices of each queue, in a loop, until none waits; see reference.sum_over_rounds.

  The longest queue of an expert is known only when the program runs, but XLA needs the sizes of tensors while it
  compiles. Room for the longest queue that is possible would be S slots for every expert and group, E / 2 times as many
  as there are choices. Here memory is that of one round, and the cost is proportional to the longest queue on any
  device: to the imbalance. The gradient is a second loop, which runs each round again and differentiates it.
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


OVERRIDES: dict[str, Callable] = {
  **vjp.OVERRIDES,
  'combine_rows': functools.partial(vjp.combine_rows, einsum=True),
  'dispatch_rows': functools.partial(vjp.dispatch_rows, einsum=True),
  'grouped_ffn': grouped_ffn,
  'loop_bound': loop_bound,
  'sum_over_rounds': sum_over_rounds,
  'write_cache': write_cache,
}

BACKEND = Backend('xla', OVERRIDES, dispatcher='gather', open_shapes=False)
