"""Lines of text files, local or remote: UTF-8, gzipped or not, read as a stream."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO

from lingvo_moe.core import files as files_lib
from lingvo_moe.core import paths
from lingvo_moe.core.errors import UserError

_LINES_A_BATCH = 4096
# What a gzip file may unpack to: so many times its size, or so many bytes if that is more. Text comes to 3 to 10 times.
_MOST_TIMES = 100
_ALWAYS_BYTES = 8 << 20
_BUFFER = 1 << 17  # bytes


def corpus_folder(data_dir: str) -> str:
  """Path of the folder that `data_dir` names, where paths of its files begin; UserError if it is not there."""
  paths.check('data_dir', data_dir, files_lib.SCHEMES)
  folder = files_lib.plain(data_dir)
  if not folder or not files_lib.isdir(folder):
    raise UserError(f'data_dir must be an existing folder; saw {data_dir!r}: give one with --data_dir=...')
  return folder


def unpacked(raw: IO[bytes]) -> io.BufferedReader:
  """Contents of an open gzip file; reading raises UserError where they are out of proportion to its size."""
  return io.BufferedReader(_Unpacked(fileobj=raw), _BUFFER)


def line_batches(
  path: str, size: int = _LINES_A_BATCH, progress: Callable[[int], None] | None = None, check_utf8: bool = True
) -> Iterator[list[bytes]]:
  """Yields the lines of a file, without line ends, in lists of up to `size`; only one list is in memory at a time.

  Args:
    path: path of a text file; gzip if it ends in .gz.
    size: number of lines in a list.
    progress: function called with the bytes of the file consumed since the last call.
    check_utf8: whether a line that is not UTF-8 is an error.

  Raises:
    UserError: the file is missing, damaged, out of proportion, or not UTF-8 (with the line number).
  """
  number, consumed = 0, 0
  try:
    with files_lib.open_to_read(path) as raw:
      lines = unpacked(raw) if path.endswith('.gz') else raw
      while batch := _take(lines, size):
        if check_utf8:
          _check_utf8(batch, path, number)
        number += len(batch)
        if progress:
          progress(raw.tell() - consumed)
          consumed = raw.tell()
        yield batch
  except FileNotFoundError:
    raise UserError(f'no such file: {path}') from None
  except (EOFError, gzip.BadGzipFile, zlib.error) as e:
    raise UserError(f'{path} is damaged or not gzip ({e}, after line {number}): make or fetch it again') from None
  except OSError as e:
    raise UserError(f'cannot read {path}: {e.strerror or e}') from None


class _Unpacked(gzip.GzipFile):
  """Contents of a gzip file, up to a limit, so that a small file cannot keep a reader busy forever."""

  def readinto(self, buffer):
    size = super().readinto(buffer)
    packed = self.fileobj.tell()
    if self.tell() > max(_MOST_TIMES * packed, _ALWAYS_BYTES):
      raise UserError(
        f'a .gz file may unpack to {_MOST_TIMES} times its size beyond its first {_ALWAYS_BYTES >> 20} MiB; saw '
        f'{self.tell():,} bytes in the first {packed:,} of {self.fileobj.name}: see what is in it, and unpack it '
        'yourself if it is text'
      )
    return size


def shortened(text: str, length: int) -> str:
  """A text for people to see, of at most so many characters; what is cut ends in an ellipsis."""
  return text if len(text) <= length else text[: length - 1] + '…'


def _take(lines, size: int) -> list[bytes]:
  return [line.rstrip(b'\r\n') for line in itertools.islice(lines, size)]


def _check_utf8(batch: list[bytes], path: str, number: int) -> None:
  try:
    b'\n'.join(batch).decode('utf-8')
    return
  except UnicodeDecodeError:
    pass
  for i, line in enumerate(batch):
    try:
      line.decode('utf-8')
    except UnicodeDecodeError as e:
      where = f'line {number + i + 1} of {path} is not (byte {e.start + 1}: {line[e.start : e.start + 4]!r})'
      raise UserError(f'text must be UTF-8; {where}: {way_out(line)}') from None


def is_utf_16(first: bytes) -> bool:
  """Whether a text begins with the byte order mark of UTF-16."""
  return first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def way_out(line: bytes) -> str:
  """Command that converts a text that is not UTF-8, for an error; `line` is its first line that is not."""
  encoding = 'utf-16' if is_utf_16(line) else 'latin1'
  return f'convert it, e.g. with iconv -f {encoding} -t utf-8'


def read_lines(files: Iterable[str]) -> list[str]:
  """Reads all lines of these files, in order; for held-out sets, which are small."""
  return [line.decode('utf-8') for path in files for batch in line_batches(path) for line in batch]


def count_lines(path: str) -> int:
  """Counts the lines of a file, read as a stream; a last line without LF counts."""
  return sum(len(batch) for batch in line_batches(path))
