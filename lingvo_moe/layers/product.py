"""The product of activations and a weight."""

from __future__ import annotations

import tensorflow as tf

from lingvo_moe.layers.gradient import custom_gradient


def product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """tf.einsum, whose gradient for the weight has the weight's axes in their order.

  TensorFlow derives one that has them in another, and transposes it: of 512 experts that takes four times as long as the
  arithmetic.

  Args:
    equation: 'BTM,MH->BTH'; each letter is in two of the three.
    x: activations.
    weight: of the same type.
  """
  operands, y_axes = equation.split('->')
  x_axes, weight_axes = operands.split(',')

  @custom_gradient
  def run(x, weight):
    def grad(dy):
      dx = tf.einsum(f'{y_axes},{weight_axes}->{x_axes}', dy, weight)
      # Of what is kept of either operand the first one's axes come first in the result.
      if weight_axes[-1] in y_axes:
        return dx, tf.einsum(f'{x_axes},{y_axes}->{weight_axes}', x, dy)
      return dx, tf.einsum(f'{y_axes},{x_axes}->{weight_axes}', dy, x)

    return tf.einsum(equation, x, weight), grad

  return run(x, weight)
