"""Arrays in files, local or remote, of which only what is used is read, and verified, by blocks with a checksum each.

A local file is memory mapped. Blocks of a remote one are copied, when they are first used, into a sparse temporary file
of this machine, which is mapped in its place.

ArrayRecord (array-record 0.8.6, whose wheels cover our platforms) does not do: it opens local files alone, replaces no
damaged chunk, and reads a file that was cut short as an empty one.
"""

from __future__ import annotations

import concurrent.futures
import mmap
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from typing import IO, ClassVar

import numpy as np

from lingvo_moe.storage import files

_BYTES = 1 << 16  # of a block
_THREADS = 16  # that read blocks of a remote file
_RESIDENT = 256 << 20  # bytes of arrays whose pages stay in memory


class DamagedError(Exception):
  """File of a cache that is not as it was written; says which."""


class Writer:
  """Writer of an array, part by part; `checksums` are those of its blocks, when it is closed."""

  def __init__(self, file: IO[bytes]):
    self._file, self._rest = file, b''
    self.checksums: list[int] = []

  def append(self, part: np.ndarray) -> None:
    self._file.write(part)
    data = self._rest + part.tobytes()
    end = len(data) // _BYTES * _BYTES
    self.checksums += [zlib.crc32(data[start : start + _BYTES]) for start in range(0, end, _BYTES)]
    self._rest = data[end:]

  def close(self) -> None:
    self.checksums += [zlib.crc32(self._rest)] * bool(self._rest)


class BlockArray:
  """Array of one axis in a file, which is indexed as one of NumPy.

  Args:
    path: of the file, as a Writer wrote it.
    dtype: of its items.
    size: their number.
    checksums: of the blocks.
    again: makes the items from one up to another again, for a block that is damaged.

  Raises:
    DamagedError: the file is not there, or of another size.
  """

  _resident: ClassVar[list[BlockArray]] = []

  def __init__(
    self, path: str, dtype: str, size: int, checksums: Sequence[int], again: Callable[[int, int], np.ndarray]
  ):
    self._path, self._checksums, self._again = path, checksums, again
    self._items = _BYTES // np.dtype(dtype).itemsize  # of a block
    self._is_remote = files.is_remote(path)
    try:
      is_whole = files.size(path) == size * np.dtype(dtype).itemsize and len(checksums) == -(-size // self._items)
    except FileNotFoundError:
      is_whole = False
    if not is_whole:
      raise DamagedError(f'{path} is cut short')
    self._values, self._is_resident = np.zeros(0, dtype), True
    if size:
      with tempfile.TemporaryFile() if self._is_remote else open(path, 'rb') as f:
        if self._is_remote:
          f.truncate(size * np.dtype(dtype).itemsize)
        self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_WRITE if self._is_remote else mmap.ACCESS_READ)
      self._values, self._is_resident = np.frombuffer(self._map, dtype), False
    self._is_verified = np.zeros(len(checksums), bool)

  def __getitem__(self, items: np.ndarray | slice) -> np.ndarray:
    """Items by their numbers, or all of them by [:]."""
    if not self._is_resident:
      self._become_resident()
    blocks = np.arange(len(self._checksums)) if isinstance(items, slice) else items // self._items
    if not (verified := self._is_verified[blocks]).all():
      self._verify(np.unique(blocks[~verified]))
    return self._values[items]

  def _become_resident(self) -> None:
    """Counts this array among those whose pages are in memory; there is room for some, and then all others leave."""
    if sum(array._values.nbytes for array in self._resident) > _RESIDENT:
      for array in self._resident:
        array._map.madvise(mmap.MADV_DONTNEED)
        array._is_resident = False
      self._resident.clear()
    self._resident.append(self)
    self._is_resident = True

  def _verify(self, blocks: np.ndarray) -> None:
    if self._is_remote:
      with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(self._fetch, blocks.tolist()))
    for block in blocks.tolist():
      if zlib.crc32(self._block(block)) != self._checksums[block]:
        self._mend(block)
      self._is_verified[block] = True

  def _block(self, number: int) -> np.ndarray:
    return self._values[number * self._items : (number + 1) * self._items]

  def _fetch(self, number: int) -> None:
    block_bytes = self._block(number).view(np.uint8)
    block_bytes[:] = np.frombuffer(files.read(self._path, block_bytes.nbytes, number * _BYTES), np.uint8)

  def _mend(self, number: int) -> None:
    """Makes a damaged block again, also in the file if it is local."""
    print(
      f'the token cache is damaged (block {number} of {self._path} was changed since it was written); this block is '
      'made again',
      file=sys.stderr,
    )
    start = number * self._items
    items = self._again(start, start + len(self._block(number))).astype(self._values.dtype)
    if zlib.crc32(items) != self._checksums[number]:
      raise DamagedError(f'{self._path} is not of the text as it is now')
    if self._is_remote:
      self._block(number)[:] = items
    else:
      with open(self._path, 'r+b') as f:
        f.seek(number * _BYTES)
        f.write(items)
