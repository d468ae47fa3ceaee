"""Section of a report on held-out text: BLEU and chrF by language, or perplexity of a language model."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lingvo_moe.addons.report import figures, svg
from lingvo_moe.addons.report.escaped_html import Html, join
from lingvo_moe.addons.report.reading import RunRecord, differ_in_text
from lingvo_moe.addons.report.series import text, thinned
from lingvo_moe.addons.report.svg import Curve
from lingvo_moe.core.errors import plural
from lingvo_moe.core.quality import METRICS
from lingvo_moe.storage.log_directory import dev_losses, number

_COLUMNS = {name: metric.title for name, metric in METRICS.items()} | {'copy_bleu': 'copy BLEU'}
# By what the target vocabulary can write.
_BOUNDS = {f'best_{name}': f'{metric.title} at most' for name, metric in METRICS.items()}


def section(records: Sequence[RunRecord]) -> Html:
  """Scores of all languages, or sentences on why there are none."""
  scored = [record for record in records if record.scores]
  parts = [_perplexity(record) for record in records if record not in scored]
  return join([*parts, figures.grid(_scores(scored) if scored else None, _dev_loss(records))])


def _why_no_scores(record: RunRecord) -> str:
  if record.run.model.startswith('lm.'):
    what = 'is a language model and has no translations; its perplexity'
  else:
    what = 'has not been decoded; the scores of its translations'
  return f'{record.name} {what} of {record.split} would come from the decoder (--split={record.split}).'


def in_order(records: Sequence[RunRecord], names: Sequence[str]) -> tuple[list[str], str]:
  """(names of pairs, those with the most training text first; what they are sorted by)."""
  sizes, unit = _sizes(records)
  by = f'sorted by the size of the training text in {unit}, the largest first' if sizes else 'in alphabetical order'
  return sorted(names, key=lambda name: (-sizes.get(name, -1), name)), by


def _sizes(records: Sequence[RunRecord]) -> tuple[Mapping[str, int], str]:
  return next((record.sizes for record in records if record.sizes[0]), ({}, ''))


def _scores(records: Sequence[RunRecord]) -> Html:
  names, by = in_order(records, sorted({name for record in records for name in record.scores}))
  sizes, unit = _sizes(records)
  values = lambda record, key: [number(record.scores.get(name, {}).get(key)) for name in names]
  drawn = []
  for record in records:
    for shape, (key, metric) in enumerate(METRICS.items()):
      series = thinned(enumerate(values(record, key)))
      drawn.append(Curve(record.label(metric.title), series, shape if record.alone else record.place, shape))
  bounds = [bound for record in records for key in _BOUNDS for bound in values(record, key)]
  bounded = any(bound is not None and bound < 99.95 for bound in bounds)
  columns = {**_COLUMNS, **_BOUNDS} if bounded else _COLUMNS
  has = {key for record in records for scores in record.scores.values() for key in scores}
  columns = {key: what for key, what in columns.items() if key not in METRICS or key in has}  # an earlier version's
  head = ['language', *([unit] if sizes else [])]
  head += [record.label(what) for record in records for what in columns.values()]
  head += ['BLEU, difference'] if len(records) == 2 else []
  title = 'BLEU and chrF by language'
  table = figures.table(head, [_row(records, name, sizes, columns) for name in names], title)
  steps = ', '.join(f'{record.name} at step {record.decoded_step}' for record in records)
  means = '; '.join(f'{curve.name} {statistics.mean(curve.series.ys):.1f}' for curve in drawn if curve.series.ys)
  label = f'BLEU and chrF of {plural(len(names), "language")}, {by}. Means: {means}'
  note = f'{records[0].split}, {by}: {steps}. Means: {means}. Copying the source gives the copy BLEU.'
  if bounded:
    note += ' The target vocabulary cannot write all references: a perfect model gets the BLEU and chrF at most.'
  if other := [name for name in names if differ_in_text(records, name)]:
    note += f' Of different text, so not to be compared: {", ".join(other)}.'
  picture = svg.dots(names, drawn, 100, 'score', label)
  return figures.figure(title, picture, table, note, figures.legend(drawn, True))


def _row(records: Sequence[RunRecord], name: str, sizes: Mapping[str, int], columns: Iterable[str]) -> list[Any]:
  cells: list[Any] = [name, *([sizes.get(name)] if sizes else [])]
  scores = [record.scores.get(name, {}) for record in records]
  cells += [
    '' if number(scores_of_run.get(key)) is None else f'{scores_of_run[key]:.1f}'
    for scores_of_run in scores
    for key in columns
  ]
  if len(records) == 2:
    one, two = (number(scores_of_run.get('bleu')) for scores_of_run in scores)
    cells.append('' if None in (one, two) or differ_in_text(records, name) else f'{two - one:+.1f}')
  return cells


def _dev_loss(records: Sequence[RunRecord]) -> Html | None:
  """Last dev loss of each part of the text; None where there are no parts."""
  last = [(record, record.evaluations[-1]) for record in records if record.evaluations]
  losses = [{name: y for name, loss in dev_losses(line).items() if (y := number(loss)) is not None} for _, line in last]
  parts = [
    (record, line['step'], losses_of_run)
    for (record, line), losses_of_run in zip(last, losses, strict=True)
    if losses_of_run
  ]
  names, by = in_order(records, sorted({name for *_, losses_of_run in parts for name in losses_of_run}))
  if len(names) < 2:
    return None
  series = [thinned(enumerate(map(losses_of_run.get, names))) for *_, losses_of_run in parts]
  drawn = [Curve(r.name, losses_of_run, r.place, r.place) for (r, *_), losses_of_run in zip(parts, series, strict=True)]
  largest = max(y for losses_of_run in series for y in losses_of_run.ys) or 1.0
  rows = [[name, *(losses_of_run.get(name) for *_, losses_of_run in parts)] for name in names]
  table = figures.table(['part', *(curve.name for curve in drawn)], rows, 'Dev loss by part')
  steps = ', '.join(f'{record.name} at step {step}' for record, step, _ in parts)
  label = f'Dev loss of {len(names)} parts of the text, from 0 to {text(largest)}, {by}: {steps}'
  picture = svg.dots(names, drawn, largest, 'nats a target token', label)
  note = f'Last evaluation, {by}: {steps}.'
  return figures.figure('Dev loss by part of the text', picture, table, note, figures.legend(drawn, True))


def _perplexity(record: RunRecord) -> Html:
  """Perplexity of a language model, or a sentence on why there are no scores."""
  if not (newest := record.run.perplexities(record.split)):
    return figures.absent(_why_no_scores(record))
  step, summary = newest
  keys = {
    'tokens': 'tokens',
    'cross_entropy': 'nats a token',
    'perplexity': 'perplexity a token',
    'perplexity_per_word': 'a word',
    'bits_per_byte': 'bits a byte',
  }
  files = {**summary['files'], 'all': summary.get('all')}
  rows = [[name, *(number(entry.get(key)) for key in keys)] for name, entry in files.items() if isinstance(entry, dict)]
  title = f'Perplexity of {record.split} by {record.name} at step {step}'
  return join([figures.absent(f'{title}:'), figures.table(['file', *keys.values()], rows, title)])
