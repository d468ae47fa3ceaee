"""Section of a report on training: losses over steps and time, pace, learning rate and gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lingvo_moe.report import figures
from lingvo_moe.report.markup import Markup
from lingvo_moe.report.markup import join
from lingvo_moe.report.markup import tag
from lingvo_moe.report.reading import RunRecord
from lingvo_moe.report.series import thinned
from lingvo_moe.report.svg import Curve

POINTS = 100  # of a curve, at most
Line = dict[str, Any]  # of train.jsonl


def curves_of(
  records: Sequence[RunRecord],
  quantities: dict[str, str],
  x: Callable[[Line], Any] = lambda line: line['step'],
  points: int = POINTS,
  lines: Callable[[RunRecord], list[Line]] = lambda record: record.steps,
  marks: bool = False,
) -> list[Curve]:
  """Curves of quantities of the log, of every run: of one run a colour each, of two a colour for each run.

  Args:
    records: the runs.
    quantities: names for the legend, by key of a line.
    x: of a line.
    points: of a curve, at most.
    lines: those of a run.
    marks: whether points are marked.
  """
  found = []
  for record in records:
    for i, (key, name) in enumerate(quantities.items()):
      name = record.label(name, sole=len(quantities) == 1)
      # Dashes of another run are other ones too, so that where both have the same values both are seen.
      colour, dash = (i, 0) if record.alone else (record.place, record.place + i)
      series = thinned(((x(line), line.get(key)) for line in lines(record)), points)
      found.append(Curve(name, series, colour, dash, marks))
  return found


def section(records: Sequence[RunRecord]) -> Markup:
  """Figures of training, and sentences on what a run's log lacks."""
  sentences = [
    figures.absent(
      f'{r.name} is the average of {r.averaged}, and has no curves or dev loss of its own.'
      if r.averaged
      else f'{r.name} has no training log (train.jsonl).'
    )
    for r in records
    if not r.steps
  ]
  sentences += [
    figures.absent(f'{r.name} has no dev loss yet: it is computed every eval_every steps.')
    for r in records
    if r.steps and not r.evaluations
  ]
  seconds, unit = _time_unit(records)
  timed = [r for r in records if any(line['trained'] is not None for line in r.log)]
  sentences += [
    figures.absent(f'{r.name} was trained by a version that did not log the time, so it is not in plots over time.')
    for r in records
    if r.steps and r not in timed
  ]
  if any(len(record.steps) > POINTS for record in records):
    sentences.append(
      tag(
        'p',
        'Points of a curve are means of several logged steps; a band reaches from the least to the largest of them.',
      )
    )
  time = lambda line: None if line['trained'] is None else line['trained'] / seconds
  return join(
    [
      *sentences,
      figures.grid(
        figures.curves('Loss', _losses(records), 'step', 'Cross-entropy in nats a target token.'),
        figures.curves(
          'Loss over time',
          _losses(timed, time),
          f'{unit} of training',
          'Time of evaluations and between restarts is not counted.',
        ),
        figures.curves(
          'Pace',
          curves_of(records, {'tokens_per_second': 'tokens a second'}),
          'step',
          'Source and target tokens a second of training.',
          from_zero=True,
        ),
        figures.curves(
          'Input wait',
          curves_of(records, {'input_wait_share': 'share'}),
          'step',
          'Share of time spent waiting for data.',
          True,
        ),
        figures.curves('Learning rate', curves_of(records, {'learning_rate': 'learning rate'}), 'step', from_zero=True),
        figures.curves(
          'Gradient norm', curves_of(records, {'grad_norm': 'norm'}), 'step', 'Before clipping.', from_zero=True
        ),
      ),
    ]
  )


def _losses(records: Sequence[RunRecord], x: Callable[[Line], Any] = lambda line: line['step']) -> list[Curve]:
  """Loss of training, without auxiliary losses where these are known apart, and of dev."""
  found = []
  for record in records:
    key = 'xent' if any('xent' in line for line in record.steps) else 'loss'
    train = thinned(((x(line), line.get(key)) for line in record.steps), POINTS)
    dev = thinned(((x(line), line.get('dev_loss')) for line in record.evaluations), POINTS)
    dev_colour, dash = (1, 0) if record.alone else (record.place, record.place + 1)
    found.append(Curve(record.label('training'), train, record.place, record.place))
    found.append(Curve(record.label('dev'), dev, dev_colour, dash, marks=True))
  return found


def _time_unit(records: Sequence[RunRecord]) -> tuple[float, str]:
  """(seconds of the unit that suits the runs, its name)."""
  longest = max((line['trained'] or 0.0 for r in records for line in r.log), default=0.0)
  return next(
    (s, name) for s, name in ((3600.0, 'hours'), (60.0, 'minutes'), (1.0, 'seconds')) if longest >= 2 * s or s == 1
  )
