"""Significance of the difference between two systems' translations: paired bootstrap of BLEU, chrF2 and chrF++.

Scores are sacreBLEU's. They follow from n-gram counts summed over lines, so the counts of every line are collected
once, and a resample of lines is a vector of multiplicities times a matrix: all resamples are one product.

One pair of languages: paired bootstrap (Koehn 2004) as sacreBLEU does it, after Moses'
bootstrap-hypothesis-difference-significance.pl, with its random numbers and its float32, to the same p. That p is of
one tail: the share of resamples whose |difference| is above the mean |difference| by more than the observed one.

The mean over pairs: where the test sets of several languages are translations of the same sentences, their lines are no
independent draws, as a sentence that is easy is so in every language, and the interval of independent resampling would
be too narrow. So sentences are resampled, each with its lines in all languages; see sentence_ids. Pairs that share no
sentence are resampled each for itself.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

METRICS = ('BLEU', 'chrF2', 'chrF++')
SAMPLES = 1000
SEED = 12345  # sacreBLEU's
_BLOCK = 1 << 22  # lines of all resamples that are counted at once

# sacreBLEU's metrics, and the columns of a line's counts that each is computed from.
_BLEU_COUNTS = 2 + 2 * 4  # lengths of translation and reference; matching and all n-grams of each order
_SCORERS = (
  (BLEU(force=True), slice(0, _BLEU_COUNTS)),
  (CHRF(), slice(_BLEU_COUNTS, _BLEU_COUNTS + 3 * 6)),  # n-grams of translation and reference, and matching ones
  (CHRF(word_order=2), slice(_BLEU_COUNTS, _BLEU_COUNTS + 3 * (6 + 2))),  # n-grams of characters, then of words
)
_COUNTS = _SCORERS[-1][1].stop


class Difference(NamedTuple):
  """A metric of two systems, and what resampling says of its difference."""

  baseline: float
  system: float
  low: float  # 95% interval of system - baseline
  high: float
  p: float

  @property
  def difference(self) -> float:
    return self.system - self.baseline

  def __str__(self) -> str:
    interval = f'[{self.low:+.1f}, {self.high:+.1f}]'
    return f'{self.baseline:6.1f} {self.system:6.1f} {self.difference:+6.2f} {interval:^15} {self.p:6.4f}'

  def to_json(self) -> dict[str, Any]:
    interval = [self.low, self.high]
    return dict(baseline=self.baseline, system=self.system, difference=self.difference, interval=interval, p=self.p)


class LineCounts:
  """Counts n-grams of translations against references, which are prepared once."""

  def __init__(self, references: Sequence[str], tokenizer: str):
    """References in order; tokenizer: sacreBLEU's, for BLEU."""
    self._bleu = BLEU(tokenize=tokenizer, force=True, references=[list(references)])
    self._chrf = CHRF(word_order=2, references=[list(references)])  # its first orders are chrF2's
    self._lines = len(references)

  def __call__(self, translations: Sequence[str]) -> np.ndarray:
    """Counts of every line, int64 [lines, counts]."""
    if len(translations) != self._lines:
      raise ValueError(f'{len(translations)} translations for {self._lines} references')
    metrics = (self._bleu, self._chrf)
    counts = [np.array(m._extract_corpus_statistics(translations, None), np.int64) for m in metrics]
    return np.concatenate(counts, axis=1).reshape(self._lines, _COUNTS)


def corpus_scores(counts: np.ndarray) -> dict[str, float]:
  """Each metric of lines' counts [lines, counts]: sacreBLEU's corpus scores."""
  return dict(zip(METRICS, _scores(counts.sum(0)), strict=True))


def paired_bootstrap(
  baseline: np.ndarray, system: np.ndarray, samples: int = SAMPLES, seed: int = SEED
) -> dict[str, Difference]:
  """Each metric's difference on one test set, from counts [lines, counts] of two systems on the same lines.

  The same draws serve every metric and both systems.
  """
  a, b = _resampled([baseline, system], samples, np.random.default_rng(seed), np.float32)
  by_metric = {}
  for i, (metric, one) in enumerate(corpus_scores(baseline).items()):
    two, differences = corpus_scores(system)[metric], b[:, i] - a[:, i]
    p = _sacrebleu_p(np.abs(differences), abs(one - two))
    by_metric[metric] = Difference(one, two, *interval(differences), p)
  return by_metric


def mean_bootstrap(
  baselines: Sequence[np.ndarray],
  systems: Sequence[np.ndarray],
  ids: Sequence[np.ndarray],
  samples: int = SAMPLES,
  seed: int = SEED,
) -> dict[str, Difference]:
  """The difference of each metric's mean over several test sets.

  Args:
    baselines, systems: counts [lines, counts] of each system, by test set.
    ids: the sentence of each line, by test set: lines of the same sentence are resampled together.
    samples, seed: of the resamples.

  Returns:
    By metric; p is two-sided: the share of resamples whose difference is as far from their mean as the one that was
    observed is from 0.
  """
  sampled = np.zeros([samples, len(METRICS)])
  for number, block in enumerate(joined(ids)):
    sentences, places = np.unique(np.concatenate([ids[i] for i in block]), return_inverse=True)
    places = np.split(places, np.cumsum([len(ids[i]) for i in block])[:-1])
    sides = [
      _summed(side[i], pair_places, len(sentences))
      for side in (baselines, systems)
      for i, pair_places in zip(block, places)
    ]
    # Blocks draw each for itself; the first as paired_bootstrap does.
    rng = np.random.default_rng(seed if number == 0 else [seed, number])
    a, b = np.split(_resampled(sides, samples, rng, np.float64), 2)
    sampled += (b - a).sum(0) / len(ids)
  by_metric = {}
  for metric, differences in zip(METRICS, sampled.T, strict=True):
    one, two = (float(np.mean([corpus_scores(counts)[metric] for counts in side])) for side in (baselines, systems))
    as_far = np.sum(np.abs(differences - differences.mean()) >= abs(two - one))
    by_metric[metric] = Difference(one, two, *interval(differences), (int(as_far) + 1) / (samples + 1))
  return by_metric


def sentence_ids(sets: Sequence[Mapping[str, Sequence[str]]]) -> tuple[list[np.ndarray], str]:
  """Numbers of the sentence of each line of some test sets, and in words how lines of different sets were matched.

  Args:
    sets: the two sides of each, language -> lines.

  Returns:
    Numbers of sentences, by set. Where all sets are as long and every language has the same lines wherever it occurs,
    line i is one sentence in all sets that languages link. Else lines are one sentence where they are equal in the
    language that all sets have. Else no two sets share a sentence.
  """
  lengths = {len(lines) for sides in sets for lines in sides.values()}
  texts = collections.defaultdict(set)
  for sides in sets:
    for language, lines in sides.items():
      texts[language].add(tuple(lines))
  ids = [np.arange(len(next(iter(sides.values())))) for sides in sets]
  number = {language: i for i, language in enumerate(texts)}
  linked = joined([np.array([number[language] for language in sides]) for sides in sets])
  aligned = len(lengths) == 1 and all(len(versions) == 1 for versions in texts.values())
  if aligned and len(linked) < len(sets):
    for i, block in enumerate(linked):
      for j in block:
        ids[j] = ids[j] + i * max(lengths)
    return ids, 'jointly, by line'
  common = set.intersection(*map(set, sets))
  if len(sets) > 1 and common:
    language = min(common, key=lambda language: (len(texts[language]), language))
    numbers: dict[str, int] = {}
    by_text = [np.array([numbers.setdefault(line, len(numbers)) for line in sides[language]]) for sides in sets]
    if len(joined(by_text)) < len(sets):
      return by_text, f'jointly, by the text in {language!r}'
  begins = np.cumsum([0, *map(len, ids)])
  return [begin + numbers for begin, numbers in zip(begins, ids)], 'each pair for itself'


def joined(ids: Sequence[np.ndarray]) -> list[list[int]]:
  """The test sets, by number, in blocks: sets of different blocks share no sentence."""
  blocks: list[tuple[list[int], set[int]]] = []
  for i, sentences in enumerate(ids):
    members, covered, apart = [i], set(sentences.tolist()), []
    for block in blocks:
      if covered.isdisjoint(block[1]):
        apart.append(block)
      else:
        members, covered = members + block[0], covered | block[1]
    blocks = [*apart, (members, covered)]
  return sorted(sorted(members) for members, _ in blocks)


def _scores(counts: np.ndarray) -> list[float]:
  """The metrics of summed counts [counts], computed in their type, as sacreBLEU does."""
  values = counts.tolist() if counts.dtype != np.float32 else list(counts)
  return [metric._compute_score_from_stats(values[columns]).score for metric, columns in _SCORERS]


def _resampled(sides: Sequence[np.ndarray], samples: int, rng, dtype) -> np.ndarray:
  """Metrics of every resample of the lines, of each side's counts [lines, counts]: [sides, samples, metrics]."""
  stacked = np.concatenate(sides, axis=1).astype(np.float64)
  drawn = rng.choice(len(stacked), size=(samples, len(stacked)), replace=True)  # in sacreBLEU's order
  times = lambda block: np.array([np.bincount(lines, minlength=len(stacked)) for lines in block], np.float64)
  blocks = np.array_split(drawn, -(-drawn.size // _BLOCK))  # of some MiB
  sums = np.concatenate([times(block) @ stacked for block in blocks if len(block)])  # exact: they are integers
  sums = sums.astype(dtype).reshape(samples, len(sides), _COUNTS)
  return np.array([[_scores(counts) for counts in sums[:, side]] for side in range(len(sides))])


def _summed(counts: np.ndarray, sentence: np.ndarray, sentences: int) -> np.ndarray:
  """Counts of lines, summed by sentence."""
  summed = np.zeros((sentences, counts.shape[1]), np.int64)
  np.add.at(summed, sentence, counts)
  return summed


def interval(differences: np.ndarray) -> tuple[float, float]:
  """95% of the resamples, at sacreBLEU's ranks (estimate_ci)."""
  ordered = np.sort(differences)
  cut = len(ordered) // 40
  return float(ordered[cut]), float(ordered[len(ordered) - cut - 1])


def _sacrebleu_p(sampled: np.ndarray, observed: float) -> float:
  """sacreBLEU's p; but 1 where no resample differs, of which sacreBLEU says 1 / (samples + 1)."""
  if observed == 0 and not sampled.any():
    return 1.0
  above = np.sum(sampled - sampled.mean() > observed)
  return (int(above) + 1) / (len(sampled) + 1)
