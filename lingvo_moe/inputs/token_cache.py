"""Token cache: the ids of every line of a corpus on disk, tokenised once and read by line number.

An entry is a list of files, such as one side of one pair and split. Line i of the text is line i of the entry, empty
lines included. An entry consists of shards, each of the lines that begin in 128 MiB of a file, or of a packed file:
`00000.tokens`, the ids of the lines one after the other (uint16, or int32 for vocabularies beyond 65,536),
`00000.offsets`, int64, where each line begins, and `00000.json`, the checksums of their blocks. `meta.json` lists the
shards when all are made.

The folder may be shared or remote. Any number of processes make the shards of an entry side by side: each claims those
that nobody has (storage/claims.py). A start reads `meta.json` alone. Shards are opened when one of their lines is used,
blocks are read and verified when they are used (blocks.py), and what is damaged is made again.

The name of an entry's folder has a hash of its inputs, the vocabulary and the contents of the files: if any of them
changes, a new folder is made, and the one of what the same files had before is removed. `hashes.json` beside the
entries keeps the hashes of files, so that one that has not changed is not read again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.core import progress as progress_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.text import FilePart, parts
from lingvo_moe.storage import content_hashes, json_files
from lingvo_moe.storage import files as files_lib
from lingvo_moe.storage.blocks import BlockArray, DamagedError, Writer
from lingvo_moe.storage.claims import WAIT_SECONDS, Claims
from lingvo_moe.vocab.tokeniser import Tokeniser

_FORMAT = 4  # with 3, an entry was one shard, verified when it was opened
_SHARD_BYTES = 128 << 20  # of text
_ENTRY = re.compile(r'(.+)-[0-9a-f]{16}')  # name of a folder
_META = {
  'shards': json_files.list_of(json_files.list_of(json_files.INTEGER)),  # file, begin, end, lines, ids of each
  'files': json_files.list_of(json_files.TEXT),
  'vocab': json_files.TEXT,
}
_SHARD = {
  'lines': json_files.INTEGER,
  'tokens': json_files.INTEGER,
  'checksums': json_files.by_name(json_files.list_of(json_files.INTEGER)),
}


# (parts, progress in bytes) -> (ids, lengths) of some lines at a time, and an empty pair at the end of each part
Tokenise = Callable[[Iterator[FilePart], Callable[[int], None]], Iterator[tuple[np.ndarray, np.ndarray]]]


class CacheEntry(NamedTuple):
  """Name and text of an entry, and how it becomes ids.

  `by_line` says whether each line is tokenised alone; parts of a file may be then.
  """

  name: str
  files: Sequence[str]
  vocab: Tokeniser
  tokenise: Tokenise
  by_line: bool = True


@dataclasses.dataclass(eq=False)
class _Shard:
  """Shard of an entry, which is opened when it is used; `lines` and `total`, of ids, are known when it is made."""

  path: str  # without ending
  part: FilePart
  entry: CacheEntry
  lines: int = 0
  total: int = 0

  @property
  def claim(self) -> str:
    return f'{self.path}.claim'

  @property
  def dtype(self) -> str:
    return 'uint16' if self.entry.vocab.size <= 65536 else 'int32'

  @property
  def offsets(self) -> BlockArray:
    return self._arrays[0]

  @property
  def tokens(self) -> BlockArray:
    return self._arrays[1]

  def is_made(self) -> bool:
    """Whether it is, and its description whole; which is read."""
    with contextlib.suppress(OSError, UserError):
      meta = self.read()
      self.lines, self.total = meta['lines'], meta['tokens']
      return True
    return False

  def read(self) -> dict[str, Any]:
    """The shard's description; OSError or UserError where it is missing or damaged."""
    return json_files.read(f'{self.path}.json', 'that of a shard of a token cache', 'it is made again', **_SHARD)

  def write(self, stream: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
    """Writes the shard, given (ids, lengths) of its lines, up to an empty pair; its last file appears last."""
    lines = total = 0
    replacing = functools.partial(files_lib.replacing, binary=True)
    with replacing(f'{self.path}.tokens') as tokens, replacing(f'{self.path}.offsets') as offsets:
      writers = {'tokens': Writer(tokens), 'offsets': Writer(offsets)}
      writers['offsets'].append(np.zeros(1, np.int64))
      for ids, lengths in itertools.takewhile(lambda batch: len(batch[1]), stream):
        writers['tokens'].append(ids.astype(self.dtype))
        writers['offsets'].append(total + np.cumsum(lengths, dtype=np.int64))
        lines += len(lengths)
        total += len(ids)
      for writer in writers.values():
        writer.close()
    checksums = {name: writer.checksums for name, writer in writers.items()}
    with files_lib.replacing(f'{self.path}.json') as f:
      f.write(json_files.dump({'lines': lines, 'tokens': total, 'checksums': checksums}))

  @functools.cached_property
  def _arrays(self) -> tuple[BlockArray, BlockArray]:
    try:
      return self._open()
    except (DamagedError, UserError, OSError) as e:
      print(f'the token cache is damaged ({e}); this part of it is made again', file=sys.stderr)
    self.write(self.entry.tokenise(iter([self.part]), lambda size: None))
    return self._open()

  def _open(self) -> tuple[BlockArray, BlockArray]:
    meta = self.read()
    if (meta['lines'], meta['tokens']) != (self.lines, self.total):
      raise DamagedError(f'{self.path}.json is of other lines')
    offsets, tokens = (meta['checksums'][name] for name in ('offsets', 'tokens'))
    return (
      BlockArray(f'{self.path}.offsets', 'int64', self.lines + 1, offsets, self._offsets_again),
      BlockArray(f'{self.path}.tokens', self.dtype, self.total, tokens, self._tokens_again),
    )

  def _offsets_again(self, start: int, end: int) -> np.ndarray:
    before = max(start - 1, 0)
    first = self.offsets[np.array([before])][0] if start else 0
    _, lengths = self._tokenised(before, end - 1)
    return np.cumsum(np.concatenate([[first], lengths]))[start - before :]

  def _tokens_again(self, start: int, end: int) -> np.ndarray:
    offsets = self.offsets[:]
    first, last = np.searchsorted(offsets, start, 'right') - 1, np.searchsorted(offsets, end)
    ids, _ = self._tokenised(int(first), int(last))
    return ids[start - offsets[first] : end - offsets[first]]

  def _tokenised(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, lengths) of some of the lines."""
    stream = self.entry.tokenise(iter([self.part._replace(first=first, last=last)]), lambda size: None)
    return tuple(np.concatenate(column) for column in zip(*stream, strict=True))


class TokenCache:
  """Cache entry: the lines of one side, as ids without bos and eos."""

  def __init__(self, folder: str, shards: Sequence[Any], file_lines: Sequence[int] = ()):
    self.folder, self.file_lines, self._shards = folder, file_lines, shards  # folder: '' of several joined
    self._first_line = np.cumsum([0, *(shard.lines for shard in shards)])
    self._first_token = np.cumsum([0, *(shard.total for shard in shards)])
    self.total = int(self._first_token[-1])  # number of ids

  def __len__(self) -> int:
    return int(self._first_line[-1])

  def spans(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the first id of each of these lines, and of the one after its last."""
    starts, ends = np.empty((2, len(lines)), np.int64)
    for shard, where in self._by_shard(self._first_line, lines):
      line, offsets = lines[where] - self._first_line[shard], self._shards[shard].offsets
      starts[where] = offsets[line] + self._first_token[shard]
      ends[where] = offsets[line + 1] + self._first_token[shard]
    return starts, ends

  def lengths(self, lines: np.ndarray) -> np.ndarray:
    """Number of ids of each of these lines."""
    starts, ends = self.spans(lines)
    return ends - starts

  def gather(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids of these lines, one after the other, and the number of ids of each."""
    starts, ends = self.spans(lines)
    lengths = ends - starts
    shift = starts - (np.cumsum(lengths) - lengths)
    return self.take(np.repeat(shift, lengths) + np.arange(lengths.sum())), lengths

  def take(self, numbers: np.ndarray) -> np.ndarray:
    """Ids by their numbers, int32."""
    ids, flat = np.empty(numbers.size, np.int32), numbers.ravel()
    for shard, where in self._by_shard(self._first_token, flat):
      ids[where] = self._shards[shard].tokens[flat[where] - self._first_token[shard]]
    return ids.reshape(numbers.shape)

  def _by_shard(self, firsts: np.ndarray, numbers: np.ndarray) -> Iterator[tuple[int, Any]]:
    """Yields (shard, places of its numbers)."""
    if len(self._shards) == 1:
      yield 0, slice(None)
      return
    yield from groups(np.searchsorted(firsts, numbers, 'right') - 1)

  def parts(self) -> Iterator[np.ndarray]:
    """Yields all ids, those of a shard at a time."""
    return (shard.tokens[:] for shard in self._shards)

  @property
  def tokens(self) -> np.ndarray:
    """All ids, in memory if there are several shards."""
    tokens = list(self.parts())
    return tokens[0] if len(tokens) == 1 else np.concatenate(tokens)

  @property
  def offsets(self) -> np.ndarray:
    """Number of the first id of each line, and at the end that of all ids; in memory."""
    firsts = zip(self._first_token, self._shards)
    return np.concatenate([[0], *(first + shard.offsets[:][1:] for first, shard in firsts)])

  def subset(self, lines: np.ndarray) -> TokenCache:
    tokens, lengths = self.gather(lines)
    offsets = np.cumsum(np.concatenate([[0], lengths]))
    shard = types.SimpleNamespace(lines=len(lines), total=len(tokens), offsets=offsets, tokens=tokens)
    return TokenCache(self.folder, [shard], [len(lines)])


def groups(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (value, its places in ascending order) for each of some integers, ascending."""
  order = np.argsort(values, kind='stable')
  starts = np.flatnonzero(np.diff(values[order], prepend=-1))  # empty if `values` is, in which case zip yields nothing
  for start, end in zip(starts, np.append(starts[1:], len(order))):
    yield int(values[order[start]]), order[start:end]


def joined(caches: Sequence[TokenCache]) -> TokenCache:
  """Lines of several caches as one."""
  return TokenCache('', [shard for cache in caches for shard in cache._shards])


def folders_of(entries: Sequence[CacheEntry], cache_dir: str, quiet: bool = False) -> list[str]:
  """Folders of entries, each named by a hash of everything that it depends on."""
  hashes = iter(content_hashes.of([path for entry in entries for path in entry.files], cache_dir, quiet))
  key = lambda entry: ' '.join([str(_FORMAT), entry.vocab.fingerprint, *itertools.islice(hashes, len(entry.files))])
  digest = lambda entry: hashlib.sha256(key(entry).encode()).hexdigest()[:16]
  return [os.path.join(cache_dir, f'{entry.name}-{digest(entry)}') for entry in entries]


def open_entries(entries: Sequence[CacheEntry], cache_dir: str, *, quiet: bool = False) -> list[TokenCache]:
  """Opens the caches of all entries; missing ones are made, with other processes that do, with a progress bar.

  Raises:
    UserError: a file cannot be read, or the cache cannot be written.
  """
  folders = folders_of(entries, cache_dir, quiet)
  caches = {folder: _open(folder, entry, quiet) for folder, entry in zip(folders, entries, strict=True)}
  if missing := {folder: entry for folder, entry in zip(folders, entries, strict=True) if caches[folder] is None}:
    try:
      _make(missing, quiet)
    except OSError as e:
      raise UserError(
        f'cannot write the token cache {e.filename or cache_dir} ({e.strerror}): give another place for it'
      ) from None
    caches |= {folder: _open(folder, entry, quiet) for folder, entry in missing.items()}
    _remove_older(missing)
  return [caches[folder] for folder in folders]


def _open(folder: str, entry: CacheEntry, quiet: bool = False) -> TokenCache | None:
  """An entry; None where it is not whole yet, or its list of shards is damaged."""
  try:
    path = os.path.join(folder, 'meta.json')
    meta = json_files.read(path, 'that of a token cache', 'it is made again', **_META)
  except OSError:
    return None
  except UserError as e:
    if not quiet:
      print(f'the token cache is damaged ({e}); its list of shards is made again', file=sys.stderr)
    return None
  shards, file_lines = [], [0] * len(entry.files)
  for number, (file, begin, end, lines, total) in enumerate(meta['shards']):
    part = FilePart(entry.files[file], begin, end or None)
    shards.append(_Shard(_shard_path(folder, number), part, entry, lines, total))
    file_lines[file] += lines
  return TokenCache(folder, shards, file_lines)


def _shard_path(folder: str, number: int) -> str:
  return os.path.join(folder, f'{number:05d}')


def _make(missing: Mapping[str, CacheEntry], quiet: bool) -> None:
  """Makes the entries that go into these folders, as far as no other process does, and waits for the others."""
  todo: dict[Tokenise, list[_Shard]] = {}
  plans = {folder: _plan(folder, entry) for folder, entry in missing.items()}
  for shard in itertools.chain(*plans.values()):
    todo.setdefault(shard.entry.tokenise, []).append(shard)
  size = sum(files_lib.size(path) for entry in missing.values() for path in entry.files)
  with (
    Claims() as claims,
    progress_lib.bar(size, 'tokenising', 'B', quiet) as bar,
  ):

    def progress(size: int) -> None:
      bar.update(size)
      claims.renew()

    while any(todo.values()):
      is_idle = True
      for tokenise, of_vocab in todo.items():
        for shard in _make_free(of_vocab, tokenise, claims, progress):
          bar.set_postfix_str(shard.entry.name, refresh=False)
          is_idle = False
        todo[tokenise] = [shard for shard in of_vocab if not shard.is_made()]
      if is_idle and any(todo.values()):
        bar.set_postfix_str(f'{sum(map(len, todo.values()))} shards are with other processes')
        time.sleep(WAIT_SECONDS)
  for folder, shards in plans.items():
    _list_shards(folder, missing[folder], shards)


def _plan(folder: str, entry: CacheEntry) -> list[_Shard]:
  files_lib.makedirs(folder)
  file_parts = [
    part for path in entry.files for part in (parts(path, _SHARD_BYTES) if entry.by_line else [FilePart(path)])
  ]
  return [_Shard(_shard_path(folder, number), part, entry) for number, part in enumerate(file_parts)]


def _make_free(
  shards: Sequence[_Shard], tokenise: Tokenise, claims: Claims, progress: Callable[[int], None]
) -> Iterator[_Shard]:
  """Makes those shards that nobody has claimed, and yields each when it is made."""
  claimed_shards: list[_Shard] = []

  def claimed() -> Iterator[FilePart]:
    for shard in claims.free(shards, lambda shard: shard.claim, _Shard.is_made):
      claimed_shards.append(shard)
      yield shard.part

  stream = tokenise(claimed(), progress)
  for number in itertools.count():
    if (first := next(stream, None)) is None:
      return
    claimed_shards[number].write(itertools.chain([first], stream))
    claims.release(claimed_shards[number].claim)
    yield claimed_shards[number]


def _list_shards(folder: str, entry: CacheEntry, made_shards: Sequence[_Shard]) -> None:
  """Writes the list of an entry's shards, all of which are made."""
  shards = [[entry.files.index(s.part.path), s.part.begin, s.part.end or 0, s.lines, s.total] for s in made_shards]
  meta = {'shards': shards, 'files': list(entry.files), 'vocab': entry.vocab.fingerprint}
  with files_lib.replacing(os.path.join(folder, 'meta.json')) as f:
    f.write(json_files.dump(meta))


def _remove_older(made: Mapping[str, CacheEntry]) -> None:
  """Removes entries of the names and vocabularies of these, by folder, with what the same files held before."""
  of_name: dict[str, list[tuple[str, CacheEntry]]] = {}
  for folder, entry in made.items():
    of_name.setdefault(entry.name, []).append((folder, entry))
  cache_dir = os.path.dirname(next(iter(made)))
  for match in filter(None, map(_ENTRY.fullmatch, files_lib.listdir(cache_dir))):
    other = os.path.join(cache_dir, match[0])
    for folder, entry in of_name.get(match[1], ()):
      with contextlib.suppress(OSError, UserError):
        meta = {} if other == folder else json_files.read(os.path.join(other, 'meta.json'))  # older: without shards
        if (meta.get('vocab'), meta.get('files')) == (entry.vocab.fingerprint, list(entry.files)):
          files_lib.rmtree(other)
