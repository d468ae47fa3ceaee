"""What rows of a batch do not need of each other is computed in parts, side by side, where kernels have one core each.

See cores.py. Only experts see all rows at once: what comes before, between and behind them is written for whole tensors,
and run on parts of them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.ops import cores

_undivided = contextvars.ContextVar('undivided', default=False)


@contextlib.contextmanager
def undivided() -> Iterator[None]:
  """Within it no batch is divided: it is for those who have done so already."""
  token = _undivided.set(True)
  try:
    yield
  finally:
    _undivided.reset(token)


def in_parts(f: Callable[..., Any], *args: Any) -> Any:
  """f(*args), of as many parts of the rows as had better be computed at once; the same numbers to rounding.

  What comes out of one call and goes into the next stays divided on the way: a result knows its parts, and is not put
  together unless somebody else asks for it. (So a gradient passes through them and not through it: watch it on no tape.)

  Args:
    f: of nested tensors [B, ...], giving nested tensors [B, ...]; none of its rows depends on another.
    *args: its arguments, or None; one row ([1, ...], known while tracing) is every part's. Where other sizes are known
      while tracing they are XLA's, and all stays whole; as it does with a random key, a scalar, that is not of each row.
  """
  flat = tf.nest.flatten(args)
  tensors = [t for t in flat if t is not None]
  of_rows = [t for t in tensors if t.shape.rank and t.shape[0] != 1]
  parts = 1 if _undivided.get() or any(t.shape.rank == 0 for t in tensors) else cores.traced_side_by_side()
  if parts == 1 or all(t.shape[0] is not None for t in of_rows):
    return f(*args)
  # Not asked of a result that knows its parts: that would put it together.
  together = [t for t in of_rows if _parts_of(t) is None]
  counts = _counts(sizes(together[0])[0], parts) if together else None

  def divided(t):
    if t is None or t.shape[0] == 1:
      return [t] * parts
    return _parts_of(t) or tf.split(t, counts, num=parts)

  results = [f(*tf.nest.pack_sequence_as(args, part)) for part in zip(*map(divided, flat))]
  return tf.nest.map_structure(_joined, *results)


def _counts(rows, parts):
  ends = [rows * (part + 1) // parts for part in range(parts)]
  return tf.stack([end - begin for begin, end in zip([0, *ends], ends)])


def _joined(*parts):
  x = tf.concat(parts, axis=0)
  x._parts = parts
  return x


def _parts_of(x):
  """The parts of a result, in the graph that they are in; else None."""
  parts = getattr(x, '_parts', None)
  return parts if parts and parts[0].graph is tf.compat.v1.get_default_graph() else None
