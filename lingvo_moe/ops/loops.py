"""Counted loop of a traced program."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe.core.shapes import Size


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
