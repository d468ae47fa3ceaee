"""Counted loops of a traced program, and sums over them with a gradient."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe.core.shapes import Size
from lingvo_moe.ops.custom_gradient import pull_back


def counted(count: Size, body: Callable[..., Any], *values: Any, scope: str | None = None) -> tuple[Any, ...]:
  """Final values of values = body(number, *values) for numbers 0, 1, ... count - 1, one after the other.

  Args:
    count: number of iterations. XLA derives the trip count from the condition.
    body: function of nested tensors or TensorArrays; it may close over others.
    *values: initial values.
    scope: name scope of the body, which is a graph of its own; None: the present one. Tools group operations by scope.
  """
  scope = tf.get_current_name_scope() if scope is None else scope

  def step(number, *values):
    with tf.name_scope(f'{scope}/' if scope else ''):
      return number + 1, *body(number, *values)

  return tf.while_loop(lambda number, *_: number < count, step, (tf.constant(0), *values), parallel_iterations=1)[1:]


def summed(
  count: Size,
  body: Callable[..., tf.Tensor],
  x_GSM: tf.Tensor,
  *args: Any,
  features: int | None = None,
  scope: str = '',
) -> tf.Tensor:
  """Sum of body(number, x, *args) over numbers 0, 1, ... count - 1, in a loop that keeps nothing for its gradient.

  The gradient is a second loop, which runs the body again for each number and differentiates it.

  Args:
    count: number of iterations.
    body: function of nested tensors, which get gradients; it may close over others, which get none.
    x_GSM: tensor of the shape of the results, but for their last axis.
    *args: further arguments of the body.
    features: size of the last axis of the results; None: as that of x.
    scope: name scope of both loops, within the present one.
  """
  scope = '/'.join(filter(None, [tf.get_current_name_scope(), scope]))

  def run_body(number, *flat):
    return body(number, *tf.nest.pack_sequence_as([x_GSM, *args], flat))

  @tf.custom_gradient
  def run(*flat):
    def grad(dy):
      def backward(number, *sums):
        grads = pull_back(lambda *flat: run_body(number, *flat), flat, [dy])
        return [total + tf.cast(g, total.dtype) for total, g in zip(sums, grads, strict=True)]

      sums = counted(count, backward, *(zeros_of(x, tf.float32) for x in flat), scope=scope)
      return [tf.cast(total, x.dtype) for total, x in zip(sums, flat, strict=True)]

    y = zeros_of(flat[0], flat[0].dtype)
    if features is not None:
      y = tf.broadcast_to(y[..., :1], [*y.shape[:-1], features])
    return counted(count, lambda number, y: [y + run_body(number, *flat)], y, scope=scope)[0], grad

  return run(*tf.nest.flatten([x_GSM, *args]))


def zeros_of(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Zeros of x's shape and sharding. TensorFlow folds `tf.zeros_like` of a whole tensor into a constant of its size."""
  return tf.cast(x * 0, dtype)
