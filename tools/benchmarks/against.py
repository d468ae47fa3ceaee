"""Comparison of benchmark results with those of an earlier run, which tools/bench.py --json has written."""

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.clock import MAX_OTHER_CORES
from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import json_files

Record = Mapping[str, Any]

_KEYS = ('model', 'what', 'engine', 'dispatch', 'mode', 'serving', 'load', 'length')
_KINDS = {
  'model': json_files.TEXT,
  'what': json_files.TEXT,
  'tokens_per_s': json_files.Kind('a speed', lambda value: json_files.NUMBER.fits(value) and 0 < value < math.inf),
  'other_cores': json_files.optional(json_files.NUMBER),
}


class Figure(NamedTuple):
  """Speed in earlier runs, the median of those that count."""

  tokens_per_s: float
  disturbed: bool  # other processes were busy during every run


def identity(record: Record) -> dict[str, Any]:
  """Fields that identify a measurement; the dispatch of a train step does not, as it may differ between runs."""
  own = [key for key in _KEYS if key in record and (key != 'dispatch' or record['what'] == 'moe_layer')]
  return {key: record[key] for key in own}


def read(path: str) -> list[Record]:
  """Reads the measurements in a file; skips other lines."""
  try:
    with open(path, encoding='utf-8') as f:
      records = []
      for line in f:
        with contextlib.suppress(ValueError):
          records.append(json_files.parse(line, **_KINDS))
  except (OSError, UnicodeDecodeError) as e:
    raise UserError(f'--against={path} cannot be read: {e}') from None
  if not records:
    raise UserError(f'--against takes lines of JSON with tokens_per_s; {path} has none: give what --json wrote')
  return records


def earlier(record: Record, others: Sequence[Record]) -> Figure | None:
  """Speed of the same measurement in other runs; None: there is none.

  A run in which other processes kept more than MAX_OTHER_CORES cores busy does not count, unless all runs are such.
  """
  runs = [other for other in others if identity(other) == identity(record)]
  quiet = [run for run in runs if (run.get('other_cores') or 0) <= MAX_OTHER_CORES]
  return Figure(statistics.median(run['tokens_per_s'] for run in quiet or runs), not quiet) if runs else None
