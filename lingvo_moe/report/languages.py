"""Section of a report on held-out text: BLEU and chrF by language, or perplexity of a language model."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lingvo_moe.core.errors import counted
from lingvo_moe.core.log_directory import dev_losses
from lingvo_moe.core.log_directory import number
from lingvo_moe.report import figures
from lingvo_moe.report import svg
from lingvo_moe.report.markup import Markup
from lingvo_moe.report.markup import join
from lingvo_moe.report.reading import RunRecord
from lingvo_moe.report.reading import differ_in_text
from lingvo_moe.report.series import Series
from lingvo_moe.report.series import text
from lingvo_moe.report.svg import Curve

_METRICS = {'bleu': 'BLEU', 'chrf': 'chrF'}
_COLUMNS = {**_METRICS, 'copy_bleu': 'copy BLEU'}
_BOUNDS = {'best_bleu': 'BLEU at most', 'best_chrf': 'chrF at most'}  # by what the target vocabulary can write


def section(records: Sequence[RunRecord]) -> Markup:
  """Scores of all languages, or sentences on why there are none."""
  parts: list[Markup | None] = []
  for record in records:
    if record.scores:
      continue
    if record.perplexities:
      parts.append(_perplexity(record))
    else:
      what = (
        'is a language model and has no translations; its perplexity'
        if record.run.model.startswith('lm.')
        else 'has not been decoded; the scores of its translations'
      )
      parts.append(
        figures.absent(f'{record.name} {what} of {record.split} would come from the decoder (--split={record.split}).')
      )
  scored = [record for record in records if record.scores]
  plots = [_scores(scored) if scored else None, _dev_loss(records)]
  return join([*parts, figures.grid(*plots)])


def in_order(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[list[str], str]:
  """(names of pairs, those with the most training text first; what they are sorted by)."""
  sizes, unit = _sizes(records)
  by = f'sorted by the size of the training text in {unit}, the largest first' if sizes else 'in alphabetical order'
  return sorted(names, key=lambda name: (-sizes.get(name, -1), name)), by


def _sizes(records: Sequence[RunRecord]) -> tuple[Mapping[str, int], str]:
  return next((record.sizes for record in records if record.sizes[0]), ({}, ''))


def _scores(records: Sequence[RunRecord]) -> Markup:
  names, by = in_order(records, sorted({name for record in records for name in record.scores}))
  sizes, unit = _sizes(records)
  rows = []
  for record in records:
    for shape, (key, metric) in enumerate(_METRICS.items()):
      found = [(i, number(record.scores.get(name, {}).get(key))) for i, name in enumerate(names)]
      xs, ys = [float(i) for i, y in found if y is not None], [y for _, y in found if y is not None]
      colour = shape if record.alone else record.place
      rows.append(Curve(record.label(metric), Series(xs, ys, ys, ys), colour, shape))
  head = ['language', *([unit] if sizes else [])]
  found = [number(record.scores.get(name, {}).get(key)) for record in records for name in names for key in _BOUNDS]
  bounded = any(bound is not None and bound < 99.95 for bound in found)
  columns = {**_COLUMNS, **_BOUNDS} if bounded else _COLUMNS
  head += [record.label(what) for record in records for what in columns.values()]
  head += ['BLEU, difference'] if len(records) == 2 else []
  table = figures.table(head, [_row(records, name, sizes, columns) for name in names], 'BLEU and chrF by language')
  steps = ', '.join(f'{record.name} at step {record.decoded_step}' for record in records)
  means = '; '.join(f'{row.name} {statistics.mean(row.series.ys):.1f}' for row in rows if row.series.ys)
  label = f'BLEU and chrF of {counted(len(names), "language")}, {by}. Means: {means}'
  note = f'{records[0].split}, {by}: {steps}. Means: {means}. Copying the source gives the copy BLEU.'
  if bounded:
    note += ' The target vocabulary cannot write all references: a perfect model gets the BLEU and chrF at most.'
  if other := [name for name in names if differ_in_text(records, name)]:
    note += f' Of different text, so not to be compared: {", ".join(other)}.'
  picture = svg.dots(names, rows, 0, 100, 'score', label)
  return figures.figure('BLEU and chrF by language', picture, table, note, figures.legend(rows, True))


def _row(records: Sequence[RunRecord], name: str, sizes: Mapping[str, int], columns: Iterable[str]) -> list[Any]:
  cells: list[Any] = [name, *([sizes.get(name)] if sizes else [])]
  bleu = []
  for record in records:
    scores = record.scores.get(name, {})
    cells += [_one_digit(scores.get(key)) for key in columns]
    bleu.append(number(scores.get('bleu')))
  if len(records) == 2:
    incomparable = None in bleu or differ_in_text(records, name)
    cells.append('' if incomparable else f'{bleu[1] - bleu[0]:+.1f}')
  return cells


def _one_digit(value: Any) -> str:
  return '' if number(value) is None else f'{value:.1f}'


def _dev_loss(records: Sequence[RunRecord]) -> Markup | None:
  """Last dev loss of each part of the text; None where there are no parts."""
  found = []
  for record in records:
    last = record.evaluations[-1] if record.evaluations else {}
    losses = {name: y for name, loss in dev_losses(last).items() if (y := number(loss)) is not None}
    found.append((record, last.get('step'), losses))
  found = [(record, step, losses) for record, step, losses in found if losses]
  names, by = in_order(records, sorted({name for *_, losses in found for name in losses}))
  if len(names) < 2:
    return None
  rows = []
  for record, _, losses in found:
    xs = [float(i) for i, name in enumerate(names) if name in losses]
    ys = [losses[names[int(i)]] for i in xs]
    rows.append(Curve(record.name, Series(xs, ys, ys, ys), record.place, record.place))
  largest = max(y for row in rows for y in row.series.ys) or 1.0
  head = ['part', *(row.name for row in rows)]
  table = figures.table(
    head, [[name, *(losses.get(name) for *_, losses in found)] for name in names], 'Dev loss by part'
  )
  steps = ', '.join(f'{record.name} at step {step}' for record, step, _ in found)
  label = f'Dev loss of {len(names)} parts of the text, from 0 to {text(largest)}, {by}: {steps}'
  picture = svg.dots(names, rows, 0, largest, 'nats a target token', label)
  note = f'Last evaluation, {by}: {steps}.'
  return figures.figure('Dev loss by part of the text', picture, table, note, figures.legend(rows, True))


def _perplexity(record: RunRecord) -> Markup:
  step, summary = record.perplexities
  keys = {
    'tokens': 'tokens',
    'cross_entropy': 'nats a token',
    'perplexity': 'perplexity a token',
    'perplexity_per_word': 'a word',
    'bits_per_byte': 'bits a byte',
  }
  files = {**summary['files'], 'all': summary.get('all')}
  rows = [[name, *(number(of.get(key)) for key in keys)] for name, of in files.items() if isinstance(of, dict)]
  title = f'Perplexity of {record.split} by {record.name} at step {step}'
  return join([figures.absent(f'{title}:'), figures.table(['file', *keys.values()], rows, title)])
