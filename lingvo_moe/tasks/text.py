"""Lines of text files: UTF-8, gzipped or not, read as a stream."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator

from lingvo_moe.core.errors import UserError

_LINES_A_BATCH = 4096


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
    UserError: the file is missing, damaged, or not UTF-8 (with the line number).
  """
  number, consumed = 0, 0
  try:
    with open(path, 'rb') as raw:
      lines = gzip.GzipFile(fileobj=raw) if path.endswith('.gz') else raw
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


def _take(lines, size: int) -> list[bytes]:
  batch = []
  for line in lines:
    batch.append(line.rstrip(b'\r\n') if line.endswith((b'\n', b'\r')) else line)
    if len(batch) == size:
      break
  return batch


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
      raise UserError(
        f'text must be UTF-8; line {number + i + 1} of {path} is not (byte {e.start + 1}: '
        f'{line[e.start : e.start + 4]!r}): convert it, e.g. with iconv -f latin1 -t utf-8'
      ) from None


def read_lines(files: Iterable[str]) -> list[str]:
  """Reads all lines of these files, in order; for held-out sets, which are small."""
  return [line.decode('utf-8') for path in files for batch in line_batches(path) for line in batch]


def count_lines(path: str) -> int:
  """Counts the lines of a file, read as a stream; a last line without LF counts."""
  return sum(len(batch) for batch in line_batches(path))
