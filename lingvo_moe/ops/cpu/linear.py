"""Matrix products on CPUs: fused with bias and activation, or of parts of the experts side by side."""

import math

import tensorflow as tf

from lingvo_moe.core.shapes import inferred, sizes
from lingvo_moe.ops import backend, reference, vjp
from lingvo_moe.ops.cpu.factored import FactoredGradient
from lingvo_moe.ops.cpu.sub_batches import by_rows
from lingvo_moe.ops.custom_gradient import custom_gradient

_TILE = 32  # columns of a tile of AMX in bfloat16; with 257 columns in place of 288 a product takes a quarter longer


def linear(x, weight, bias=None, activation=tf.identity, inputs=1):
  """Matmul of two matrices with bias_add, which TensorFlow fuses with a ReLU into one kernel.

  The gradient of the bias is then BiasAddGrad, which takes a tenth of the time of a sum over axes. XLA keeps the einsum
  of the reference: it would copy a matrix that is reshaped. In bfloat16 the bias is added to a tensor of another rank,
  as the fused kernel has no AMX: it takes twice the time of a product and an addition.
  """
  inner, outer = weight.shape[:inputs], weight.shape[inputs:]
  shape = inferred([*sizes(x)[: x.shape.rank - inputs], *outer])
  y = tf.matmul(tf.reshape(x, [-1, math.prod(inner)]), tf.reshape(weight, [math.prod(inner), math.prod(outer)]))
  if y.dtype == tf.bfloat16:
    y = tf.reshape(y, shape)
    return activation(y if bias is None else y + bias)
  if bias is not None:
    y = tf.nn.bias_add(y, tf.reshape(bias, [-1]))
  return tf.reshape(activation(y), shape)


def trained_linear(x, weight, bias=None, activation=tf.identity, inputs=1):
  """Linear map; with a bias in bfloat16, the product [x, 1] [W; b], and the bias' gradient is a product with ones.

  An addition takes as long as the product, and a sum in bfloat16 would be inexact: 256 + 1 is 256 there.
  """
  if bias is None or x.dtype != tf.bfloat16:
    return linear(x, weight, bias, activation, inputs)

  @custom_gradient
  def run(x_FI, weight_IO, bias_1O):
    ones = tf.ones([sizes(x_FI)[0], _TILE], x.dtype)
    with_bias = tf.concat([weight_IO, tf.pad(bias_1O, [[0, _TILE - 1], [0, 0]])], axis=0)

    def grad(dy_FO):
      dweight_IO = tf.matmul(x_FI, dy_FO, transpose_a=True)
      return tf.matmul(dy_FO, weight_IO, transpose_b=True), dweight_IO, tf.matmul(ones[:, :1], dy_FO, transpose_a=True)

    return tf.matmul(tf.concat([x_FI, ones], axis=1), with_bias), grad

  inner, outer = weight.shape[:inputs], weight.shape[inputs:]
  y_FO = run(
    tf.reshape(x, [-1, math.prod(inner)]),
    tf.reshape(weight, [math.prod(inner), math.prod(outer)]),
    tf.reshape(bias, [1, -1]),
  )
  return activation(tf.reshape(y_FO, inferred([*sizes(x)[: x.shape.rank - inputs], *outer])))


_product_of_rows = by_rows(vjp.product, places=(1,))


def product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """Einsum with the vjp of vjp.product; for weights of experts, in equal parts of the experts side by side.

  Experts are a first axis that all three tensors share. The gradient of their weight is returned as a FactoredGradient:
  the product is as large as the weight, and only its update needs it.
  """
  if x.dtype != weight.dtype:
    return reference.product(equation, x, weight)
  x_axes, weight_axes, y_axes = vjp.split_equation(equation)
  per_expert = x_axes[0] == weight_axes[0] == y_axes[0]
  if not per_expert:
    return _product_of_rows(equation, x, weight)
  einsum = _in_parts if weight.shape[0] % backend.current().sub_batches == 0 else tf.einsum
  factors = lambda x, dy: (x, dy) if weight_axes[-1] in y_axes else (dy, x)
  factored = lambda _, x, dy: FactoredGradient(*map(_rows_of_experts, factors(x, dy)))
  return vjp.product(equation, x, weight, einsum, factored)


def trained_product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """Product in the type of activations, which is a third or less of the time: of output scores in bfloat16."""
  return tf.cast(product(equation, x, tf.cast(weight, x.dtype)), weight.dtype)


def _in_parts(equation, x, weight):
  parts = backend.current().sub_batches
  if parts == 1:
    return tf.einsum(equation, x, weight)
  pairs = zip(tf.split(x, parts), tf.split(weight, parts))
  return tf.concat([tf.einsum(equation, *pair) for pair in pairs], axis=0)


def _rows_of_experts(x_EGCM):
  count, *_, features = sizes(x_EGCM)
  return tf.reshape(x_EGCM, [count, -1, features])
