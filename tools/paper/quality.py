"""Quality beside cost, from recorded results (recording.py), as GShard's tables and figures have them.

Curves of the dev loss over tokens and seconds; Table 2, tokens until a loss is reached; Table 3 and Figure 1, cost
beside quality; Figure 6, differences by language, the largest training sets first.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.core.errors import UserError, closest, plural
from lingvo_moe.text import markdown
from paper import claims, plots

WINDOW = 10  # languages of the moving average of Figure 6
METRICS = ('chrF2', 'chrF++', 'BLEU')

_SHARES = {'a quarter': 0.25, 'a half': 0.5, 'all': 1.0}  # of the base's tokens, in Table 2


class Cost(NamedTuple):
  """What training has cost up to a step."""

  step: int
  tokens: float  # target tokens
  seconds: float


class Evaluation(NamedTuple):
  """A point of a curve: the dev loss after a step."""

  step: int
  tokens: float  # target tokens of training so far
  seconds: float  # of training so far
  loss: float


class RunResults(NamedTuple):
  """What is recorded of a run.

  Attributes:
    name: of its log directory.
    curve: evaluations by step.
    scores: by metric and pair, of the last step that was translated.
    step: that step; None: none was.
    cost: up to `step`, between evaluations by interpolation, or where nothing was translated up to the last one; None:
      not recorded.
  """

  name: str
  curve: list[Evaluation]
  scores: Mapping[str, Mapping[str, float]]
  step: int | None
  cost: Cost | None

  def tokens_to(self, loss: float) -> float | None:
    """Target tokens at which the running minimum falls to a loss, between evaluations by interpolation; None: never."""
    before = None
    for point in self.curve:
      if point.loss <= loss:
        if before is None or point.loss == before.loss:
          return point.tokens
        share = (before.loss - loss) / (before.loss - point.loss)
        return before.tokens + share * (point.tokens - before.tokens)
      before = point if before is None else point._replace(loss=min(before.loss, point.loss))
    return None

  def loss_at(self, step: int) -> float | None:
    """Dev loss of the last evaluation up to a step; None: there was none."""
    return next((point.loss for point in reversed(self.curve) if point.step <= step), None)


def by_run(records: Sequence[Mapping[str, Any]], split: str) -> dict[str, RunResults]:
  """Results of each run, in the order in which runs first occur.

  Args:
    records: of recording.py. Evaluations without seconds or tokens are left out.
    split: decoded set whose scores are meant.
  """
  results = {}
  for name in dict.fromkeys(record['run'] for record in records):
    own = [record for record in records if record['run'] == name]
    curve = sorted(
      Evaluation(r['step'], r['target_tokens'], r['seconds'], r['dev_loss'])
      for r in own
      if r['kind'] == 'eval' and None not in (r['target_tokens'], r['seconds'])
    )
    tests = [r for r in own if r['kind'] == 'test' and r['split'] == split]
    step = max((r['step'] for r in tests), default=None)
    at_step = [record for record in tests if record['step'] == step]
    scores = {m: {r['pair']: r[m] for r in at_step if r.get(m) is not None} for m in METRICS}
    results[name] = RunResults(name, curve, scores, step, _cost(curve, at_step, step))
  return results


def chosen(runs: Mapping[str, RunResults], base: str, names: Sequence[str]) -> dict[str, RunResults]:
  """Base and named runs, in that order; without names all runs. UserError for a name that is missing."""
  for flag, name in [('--base', base), *(('--runs', name) for name in names)]:
    if name not in runs:
      raise UserError(f'{flag} names a recorded run; saw {name!r}; {closest(name, list(runs))}')
  return {name: runs[name] for name in dict.fromkeys([base, *names])} if names else dict(runs)


def _cost(curve: Sequence[Evaluation], tests: Sequence[Mapping[str, Any]], step: int | None) -> Cost | None:
  """Cost up to a step, from the scores recorded there or else from the curve; step None: of the whole curve."""
  recorded = (Cost(r['step'], r.get('target_tokens'), r.get('seconds')) for r in tests)
  if cost := next((cost for cost in recorded if None not in cost), None):
    return cost
  step = curve[-1].step if curve and step is None else step
  if not curve or not curve[0].step <= step <= curve[-1].step:
    return None
  steps = [point.step for point in curve]
  tokens, seconds = (np.interp(step, steps, values) for values in list(zip(*curve))[1:3])
  return Cost(step, float(tokens), float(seconds))


def moving_average(values: Sequence[float], window: int = WINDOW) -> tuple[np.ndarray, np.ndarray]:
  """(positions, means) of every window of so many neighbours; of all values where there are fewer."""
  size = min(window, len(values))
  means = np.convolve(values, np.full(size, 1.0 / size), mode='valid')
  return np.arange(len(means)) + (size - 1) / 2, means


class Quality:
  """Tables, as blocks of Markdown, and plots, as PNG files in a folder.

  Args:
    runs: results by run.
    base: name of the run that the others are compared with.
    folder: of the plots.
    sizes: training examples by pair; empty: not known.
    metric: one of METRICS.
  """

  def __init__(
    self, runs: Mapping[str, RunResults], base: str, folder: str, sizes: Mapping[str, int], metric: str = 'chrF2'
  ) -> None:
    self._runs = runs
    self._base = runs[base]
    self._folder = folder
    self._sizes = sizes
    self._metric = metric

  def make(self) -> list[str]:
    """All blocks."""
    self._compared()  # raises UserError before anything is drawn
    return [*self.curves(), *self.the_paper(), *self.table2(), *self.table3(), *self.figure6()]

  def curves(self) -> list[str]:
    """Dev loss over target tokens and over seconds."""
    drawn = [run for run in self._runs.values() if run.curve]
    if not drawn:
      return ['No evaluation is recorded, so there are no curves.']
    with plots.page(self._path('curves'), columns=2) as (by_tokens, by_seconds):
      for colour, run in zip(_colours(len(drawn)), drawn):
        losses = [point.loss for point in run.curve]
        plots.line(by_tokens, [point.tokens / 1e6 for point in run.curve], losses, run.name, colour)
        plots.line(by_seconds, [point.seconds / 3600 for point in run.curve], losses, run.name, colour)
      by_tokens.set_xlabel('target tokens, millions')
      by_seconds.set_xlabel('hours')
      by_tokens.set_ylabel('dev loss, nats a target token')
      by_tokens.legend()
    return ['## Dev loss over tokens and time', '![curves](curves.png)']

  def table2(self) -> list[str]:
    """Target tokens until the base's losses after a quarter, a half and all of its tokens are reached.

    A share of the tokens before the base's first evaluation is left out.
    """
    if not self._base.curve:
      return []
    last = self._base.curve[-1].tokens
    millions = lambda tokens: f'{tokens / 1e6:.1f}M'
    shares = {words: share for words, share in _SHARES.items() if share * last >= self._base.curve[0].tokens}
    losses = [_loss_at(self._base.curve, share * last) for share in shares.values()]

    def row(run):
      cells = []
      for loss in losses:
        tokens, of_base = run.tokens_to(loss), self._base.tokens_to(loss)
        missed = f'not in {millions(run.curve[-1].tokens)}'
        cells.append(missed if tokens is None else f'{millions(tokens)} ({tokens / of_base:.2f})')
      return [run.name, *cells]

    columns = ['run', *(f'to {loss:.3f}' for loss in losses)]
    rows = [row(run) for run in self._runs.values() if run.curve]
    *first, end = shares
    reached = f'{", ".join(first)} and {end}' if first else end
    about = f'Losses of {self._base.name} after {reached} of its tokens; in brackets the share of its tokens.'
    return ['## Target tokens to a dev loss (Table 2)', about, markdown.table(columns, rows)]

  def table3(self) -> list[str]:
    """Cost of training beside quality."""
    rows, points = [], []
    for run in self._runs.values():
      cost = run.cost
      scores = run.scores[self._metric]
      mean = float(np.mean(list(scores.values()))) if scores else None
      loss = run.loss_at(cost.step) if cost else None
      rows.append(
        [
          run.name,
          *([str(cost.step), f'{cost.tokens / 1e6:.1f}M', f'{cost.seconds / 3600:.2f}'] if cost else ['-'] * 3),
          f'{1e6 * cost.seconds / cost.tokens:.1f}' if cost else '-',
          '-' if loss is None else f'{loss:.4f}',
          f'{mean:.2f} ({plural(len(scores), "pair")}, step {run.step})' if scores else 'not translated',
        ]
      )
      if cost and scores:
        points.append((run.name, cost.seconds / 3600, mean))
    columns = ['run', 'steps', 'target tokens', 'hours', 'seconds a million tokens', 'dev loss', f'mean {self._metric}']
    blocks = ['## Cost beside quality (Table 3, Figure 1)', markdown.table(columns, rows)]
    if points:
      with plots.page(self._path('figure1')) as (axes,):
        for colour, (name, hours, mean) in zip(_colours(len(points)), points):
          plots.line(axes, [hours], [mean], name, colour)
        axes.set_xlabel('hours of training')
        axes.set_ylabel(f'mean {self._metric}')
        axes.legend()
      blocks.append('![figure1](figure1.png)')
    return blocks

  def figure6(self) -> list[str]:
    """Difference of each language from the base, sorted by size of the training set, with a moving average."""
    title = f'## {self._metric} by language, minus {self._base.name} (Figure 6)'
    base, others = self._base.scores[self._metric], self._compared()
    if not others:
      return [title, f'No other run has translations of pairs that {self._base.name} has.']
    blocks = [title]
    with plots.page(self._path('figure6'), width=9) as (axes,):
      axes.axhline(0, color='#555555', linewidth=1)
      for colour, (name, scores) in zip(_colours(len(others)), others.items()):
        pairs = sorted(scores.keys() & base.keys(), key=lambda pair: (-self._sizes[pair], pair))
        differences = [scores[pair] - base[pair] for pair in pairs]
        axes.scatter(range(len(pairs)), differences, s=8, color=colour, alpha=0.5)
        plots.line(axes, *moving_average(differences), name, colour, style='-')
        gains = sum(difference > 0 for difference in differences)
        means = [
          f'{np.mean(some):+.2f} (median {np.median(some):+.2f})'
          for some in (differences, differences[: (len(pairs) + 1) // 2], differences[len(pairs) // 2 :])
        ]
        blocks.append(
          f'{name}: {means[0]} in the mean of {len(pairs)} pairs, {gains} gain. Of the larger half of the training '
          f'sets {means[1]}, of the smaller {means[2]}.'
        )
      axes.set_xlabel('pairs, the largest training set first')
      axes.set_ylabel(f'difference in {self._metric}')
      axes.legend()
    pairs = sorted(base, key=lambda pair: (-self._sizes[pair], pair))
    cell = lambda scores, pair: f'{scores[pair] - base[pair]:+.2f}' if pair in scores else '-'
    rows = [[p, str(self._sizes[p]), f'{base[p]:.2f}', *(cell(s, p) for s in others.values())] for p in pairs]
    return [*blocks, '![figure6](figure6.png)', markdown.table(['pair', 'examples', self._base.name, *others], rows)]

  def the_paper(self) -> list[str]:
    """GShard's own numbers for these tables."""
    cell = lambda value: '-' if value is None else f'{value:g}'
    baseline = ['100 bilingual baselines', *'---', cell(claims.BILINGUAL_BLEU), '-', cell(claims.BILINGUAL_CORE_YEARS)]
    gain = lambda row: f'+{row.bleu - claims.BILINGUAL_BLEU:.1f}'
    rows = [
      [row.name, *map(cell, row.billions), cell(row.bleu), gain(row), cell(row.core_years)]
      for row in claims.TABLE_1
      if row.bleu
    ]
    columns = ['model', *(f'billions of tokens to {loss:g}' for loss in claims.LOSSES), 'BLEU', 'gain', 'core-years']
    return ['## The paper (Tables 2 and 3, Figure 6)', markdown.table(columns, [*rows, baseline])]

  def _compared(self) -> dict[str, Mapping[str, float]]:
    """Scores of the runs that have translations of the base's pairs; UserError if sizes are needed and not known."""
    base = self._base.scores[self._metric]
    compared = {
      run.name: run.scores[self._metric]
      for run in self._runs.values()
      if run is not self._base and run.scores[self._metric].keys() & base.keys()
    }
    if compared and (missing := sorted(base.keys() - self._sizes.keys())):
      raise UserError(
        f'languages are sorted by the size of their training sets; that of {", ".join(missing[:5])} is not known: '
        '--data_dir=CORPUS is where it is counted'
      )
    return compared

  def _path(self, name: str) -> str:
    return os.path.join(self._folder, f'{name}.png')


def _loss_at(curve: Sequence[Evaluation], tokens: float) -> float:
  """Loss of a curve at a number of tokens, by interpolation; the running minimum, so that every one is reached."""
  losses = np.minimum.accumulate([point.loss for point in curve])
  return float(np.interp(tokens, [point.tokens for point in curve], losses))


def _colours(count: int) -> list[str]:
  return [plots.COLOURS[i % len(plots.COLOURS)] for i in range(count)]
