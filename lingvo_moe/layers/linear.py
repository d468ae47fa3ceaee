"""Linear maps of features: with the bias and what follows it as one, and in the plainest form there is of a product.

On CPUs TensorFlow turns a product of two matrices, a bias and a ReLU into one kernel, and the sum that is a bias's
gradient takes a tenth of the time when it is asked for by that name.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core.shapes import is_static
from lingvo_moe.core.shapes import sizes
from lingvo_moe.layers.gradient import custom_gradient
from lingvo_moe.ops import cores


def linear(
  x: tf.Tensor,
  weight: tf.Tensor,
  bias: tf.Tensor | None = None,
  activation: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
  inputs: int = 1,
) -> tf.Tensor:
  """activation(x W + b), over the last axes of x.

  Args:
    x: [..., *in].
    weight: [*in, *out], of the same type.
    bias: [*out]; None for none.
    activation: elementwise.
    inputs: how many axes of the weight are features of x.

  Returns:
    [..., *out].
  """
  inner, outer = weight.shape[:inputs], weight.shape[inputs:]
  lead = sizes(x)[: x.shape.rank - inputs]
  if is_static(*lead):
    # XLA's shapes. It lays out a product with all its axes as what follows wants it, but a matrix that is reshaped it copies.
    a, i, o = 'abcd'[: len(lead)], 'ijk'[:inputs], 'opq'[: len(outer)]
    y = tf.einsum(f'{a}{i},{i}{o}->{a}{o}', x, weight)
    return activation(y if bias is None else y + bias)
  y = tf.matmul(tf.reshape(x, [-1, math.prod(inner)]), tf.reshape(weight, [math.prod(inner), math.prod(outer)]))
  if bias is not None:
    y = tf.nn.bias_add(y, tf.reshape(bias, [-1]))
  return tf.reshape(activation(y), [*lead, *outer])


def product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """tf.einsum of activations and a weight, whose gradient for the weight has the weight's axes in their order.

  TensorFlow derives one that has them in another, and transposes it: of 512 experts that takes four times as long as the
  arithmetic. This one is a single einsum, so that an optimiser can take its factors instead. Where kernels have one core
  each and sizes are open, equal parts of the experts, a first axis that all three have, are computed side by side; but not
  for the weight's gradient: that of so large a weight had better not be copied together, and nothing but its update waits
  for it.

  Args:
    equation: 'EGCM,EMH->EGCH'; each letter is in two of the three, or in all.
    x: activations.
    weight: of the same type.
  """
  operands, y_axes = equation.split('->')
  x_axes, weight_axes = operands.split(',')

  @custom_gradient
  def run(x, weight):
    def grad(dy):
      dx = _in_parts(f'{y_axes},{weight_axes}->{x_axes}', dy, weight)
      # First dx, which other layers wait for: with its gradient known the weight is not in use, and can be written to.
      with tf.control_dependencies([dx]):
        # Of what is kept of either operand the first one's axes come first in the result.
        if weight_axes[-1] in y_axes:
          return dx, tf.einsum(f'{x_axes},{y_axes}->{weight_axes}', x, dy)
        return dx, tf.einsum(f'{y_axes},{x_axes}->{weight_axes}', dy, x)

    return _in_parts(equation, x, weight), grad

  return run(x, weight)


def _in_parts(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  parts = cores.traced_side_by_side()
  shared = equation[0] == equation.partition(',')[2][0] == equation.partition('->')[2][0]
  if parts == 1 or not shared or is_static(*sizes(x)) or weight.shape[0] % parts:
    return tf.einsum(equation, x, weight)
  pairs = zip(tf.split(x, parts), tf.split(weight, parts))
  return tf.concat([tf.einsum(equation, *pair) for pair in pairs], axis=0)


def sum_to_features(x: tf.Tensor) -> tf.Tensor:
  """The sum over all axes but the last."""
  return tf.raw_ops.BiasAddGrad(out_backprop=x)
