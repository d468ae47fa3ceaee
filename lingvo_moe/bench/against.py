"""Figures of an earlier run, of ours or of another system's, beside those of this one.

Two kinds of lines of JSON are read: what tools/bench.py --json writes, and what timings of other systems at bench-S
print ('RESULT {...}', with 'peer', 'config' such as 'bench-S-E128', and 'measure') or collect in a file ('job' then says
what was run).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lingvo_moe.bench.clock import MAX_OTHER_CORES
from lingvo_moe.core.errors import UserError

Record = Mapping[str, Any]

_MODELS = {
  'bench-S-dense': 'mt.bench_s.Dense',
  'bench-S': 'mt.bench_s.Moe16',
  'bench-S-E128': 'mt.bench_s.Moe128',
  'bench-S-E512': 'mt.bench_s.Moe512',
}
_WHATS = {'moe_layer_fwd_bwd': 'moe_layer'}
# What else two figures of a measurement must have in common, where both tell.
_ALIKE = {'moe_layer': ('dispatch',), 'beam': ('length',)}


class Figure(NamedTuple):
  """Tokens a second of one system, the median of its runs."""

  label: str
  tokens_per_s: float
  peak_rss_mib: float
  disturbed: bool  # other processes were busy during every run


def read(path: str) -> list[Record]:
  """The measurements in a file, each with 'model', 'what', 'label' and 'tokens_per_s'; other lines are passed over."""
  try:
    with open(path, encoding='utf-8') as f:
      lines = [line.removeprefix('RESULT ').strip() for line in f]
  except (OSError, UnicodeDecodeError) as e:
    raise UserError(f'--against={path} cannot be read: {e}') from None
  found = [_named(record) for line in lines if (record := _parsed(line)) and 'tokens_per_s' in record]
  if not found:
    raise UserError(
      f'--against takes lines of JSON with tokens_per_s; {path} has none: give what --json wrote, or the output of peers'
    )
  return found


def beside(record: Record, others: Sequence[Record]) -> list[Figure]:
  """Those of other runs that measured what a record did, fastest first; runs of one label are one figure.

  A run in which other processes kept more than MAX_OTHER_CORES cores busy does not count, unless all were so.
  """
  by_label: dict[str, list[Record]] = {}
  for other in others:
    if _same(record, other):
      by_label.setdefault(other['label'], []).append(other)
  return sorted((_figure(label, runs) for label, runs in by_label.items()), key=lambda f: -f.tokens_per_s)


def lines(record: Record, figures: Sequence[Figure]) -> list[str]:
  """For people: how many times as fast as each the record is."""
  told = []
  for figure in figures:
    load = ', disturbed by other processes' if figure.disturbed else ''
    ratio = record['tokens_per_s'] / figure.tokens_per_s
    told.append(f'{ratio:8.2f} x {figure.tokens_per_s:9.1f} tokens/s of {figure.label}{load}')
  return told


def _parsed(line: str) -> dict | None:
  if not line.startswith('{'):
    return None
  try:
    return json.loads(line)
  except ValueError:
    return None


def _named(record: dict) -> Record:
  """With the names that our own measurements have."""
  if 'peer' not in record:
    return {'label': record.get('model', ''), **record}
  label = f'{record["peer"]} ({record["job"]})' if 'job' in record else record['peer']
  what = _WHATS.get(record.get('measure'), record.get('measure'))
  return {**record, 'label': label, 'model': _MODELS.get(record.get('config')), 'what': what}


def _same(record: Record, other: Record) -> bool:
  alike = all(record[key] == other[key] for key in _ALIKE.get(record['what'], ()) if key in record and key in other)
  return alike and (record['model'], record['what']) == (other.get('model'), other.get('what'))


def _figure(label: str, runs: Sequence[Record]) -> Figure:
  quiet = [run for run in runs if run.get('other_cores', 0) <= MAX_OTHER_CORES]
  counted = quiet or runs
  tokens = statistics.median(run['tokens_per_s'] for run in counted)
  peak = max(run.get('peak_rss_mib', 0) for run in counted)
  return Figure(label, tokens, peak, not quiet)
