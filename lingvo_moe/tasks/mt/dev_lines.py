"""Dev text taken from train, where a corpus has none (dev_lines): which lines, and which others go with them.

The lines are a function of the pair, its number of lines and the seed. Training leaves them out, with every line that is
the same as one of them on either side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import sampling
from lingvo_moe.tasks import text
from lingvo_moe.tasks.mt import corpus

if TYPE_CHECKING:
  from lingvo_moe.tasks.mt.data_config import DataConfig
  from lingvo_moe.tasks.token_cache import TokenCache

_CHUNK = 1 << 16  # lines that are compared at a time


def find_pairs(config: DataConfig, split: str) -> list[corpus.Pair]:
  """Pairs of a split; those without dev have in its place, with dev_lines, that of train (Pair.split is 'train').

  Raises:
    UserError: as corpus.find_pairs; of dev that is lacking, with the offer of dev_lines.
  """
  find = lambda split: corpus.find_pairs(config.data_dir, config.pairs, split, config.split_files)
  if split != 'dev':
    return find(split)
  try:
    found = find('dev')
  except UserError as e:
    if not config.dev_lines:
      raise UserError(f'{e}; or take dev text from train, with --set dev_lines=1000') from None
    found = []
  if not config.dev_lines:
    return found
  names = {pair.name for pair in found}
  try:
    found += [pair for pair in find('train') if pair.name not in names]
  except UserError:
    if not found:
      raise
  return sorted(found, key=lambda pair: pair.name)


def taken(config: DataConfig) -> set[str]:
  """Names of the pairs whose dev text is taken from train."""
  return {pair.name for pair in find_pairs(config, 'dev') if pair.split == 'train'} if config.dev_lines else set()


def numbers(config: DataConfig, name: str, size: int) -> np.ndarray:
  """Numbers of the lines that are taken of a pair's `size` lines, ascending."""
  if config.dev_lines * 2 > size:
    raise UserError(
      f'dev_lines must leave half of the lines to train on; saw dev_lines={config.dev_lines}, and {name} has {size} '
      f'lines: use at most {size // 2}'
    )
  places = sampling.permute(np.arange(size), size, sampling.fold(config.seed, 'dev_lines', name))
  return np.flatnonzero(places < config.dev_lines)


def left_out(sides: Sequence[TokenCache], chosen: np.ndarray) -> np.ndarray:
  """Whether each line of a pair is one of the chosen, or has the same tokens as one of them on either side."""
  out = np.zeros(len(sides[0]), bool)
  out[chosen] = True
  for side in sides:
    hashes = np.concatenate([*_hashes(side), np.zeros(0, np.uint64)])
    out |= np.isin(hashes, hashes[chosen])
  return out


def _hashes(side: TokenCache) -> Iterator[np.ndarray]:
  """A hash of the tokens of each line, for some lines at a time."""
  for begin in range(0, len(side), _CHUNK):
    tokens, lengths = side.gather(np.arange(begin, min(begin + _CHUNK, len(side))))
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(tokens)) - np.repeat(starts, lengths)
    sums = np.concatenate([[np.uint64(0)], np.cumsum(sampling.fold(tokens, places), dtype=np.uint64)])
    yield sums[starts + lengths] - sums[starts]


class Lines:
  """Some lines of a token cache, numbered from 0, as a token cache."""

  def __init__(self, side: TokenCache, chosen: np.ndarray):
    self._side, self._chosen = side, chosen
    self.folder = side.folder

  def __len__(self) -> int:
    return len(self._chosen)

  def lengths(self, lines: np.ndarray | slice) -> np.ndarray:
    return self._side.lengths(self._chosen[lines])

  def gather(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return self._side.gather(self._chosen[lines])


def read_pair(config: DataConfig, pair: corpus.Pair) -> tuple[list[str], list[str]]:
  """(source lines, target lines) of a held-out set that find_pairs gave."""
  if pair.split != 'train' or not config.dev_lines:
    return corpus.read_pair(pair)
  counts = [[text.count_lines(path) for path in files] for files in (pair.source_files, pair.target_files)]
  chosen = numbers(config, pair.name, corpus.check_counts(pair, *counts))
  return _chosen_lines(pair.source_files, chosen), _chosen_lines(pair.target_files, chosen)


def _chosen_lines(files: Sequence[str], chosen: np.ndarray) -> list[str]:
  found, begin = [], 0
  for path in files:
    for batch in text.line_batches(path):
      here = chosen[np.searchsorted(chosen, begin) : np.searchsorted(chosen, begin + len(batch))]
      found += [batch[i - begin].decode('utf-8') for i in here]
      begin += len(batch)
  return found
