"""Sub-batches of rows computed side by side, one core each, where rows do not depend on each other.

Measured with two cores: 1.18 to 1.27 times the steps a second of dense and 8-expert models, 1.0 to 1.1 of 128 experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.ops import backend

_MIN_ROWS = 8  # least rows of a sub-batch of map_rows; with fewer, matrix products are too small


def map_sub_batches(f: Callable[..., Any], *rows: Any) -> Any:
  """Computes f sub-batch by sub-batch, side by side in the traced program.

  A tensor [1, ...] belongs to every sub-batch. If there is a scalar, such as one random key for all rows, all rows are
  one sub-batch.
  """
  number, flat = backend.current().sub_batches, tf.nest.flatten(rows)
  tensors = [x for x in flat if x is not None]
  divisible = [x for x in tensors if x.shape.rank and x.shape[0] != 1]
  if number == 1 or not divisible or any(x.shape.rank == 0 for x in tensors):
    return f(*rows)
  count = sizes(divisible[0])[0]
  ends = [count * (i + 1) // number for i in range(number)]
  counts = tf.stack([end - begin for begin, end in zip([0, *ends], ends)])
  divided = [[x] * number if x is None or x.shape[0] == 1 else tf.split(x, counts, num=number) for x in flat]
  results = [f(*tf.nest.pack_sequence_as(rows, sub_batch)) for sub_batch in zip(*divided, strict=True)]
  return tf.nest.map_structure(lambda *x: tf.concat(x, axis=0), *results)


def map_rows(f: Callable[[Any], Any], rows: Any, specs: Any) -> Any:
  """Maps f over equal sub-batches in a loop, several calls at once; the last one is padded with rows of zeros.

  A scalar result is the maximum over all calls.
  """
  most = backend.current().parallel_calls
  if most == 1:
    return f(rows)
  count = sizes(tf.nest.flatten(rows)[0])[0]
  number = tf.clip_by_value(count // _MIN_ROWS, 1, most)
  each = -(-count // number)

  def divided(x):
    padded = tf.pad(x, [[0, number * each - count]] + [[0, 0]] * (x.shape.rank - 1))
    return tf.reshape(padded, [number, each, *sizes(x)[1:]])

  def joined(x, spec):
    if spec.shape.rank == 0:
      return tf.reduce_max(x)
    return tf.reshape(x, tf.concat([[number * each], tf.shape(x)[2:]], axis=0))[:count]

  with backend.use(dataclasses.replace(backend.current(), sub_batches=1, parallel_calls=1)):
    results = tf.map_fn(f, tf.nest.map_structure(divided, rows), parallel_iterations=most, fn_output_signature=specs)
  return tf.nest.map_structure(joined, results, specs)
