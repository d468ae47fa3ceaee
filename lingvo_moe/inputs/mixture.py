"""Mixture of several corpora of each language pair, whose weights may change as training goes on.

A mixture is text, a line (or a part before a semicolon) for each corpus; what follows # is a comment:

  # files     weight, and others from a step on   symbol before sources   factor of the loss
  train       1
  bt            2  20000:1  50000:0                   tag                     loss=0.5

A corpus is the files of one prefix in a pair's folder, here train.de with train.en and bt.de with bt.en. Weights are
the shares of the corpora in the examples of a pair, whatever their sizes. A stage begins at each step that is named.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import temperature_sampling
from lingvo_moe.storage import files

_WORDS = {
  'weight': r'(?P<weight>\d+(\.\d+)?)',
  'later': r'(?P<step>\d{1,12}):(?P<later>\d+(\.\d+)?)',
  'tag': r'(?P<tag>tag)(=(?P<name>[\w-]+))?',
  'loss': r'loss=(?P<loss>\d+(\.\d{1,3})?)',
}
_WORD = re.compile('|'.join(_WORDS.values()))


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Corpus of a mixture."""

  prefix: str  # of its files
  weights: tuple[tuple[int, float], ...] = ((0, 1.0),)  # by the step from which on they hold, ascending from 0
  tag: str = ''  # name of a symbol before its sources; '' for none
  loss: int = 1000  # factor of its loss, in thousandths

  def weight(self, step: int) -> float:
    return [weight for begin, weight in self.weights if begin <= step][-1]


def read(text: str) -> str:
  """A mixture in one line; of one word, the path of a file, what is in the file."""
  if text.strip() and len(text.split()) == 1:
    try:
      text = files.read(text.strip()).decode('utf-8')
    except (OSError, UnicodeDecodeError) as e:
      raise UserError(
        f"corpora are lines such as 'train 1' and 'bt 2 tag', or a file of them; cannot read {text.strip()} ({e}): "
        'write a weight after the prefix, or give another path'
      ) from None
  lines = (line.partition('#')[0].split() for line in re.split(r'[\n;]', text))
  return '; '.join(' '.join(words) for words in lines if words)


def parse(text: str) -> tuple[Corpus, ...]:
  """Corpora of a mixture as `read` gives it; of '', train alone. UserError for what is none."""
  corpora = tuple(_corpus(line.split()) for line in text.split('; ')) if text else (Corpus('train'),)
  prefixes = [corpus.prefix for corpus in corpora]
  if twice := next((prefix for prefix in prefixes if prefixes.count(prefix) > 1), None):
    raise UserError(f'corpora has a line for each prefix; saw two of {twice!r}: write its weights in one')
  for step in stages(corpora):
    if not any(corpus.weight(step) for corpus in corpora):
      raise UserError(f'corpora needs a weight above 0 in each stage; from step {step} on all are 0: raise one')
  return corpora


def _corpus(words: Sequence[str]) -> Corpus:
  prefix, matches = words[0], [_WORD.fullmatch(word) for word in words[1:]]
  bad = next((word for word, match in zip(words[1:], matches) if match is None), None)
  weights = [
    (int(m['step'] or 0), float(m['weight'] or m['later'])) for m in matches if m and (m['weight'] or m['later'])
  ]
  if bad or [step for step, _ in weights] != sorted({0, *(step for step, _ in weights)}) or prefix in ('dev', 'test'):
    raise UserError(
      'a line of corpora is the prefix of files, neither dev nor test, a weight, others as STEP:WEIGHT by ascending '
      f'steps, tag or tag=NAME, and loss=NUMBER; saw {" ".join(words)!r}: write e.g. bt 2 20000:0.5 tag loss=0.5'
    )
  tag = next((m['name'] or prefix for m in matches if m['tag']), '')
  return Corpus(prefix, tuple(weights), tag, next((round(1000 * float(m['loss'])) for m in matches if m['loss']), 1000))


def stages(corpora: Sequence[Corpus]) -> list[int]:
  """Steps at which stages begin, the first at 0."""
  return sorted({step for corpus in corpora for step, _ in corpus.weights})


def shares(
  corpora: Sequence[Corpus],
  pairs: Sequence[str],
  kept: Sequence[int],
  temperature: float,
  weights: Sequence[float],
  step: int,
) -> np.ndarray:
  """Share of each corpus of each pair in the examples of a stage; zeros where there is none.

  Args:
    corpora: of each entry.
    pairs: names of the pair of each.
    kept: number of its examples, lines that are neither empty nor too long.
    temperature: of the sampling over pairs, by the examples of all their corpora.
    weights: of the pair of each, or empty.
    step: at which the stage begins.
  """
  names, number = np.unique(pairs, return_inverse=True)
  of_pairs = [dict(zip(pairs, weights, strict=True))[name] for name in names] if len(weights) else ()
  within = np.array([corpus.weight(step) * (count > 0) for corpus, count in zip(corpora, kept, strict=True)])
  if not within.any():
    return within
  total = np.bincount(number, within)[number]
  p = (
    temperature_sampling.shares(np.bincount(number, kept), temperature, of_pairs)[number]
    * within
    / np.where(total, total, 1)
  )
  return p / p.sum()


def drawn(of_stage: np.ndarray, kept: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
  """Share of each entry in the lines that are drawn, such that those of their examples are as given."""
  p = of_stage * np.asarray(sizes) / np.maximum(kept, 1)
  return p / p.sum()


def summary(corpora: Sequence[Corpus], stages_shares: Sequence[np.ndarray]) -> str:
  """Share of the corpora in each stage, as text; UserError for a stage without an example.

  Entries are those of `shares`.
  """
  said = []
  prefixes, number = np.unique([corpus.prefix for corpus in corpora], return_inverse=True)
  for step, of_stage in zip(stages(corpora), stages_shares, strict=True):
    if not of_stage.any():
      raise UserError(
        f'each stage of corpora needs an example; from step {step} on, all lines are empty or too long: raise the '
        'weight of another corpus'
      )
    percent = zip(prefixes, 100 * np.bincount(number, of_stage))
    said.append(f'from step {step} on ' * bool(step) + ', '.join(f'{prefix} {p:.3g}%' for prefix, p in percent if p))
  return '; '.join(said)
