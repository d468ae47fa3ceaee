"""Dev text taken from train, where a corpus has none (dev_lines): which lines, and which others go with them. And how
much of a corpus's own dev and test is in its train.

A pair's lines are chosen by the text of one side, so that pairs of the same sentences, the two directions of one text
among them, choose the same ones: the side in the language that most pair folders of the corpus have. They depend on no
other pair of the run, so a decoder of one pair finds them too. Of lines equal there, one is chosen. Training leaves
them out, in every pair, with every line that is the same as one of them on either side. Lines are the same if their
text.key is, or their tokens are.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, temperature_sampling, text
from lingvo_moe.storage import files, json_files

if TYPE_CHECKING:
  from lingvo_moe.inputs.data_config import DataConfig
  from lingvo_moe.inputs.token_cache import TokenCache

_CHUNK = 1 << 16  # lines that are compared at a time
_MANY_SHARED = 0.01  # share of held-out lines in train from which on the user is told


def trained_pairs(config: DataConfig) -> list[parallel.Pair]:
  """Pairs that are trained on, one for each corpus of its mixture; Pair.split is the prefix of the corpus."""
  pairs = [pair for corpus in config.mixture for pair in _find(config, corpus.prefix)]
  corpora: dict[tuple[str, str], str] = {}  # by pair and file
  for pair in pairs:
    for path in pair.source_files:
      other = corpora.setdefault((pair.name, path), pair.split)
      if other != pair.split:
        raise UserError(
          f'a file is of one corpus; {path} is of {other} and of {pair.split}, as files PREFIX-*.LANGUAGE are shards '
          f'of PREFIX where there is no PREFIX.LANGUAGE: leave one out of corpora, or rename its files'
        )
  return sorted(pairs, key=lambda pair: pair.name)


def find_pairs(config: DataConfig, split: str) -> list[parallel.Pair]:
  """Pairs of a split; those without dev have in its place, with dev_lines, that of train (Pair.split is 'train').

  Raises:
    UserError: as parallel.find_pairs; of dev that is lacking, with the offer of dev_lines.
  """
  if split != 'dev':
    return _find(config, split)
  try:
    pairs = _find(config, 'dev')
  except parallel.NoPairError:  # of plain files some have dev
    if config.dev_lines == 0:
      raise
    pairs = []
    for pair in _find(config, 'train'):
      with contextlib.suppress(parallel.MissingFilesError):
        pairs += parallel.find_pairs(config.data_dir, pair.name, 'dev', config.split_files)
  except parallel.MissingFilesError as e:
    if config.dev_lines == 0:
      raise UserError(f'{e}; or take dev text from train, with --set dev_lines=1000') from None
    pairs = []
  if config.dev_lines == 0:
    return pairs
  names = {pair.name for pair in pairs}
  try:
    pairs += [pair for pair in _find(config, 'train') if pair.name not in names]
  except parallel.MissingFilesError:
    if not pairs:
      raise
  return sorted(pairs, key=lambda pair: pair.name)


def _find(config: DataConfig, split: str) -> list[parallel.Pair]:
  return parallel.find_pairs(config.data_dir, config.pairs, split, config.split_files)


def choose(config: DataConfig, pairs: Sequence[parallel.Pair], sizes: Iterable[int]) -> dict[int, np.ndarray]:
  """Numbers of the lines of train that are dev text, ascending, by the number of their pair; none of pairs with dev.

  Args:
    config: its dev_lines and seed say how many, and which.
    pairs: of train or dev, from find_pairs.
    sizes: number of lines of each.
  """
  taken = {pair.name for pair in find_pairs(config, 'dev') if pair.split == 'train'} if config.dev_lines != 0 else ()
  if not taken:
    return {}
  folders_with = collections.Counter(itertools.chain(*parallel.pair_folders(config.data_dir)))
  return {
    number: _choose(config, pair, size, folders_with)
    for number, (pair, size) in enumerate(zip(pairs, sizes, strict=True))
    if pair.name in taken and pair.split in ('train', 'dev')
  }


def _choose(config: DataConfig, pair: parallel.Pair, size: int, folders_with: Mapping[str, int]) -> np.ndarray:
  wanted = max(1, min(1000, size // 20)) if config.dev_lines is None else config.dev_lines
  if wanted * 2 > size:
    raise UserError(
      f'dev_lines must leave half of the lines to train on; saw dev_lines={wanted}, and {pair.name} has '
      f'{size} lines: use at most {size // 2}'
    )
  _, paths = min(pair.sides, key=lambda side: (-folders_with[side[0]], side[0]))
  checksums = np.fromiter((zlib.crc32(text.key(line).encode()) for line in text.lines(paths)), np.uint64, size)
  places = temperature_sampling.fold(config.seed, 'dev_lines', checksums)
  _, first = np.unique(places, return_index=True)  # one of each set of equal lines, in the order of places
  repeated = np.ones(size, bool)
  repeated[first] = False
  return np.sort(np.concatenate([first, np.flatnonzero(repeated)])[:wanted])


def left_out(
  caches: Sequence[tuple[TokenCache, TokenCache]],
  keys: Sequence[tuple[np.ndarray, np.ndarray]],
  chosen: Mapping[int, np.ndarray],
  *,
  shared_vocab: bool,
) -> list[np.ndarray]:
  """Whether each line of each pair is chosen, or is the same as a chosen one, of any pair, on either side.

  Args:
    caches: source and target side of every pair of train.
    keys: hashes of text.key of the same lines; see pair_caches.open_keys.
    chosen: numbers of the chosen lines, by the number of their pair.
    shared_vocab: whether a source and a target compare.
  """
  out = [np.zeros(len(source), bool) for source, _ in caches]
  for sides_of in (keys.__getitem__, lambda number: [_hashes(side) for side in caches[number]]):
    chosen_sides = [[side[lines] for side in sides_of(number)] for number, lines in chosen.items()]
    of_dev = [np.concatenate([np.zeros(0, np.uint64), *side]) for side in zip(*chosen_sides)]
    if shared_vocab:
      of_dev = [np.concatenate(of_dev)] * 2
    of_dev = [np.unique(hashes) for hashes in of_dev]
    for number, lines in enumerate(out):
      for side, hashes in zip(sides_of(number), of_dev):
        lines |= np.isin(side, hashes)
  return out


def _hashes(side: TokenCache) -> np.ndarray:
  """A hash of the tokens of each line."""
  hashes = [np.zeros(0, np.uint64)]
  for start in range(0, len(side), _CHUNK):
    tokens, lengths = side.gather(np.arange(start, min(start + _CHUNK, len(side))))
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(tokens)) - np.repeat(starts, lengths)
    sums = np.concatenate([[np.uint64(0)], np.cumsum(temperature_sampling.fold(tokens, places), dtype=np.uint64)])
    hashes.append(sums[starts + lengths] - sums[starts])
  return np.concatenate(hashes)


def within_train(config: DataConfig, cache_dir: str) -> list[str]:
  """Lines that warn of dev or test text of which many sentences, on one side at least, are in train of their pair.

  A file in the cache folder keeps them.
  """
  from lingvo_moe.inputs import pair_caches  # imports TensorFlow

  pairs_by_corpus: dict[str, list[parallel.Pair]] = {}
  for split in ('dev', 'test', 'train'):
    with contextlib.suppress(UserError):  # there is none: who needs it will say so
      if split != 'train' or pairs_by_corpus:
        pairs_by_corpus[split] = trained_pairs(config) if split == 'train' else _find(config, split)
  path = os.path.join(
    cache_dir, f'in_train-{pair_caches.digest_of_keys([*itertools.chain(*pairs_by_corpus.values())], cache_dir)}.json'
  )
  with contextlib.suppress(OSError, UserError):
    return json_files.read(path, warnings=json_files.list_of(json_files.TEXT))['warnings']
  warnings = _within_train(pairs_by_corpus, cache_dir)
  with contextlib.suppress(OSError):
    files.write(path, json_files.dump({'warnings': warnings}))
  return warnings


def _within_train(pairs_by_corpus: Mapping[str, Sequence[parallel.Pair]], cache_dir: str) -> list[str]:
  """Warnings of within_train, given the pairs of each split."""
  from lingvo_moe.inputs import pair_caches
  from lingvo_moe.inputs.token_cache import joined

  keys = {}
  for split, pairs in pairs_by_corpus.items():
    with contextlib.suppress(UserError):  # it is no text
      sides_of = pair_caches.open_keys(pairs, cache_dir)
      by_name = collections.defaultdict(list)
      for pair, sides in zip(pairs, sides_of, strict=True):
        by_name[pair.name].append(sides)
      keys[split] = {name: tuple(map(joined, zip(*corpora))) for name, corpora in by_name.items()}
  train, warnings = keys.pop('train', {}), []
  for split, sides_of in keys.items():
    lines, shared = 0, 0
    for name, sides in sides_of.items():
      sources, targets = (side.tokens.view(np.uint64) for side in sides)
      if name in train and len(sources) == len(targets):
        in_train = [
          _are_in(side, train_paths) for side, train_paths in zip((sources, targets), train[name], strict=True)
        ]
        lines += len(sources)
        shared += int(np.count_nonzero(np.logical_or(*in_train)))
    if shared > _MANY_SHARED * lines:
      warnings.append(
        f'warning: {shared:,} of {lines:,} {split} lines are in train: what is measured on them is no measure of new '
        'text'
      )
  return warnings


def _are_in(hashes: np.ndarray, train: TokenCache) -> np.ndarray:
  """Whether each hash, other than 0, is in a cache of keys."""
  is_in_train = np.zeros(len(hashes), bool)
  for part in train.parts():
    is_in_train |= np.isin(hashes, part.view(np.uint64))
  return is_in_train & (hashes != 0)


def read_pairs(config: DataConfig, split: str) -> Iterator[tuple[parallel.Pair, list[str], list[str]]]:
  """Yields (pair, source lines, target lines) of every pair of a held-out set."""
  pairs = find_pairs(config, split)
  chosen = choose(config, pairs, map(parallel.count_lines, pairs)) if split == 'dev' else {}
  for number, pair in enumerate(pairs):
    if number in chosen:
      lines = set(chosen[number].tolist())
      yield pair, *([line for i, line in enumerate(text.lines(paths)) if i in lines] for _, paths in pair.sides)
    else:
      yield pair, *parallel.read_pair(pair)
