"""Token cache: the ids of every line of a corpus on disk, tokenised once and read by line number.

An entry is a list of files, such as one side of one pair and split: `tokens.bin`, the ids of all lines one after the
other (uint16, or int32 for vocabularies beyond 65,536), `offsets.bin`, int64, the start of each line, and `meta.json`.
Line i of the text is line i of the entry, empty lines included. Both arrays are memory mapped, so a corpus may be
larger than memory.

The name of an entry's folder has a hash of its inputs, the vocabulary and the contents of the files: if any of them
changes, a new folder is made, and the one of what the same files had before is removed. A folder is written under a
temporary name and renamed when complete, so processes may build the same entry at the same time: the first to finish
wins. Checksums of both arrays are verified when an entry is opened, and a damaged entry is built again. `hashes.json`
beside the entries keeps the hashes of files, so that one that has not changed is not read again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import itertools
import os
import shutil
import socket
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tqdm

from lingvo_moe.core import content_hashes, json_files
from lingvo_moe.core import files as files_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.files import lock

_FORMAT = 3  # with 2, text began with a byte order mark where the file did
_DTYPES = ('uint16', 'int32')
_META = {
  'dtype': json_files.Kind(f'one of {", ".join(_DTYPES)}', lambda value: value in _DTYPES),
  'tokens': json_files.INTEGER,
  'shard_lines': json_files.list_of(json_files.INTEGER),
  'files': json_files.list_of(json_files.TEXT),
  'vocab': json_files.TEXT,
  'checksums': json_files.by_name(json_files.INTEGER),
}


class DamagedError(Exception):
  """Cache entry that is not as it was written; says which file."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenCache:
  """Cache entry: the lines of one side, as ids without bos and eos.

  Attributes:
    folder: of the entry.
    tokens: all ids, memory mapped.
    offsets: int64, one more than lines; line i is tokens[offsets[i] : offsets[i + 1]].
    shard_lines: number of lines of each file.
  """

  folder: str
  tokens: np.ndarray
  offsets: np.ndarray
  shard_lines: Sequence[int]

  @classmethod
  def open(cls, folder: str) -> TokenCache:
    """The entry in a folder; FileNotFoundError if there is none, DamagedError if a file fails its checksum."""
    meta = _read_meta(folder)
    tokens = _map(folder, 'tokens.bin', meta['dtype'], meta['tokens'], meta)
    offsets = _map(folder, 'offsets.bin', 'int64', sum(meta['shard_lines']) + 1, meta)
    return cls(folder, tokens, offsets, meta['shard_lines'])

  def __len__(self) -> int:
    return len(self.offsets) - 1

  def lengths(self, lines: np.ndarray) -> np.ndarray:
    """Number of ids of each of these lines."""
    return self.offsets[lines + 1] - self.offsets[lines]

  def gather(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids of these lines, one after the other, and the number of ids of each."""
    lengths = self.lengths(lines)
    shift = self.offsets[lines] - (np.cumsum(lengths) - lengths)
    return self.tokens[np.repeat(shift, lengths) + np.arange(lengths.sum())].astype(np.int32), lengths

  def subset(self, lines: np.ndarray) -> TokenCache:
    """Some of the lines, in memory."""
    tokens, lengths = self.gather(lines)
    return TokenCache(self.folder, tokens, np.cumsum(np.concatenate([[0], lengths])), [len(lines)])


def joined(caches: Sequence[TokenCache]) -> TokenCache:
  """Lines of several caches as one, in memory if there are two or more."""
  if len(caches) == 1:
    return caches[0]
  offsets = np.cumsum(np.concatenate([[0], *(np.diff(cache.offsets) for cache in caches)]))
  return TokenCache('', np.concatenate([cache.tokens for cache in caches]), offsets, [len(cache) for cache in caches])


def _read_meta(folder: str) -> dict[str, Any]:
  try:
    return json_files.read(os.path.join(folder, 'meta.json'), 'that of a token cache', 'it is built again', **_META)
  except UserError as e:
    raise DamagedError(str(e)) from None


def _map(folder: str, name: str, dtype: str, size: int, meta: Mapping[str, Any]) -> np.ndarray:
  path = os.path.join(folder, name)
  if not os.path.exists(path) or os.path.getsize(path) != size * np.dtype(dtype).itemsize:
    raise DamagedError(f'{path} is cut short')
  # A plain array view of the map, as numpy's memmap class is slow to index.
  array = np.asarray(np.memmap(path, dtype, 'r')) if size else np.zeros(0, dtype)
  if zlib.crc32(array) != meta['checksums'].get(name):
    raise DamagedError(f'{path} was changed since it was written')
  return array


class Vocab(Protocol):
  """Vocabulary: turns text into ids."""

  size: int  # number of ids, special ones included
  fingerprint: str  # of everything that the ids depend on


class Entry(NamedTuple):
  """Name and text of an entry."""

  name: str
  files: Sequence[str]


# (paths, progress in bytes) -> (ids, lengths) of some lines at a time, and an empty pair at the end of each file
Tokenise = Callable[[Sequence[str], Callable[[int], None]], Iterator[tuple[np.ndarray, np.ndarray]]]


def open_entries(
  entries: Sequence[Entry], vocab: Vocab, tokenise: Tokenise, cache_dir: str, *, quiet: bool = False
) -> list[TokenCache]:
  """Opens the caches of all entries; missing ones are built, with a progress bar.

  Raises:
    UserError: a file cannot be read, or the cache cannot be written.
  """
  hashes = iter(content_hashes.of([path for entry in entries for path in entry.files], cache_dir, quiet))
  folders = []  # each named by a hash of everything that it depends on
  for entry in entries:
    key = ' '.join([str(_FORMAT), vocab.fingerprint, *itertools.islice(hashes, len(entry.files))])
    folders.append(os.path.join(cache_dir, f'{entry.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}'))
  caches = {folder: _open(folder, quiet) for folder in folders}
  if None in caches.values():
    with lock(cache_dir):
      _remove_leftovers(cache_dir)
      caches = {folder: cache or _open(folder) for folder, cache in caches.items()}
      missing = {folder: entry for folder, entry in zip(folders, entries, strict=True) if caches[folder] is None}
      caches |= _build_all(missing, vocab, tokenise, quiet)
      for folder, entry in missing.items():
        _remove_older(folder, entry, vocab)
  return [caches[folder] for folder in folders]


def _build_all(missing: Mapping[str, Entry], vocab: Vocab, tokenise: Tokenise, quiet: bool) -> dict[str, TokenCache]:
  built = {}
  paths = [path for entry in missing.values() for path in entry.files]
  size = sum(map(files_lib.size, paths))
  with tqdm.tqdm(total=size, desc='tokenising', unit='B', unit_scale=True, disable=quiet or None, leave=False) as bar:
    stream = tokenise(paths, bar.update)
    for folder, entry in missing.items():
      bar.set_postfix_str(entry.name, refresh=False)
      built[folder] = _build(folder, entry, vocab, stream)
  return built


def _remove_leftovers(cache_dir: str) -> None:
  """Removes temporary folders of killed processes of this machine; none is in use, as this process holds the lock."""
  for name in os.listdir(cache_dir):
    if f'.tmp-{socket.gethostname()}-' in name:
      shutil.rmtree(os.path.join(cache_dir, name), ignore_errors=True)


def _remove_older(folder: str, entry: Entry, vocab: Vocab) -> None:
  """Removes entries, by the same name and vocabulary, of what the same files held before."""
  prefix = os.path.join(os.path.dirname(folder), entry.name)
  for other in glob.glob(f'{glob.escape(prefix)}-{"[0-9a-f]" * 16}'):
    with contextlib.suppress(OSError, DamagedError):
      meta = _read_meta(other)
      if other != folder and meta['vocab'] == vocab.fingerprint and meta['files'] == list(entry.files):
        shutil.rmtree(other, ignore_errors=True)


def _open(folder: str, quiet: bool = True) -> TokenCache | None:
  """An entry; None where there is none, or a damaged one, of which a line says so unless `quiet`."""
  try:
    return TokenCache.open(folder)
  except DamagedError as e:
    if not quiet:
      print(f'the token cache is damaged ({e}); this part of it is made again', file=sys.stderr)
  except OSError:
    pass
  return None


def _build(folder: str, entry: Entry, vocab: Vocab, stream: Iterator) -> TokenCache:
  """Writes an entry under a temporary name, then renames it into place."""
  temporary = f'{folder}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}'
  try:
    os.makedirs(temporary)
    try:
      _write(temporary, entry, vocab, stream)
      try:
        os.rename(temporary, folder)
      except OSError:
        if _open(folder) is None:  # damaged, and not of another process that was first
          shutil.rmtree(folder, ignore_errors=True)
          with contextlib.suppress(OSError):
            os.rename(temporary, folder)
    finally:
      shutil.rmtree(temporary, ignore_errors=True)
    if (cache := _open(folder)) is not None:
      return cache
    raise OSError(None, 'it cannot be read back', folder)
  except OSError as e:
    raise UserError(f'cannot write the token cache {folder} ({e.strerror}): give another place for it') from None


def _write(folder: str, entry: Entry, vocab: Vocab, stream: Iterator) -> None:
  dtype = _DTYPES[0] if vocab.size <= 65536 else _DTYPES[1]
  shard_lines, total = [], 0
  checksums = {'tokens.bin': 0, 'offsets.bin': 0}

  def append(f, array):
    name = os.path.basename(f.name)
    checksums[name] = zlib.crc32(array, checksums[name])
    f.write(array)

  tokens, offsets = (os.path.join(folder, name) for name in checksums)
  with open(tokens, 'wb') as tokens, open(offsets, 'wb') as offsets:
    append(offsets, np.zeros(1, np.int64))
    for _ in entry.files:
      lines = 0
      for ids, lengths in stream:
        if not len(lengths):  # the end of the file
          break
        append(tokens, ids.astype(dtype))
        append(offsets, total + np.cumsum(lengths, dtype=np.int64))
        lines += len(lengths)
        total += len(ids)
      shard_lines.append(lines)
  meta = {'dtype': dtype, 'tokens': total, 'shard_lines': shard_lines, 'files': list(entry.files)}
  meta |= {'vocab': vocab.fingerprint, 'checksums': checksums}
  files_lib.write(os.path.join(folder, 'meta.json'), json_files.dump(meta))
