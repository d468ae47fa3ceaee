"""Augmentation of training examples: noise in their text, and other segmentations, anew for each window.

What becomes of an example depends on the seed, the number of its window and its place there alone, so that a batch is a
pure function of its step. Text is that of the token cache, as the vocabulary writes it.
"""

from collections.abc import Sequence

import numpy as np

from lingvo_moe.corpora import temperature_sampling
from lingvo_moe.inputs import noise
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.inputs.subword_sampling import SubwordSampler, uniform
from lingvo_moe.models import batches
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

Rows = Sequence[Sequence[int]]  # ids of each example


class Augmentation:
  """Augmentation of windows."""

  settings: tuple = ()  # fields that say what is done; () where nothing is

  def __init__(self, config: DataConfig, vocabs: tuple[TaggedVocab, TaggedVocab]) -> None:
    shares = config.noise, config.source_sampling, config.target_sampling
    if not any(shares):
      return
    self.settings = *shares, config.sampling_nbest, config.sampling_alpha
    self._noise, *self._sampling = map(dict, shares)
    self._seed, self._vocabs = config.seed, vocabs
    self._samplers = [SubwordSampler(vocab, config.sampling_nbest, config.sampling_alpha) for vocab in vocabs]
    for sampler, methods in zip(self._samplers, self._sampling):
      if 'nbest' in methods:
        sampler.check_nbest()

  def __call__(
    self, window: int, before: Sequence[Rows], most: Sequence[int], languages: Sequence[tuple[str, str]]
  ) -> list[Rows]:
    """Sources and targets of a window in place of those given; an example of more ids than `most` stays as it is.

    `languages` are those of each example.
    """
    keys = temperature_sampling.fold(self._seed, 'augmentation', window, np.arange(len(before[0])))
    texts = self._noisy(before, keys, languages)
    after = [self._segmented(side, before[side], texts[side], temperature_sampling.fold(keys, side)) for side in (0, 1)]
    fits = np.all([[0 < len(ids) <= length for ids in rows] for rows, length in zip(after, most)], axis=0)
    return [[b if fit else a for a, b, fit in zip(*sides, fits)] for sides in zip(before, after)]

  def _noisy(
    self, rows: Sequence[Rows], keys: np.ndarray, languages: Sequence[tuple[str, str]]
  ) -> list[dict[int, str]]:
    """Text of each side with noise, by example."""
    texts: list[dict[int, str]] = [{}, {}]
    for kind in noise.KINDS:
      for i in np.flatnonzero(uniform(keys, kind) < self._noise.get(kind, 0)).tolist():
        pair = [
          changed_texts[i] if i in changed_texts else vocab.decode(side_rows[i])
          for changed_texts, vocab, side_rows in zip(texts, self._vocabs, rows)
        ]
        changed = noise.add(kind, *pair, int(temperature_sampling.fold(keys[i], 'noise', kind)), languages[i])
        for changed_texts, old, new in zip(texts, pair, changed):
          changed_texts |= {i: new} if new != old else {}
    return texts

  def _segmented(self, side: int, rows: Rows, texts: dict[int, str], keys: np.ndarray) -> Rows:
    """Ids of each example of a side, given its ids so far, and its text where that has changed."""
    vocab, sampler, shares = self._vocabs[side], self._samplers[side], self._sampling[side]
    new = dict(zip(texts, vocab.encode(list(texts.values()))))
    for i in np.flatnonzero(uniform(keys, 'draw') < shares.get('nbest', 0)).tolist():
      new[i] = sampler.draw(texts[i] if i in texts else vocab.decode(rows[i]), keys[i])
    rows = [new.get(i, ids) for i, ids in enumerate(rows)]
    if 'dropout' not in shares:
      return rows
    ids, lengths = sampler.drop_out(*batches.flat(rows), shares['dropout'], keys)
    return np.split(ids, np.cumsum(lengths)[:-1])
