"""Comparison of two systems by their decoded translations: scores by pair, their mean, and what was configured."""

import collections
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lingvo_moe.addons.analysis import external_metric, significance, translations
from lingvo_moe.addons.analysis.significance import METRICS, Difference
from lingvo_moe.addons.analysis.translations import Translations
from lingvo_moe.core import progress
from lingvo_moe.core.errors import UserError, listed
from lingvo_moe.storage import files, log_directory
from lingvo_moe.storage.log_directory import LogDirectory
from lingvo_moe.tasks.mt import scoring

_WEIGHTS_AND_TEXT = ('checkpoint', 'text')  # among a decoder's settings
_NONE = '(none)'


class DecodedRun(NamedTuple):
  """A run with the translations of one checkpoint."""

  run: LogDirectory
  step: int
  translations: dict[str, Translations]
  settings: dict[str, Any]  # of decoding

  def describe(self) -> dict[str, Any]:
    return {'run': self.run.name, 'model': self.run.model, 'step': self.step}


@dataclasses.dataclass(frozen=True)
class System:
  """System to compare: one run, or several that translate different pairs, such as bilingual ones."""

  runs: tuple[DecodedRun, ...]

  @functools.cached_property
  def translations(self) -> dict[str, Translations]:
    return {name: t for decoded in self.runs for name, t in decoded.translations.items()}

  def __str__(self) -> str:
    return ', '.join(f'{run.path} step {step} ({run.model})' for run, step, *_ in self.runs)

  def translated_by(self, pair: str) -> dict[str, Any]:
    """The run that has translated a pair."""
    return next(run.describe() for run in self.runs if pair in run.translations)

  def configured(self) -> dict[str, str]:
    """Each field's value, or values where runs of the system differ."""
    seen = collections.defaultdict(list)
    for decoded in self.runs:
      settings = {f'decoded with {k}': v for k, v in decoded.settings.items() if k not in _WEIGHTS_AND_TEXT}
      for name, value in {**decoded.run.configured(), **settings}.items():
        if repr(value) not in seen[name]:
          seen[name].append(repr(value))
    return {name: ' or '.join(values[:3]) + (' or ...' if len(values) > 3 else '') for name, values in seen.items()}


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Scores of two systems on the pairs that both have translated."""

  baseline: System
  system: System
  pairs: dict[str, dict[str, Difference]]  # by pair and metric
  mean: dict[str, Difference]  # of the scores over pairs, by metric
  resampling: str  # how lines of different pairs were matched for the interval of the mean

  @property
  def left_out(self) -> list[str]:
    """Pairs that only one of them has translated."""
    return sorted(self.system.translations.keys() ^ self.baseline.translations.keys())

  def gains(self, metric: str) -> dict[str, int]:
    """Pairs in which the system is better, worse and equal; significantly so where the pair's own interval excludes 0.

    p of a pair is no measure of it: sacreBLEU's is of the upper tail alone (see significance).
    """
    differences = [by_metric[metric] for by_metric in self.pairs.values()]
    return {
      'better': sum(d.difference > 0 for d in differences),
      'worse': sum(d.difference < 0 for d in differences),
      'equal': sum(d.difference == 0 for d in differences),
      'significantly_better': sum(d.low > 0 for d in differences),
      'significantly_worse': sum(d.high < 0 for d in differences),
    }

  def configured(self) -> list[tuple[str, str, str]]:
    """(field, baseline's value, system's) wherever configurations, vocabularies or settings of decoding differ."""
    baseline, system = self.baseline.configured(), self.system.configured()
    rows = [(name, baseline.get(name, _NONE), system.get(name, _NONE)) for name in baseline | system]
    return [row for row in rows if row[1] != row[2]]

  def notices(self) -> list[str]:
    """Remarks on their BLEU; see scoring.notices."""
    text_of = lambda t: (t.pair.target, t.references, t.lines)
    texts = ({name: text_of(t) for name, t in side.translations.items()} for side in (self.baseline, self.system))
    return list(dict.fromkeys(itertools.chain(*map(scoring.notices, texts))))

  def records(self, split: str, metrics: Sequence[str]) -> list[dict]:
    """A record of every pair, and one of the mean, ready for JSON."""
    shown = [metric for metric in METRICS if metric in metrics]
    pairs = [
      {
        'kind': 'pair',
        'split': split,
        'baseline': self.baseline.translated_by(name),
        'system': self.system.translated_by(name),
        'direction': self.baseline.translations[name].direction,
        'pair': name,
        'lines': len(self.baseline.translations[name].lines),
        'tokenizer': self.baseline.translations[name].tokenizer,
        'scores': {metric: differences[metric].to_json() for metric in shown},
      }
      for name, differences in self.pairs.items()
    ]
    directions = {pair['direction'] for pair in pairs}
    mean = {
      'kind': 'mean',
      'split': split,
      'baseline': [run.describe() for run in self.baseline.runs],
      'system': [run.describe() for run in self.system.runs],
      'direction': directions.pop() if len(directions) == 1 else 'several',
      'pairs': len(self.pairs),
      'resampling': self.resampling,
      'scores': {metric: {**self.mean[metric].to_json(), **self.gains(metric)} for metric in shown},
      'configured': {name: values for name, *values in self.configured()},
    }
    return [*pairs, mean]

  def table(self, metrics: Sequence[str]) -> str:
    """Every pair, the mean, and how many pairs gain."""
    count = len(self.pairs)
    mean = f'mean of {count}'
    width = max(map(len, ('pair', mean, *self.pairs)))
    row = lambda name, lines, cells: '   '.join([f'{name:{width}} {lines:>6}', *cells])
    lines = [row('pair', 'lines', [f'{metric:>6} {"":>6} {"diff":>6} {"95%":^15} {"p":>6}' for metric in metrics])]
    for name, differences in self.pairs.items():
      lines.append(row(name, len(self.baseline.translations[name].lines), [str(differences[m]) for m in metrics]))
    if count > 1:
      lines += [row(mean, '', [str(self.mean[m]) for m in metrics]), f'mean: resampled {self.resampling}']
    for metric in metrics:
      gains = self.gains(metric)
      lines.append(
        f'{metric}: {gains["better"]} of {count} pairs gain ({gains["significantly_better"]} with an interval above '
        f'0), {gains["worse"]} lose ({gains["significantly_worse"]} with one below)'
      )
    if 'BLEU' in metrics:
      lines.append(f'BLEU splits words by {self._tokenizers()}')
    return '\n'.join(lines)

  def _tokenizers(self) -> str:
    """The commonest tokeniser, then those of single pairs."""
    names = collections.defaultdict(list)
    for name in self.pairs:
      names[self.baseline.translations[name].tokenizer].append(name)
    first, *others = sorted(names, key=lambda tokenizer: -len(names[tokenizer]))
    return '; '.join([first, *(f'{tokenizer} for {", ".join(names[tokenizer])}' for tokenizer in others)])


def by_command(comparison: Comparison, command: str, samples: int, seed: int) -> dict[str, Difference]:
  """Differences by an external metric, by pair."""
  scores_by_pair = {}
  for name in comparison.pairs:
    sides = [system.translations[name] for system in (comparison.baseline, comparison.system)]
    one, two = (external_metric.scores(command, t.sources, t.lines, t.references) for t in sides)
    scores_by_pair[name] = external_metric.difference(one, two, samples, seed)
  return scores_by_pair


def read_system(text: str, split: str, data_dir: str | None = None) -> System:
  """A system as it is typed: log directories with commas between, each with @STEP or else its newest decoded step."""
  runs = []
  for path in filter(None, (typed.strip() for typed in text.split(','))):
    before, at, step = path.rpartition('@')
    is_step = at and re.fullmatch(r'\d{1,18}', step) and not files.exists(os.path.join(path, log_directory.CONFIG))
    run = LogDirectory.read(before if is_step else path)
    chosen = int(step) if is_step else max(run.decoded_steps(split), default=None)
    if chosen is None:
      raise UserError(
        f'{run.path} has no translations of {split}: make them with lingvo-moe decode {run.path} --split={split} --once'
      )
    settings = run.summary(split, chosen).get('settings') or {}
    runs.append(DecodedRun(run, chosen, translations.read(run, split, chosen, data_dir), settings))
  if not runs:
    raise UserError(f'a system is a log directory or several, with commas between; saw {text!r}')
  counts = collections.Counter(name for decoded in runs for name in decoded.translations)
  if double := [name for name, count in counts.items() if count > 1]:
    raise UserError(f'runs of one system translate different pairs; {", ".join(double)} is in several of {text}')
  return System(tuple(runs))


def compare(
  baseline: System, system: System, samples: int = significance.SAMPLES, seed: int = significance.SEED
) -> Comparison:
  """Scores of two systems, differences (system - baseline) and their significance from resamples of the lines.

  Raises:
    UserError: they have no pair in common, or were not given the same lines.
  """
  ours, theirs = system.translations, baseline.translations
  common = sorted(ours.keys() & theirs.keys())
  if not common:
    saw = f'{listed(sorted(theirs), 5)} and {listed(sorted(ours), 5)}'
    raise UserError(f'both must have translated a pair; saw {saw}: decode the same pairs (--pairs)')
  pairs, counted = {}, []
  for name in progress.over(common, 'pair'):
    one, two = theirs[name], ours[name]
    if (one.sources, one.references) != (two.sources, two.references):
      raise UserError(
        f'both must have translated the same lines; {name} has {len(one.lines)} and {len(two.lines)}, or other text: '
        'decode both with the same --data_dir and --max_sentences'
      )
    counter = significance.LineCounts(one.references, one.tokenizer)
    counts = (one.counted(counter), two.counted(counter))
    counted.append(counts)
    pairs[name] = significance.paired_bootstrap(*counts, samples, seed)
  sides = lambda t: {t.pair.source: t.sources, t.pair.target: t.references}
  ids, resampling = significance.sentence_ids([sides(theirs[name]) for name in common])
  mean = significance.mean_bootstrap(*zip(*counted), ids, samples, seed)
  return Comparison(baseline, system, pairs, mean, resampling)
