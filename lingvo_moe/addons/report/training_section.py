"""Section of a report on training: losses over steps and time, pace, learning rate and gradient norm."""

from collections.abc import Callable, Sequence
from typing import Any

from lingvo_moe.addons.report import figures
from lingvo_moe.addons.report.escaped_html import Html, join, tag
from lingvo_moe.addons.report.reading import RunRecord
from lingvo_moe.addons.report.series import thinned
from lingvo_moe.addons.report.svg import Curve
from lingvo_moe.storage import log_directory

POINTS = 100  # of a curve, at most

# Quantities of the log: title of the figure, key, name for the legend, note.
_QUANTITIES = (
  ('Pace', 'tokens_per_second', 'tokens a second', 'Source and target tokens a second of training.'),
  ('Input wait', 'input_wait_share', 'share', 'Share of time spent waiting for data.'),
  ('Learning rate', 'learning_rate', 'learning rate', ''),
  ('Gradient norm', 'grad_norm', 'norm', 'Before clipping.'),
)
_OBJECTIVE = 'What training minimises: the cross-entropy of smoothed labels, and the balance losses of experts.'


def curves_of(records: Sequence[RunRecord], quantities: dict[str, str], points: int = POINTS) -> list[Curve]:
  """Curves over steps of quantities of the log, of every run: of one run a colour each, of two a colour for each run.

  `quantities` are names for the legend, by key of a line of the log. A curve has at most `points` points.
  """
  drawn = []
  for record in records:
    for i, (key, name) in enumerate(quantities.items()):
      # Dashes of another run are other ones too, so that where both have the same values both are seen.
      colour, dash = (i, 0) if record.alone else (record.place, record.place + i)
      series = thinned(((line['step'], line.get(key)) for line in record.steps), points)
      drawn.append(Curve(record.label(name, sole=len(quantities) == 1), series, colour, dash))
  return drawn


def section(records: Sequence[RunRecord]) -> Html:
  """Figures of training, and sentences on what a run's log lacks."""
  logged = [record for record in records if record.steps]
  timed = [record for record in records if any(line['trained'] is not None for line in record.log)]
  sentences = [figures.absent(why_no_log(record)) for record in records if record not in logged]
  no_dev_loss = 'has no dev loss yet: it is computed every eval_every steps.'
  no_time = 'was trained by a version that did not log the time, so it is not in plots over time.'
  sentences += [figures.absent(f'{record.name} {no_dev_loss}') for record in logged if not record.evaluations]
  sentences += [figures.absent(f'{record.name} {no_time}') for record in logged if record not in timed]
  if any(len(record.steps) > POINTS for record in records):
    about = 'Points of a curve are means of several logged steps; a band reaches from the least to the largest of them.'
    sentences.append(tag('p', about))
  seconds, unit = _time_unit(records)
  time = lambda line: None if line['trained'] is None else line['trained'] / seconds
  over_time = f'{unit} of training', 'Time of evaluations and between restarts is not counted.'
  plots = [
    figures.curves('Loss', _losses(records), 'step', 'Cross-entropy in nats a target token.'),
    figures.curves('Loss over time', _losses(timed, time), *over_time),
  ]
  for title, key, name, note in _QUANTITIES:
    plots.append(figures.curves(title, curves_of(records, {key: name}), 'step', note, from_zero=True))
  plots.append(figures.curves('Objective', curves_of(records, _objective(records), POINTS // 2), 'step', _OBJECTIVE))
  return join([*sentences, figures.grid(*plots)])


def why_no_log(record: RunRecord) -> str:
  """Sentence on a run without a log."""
  if record.averaged:
    return f'{record.name} is the average of {record.averaged}, and has no curves or dev loss of its own.'
  return f'{record.name} has no training log (train.jsonl).'


def _losses(records: Sequence[RunRecord], x: Callable[[dict], Any] = lambda line: line['step']) -> list[Curve]:
  """Loss of training and of dev."""
  drawn = []
  for record in records:
    train = thinned(((x(line), line.get('loss')) for line in record.steps), POINTS)
    dev = thinned(((x(line), line.get('dev_loss')) for line in record.evaluations), POINTS)
    dev_colour, dash = (1, 0) if record.alone else (record.place, record.place + 1)
    drawn.append(Curve(record.label('training'), train, record.place, record.place))
    drawn.append(Curve(record.label('dev'), dev, dev_colour, dash, marks=True))
  return drawn


def _objective(records: Sequence[RunRecord]) -> dict[str, str]:
  """The objective, and of one run its parts, by key with their names."""
  part = log_directory.objective_part('')
  last = [line for record in records if record.alone for line in record.steps[-1:]]
  parts = {key: key.removeprefix(part).replace('_', ' ') for line in last for key in line if key.startswith(part)}
  return {'objective': 'objective', **parts}


def _time_unit(records: Sequence[RunRecord]) -> tuple[float, str]:
  """(seconds of the unit that suits the runs, its name)."""
  longest = max((line['trained'] or 0.0 for r in records for line in r.log), default=0.0)
  units = (3600.0, 'hours'), (60.0, 'minutes'), (1.0, 'seconds')
  return next((seconds, name) for seconds, name in units if longest >= 2 * seconds or seconds == 1)
