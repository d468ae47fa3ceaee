"""Comparison of two systems by their decoded translations: scores by pair, their mean, and what was configured."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lingvo_moe.analysis import significance
from lingvo_moe.analysis import translations
from lingvo_moe.analysis.significance import Difference
from lingvo_moe.core import files
from lingvo_moe.core import log_directory
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.log_directory import LogDirectory
from lingvo_moe.tasks.mt import scoring

_WEIGHTS_AND_TEXT = ('checkpoint', 'text')  # among a decoder's settings
_NONE = '(none)'


class Part(NamedTuple):
  """One run's part of a system: with the translations of one checkpoint."""

  run: LogDirectory
  step: int
  translations: dict[str, translations.Translations]
  settings: dict[str, Any]  # of decoding

  def describe(self) -> dict[str, Any]:
    return {'run': self.run.name, 'model': self.run.model, 'step': self.step}


@dataclasses.dataclass(frozen=True)
class System:
  """What is compared: one run, or several that translate different pairs, such as bilingual ones."""

  parts: tuple[Part, ...]

  @property
  def translations(self) -> dict[str, translations.Translations]:
    return {name: t for part in self.parts for name, t in part.translations.items()}

  def part_of(self, pair: str) -> Part:
    return next(part for part in self.parts if pair in part.translations)

  def __str__(self) -> str:
    return ', '.join(f'{part.run.path} step {part.step} ({part.run.model})' for part in self.parts)


@dataclasses.dataclass(frozen=True)
class PairResult:
  """One pair of languages."""

  direction: str
  lines: int
  tokenizer: str
  differences: dict[str, Difference]  # by metric


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Scores of two systems on the pairs that both have translated.

  Attributes:
    pairs: by name.
    mean: of the scores over pairs, by metric.
    resampling: how lines of different pairs were matched for the interval of the mean.
    left_out: pairs that only one of them has translated.
  """

  pairs: dict[str, PairResult]
  mean: dict[str, Difference]
  resampling: str
  left_out: list[str]

  def gains(self, metric: str) -> dict[str, int]:
    """Pairs in which the system is better, worse and equal; significantly so where the pair's own interval excludes 0.

    p of a pair is no measure of it: sacreBLEU's is of the upper tail alone (see significance).
    """
    found = [result.differences[metric] for result in self.pairs.values()]
    return {
      'better': sum(d.difference > 0 for d in found),
      'worse': sum(d.difference < 0 for d in found),
      'equal': sum(d.difference == 0 for d in found),
      'significantly_better': sum(d.low > 0 for d in found),
      'significantly_worse': sum(d.high < 0 for d in found),
    }


def read_system(text: str, split: str, data_dir: str | None = None) -> System:
  """A system as it is typed: log directories with commas between, each with @STEP or else its newest decoded step."""
  parts = []
  for path in filter(None, (part.strip() for part in text.split(','))):
    before, at, step = path.rpartition('@')
    is_step = at and re.fullmatch(r'\d{1,18}', step) and not files.exists(os.path.join(path, log_directory.CONFIG))
    chosen = int(step) if is_step else None
    run = LogDirectory.read(path if chosen is None else before)
    if chosen is None:
      chosen = max(run.decoded_steps(split), default=None)
    if chosen is None:
      raise UserError(
        f'{run.path} has no translations of {split}: make them with lingvo-moe decode {run.path} --split={split} --once'
      )
    settings = run.summary(split, chosen).get('settings') or {}
    parts.append(Part(run, chosen, translations.read(run, split, chosen, data_dir), settings))
  if not parts:
    raise UserError(f'a system is a log directory or several, with commas between; saw {text!r}')
  counts = collections.Counter(name for part in parts for name in part.translations)
  if double := [name for name, count in counts.items() if count > 1]:
    raise UserError(f'runs of one system translate different pairs; {", ".join(double)} is in several of {text}')
  return System(tuple(parts))


def compare(
  baseline: System,
  system: System,
  samples: int = significance.SAMPLES,
  seed: int = significance.SEED,
  progress: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> Comparison:
  """Scores, differences (system - baseline) and their significance.

  Args:
    baseline: one system.
    system: the other.
    samples: resamples of the lines.
    seed: of the resamples.
    progress: wraps the pairs' names.

  Raises:
    UserError: they have no pair in common, or were not given the same lines.
  """
  ours, theirs = system.translations, baseline.translations
  common = sorted(ours.keys() & theirs.keys())
  if not common:
    raise UserError(
      f'both must have translated a pair; saw {_some(theirs)} and {_some(ours)}: decode the same pairs (--pairs)'
    )
  pairs, counted = {}, []
  for name in progress(common):
    one, two = theirs[name], ours[name]
    if (one.sources, one.references) != (two.sources, two.references):
      raise UserError(
        f'both must have translated the same lines; {name} has {len(one.lines)} and {len(two.lines)}, or other text: '
        'decode both with the same --data_dir and --max_sentences'
      )
    counter = significance.LineCounts(one.references, one.tokenizer)
    counts = (one.counted(counter), two.counted(counter))
    counted.append(counts)
    found = significance.paired_bootstrap(*counts, samples, seed)
    pairs[name] = PairResult(one.direction, len(one.lines), one.tokenizer, found)
  sides = lambda t: {t.pair.source: t.sources, t.pair.target: t.references}
  ids, resampling = significance.sentence_ids([sides(theirs[name]) for name in common])
  mean = significance.mean_bootstrap(*zip(*counted), ids, samples, seed)
  return Comparison(pairs, mean, resampling, sorted(ours.keys() ^ theirs.keys()))


def notices(*systems: System) -> list[str]:
  """Remarks on their BLEU; see scoring.notices."""
  of = lambda t: (t.pair.target, t.references, t.lines)
  found = (scoring.notices({name: of(t) for name, t in s.translations.items()}) for s in systems)
  return list(dict.fromkeys(itertools.chain(*found)))


def configured(baseline: System, system: System) -> list[tuple[str, str, str]]:
  """(field, baseline's value, system's) wherever configurations, vocabularies or settings of decoding differ."""
  found = [_values(side) for side in (baseline, system)]
  names = list(dict.fromkeys(name for values in found for name in values))
  rows = [(name, *(values.get(name, _NONE) for values in found)) for name in names]
  return [row for row in rows if row[1] != row[2]]


def _values(system: System) -> dict[str, str]:
  """Each field's value, or values where runs of the system differ."""
  seen = collections.defaultdict(list)
  for part in system.parts:
    values = part.run.configured()
    values |= {f'decoded with {k}': v for k, v in part.settings.items() if k not in _WEIGHTS_AND_TEXT}
    for name, value in values.items():
      if repr(value) not in seen[name]:
        seen[name].append(repr(value))
  return {name: ' or '.join(values[:3]) + (' or ...' if len(values) > 3 else '') for name, values in seen.items()}


def _some(names: Iterable[str]) -> str:
  names = sorted(names)
  return ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')


def records(comparison: Comparison, baseline: System, system: System, split: str, metrics: Sequence[str]) -> list[dict]:
  """A record of every pair, and one of the mean, ready for JSON."""
  row = lambda differences: {
    metric: {
      'baseline': d.baseline,
      'system': d.system,
      'difference': d.difference,
      'interval': [d.low, d.high],
      'p': d.p,
    }
    for metric, d in differences.items()
    if metric in metrics
  }
  found = []
  for name, result in comparison.pairs.items():
    found.append(
      {
        'kind': 'pair',
        'split': split,
        'baseline': baseline.part_of(name).describe(),
        'system': system.part_of(name).describe(),
        'direction': result.direction,
        'pair': name,
        'lines': result.lines,
        'tokenizer': result.tokenizer,
        'scores': row(result.differences),
      }
    )
  mean = row(comparison.mean)
  for metric, values in mean.items():
    values.update(comparison.gains(metric))
  directions = {result.direction for result in comparison.pairs.values()}
  found.append(
    {
      'kind': 'mean',
      'split': split,
      'baseline': [part.describe() for part in baseline.parts],
      'system': [part.describe() for part in system.parts],
      'direction': directions.pop() if len(directions) == 1 else 'several',
      'pairs': len(comparison.pairs),
      'resampling': comparison.resampling,
      'scores': mean,
      'configured': {name: values for name, *values in configured(baseline, system)},
    }
  )
  return found


def table(comparison: Comparison, metrics: Sequence[str]) -> str:
  """Every pair, the mean, and how many pairs gain."""
  width = max(len('pair'), len(_mean_label(comparison)), *map(len, comparison.pairs))
  heads = [f'{metric:>6} {"":>6} {"diff":>6} {"95%":^15} {"p":>6}' for metric in metrics]
  lines = ['   '.join([f'{"pair":{width}} {"lines":>6}', *heads])]
  for name, result in comparison.pairs.items():
    lines.append('   '.join([f'{name:{width}} {result.lines:6d}', *(_cells(result.differences[m]) for m in metrics)]))
  if len(comparison.pairs) > 1:
    cells = [_cells(comparison.mean[m]) for m in metrics]
    lines.append('   '.join([f'{_mean_label(comparison):{width}} {"":6}', *cells]))
    lines.append(f'mean: resampled {comparison.resampling}')
  for metric in metrics:
    gains = comparison.gains(metric)
    lines.append(
      f'{metric}: {gains["better"]} of {len(comparison.pairs)} pairs gain ({gains["significantly_better"]} with '
      f'an interval above 0), {gains["worse"]} lose ({gains["significantly_worse"]} with one below)'
    )
  if 'BLEU' in metrics:
    lines.append(f'BLEU splits words by {_tokenizers(comparison.pairs)}')
  return '\n'.join(lines)


def _mean_label(comparison: Comparison) -> str:
  return f'mean of {len(comparison.pairs)}'


def _cells(d: Difference) -> str:
  interval = f'[{d.low:+.1f}, {d.high:+.1f}]'
  return f'{d.baseline:6.1f} {d.system:6.1f} {d.difference:+6.2f} {interval:^15} {d.p:6.4f}'


def _tokenizers(pairs: Mapping[str, PairResult]) -> str:
  """The commonest tokeniser, then those of single pairs."""
  names = collections.defaultdict(list)
  for name, result in pairs.items():
    names[result.tokenizer].append(name)
  first, *others = sorted(names, key=lambda tokenizer: -len(names[tokenizer]))
  return '; '.join([first, *(f'{tokenizer} for {", ".join(names[tokenizer])}' for tokenizer in others)])
