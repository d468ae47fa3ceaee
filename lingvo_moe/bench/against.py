"""Comparison of benchmark results with those of earlier runs, of this package or of other systems.

Two kinds of JSON lines are read: the output of lingvo-moe bench --json, and timings of other systems at bench-S, either
printed ('RESULT {...}', with 'peer', 'config' such as 'bench-S-E128', and 'measure') or collected in a file (then with
'job', the name of what was run).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lingvo_moe.bench.clock import MAX_OTHER_CORES
from lingvo_moe.core import json_files
from lingvo_moe.core.errors import UserError

Record = Mapping[str, Any]

_MODELS = {
  'bench-S-dense': 'mt.bench_s.Dense',
  'bench-S': 'mt.bench_s.Moe16',
  'bench-S-E128': 'mt.bench_s.Moe128',
  'bench-S-E512': 'mt.bench_s.Moe512',
}
_MEASURES = {'moe_layer_fwd_bwd': 'moe_layer'}
# Further fields that must be equal for two results of a measurement to be compared, where both have them.
_EQUAL_FIELDS = {'moe_layer': ('dispatch',), 'rounds': ('mode', 'serving', 'load'), 'beam': ('length',)}
_TEXT, _NUMBER = json_files.optional(json_files.TEXT), json_files.optional(json_files.NUMBER)
_KINDS = {'config': _TEXT, 'measure': _TEXT, 'other_cores': _NUMBER, 'peak_rss_mib': _NUMBER}


class Figure(NamedTuple):
  """Speed of one system, the median of its runs."""

  label: str
  tokens_per_s: float
  peak_rss_mib: float
  disturbed: bool  # other processes were busy during every run


def read(path: str) -> list[Record]:
  """Reads the measurements in a file, each with 'model', 'what', 'label' and 'tokens_per_s'; skips other lines."""
  try:
    with open(path, encoding='utf-8') as f:
      lines = [line.removeprefix('RESULT ').strip() for line in f]
  except (OSError, UnicodeDecodeError) as e:
    raise UserError(f'--against={path} cannot be read: {e}') from None
  found = [_named(record) for line in lines if (record := _parsed(line)) and _is_speed(record.get('tokens_per_s'))]
  if not found:
    raise UserError(
      f'--against takes lines of JSON with tokens_per_s; {path} has none: give what --json wrote, or the output of peers'
    )
  return found


def comparable(record: Record, others: Sequence[Record]) -> list[Figure]:
  """Figures of other runs of the same measurement, fastest first; runs with the same label make one figure.

  A run in which other processes kept more than MAX_OTHER_CORES cores busy does not count, unless all runs are such.
  """
  by_label: dict[str, list[Record]] = {}
  for other in others:
    if _same(record, other):
      by_label.setdefault(other['label'], []).append(other)
  return sorted((_figure(label, runs) for label, runs in by_label.items()), key=lambda f: -f.tokens_per_s)


def lines(record: Record, figures: Sequence[Figure]) -> list[str]:
  """Lines of text with the speed of the record relative to each figure."""
  text = []
  for figure in figures:
    load = ', disturbed by other processes' if figure.disturbed else ''
    ratio = record['tokens_per_s'] / figure.tokens_per_s
    text.append(f'{ratio:8.2f} x {figure.tokens_per_s:9.1f} tokens/s of {figure.label}{load}')
  return text


def _parsed(line: str) -> dict | None:
  if not line.startswith('{'):
    return None
  try:
    return json_files.parse(line, **_KINDS)
  except ValueError:
    return None


def _is_speed(value: Any) -> bool:
  return json_files.NUMBER.fits(value) and 0 < value < math.inf


def _named(record: dict) -> Record:
  """Record of another system with the field names and values of our own measurements."""
  if 'peer' not in record:
    return {**record, 'label': str(record.get('label', record.get('model', '')))}
  label = f'{record["peer"]} ({record["job"]})' if 'job' in record else str(record['peer'])
  what = _MEASURES.get(record.get('measure'), record.get('measure'))
  return {**record, 'label': label, 'model': _MODELS.get(record.get('config')), 'what': what}


def _same(record: Record, other: Record) -> bool:
  fields = [key for key in _EQUAL_FIELDS.get(record['what'], ()) if key in record and key in other]
  equal = all(record[key] == other[key] for key in fields)
  return equal and (record['model'], record['what']) == (other.get('model'), other.get('what'))


def _figure(label: str, runs: Sequence[Record]) -> Figure:
  quiet = [run for run in runs if (run.get('other_cores') or 0) <= MAX_OTHER_CORES]
  counted = quiet or runs
  tokens = statistics.median(run['tokens_per_s'] for run in counted)
  peak = max(run.get('peak_rss_mib') or 0 for run in counted)
  return Figure(label, tokens, peak, not quiet)
