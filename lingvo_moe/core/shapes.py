"""Tensor sizes as Python ints where they are static, so that tensors shaped by them have static shapes too."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

Size = int | tf.Tensor  # the size of one axis; a tensor is an int32 scalar


def sizes(x: tf.Tensor) -> list[Size]:
  """Size of each axis: a Python int where it is static, else an int32 scalar tensor."""
  dynamic = tf.shape(x)
  return [dynamic[axis] if size is None else size for axis, size in enumerate(x.shape)]


def inferred(shape: list[Size]) -> list[Size]:
  """Shape for tf.reshape in which the one size that is not static is -1, so that the shape is a constant."""
  is_open = [not isinstance(size, int) for size in shape]
  return [-1 if open_ else size for open_, size in zip(is_open, shape, strict=True)] if sum(is_open) == 1 else shape


def results_of(function: Callable[[], Any]) -> Any:
  """TensorSpecs of a function's results, in the same nesting, found by tracing it; loops declare them up front."""
  results = tf.function(function, autograph=False).get_concrete_function().structured_outputs
  return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), results)


def row_parts(x_B: tf.Tensor, number: int) -> list[tf.Tensor]:
  """Rows [B, ...] in consecutive parts, whose numbers of rows differ by one at most."""
  rows = sizes(x_B)[0]
  ends = [rows * i // number for i in range(number + 1)]
  return tf.split(x_B, [end - begin for begin, end in zip(ends, ends[1:])], num=number)


def dealt(x_B: tf.Tensor, groups: int, parts: int) -> tf.Tensor:
  """Rows [B, ...] as micro-batches [parts, B / parts, ...], to which groups of rows are dealt in turn.

  Each device then has an equal part of every micro-batch.
  """
  rows, *rest = sizes(x_B)
  x = tf.reshape(x_B, [groups // parts, parts, rows // groups, *rest])
  return tf.reshape(_swapped(x), [parts, rows // parts, *rest])


def collected(x_OB: tf.Tensor, groups: int) -> tf.Tensor:
  """Rows [B, ...] of micro-batches, the inverse of `dealt`."""
  parts, rows, *rest = sizes(x_OB)
  x = tf.reshape(x_OB, [parts, groups // parts, rows * parts // groups, *rest])
  return tf.reshape(_swapped(x), [parts * rows, *rest])


def _swapped(x: tf.Tensor) -> tf.Tensor:
  """Transpose of the first two axes, of any type."""
  return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])
