"""Token cache: the ids of every line of a corpus on disk, tokenised once and read by line number.

An entry is a list of files, such as one side of one pair and split: `tokens.bin`, the ids of all lines one after the other (uint16, or int32 for
vocabularies beyond 65,536), `offsets.bin`, int64, the start of each line, and `meta.json`. Line i of the text is line i
of the entry, empty lines included. Both arrays are memory mapped, so a corpus may be larger than memory.

The name of an entry's folder has a hash of its inputs (the vocabulary, and the paths, sizes, modification times and
first and last bytes of the files): if any of them changes, a new folder is made. A folder is written under a temporary
name and renamed when complete, so processes may build the same entry at the same time: the first to finish wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import tqdm

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.lock import lock

_FORMAT = 1
_ENDS = 65536  # bytes from the start and from the end of a file that enter its fingerprint


class TokenCache:
  """Cache entry: the lines of one side, as ids without bos and eos.

  Attributes:
    tokens: all ids, memory mapped.
    offsets: int64, one more than lines; line i is tokens[offsets[i] : offsets[i + 1]].
    shard_lines: number of lines of each file.
  """

  def __init__(self, folder: str):
    with open(os.path.join(folder, 'meta.json')) as f:
      meta = json.load(f)
    self.folder = folder
    self.shard_lines = meta['shard_lines']
    self.tokens = _map(os.path.join(folder, 'tokens.bin'), meta['dtype'], meta['tokens'])
    self.offsets = _map(os.path.join(folder, 'offsets.bin'), 'int64', sum(self.shard_lines) + 1)

  def __len__(self) -> int:
    return len(self.offsets) - 1

  def lengths(self, lines: np.ndarray | slice) -> np.ndarray:
    """Number of ids of each of these lines."""
    if isinstance(lines, slice):
      return np.diff(self.offsets[lines.start : lines.stop + 1])
    return self.offsets[lines + 1] - self.offsets[lines]

  def gather(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids of these lines, one after the other, and the number of ids of each."""
    starts = self.offsets[lines]
    lengths = self.offsets[lines + 1] - starts
    shift = starts - (np.cumsum(lengths) - lengths)
    return self.tokens[np.repeat(shift, lengths) + np.arange(lengths.sum())].astype(np.int32), lengths


def _map(path: str, dtype: str, size: int) -> np.ndarray:
  if os.path.getsize(path) != size * np.dtype(dtype).itemsize:
    raise OSError(f'{path} is incomplete')
  # A plain array view of the map, as numpy's memmap class is slow to index.
  return np.asarray(np.memmap(path, dtype, 'r')) if size else np.zeros(0, dtype)


class Vocab(Protocol):
  """What turns text into ids."""

  size: int
  fingerprint: str  # of everything that the ids depend on


class Entry(NamedTuple):
  """An entry that is wanted."""

  name: str
  files: Sequence[str]
  vocab: Vocab


# (paths, vocab, progress in bytes) -> (ids, lengths) of some lines at a time, and an empty pair at the end of each file
Tokenise = Callable[[Sequence[str], Vocab, Callable[[int], None]], Iterator[tuple[np.ndarray, np.ndarray]]]


def fingerprint(files: Sequence[str], vocab: Vocab) -> str:
  """Hash of everything that an entry depends on, as 16 hex digits."""
  h = hashlib.sha256(f'{_FORMAT} {vocab.fingerprint}'.encode())
  for path in files:
    stat = os.stat(path)
    h.update(f'\n{os.path.realpath(path)} {stat.st_size} {stat.st_mtime_ns} '.encode())
    with open(path, 'rb') as f:
      h.update(f.read(_ENDS))
      f.seek(max(0, stat.st_size - _ENDS))
      h.update(f.read(_ENDS))
  return h.hexdigest()[:16]


def open_entries(
  entries: Sequence[Entry], tokenise: Tokenise, cache_dir: str, *, quiet: bool = False
) -> list[TokenCache]:
  """Opens the caches of all entries; missing ones are built, with a progress bar.

  Raises:
    UserError: a file cannot be read, or the cache cannot be written.
  """
  paths = [os.path.join(cache_dir, f'{entry.name}-{fingerprint(entry.files, entry.vocab)}') for entry in entries]
  found = {path: _open(path) for path in paths}
  if None in found.values():
    with lock(cache_dir):
      _remove_leftovers(cache_dir)
      missing = {}
      for path, entry in zip(paths, entries, strict=True):
        found[path] = found[path] or _open(path)
        if found[path] is None:
          missing[path] = entry.files, entry.vocab
      found |= _build_all(missing, tokenise, quiet)
  return [found[path] for path in paths]


def _build_all(
  missing: dict[str, tuple[Sequence[str], Vocab]], tokenise: Tokenise, quiet: bool
) -> dict[str, TokenCache]:
  built = {}
  size = sum(os.path.getsize(path) for files, _ in missing.values() for path in files)
  with tqdm.tqdm(total=size, desc='tokenising', unit='B', unit_scale=True, disable=quiet or None, leave=False) as bar:
    for vocab in {vocab.fingerprint: vocab for _, vocab in missing.values()}.values():
      entries = [(folder, files) for folder, (files, v) in missing.items() if v.fingerprint == vocab.fingerprint]
      stream = tokenise([path for _, files in entries for path in files], vocab, bar.update)
      for folder, files in entries:
        bar.set_postfix_str(os.path.basename(folder).rpartition('-')[0], refresh=False)
        built[folder] = _build(folder, files, vocab, stream)
  return built


def _remove_leftovers(cache_dir: str) -> None:
  """Removes temporary folders of killed processes of this machine; none is in use, as this process holds the lock."""
  for name in os.listdir(cache_dir):
    if f'.tmp-{socket.gethostname()}-' in name:
      shutil.rmtree(os.path.join(cache_dir, name), ignore_errors=True)


def _open(folder: str) -> TokenCache | None:
  try:
    return TokenCache(folder)
  except (OSError, ValueError, KeyError):  # missing, or incomplete after a full disk or a crash
    return None


def _build(folder: str, files: Sequence[str], vocab: Vocab, stream: Iterator) -> TokenCache:
  """Writes an entry under a temporary name, then renames it into place."""
  temporary = f'{folder}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}'
  try:
    os.makedirs(temporary)
    try:
      _write(temporary, files, vocab, stream)
      return _settle(temporary, folder)
    finally:
      shutil.rmtree(temporary, ignore_errors=True)
  except OSError as e:
    raise UserError(f'cannot write the token cache {folder} ({e.strerror}): give another place for it') from None


def _settle(temporary: str, folder: str) -> TokenCache:
  for _ in range(2):
    try:
      os.rename(temporary, folder)
      break
    except OSError:
      if _open(folder) is not None:  # another process was first
        break
      shutil.rmtree(folder, ignore_errors=True)  # damaged
  cache = _open(folder)
  if cache is None:
    raise OSError(None, 'it cannot be read back', folder)
  return cache


def _write(folder: str, files: Sequence[str], vocab: Vocab, stream: Iterator) -> None:
  dtype = 'uint16' if vocab.size <= 65536 else 'int32'
  shard_lines, total = [], 0
  with (
    open(os.path.join(folder, 'tokens.bin'), 'wb') as tokens,
    open(os.path.join(folder, 'offsets.bin'), 'wb') as offsets,
  ):
    offsets.write(np.zeros(1, np.int64).tobytes())
    for _ in files:
      lines = 0
      for ids, lengths in stream:
        if not len(lengths):  # the end of the file
          break
        tokens.write(ids.astype(dtype).tobytes())
        offsets.write((total + np.cumsum(lengths, dtype=np.int64)).tobytes())
        lines += len(lengths)
        total += len(ids)
      shard_lines.append(lines)
  meta = {'dtype': dtype, 'tokens': total, 'shard_lines': shard_lines, 'files': list(files), 'vocab': vocab.fingerprint}
  with open(os.path.join(folder, 'meta.json'), 'w') as f:
    json.dump(meta, f)
