"""Token caches of language pairs: both sides, tokenised once, and keys of sentences; see tasks/token_cache.py."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, text
from lingvo_moe.tasks.token_cache import Entry, TokenCache, folders_of, open_entries
from lingvo_moe.tasks.vocab import Vocab


def open_pairs(
  pairs: Sequence[parallel.Pair], vocabs: tuple[Vocab, Vocab], cache_dir: str, *, quiet: bool = False
) -> list[tuple[TokenCache, TokenCache]]:
  """Opens the (source, target) caches of every pair; missing ones are built, with a progress bar.

  Raises:
    UserError: the two sides differ in their number of lines, a file cannot be read, or the cache cannot be written.
  """
  tokenise = [functools.partial(_tokenised, vocab) for vocab in vocabs]
  caches = open_entries(_entries(pairs, vocabs, tokenise), cache_dir, quiet=quiet)
  sides = list(zip(caches[: len(pairs)], caches[len(pairs) :], strict=True))
  for pair, (source, target) in zip(pairs, sides, strict=True):
    parallel.check_counts(pair, source.file_lines, target.file_lines)
  return sides


class _Keys:
  """Keys in place of a vocabulary: a sentence's ids are the two halves of a hash of its text.key."""

  size = 1 << 31
  fingerprint = 'hashes of keys, 1'


def _key_entries(pairs: Sequence[parallel.Pair]) -> list[Entry]:
  """Entries of hashes of the keys of sources, then of targets; see open_keys."""
  return _entries(pairs, [_Keys()] * 2, [_hashed] * 2, '.keys')


def digest_of_keys(pairs: Sequence[parallel.Pair], cache_dir: str) -> str:
  """Hash, in hex, of the entries of open_keys."""
  return hashlib.sha256(repr(folders_of(_key_entries(pairs), cache_dir)).encode()).hexdigest()[:16]


def open_keys(
  pairs: Sequence[parallel.Pair], cache_dir: str, *, quiet: bool = False
) -> list[tuple[TokenCache, TokenCache]]:
  """The (source, target) caches of every pair whose ids, as uint64, are hashes of text.key; 0 of an empty line."""
  caches = open_entries(_key_entries(pairs), cache_dir, quiet=quiet)
  return list(zip(caches[: len(pairs)], caches[len(pairs) :], strict=True))


def _entries(pairs, vocabs, tokenise, suffix: str = '') -> list[Entry]:
  """Entries of the sources, then of the targets; `vocabs` and `tokenise` are of both sides."""
  return [
    Entry(f'{pair.name}.{pair.split}.{language}{suffix}', files, vocabs[side], tokenise[side])
    for side in (0, 1)
    for pair in pairs
    for language, files in [pair.sides[side]]
  ]


def _hashed(parts: Iterator[text.Part], progress: text.Progress) -> Iterator:
  """Yields (hashes, 2s) of some thousands of lines at a time, and an empty pair at the end of each part."""
  for part in parts:
    for batch in part.batches(progress):
      keys = (text.key(line.decode('utf-8')).encode() for line in batch)
      hashes = b''.join(hashlib.blake2b(key, digest_size=8).digest() if key else bytes(8) for key in keys)
      yield np.frombuffer(hashes, np.int32), np.full(len(batch), 2)
    yield np.zeros(0, np.int32), np.zeros(0, np.int64)


def _tokenised(vocab: Vocab, parts: Iterator[text.Part], progress: text.Progress) -> Iterator:
  """Yields (ids, lengths) of some thousands of lines at a time, and an empty pair at the end of each part.

  All parts share one tf.data pipeline, because building a pipeline takes longer than tokenising a small file.
  """
  failure = []

  def batches():
    try:
      for part in parts:
        for batch in part.batches(progress):
          yield np.array([b'' if text.is_empty(line.decode('utf-8')) else line for line in batch], object)
        yield np.array([], object)
    except (UserError, OSError) as e:  # raised below, as tf.data would wrap it in an error with a stack trace
      failure.append(e)

  def tokenise(lines):
    ragged = vocab.tokenize(lines)
    return ragged.flat_values, ragged.row_lengths()

  dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([None], tf.string))
  yield from dataset.map(tokenise, num_parallel_calls=2).prefetch(2).as_numpy_iterator()
  if failure:
    raise failure[0]
