"""Token caches of language pairs: both sides, tokenised once, and keys of sentences; see tasks/token_cache.py."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, text
from lingvo_moe.tasks.token_cache import Entry, TokenCache, open_entries
from lingvo_moe.tasks.vocab import Vocab


def open_pairs(
  pairs: Sequence[parallel.Pair], vocabs: tuple[Vocab, Vocab], cache_dir: str, *, quiet: bool = False
) -> list[tuple[TokenCache, TokenCache]]:
  """Opens the (source, target) caches of every pair; missing ones are built, with a progress bar.

  Raises:
    UserError: the two sides differ in their number of lines, a file cannot be read, or the cache cannot be written.
  """
  sides = []
  for side, vocab in enumerate(vocabs):
    entries = _entries(pairs, side)
    sides.append(open_entries(entries, vocab, functools.partial(_tokenised, vocab), cache_dir, quiet=quiet))
  for pair, source, target in zip(pairs, *sides, strict=True):
    parallel.check_counts(pair, source.shard_lines, target.shard_lines)
  return list(zip(*sides, strict=True))


class _Keys:
  """Keys in place of a vocabulary: a sentence's ids are the two halves of a hash of its text.key."""

  size = 1 << 31
  fingerprint = 'hashes of keys, 1'


def open_keys(
  pairs: Sequence[parallel.Pair], cache_dir: str, *, quiet: bool = False
) -> list[tuple[np.ndarray, np.ndarray]]:
  """A hash of text.key, uint64, of each (source, target) line of every pair; 0 of an empty one."""
  entries = [*_entries(pairs, 0, '.keys'), *_entries(pairs, 1, '.keys')]
  hashes = [cache.tokens.view(np.uint64) for cache in open_entries(entries, _Keys(), _hashed, cache_dir, quiet=quiet)]
  return list(zip(hashes[: len(pairs)], hashes[len(pairs) :], strict=True))


def _entries(pairs: Sequence[parallel.Pair], side: int, suffix: str = '') -> list[Entry]:
  """The entries of the sources (0) or the targets (1)."""
  return [Entry(f'{pair.name}.{pair.split}.{pair.sides[side][0]}{suffix}', pair.sides[side][1]) for pair in pairs]


def _hashed(paths: Sequence[str], progress: Callable[[int], None]) -> Iterator:
  """Yields (hashes, 2s) of some thousands of lines at a time, and an empty pair at the end of each file."""
  for path in paths:
    for batch in text.line_batches(path, progress=progress):
      keys = (text.key(line.decode('utf-8')).encode() for line in batch)
      hashes = b''.join(hashlib.blake2b(key, digest_size=8).digest() if key else bytes(8) for key in keys)
      yield np.frombuffer(hashes, np.int32), np.full(len(batch), 2)
    yield np.zeros(0, np.int32), np.zeros(0, np.int64)


def _tokenised(vocab: Vocab, paths: Sequence[str], progress: Callable[[int], None]) -> Iterator:
  """Yields (ids, lengths) of some thousands of lines at a time, and an empty pair at the end of each file.

  All files share one tf.data pipeline, because building a pipeline takes longer than tokenising a small file.
  """
  failure = []

  def batches():
    try:
      for path in paths:
        for batch in text.line_batches(path, progress=progress):
          yield np.array([b'' if text.is_empty(line.decode('utf-8')) else line for line in batch], object)
        yield np.array([], object)
    except UserError as e:  # raised below, as tf.data would wrap it in an error with a stack trace
      failure.append(e)

  def tokenise(lines):
    ragged = vocab.tokenize(lines)
    return ragged.flat_values, ragged.row_lengths()

  dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([None], tf.string))
  yield from dataset.map(tokenise, num_parallel_calls=2).prefetch(2).as_numpy_iterator()
  if failure:
    raise failure[0]
