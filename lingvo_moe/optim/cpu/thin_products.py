"""Gradients of experts' weights before they are multiplied out.

The gradient is x^T dy of the few rows that an expert saw: two thin matrices, which a cache holds, and a product as large as
the weight. A traced program computes what is asked for: who takes the two instead is spared the product.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.core.shapes import sizes

# Numbers of rows to pad to: of each, XLA compiles an update of its own. With more, to multiply twice takes longer than to
# write a product to memory once.
_ROWS = (4, 6, 8, 12, 16, 24, 32, 48, 64)


class ThinProduct(NamedTuple):
  """x^T dy of each expert; C rows each."""

  x_ECM: tf.Tensor
  dy_ECH: tf.Tensor

  @classmethod
  def behind(cls, grad: tf.Tensor) -> ThinProduct | None:
    """What a traced [E, M, H] is the product of, to be had no sooner than that; None if it is something else."""
    op = None if tf.executing_eagerly() else grad.op
    if op is None or op.type != 'Einsum':
      return None
    operands, result = op.get_attr('equation').decode().split('->')
    x, _, dy = operands.partition(',')
    rows = x[1:-1]
    if not rows or dy[:-1] != x[0] + rows or result != x[0] + x[-1] + dy[-1:]:
      return None
    with tf.control_dependencies(op.control_inputs):
      return cls(*(tf.reshape(of, [sizes(of)[0], -1, sizes(of)[-1]]) for of in op.inputs))

  @property
  def worth_it(self) -> tf.Tensor:
    """Whether there are so few rows that the product had better be made where it is used."""
    return self._rows <= _ROWS[-1]

  def padded(self) -> ThinProduct:
    """The same product, if it is worth it, with rows of zeros to one of a few numbers."""
    rows = tf.gather(_ROWS, tf.searchsorted(_ROWS, [self._rows])[0])
    return ThinProduct(*(tf.pad(of, [[0, 0], [0, rows - self._rows], [0, 0]]) for of in self))

  def norm(self) -> tf.Tensor:
    """The root of the sum of all squares: that sum is the inner product of x x^T and dy dy^T, which are small."""
    gram = lambda of: tf.matmul(of, of, transpose_b=True)
    small = lambda: tf.reduce_sum(gram(self.x_ECM) * gram(self.dy_ECH))
    square = tf.cond(self.worth_it, small, lambda: 2.0 * tf.nn.l2_loss(self.multiplied()))
    return tf.sqrt(tf.maximum(square, 0.0))

  def scaled(self, scale: tf.Tensor) -> tf.Tensor:
    """The product times a scalar, traced as a product again."""
    return tf.einsum('ECM,ECH->EMH', self.x_ECM, self.dy_ECH * scale)

  def multiplied(self) -> tf.Tensor:
    """[E, M, H]."""
    return tf.matmul(self.x_ECM, self.dy_ECH, transpose_a=True)

  @property
  def _rows(self):
    return tf.shape(self.x_ECM)[1]
