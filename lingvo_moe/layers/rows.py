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

from lingvo_moe import cores
from lingvo_moe.shapes import is_static
from lingvo_moe.shapes import sizes

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
  together unless somebody else asks for it. (So no gradient passes through it but through them.)

  Args:
    f: of nested tensors [B, ...], giving nested tensors [B, ...]; none of its rows depends on another.
    *args: its arguments, or None. Sizes known while tracing are XLA's, and stay whole; as does all of it with a random
      key, a scalar, that is not of each row.
  """
  flat = [t for t in tf.nest.flatten(args) if t is not None]
  parts = 1 if _undivided.get() or any(t.shape.rank == 0 for t in flat) else min(cores.side_by_side(), cores.FEW)
  rows = sizes(flat[0])[0]
  if parts == 1 or is_static(rows):
    return f(*args)
  ends = [rows * (part + 1) // parts for part in range(parts)]
  counts = tf.stack([end - begin for begin, end in zip([0, *ends], ends)])
  divided = zip(*([t] * parts if t is None else _divided(t, counts, parts) for t in tf.nest.flatten(args)))
  results = [f(*tf.nest.pack_sequence_as(args, part)) for part in divided]
  return tf.nest.map_structure(_joined, *results)


def _divided(x, counts, parts):
  known = getattr(x, '_parts', None)
  if known is not None and known[0].graph is tf.compat.v1.get_default_graph():
    return known
  return tf.split(x, counts, num=parts)


def _joined(*parts):
  x = tf.concat(parts, axis=0)
  x._parts = parts
  return x
