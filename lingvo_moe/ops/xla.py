"""XLA backend: all sizes are static, and a mesh may split every tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.ops import vjp
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.rounds import sum_over_rounds


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
