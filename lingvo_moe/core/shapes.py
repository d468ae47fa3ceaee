"""Sizes of tensors: Python ints where a trace knows them, so that what is built from them has static shapes too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

Size = int | tf.Tensor  # of an axis; a tensor is an int32 scalar


def sizes(x: tf.Tensor) -> list[Size]:
  """The size of each axis: a Python int where it is static, else a scalar tensor."""
  dynamic = tf.shape(x)
  return [dynamic[axis] if size is None else size for axis, size in enumerate(x.shape)]


def results_of(function: Callable[[], Any]) -> Any:
  """TensorSpecs of what a function gives, nested as it is: by tracing it. A loop must know them before it begins."""
  results = tf.function(function, autograph=False).get_concrete_function().structured_outputs
  return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), results)
