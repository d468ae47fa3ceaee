"""Mean squares on CPUs: by TensorFlow's kernels, and in the form that XLA compiles best."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.ops import reference

_MAX_TERMS = 8  # terms of a sum that are written out


def mean_square(x: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
  """Mean over all axes by the kernel of an L2 loss: one pass instead of the two of square and mean."""
  if len(axes) == x.shape.rank and x.shape.is_fully_defined():
    mean = 2.0 / x.shape.num_elements() * tf.nn.l2_loss(x)
    return tf.reshape(mean, [1] * x.shape.rank)
  return reference.mean_square(x, axes)


def compiled_mean_square(x: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
  """Mean square for XLA on CPUs, of a static shape, in half to a sixth of the time.

  Along the last axis XLA sums one number at a time, but a product with a vector runs at the speed of memory, with the
  squares fused into it. Along another axis a sum is twice as fast if some of its terms are written out.
  """
  shape = list(x.shape)
  axis = max(axes)
  size, kept = shape[axis], [*shape[:axis], 1, *shape[axis + 1 :]]
  if axis == len(shape) - 1:
    means = tf.linalg.matvec(tf.reshape(tf.square(x), [-1, size]), tf.fill([size], 1.0 / size))
  else:
    parts = math.gcd(size, _MAX_TERMS)
    divided = tf.reshape(x, [math.prod(shape[:axis]), parts, size // parts, math.prod(shape[axis + 1 :])])
    sums = sum(tf.square(divided[:, part]) for part in range(parts))
    means = tf.reduce_sum(sums, axis=1) / size
  others = [other for other in axes if other != axis]
  return tf.reduce_mean(tf.reshape(means, kept), axis=others, keepdims=True)
