"""Factored gradient of per-expert weights: two thin matrices in place of their product.

The gradient is x^T dy of the few rows of each expert: its factors fit a cache, the product is as large as the weight.
The operation that would multiply them returns this type; an update that can use the factors does not write the product
to memory (optim/cpu/in_place.py), and all other code reads the product.
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_moe.ops import reference

# Numbers of rows to pad to, as XLA compiles an update for each. With more rows, computing the product twice takes
# longer than writing it to memory once.
_ROWS = (4, 6, 8, 12, 16, 24, 32, 48, 64)

# Most rows of factors in bfloat16, whose product is faster to compute and to write. With 128 experts of 64 rows, a
# training step takes 0.81 s of processor time in place of 0.90 (2 + 2 layers of bench-S, 4096 tokens, an EPYC).
_MOST_ROWS_BFLOAT16 = 32


class FactoredGradient(tf.IndexedSlices):
  """x^T dy of each expert, [E, M, H], of factors x [E, C, M] and dy [E, C, H].

  TensorFlow accepts a tensor or IndexedSlices as a gradient: this is one slice for each expert, multiplied when it is
  read. Where TensorFlow adds gradients up or converts them to tensors, the result is right and no longer factored. It
  lives in the graph that computes it: a tape belongs inside the tf.function whose gradient it takes, as in program.py.
  """

  def __init__(self, x_ECM: tf.Tensor, dy_ECH: tf.Tensor):
    self.x_ECM = x_ECM
    self.dy_ECH = dy_ECH

  @property
  def values(self) -> tf.Tensor:
    """Product [E, M, H], by the einsum of a plain gradient."""
    return tf.einsum('ECM,ECH->EMH', self.x_ECM, self.dy_ECH)

  @property
  def indices(self) -> tf.Tensor:
    return tf.range(tf.shape(self.x_ECM)[0])

  @property
  def dense_shape(self) -> tf.Tensor:
    return tf.stack([tf.shape(self.x_ECM)[0], tf.shape(self.x_ECM)[2], tf.shape(self.dy_ECH)[2]])

  @property
  def shape(self) -> tf.TensorShape:
    return tf.TensorShape([self.x_ECM.shape[0], self.x_ECM.shape[2], self.dy_ECH.shape[2]])

  @property
  def dtype(self) -> tf.DType:
    return self.dy_ECH.dtype

  @property
  def has_few_rows(self) -> tf.Tensor:
    """Whether the rows are few enough for an update to compute the product itself."""
    return self._rows <= (_MOST_ROWS_BFLOAT16 if self.dtype == tf.bfloat16 else _ROWS[-1])

  def padded(self) -> FactoredGradient:
    """Gradient padded with rows of zeros to one of a few numbers of rows; only if it has few rows."""
    rows = tf.gather(_ROWS, tf.searchsorted(_ROWS, [self._rows])[0])
    pad = lambda factor: tf.pad(factor, [[0, 0], [0, rows - self._rows], [0, 0]])
    return FactoredGradient(pad(self.x_ECM), pad(self.dy_ECH))

  def multiplied(self) -> tf.Tensor:
    """Product [E, M, H] as one batched matmul."""
    return tf.matmul(self.x_ECM, self.dy_ECH, transpose_a=True)

  def norm(self) -> tf.Tensor:
    """Root of the sum of squares of the product, which is the inner product of the small x x^T and dy dy^T."""
    wide = lambda factor: tf.cast(factor, tf.float32)
    gram = lambda factor: tf.matmul(wide(factor), wide(factor), transpose_b=True)
    small = lambda: tf.reduce_sum(gram(self.x_ECM) * gram(self.dy_ECH))
    square = tf.cond(self.has_few_rows, small, lambda: 2.0 * tf.nn.l2_loss(wide(self.multiplied())))
    return tf.sqrt(tf.maximum(square, 0.0))

  def scaled(self, scale: tf.Tensor) -> FactoredGradient:
    return FactoredGradient(tf.cast(self.x_ECM, tf.float32), tf.cast(self.dy_ECH, tf.float32) * scale)

  @property
  def _rows(self):
    return tf.shape(self.x_ECM)[1]


def add_gradients(*grads):
  """Sum of gradients of parts of a batch; the factors of factored ones are joined along their rows."""
  if not all(isinstance(grad, FactoredGradient) for grad in grads):
    return reference.add_gradients(*grads)
  x_ECM, dy_ECH = (tf.concat([getattr(grad, field) for grad in grads], axis=1) for field in ('x_ECM', 'dy_ECH'))
  return FactoredGradient(x_ECM, dy_ECH)


tf.register_tensor_conversion_function(
  FactoredGradient,
  lambda value, dtype=None, name=None, as_ref=False: tf.cast(value.values, dtype or value.dtype),
  priority=0,
)
