"""Matrix products on CPUs: fused with bias and activation, or of parts of the experts side by side."""

import math

import tensorflow as tf

from lingvo_moe.core.shapes import inferred, sizes
from lingvo_moe.ops import backend, vjp
from lingvo_moe.ops.cpu.factored import FactoredGradient
from lingvo_moe.ops.custom_gradient import custom_gradient


def linear(x, weight, bias=None, activation=tf.identity, inputs=1):
  """Matmul of two matrices with bias_add, which TensorFlow fuses with a ReLU into one kernel.

  The gradient of the bias is then BiasAddGrad, which takes a tenth of the time of a sum over axes. In bfloat16 the bias
  is added: BiasAddGrad would sum in bfloat16, in which 256 + 1 is 256. XLA keeps the einsum of the reference: it would
  copy a matrix that is reshaped.
  """
  inner, outer = weight.shape[:inputs], weight.shape[inputs:]
  batch_sizes = sizes(x)[: x.shape.rank - inputs]
  y = tf.matmul(tf.reshape(x, [-1, math.prod(inner)]), tf.reshape(weight, [math.prod(inner), math.prod(outer)]))
  if bias is not None:
    y = (tf.nn.bias_add if y.dtype == tf.float32 else tf.add)(y, tf.reshape(bias, [-1]))
  return tf.reshape(activation(y), inferred([*batch_sizes, *outer]))


def product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """Einsum with the vjp of vjp.product; for weights of experts, in equal parts of the experts side by side.

  Experts are a first axis that all three tensors share. The gradient of their weight is returned as a FactoredGradient:
  the product is as large as the weight, and only its update needs it.
  """
  if x.dtype != weight.dtype:
    return _with_gradients_in_type_of_x(equation, x, weight)
  x_axes, weight_axes, y_axes = vjp.split_equation(equation)
  per_expert = x_axes[0] == weight_axes[0] == y_axes[0]
  if not per_expert:
    return vjp.product(equation, x, weight)
  einsum = _in_parts if weight.shape[0] % backend.current().sub_batches == 0 else tf.einsum
  factors = lambda x, dy: (x, dy) if weight_axes[-1] in y_axes else (dy, x)
  factored = lambda _, x, dy: FactoredGradient(*map(_rows_of_experts, factors(x, dy)))
  return vjp.product(equation, x, weight, einsum, factored)


def _with_gradients_in_type_of_x(equation, x, weight):
  """Output scores: float32, of bfloat16 activations. Gradients are products in bfloat16, as those of other weights."""

  @custom_gradient
  def run(x, weight):
    def grad(dy):
      dy = tf.cast(dy, x.dtype)
      dx = tf.einsum(vjp.backward_equation(equation), dy, tf.cast(weight, x.dtype))
      return dx, tf.cast(vjp.weight_gradient(equation, x, dy), weight.dtype)

    return tf.einsum(equation, tf.cast(x, weight.dtype), weight), grad

  return run(x, weight)


def _in_parts(equation, x, weight):
  parts = backend.current().sub_batches
  if parts == 1:
    return tf.einsum(equation, x, weight)
  pairs = zip(tf.split(x, parts), tf.split(weight, parts))
  return tf.concat([tf.einsum(equation, *pair) for pair in pairs], axis=0)


def _rows_of_experts(x_EGCM):
  count, *_, features = sizes(x_EGCM)
  return tf.reshape(x_EGCM, [count, -1, features])
