"""Key/value cache written in place."""

from __future__ import annotations

import tensorflow as tf


def write_cache(buffer: tf.Tensor, x_BNWK: tf.Tensor, start: tf.Tensor, layer: tf.Tensor | int = 0) -> tf.Tensor:
  """Strided-slice update, in place inside a loop; tensor_scatter_nd_update copies the whole buffer at every step.

  The kernel copies element by element, so where the head size allows it 16 bytes are passed as one element.
  """
  shape, new = tf.shape(buffer), tf.shape(x_BNWK)
  rows, width, positions, head_dim = new[0] * new[1], new[2], shape[-2], buffer.shape[-1]
  packed = tf.complex128.size // buffer.dtype.size
  if head_dim % packed:
    packed = 1
  size = head_dim // packed

  def matrix(x, columns):
    if packed == 1:
      return tf.reshape(x, [-1, columns])
    return tf.bitcast(tf.reshape(x, [-1, columns, packed]), tf.complex128)

  written = tf.raw_ops.TensorStridedSliceUpdate(
    input=matrix(buffer, positions * size),
    begin=tf.stack([layer * rows, start * size]),
    end=tf.stack([(layer + 1) * rows, (start + width) * size]),
    strides=[1, 1],
    value=matrix(x_BNWK, width * size),
  )
  if packed > 1:
    written = tf.bitcast(written, buffer.dtype)
  return tf.ensure_shape(tf.reshape(written, shape), buffer.shape)
