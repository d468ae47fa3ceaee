"""Token caches of language pairs: both sides, tokenised once, and keys of sentences; see inputs/token_cache.py."""

import functools
import hashlib
import os
import re
import types
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import Advance
from lingvo_moe.corpora import parallel, text
from lingvo_moe.inputs.token_cache import CacheEntry, TokenCache, folders_of, open_entries
from lingvo_moe.models import batches
from lingvo_moe.storage import files
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

# In place of vocabularies: ids are the two halves of a hash of a sentence's text.key; or the source pieces, from 1, of
# target pieces, 0 for none.
_KEYS = types.SimpleNamespace(size=1 << 31, fingerprint='hashes of keys, 1')
_POINT = re.compile('[0-9]{1,4}-[0-9]{1,4}')
_POINTS = types.SimpleNamespace(size=1 << 31, fingerprint='alignments, 1')


def open_pairs(
  pairs: Sequence[parallel.Pair], vocabs: tuple[TaggedVocab, TaggedVocab], cache_dir: str, *, quiet: bool = False
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


def _key_entries(pairs: Sequence[parallel.Pair]) -> list[CacheEntry]:
  """Entries of hashes of the keys of sources, then of targets; see open_keys."""
  return _entries(pairs, [_KEYS] * 2, [functools.partial(_by_line, _hashed)] * 2, '.keys')


def digest_of_keys(pairs: Sequence[parallel.Pair], cache_dir: str) -> str:
  """Hash, in hex, of the entries of open_keys."""
  return hashlib.sha256(repr(folders_of(_key_entries(pairs), cache_dir)).encode()).hexdigest()[:16]


def open_keys(
  pairs: Sequence[parallel.Pair], cache_dir: str, *, quiet: bool = False
) -> list[tuple[TokenCache, TokenCache]]:
  """The (source, target) caches of every pair whose ids, as uint64, are hashes of text.key; 0 of an empty line."""
  caches = open_entries(_key_entries(pairs), cache_dir, quiet=quiet)
  return list(zip(caches[: len(pairs)], caches[len(pairs) :], strict=True))


def open_alignments(pairs: Sequence[parallel.Pair], folder: str, cache_dir: str, *, quiet: bool) -> list[TokenCache]:
  """Opens the alignments of every pair's corpus: for each line the source piece, from 1, of each target piece."""
  entries = []
  for pair in pairs:
    name = f'{pair.name}.{pair.split}.align'
    if not files.isfile(path := os.path.join(folder, name)):
      raise UserError(f'guided_by is a folder with alignments of each corpus; {path} is missing: add it')
    entries.append(CacheEntry(name, [path], _POINTS, _points))
  return open_entries(entries, cache_dir, quiet=quiet)


def _by_line(convert: Callable, parts: Iterator[text.FilePart], progress: Advance) -> Iterator:
  """Yields convert(lines), (ids, lengths), of some thousands at a time, and an empty pair at the end of each part."""
  for part in parts:
    for batch in part.batches(progress):
      yield convert([line.decode('utf-8') for line in batch])
    yield np.zeros(0, np.int32), np.zeros(0, np.int64)


def _points(parts: Iterator[text.FilePart], progress: Advance) -> Iterator:
  """Yields (source pieces, their numbers) of lines of alignments, as _by_line does."""
  for part in parts:
    done = 0
    for batch in part.batches(progress):
      rows = [_sources(line.decode('utf-8')) for line in batch]
      if None in rows:
        place = rows.index(None)
        seen = batch[place].decode('utf-8').rpartition('\t')[2].strip()
        raise UserError(
          f"a line of alignments has pairs of numbers such as '0-0 1-2'; saw {seen!r:.60} in line "
          f'{part.number(done + place)} of {part.path}: make it again'
        )
      yield batches.flat(rows)
      done += len(batch)
    yield np.zeros(0, np.int32), np.zeros(0, np.int64)


def _sources(line: str) -> list[int] | None:
  """Source piece of each target piece of a line in Pharaoh's format, its first one; text before a tab is left out."""
  points = line.rpartition('\t')[2].split()
  if not all(map(_POINT.fullmatch, points)):
    return None
  source_of = {int(target): int(source) + 1 for source, target in (p.split('-') for p in reversed(points))}
  return [source_of.get(target, 0) for target in range(max(source_of, default=-1) + 1)]


def _entries(pairs, vocabs, tokenise, suffix: str = '') -> list[CacheEntry]:
  """Entries of the sources, then of the targets; `vocabs` and `tokenise` are of both sides."""
  return [
    CacheEntry(f'{pair.name}.{pair.split}.{language}{suffix}', files, vocabs[side], tokenise[side])
    for side in (0, 1)
    for pair in pairs
    for language, files in [pair.sides[side]]
  ]


def _hashed(lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
  """(hashes, 2s) of lines."""
  keys = (text.key(line).encode() for line in lines)
  hashes = b''.join(hashlib.blake2b(key, digest_size=8).digest() if key else bytes(8) for key in keys)
  return np.frombuffer(hashes, np.int32), np.full(len(lines), 2)


def _tokenised(vocab: TaggedVocab, parts: Iterator[text.FilePart], progress: Advance) -> Iterator:
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
