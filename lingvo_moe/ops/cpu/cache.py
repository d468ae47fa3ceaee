"""Key/value cache written in place."""

from __future__ import annotations

import tensorflow as tf


def write_cache(buffer_BNUK: tf.Tensor, x_BNWK: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
  """Strided-slice update, in place inside a loop; tensor_scatter_nd_update copies the whole buffer at every step.

  The kernel copies element by element, so where the head size allows it 16 bytes are passed as one element.
  """
  shape, width, head_dim = tf.shape(buffer_BNUK), tf.shape(x_BNWK)[2], buffer_BNUK.shape[3]
  rows, together = shape[0] * shape[1], tf.complex128.size // buffer_BNUK.dtype.size
  if head_dim % together:
    together = 1
  size = head_dim // together

  def matrix(x, positions):
    if together == 1:
      return tf.reshape(x, [rows, positions * size])
    return tf.bitcast(tf.reshape(x, [rows, positions * size, together]), tf.complex128)

  written = tf.raw_ops.TensorStridedSliceUpdate(
    input=matrix(buffer_BNUK, shape[2]),
    begin=[0, start * size],
    end=[0, (start + width) * size],
    strides=[1, 1],
    value=matrix(x_BNWK, width),
    begin_mask=0b01,  # every row
    end_mask=0b01,
  )
  if together > 1:
    written = tf.bitcast(written, buffer_BNUK.dtype)
  return tf.ensure_shape(tf.reshape(written, shape), buffer_BNUK.shape)
