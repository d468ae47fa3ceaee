"""Ancestors in a graph: the operations needed to compute a tensor or a traced function."""

from collections.abc import Iterable

import tensorflow as tf


def ancestors(ops: Iterable[tf.Operation]) -> list[tf.Operation]:
  """Operations with all operations that must run before them."""
  found, left = {}, list(ops)
  while left:
    op = left.pop()
    if op.name not in found:
      found[op.name] = op
      left += [*op.control_inputs, *(t.op for t in op.inputs)]
  return list(found.values())
