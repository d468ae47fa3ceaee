"""XLA backend: all sizes are static, and a mesh may split every tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.ops import recurrence, vjp
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.rounds import sum_over_rounds


def grouped_ffn(*args: Any) -> tf.Tensor:
  """Raises UserError: the number of rows of an expert is known only when the program runs."""
  raise UserError(
    "dispatch='grouped' gives every expert the rows of its own tokens, whose number XLA cannot know while it compiles: "
    "bind dispatch = 'auto', 'gather' or 'einsum'"
  )


def write_cache(buffer_BNUK: tf.Tensor, x_BNWK: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
  """Elementwise select by position, which XLA fuses and partitions. U and start must be multiples of W."""
  rows, num_heads, num_positions, head_dim = sizes(buffer_BNUK)
  width = x_BNWK.shape[2]
  buffer_BNTWK = tf.reshape(buffer_BNUK, [rows, num_heads, num_positions // width, width, head_dim])
  at_T11 = (tf.range(0, num_positions, width) == start)[:, tf.newaxis, tf.newaxis]
  return tf.reshape(tf.where(at_T11, x_BNWK[:, :, tf.newaxis], buffer_BNTWK), sizes(buffer_BNUK))


def write_stacked_cache(buffer_LBNUK: tf.Tensor, x_BNWK: tf.Tensor, layer: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
  """Dynamic-update-slice of the new positions alone, which XLA makes in place inside a loop."""
  return xla_sharding.update_slice(buffer_LBNUK, x_BNWK[tf.newaxis], [layer, 0, 0, start, 0])


def loop_bound(limit_B: tf.Tensor, most: int) -> Size:
  """Largest possible bound, as the buffers of a loop need a static size; the loop may end earlier."""
  return most


OVERRIDES: dict[str, Callable] = {
  'combine_rows': functools.partial(vjp.combine_rows, einsum=True),
  'dispatch_rows': functools.partial(vjp.dispatch_rows, einsum=True),
  'grouped_ffn': grouped_ffn,
  'layer_norm': vjp.layer_norm,
  'loop_bound': loop_bound,
  'lstm': recurrence.lstm,
  'product': vjp.product,
  'sum_over_rounds': sum_over_rounds,
  'softmax_cross_entropy': vjp.softmax_cross_entropy,
  'write_cache': write_cache,
  'write_stacked_cache': write_stacked_cache,
}

BACKEND = Backend('xla', OVERRIDES, dispatcher='gather', open_shapes=False)
