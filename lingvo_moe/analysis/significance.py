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

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from sacrebleu.metrics import BLEU
from sacrebleu.metrics import CHRF

METRICS = ('BLEU', 'chrF2', 'chrF++')
SAMPLES = 1000
SEED = 12345  # sacreBLEU's

_NGRAMS = 4
_BLEU_COUNTS = 2 + 2 * _NGRAMS  # lengths of translation and reference; matching and all n-grams of each order
_CHARACTERS, _WORDS = 6, 2  # orders of n-grams; chrF2 has no words
_COUNTS = _BLEU_COUNTS + 3 * (_CHARACTERS + _WORDS)  # chrF: n-grams of translation and reference, and matching ones
_BETA = 2
_BLOCK = 4 << 20  # multiplicities held at a time


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


class LineCounts:
  """Counts n-grams of translations against references, which are prepared once."""

  def __init__(self, references: Sequence[str], tokenizer: str):
    """References in order; tokenizer: sacreBLEU's, for BLEU."""
    self._bleu = BLEU(tokenize=tokenizer, force=True, references=[list(references)])
    self._chrf = CHRF(word_order=_WORDS, references=[list(references)])  # its first orders are chrF2's
    self._lines = len(references)

  def __call__(self, translations: Sequence[str]) -> np.ndarray:
    """Counts of every line, int64 [lines, counts]."""
    if len(translations) != self._lines:
      raise ValueError(f'{len(translations)} translations for {self._lines} references')
    metrics = (self._bleu, self._chrf)
    counts = [np.array(m._extract_corpus_statistics(translations, None), np.int64) for m in metrics]
    return np.concatenate(counts, axis=1).reshape(self._lines, _COUNTS)


def scores(counts: np.ndarray) -> dict[str, np.ndarray]:
  """Each metric, 0 to 100, of summed counts [..., counts]; computed in their type, float64 or float32."""
  chrf = counts[..., _BLEU_COUNTS:]
  return {
    'BLEU': _bleu(counts[..., :_BLEU_COUNTS]),
    'chrF2': _chrf(chrf[..., : 3 * _CHARACTERS]),
    'chrF++': _chrf(chrf),
  }


def corpus_scores(counts: np.ndarray) -> dict[str, float]:
  """Each metric of lines' counts [lines, counts]: sacreBLEU's corpus scores."""
  return {metric: float(score) for metric, score in scores(counts.sum(0).astype(np.float64)).items()}


def paired_bootstrap(
  baseline: np.ndarray, system: np.ndarray, samples: int = SAMPLES, seed: int = SEED
) -> dict[str, Difference]:
  """Each metric's difference on one test set.

  Args:
    baseline: counts [lines, counts] of one system.
    system: of the other, on the same lines.
    samples: resamples of all lines.
    seed: of the resamples; the same draws serve every metric and both systems.
  """
  sampled = _score_samples([baseline, system], len(baseline), samples, np.random.default_rng(seed), np.float32)
  found = {}
  for metric, (a, b) in _pairs(sampled).items():
    one, two = corpus_scores(baseline)[metric], corpus_scores(system)[metric]
    found[metric] = Difference(one, two, *_interval(b - a), _sacrebleu_p(np.abs(b - a), abs(one - two)))
  return found


def mean_bootstrap(
  baselines: Sequence[np.ndarray],
  systems: Sequence[np.ndarray],
  ids: Sequence[np.ndarray],
  samples: int = SAMPLES,
  seed: int = SEED,
) -> dict[str, Difference]:
  """The difference of each metric's mean over several test sets.

  Args:
    baselines: counts [lines, counts] of one system, by test set.
    systems: of the other.
    ids: the sentence of each line, by test set: lines of the same sentence are resampled together.
    samples: resamples.
    seed: of them.

  Returns:
    By metric; p is two-sided: the share of resamples whose difference is as far from their mean as the one that was
    observed is from 0.
  """
  sampled = {metric: np.zeros(samples) for metric in METRICS}
  for number, block in enumerate(joined(ids)):
    sentences, places = np.unique(np.concatenate([ids[i] for i in block]), return_inverse=True)
    parts = np.split(places, np.cumsum([len(ids[i]) for i in block])[:-1])
    sides = [_summed(side[i], part, len(sentences)) for i, part in zip(block, parts) for side in (baselines, systems)]
    # Blocks draw each for itself; the first as paired_bootstrap does.
    rng = np.random.default_rng(seed if number == 0 else [seed, number])
    for metric, (a, b) in _pairs(_score_samples(sides, len(sentences), samples, rng, np.float64)).items():
      sampled[metric] += (b - a).reshape(len(block), samples).sum(0) / len(ids)
  found = {}
  for metric, differences in sampled.items():
    one, two = (np.mean([corpus_scores(counts)[metric] for counts in side]) for side in (baselines, systems))
    as_far = np.sum(np.abs(differences - differences.mean()) >= abs(two - one))
    found[metric] = Difference(float(one), float(two), *_interval(differences), (int(as_far) + 1) / (samples + 1))
  return found


def sentence_ids(sets: Sequence[Mapping[str, Sequence[str]]]) -> tuple[list[np.ndarray], str]:
  """The sentence of each line of some test sets, and in words how lines of different sets were matched.

  Args:
    sets: of each, its two sides: language -> lines.

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
  block_of = list(range(len(ids)))
  first_with: dict[int, int] = {}

  def root(i):
    while block_of[i] != i:
      i = block_of[i]
    return i

  for i, sentences in enumerate(ids):
    for sentence in np.unique(sentences).tolist():
      a, b = root(first_with.setdefault(sentence, i)), root(i)
      block_of[max(a, b)] = min(a, b)
  blocks = collections.defaultdict(list)
  for i in range(len(ids)):
    blocks[root(i)].append(i)
  return list(blocks.values())


def _bleu(counts: np.ndarray) -> np.ndarray:
  """sacreBLEU's compute_bleu with exponential smoothing, of many corpora at once."""
  translation, reference = np.moveaxis(counts[..., :2].astype(np.float64), -1, 0)
  matching, total = counts[..., 2 : 2 + _NGRAMS], counts[..., 2 + _NGRAMS :]
  smooth = (2 ** np.cumsum(matching == 0, axis=-1)).astype(counts.dtype)
  with np.errstate(divide='ignore', invalid='ignore'):
    precisions = np.where(matching == 0, 100 / (smooth * total), 100 * matching / total)
    logs = np.log(precisions.astype(np.float64))
    brevity = np.where(translation < reference, np.exp(1 - reference / translation), 1.0)
  scored = (total > 0).all(-1) & (matching > 0).any(-1)
  return np.where(scored, brevity * np.exp(np.where(scored[..., None], logs, 0.0).sum(-1) / _NGRAMS), 0.0)


def _chrf(counts: np.ndarray) -> np.ndarray:
  """sacreBLEU's _compute_f_score without epsilon smoothing, of many corpora at once."""
  translation, reference, matching = (counts[..., i::3] for i in range(3))
  counted = (translation > 0) & (reference > 0)
  zero = counts.dtype.type(0)
  precision = recall = zero
  for i in range(counted.shape[-1]):  # in sacreBLEU's order: float32 rounds
    with np.errstate(divide='ignore', invalid='ignore'):
      precision = precision + np.where(counted[..., i], matching[..., i] / translation[..., i], zero)
      recall = recall + np.where(counted[..., i], matching[..., i] / reference[..., i], zero)
  orders = np.maximum(counted.sum(-1), 1).astype(counts.dtype)
  precision, recall = precision / orders, recall / orders
  with np.errstate(divide='ignore', invalid='ignore'):
    score = (1 + _BETA**2) * precision * recall / (_BETA**2 * precision + recall)
  return np.where(precision + recall > 0, 100 * score, zero)


def _score_samples(sides: Sequence[np.ndarray], lines: int, samples: int, rng, dtype) -> dict[str, np.ndarray]:
  """Each metric of every resample of each side's counts [lines, counts]: [sides, samples]."""
  stacked = np.concatenate(sides, axis=1).astype(np.float64)
  found = []
  for multiplicities in _resamples(lines, samples, rng):
    sums = (multiplicities @ stacked).reshape(len(multiplicities), len(sides), _COUNTS)  # exact: they are integers
    found.append(scores(np.moveaxis(sums, 1, 0).astype(dtype)))
  return {metric: np.concatenate([block[metric] for block in found], axis=1) for metric in METRICS}


def _resamples(lines: int, samples: int, rng) -> Iterator[np.ndarray]:
  """How often each line is drawn in each resample, float64 [block, lines]; in sacreBLEU's order of drawing."""
  drawn = rng.choice(lines, size=(samples, lines), replace=True)
  rows = max(1, _BLOCK // lines)
  for begin in range(0, samples, rows):
    block = drawn[begin : begin + rows]
    flat = block + lines * np.arange(len(block))[:, None]
    yield np.bincount(flat.ravel(), minlength=lines * len(block)).reshape(len(block), lines).astype(np.float64)


def _pairs(sampled: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """(baseline, system) of each metric where sides alternate; flat where there are two sides."""
  found = {metric: (values[0::2], values[1::2]) for metric, values in sampled.items()}
  return {metric: (a[0], b[0]) if len(a) == 1 else (a, b) for metric, (a, b) in found.items()}


def _summed(counts: np.ndarray, sentence: np.ndarray, sentences: int) -> np.ndarray:
  """Counts of lines, summed by sentence."""
  found = np.zeros((sentences, counts.shape[1]), np.int64)
  np.add.at(found, sentence, counts)
  return found


def _interval(differences: np.ndarray) -> tuple[float, float]:
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
