"""Subword sampling: other segmentations of sentences into the pieces of a vocabulary, as a pure function of keys.

`nbest` draws one of the best segmentations of a unigram vocabulary, in proportion to p^alpha (Kudo 2018,
arXiv:1804.10959). `dropout` splits pieces again into others that spell the same, also those that it made, as if
BPE-dropout had left out their merges (Provilkov et al. 2020, arXiv:1910.13267); it takes a vocabulary of any kind.
SentencePiece's own sampling has one random generator for a thread, so that a batch would depend on those before it.
"""

import functools
from collections.abc import Sequence

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import temperature_sampling
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

_UNIGRAM = sentencepiece_model_pb2.TrainerSpec.UNIGRAM
_NORMAL = sentencepiece_model_pb2.ModelProto.SentencePiece.NORMAL


def uniform(*key) -> np.ndarray:
  """Uniform numbers in [0, 1) for the key, as sampling.fold takes it."""
  return (temperature_sampling.fold(*key) >> np.uint64(11)) * 2.0**-53


class SubwordSampler:
  """Sampler of `nbest` segmentations; `alpha` is the exponent of their probabilities, and 0 makes all alike."""

  def __init__(self, vocab: TaggedVocab, nbest: int, alpha: float) -> None:
    self._nbest, self._alpha = nbest, alpha
    proto = sentencepiece_model_pb2.ModelProto.FromString(vocab.model_bytes)
    self._vocab, self._is_unigram = vocab, proto.trainer_spec.model_type == _UNIGRAM
    self._scores = np.array([piece.score for piece in proto.pieces])
    self._ids = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == _NORMAL}

  @functools.cached_property
  def _splits(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(number of each piece's splits, number of its first, ids of each split).

    A split has a shorter piece first, and as few as can be after it.
    """
    ids = self._ids

    @functools.cache
    def fewest(rest: str) -> tuple[int, ...] | None:
      return (ids[rest],) if rest in ids else min(splits_of(rest), key=len, default=None)

    def splits_of(text: str) -> list[tuple[int, ...]]:
      firsts = (k for k in range(1, len(text)) if text[:k] in ids)
      return [(ids[text[:k]], *rest) for k in firsts if (rest := fewest(text[k:])) is not None]

    splits = [[] for _ in self._scores]
    for piece, i in ids.items():
      splits[i] = splits_of(piece)
    counts = np.array(list(map(len, splits)))
    return (
      counts,
      np.cumsum(counts) - counts,
      [np.array(split, np.int32) for word_splits in splits for split in word_splits],
    )

  def check_nbest(self) -> None:
    """Raises UserError where there are no n best segmentations."""
    if not self._is_unigram:
      raise UserError(
        f'nbest needs a unigram vocabulary; {self._vocab.path} is of another kind: use dropout, such as 0.1'
      )

  def draw(self, text: str, key: int) -> Sequence[int]:
    """One of the best segmentations of a text."""
    candidates = self._vocab.nbest(text, self._nbest)
    scores = self._alpha * np.array([self._scores[ids].sum() for ids in candidates])
    sums = np.cumsum(np.exp(scores - scores.max()))
    return candidates[int(np.searchsorted(sums, uniform(key, 'nbest') * sums[-1], side='right'))]

  def drop_out(self, ids: np.ndarray, lengths: np.ndarray, rate: float, keys: np.ndarray) -> tuple[np.ndarray, ...]:
    """(ids, lengths) of sentences, one after the other, whose pieces are split again, each with the probability `rate`.

    Each sentence has a key.
    """
    counts, firsts, splits = self._splits
    row, new, depth = np.repeat(np.arange(len(lengths)), lengths), np.ones(len(ids), bool), 0
    while new.any():
      place = np.arange(len(ids)) - np.searchsorted(row, row)
      new &= (counts[ids] > 0) & (uniform(keys[row], 'dropout', depth, place) < rate)
      which = firsts[ids] + (uniform(keys[row], 'split', depth, place) * counts[ids]).astype(np.int64)
      chosen = [splits[number] for number in which[new]]
      times = np.ones(len(ids), np.int64)
      times[new] = list(map(len, chosen))
      ids, row, new = (np.repeat(array, times) for array in (ids, row, new))
      ids[new] = np.concatenate([np.zeros(0, np.int32), *chosen])
      depth += 1
    return ids, np.bincount(row, minlength=len(lengths))
