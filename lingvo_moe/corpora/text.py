"""Lines of text files, local or remote: UTF-8, packed or not, read as a stream; and sentences as they compare."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TypeVar

from lingvo_moe.core import files as files_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.visible_text import FORMAT
from lingvo_moe.core.visible_text import INVISIBLE as INVISIBLE
from lingvo_moe.core.visible_text import is_empty as is_empty
from lingvo_moe.corpora import packed

Progress = Callable[[int], object]  # called with bytes of a file
_T = TypeVar('_T')

_BATCH = 4096  # lines, or pairs of them
_FORMATS = re.compile(f'[{FORMAT}]+')


def key(line: str) -> str:
  """A sentence as it compares with others: NFKC, without format characters, runs of white space made one space.

  A line that is_empty has the key ''.
  """
  printable = line.isprintable()  # then U+0020 is its only space, and it has no format character
  if printable and line.isascii() and '  ' not in line:  # most lines of many languages: in half the time
    return line.strip(' ')
  if is_empty(line):
    return ''
  line = unicodedata.normalize('NFKC', line if printable else _FORMATS.sub('', line))
  if printable and '  ' not in line:
    return line.strip(' ')
  return ' '.join(line.split())


def corpus_folder(data_dir: str) -> str:
  """Path of the folder that `data_dir` names, where paths of its files begin; UserError if it is not there."""
  files_lib.check_scheme('data_dir', data_dir, files_lib.SCHEMES)
  folder = files_lib.plain(data_dir)
  if not folder or not files_lib.isdir(folder):
    raise UserError(f'data_dir must be an existing folder; saw {data_dir!r}: give one with --data_dir=...')
  return folder


def line_batches(
  path: str, size: int = _BATCH, progress: Progress | None = None, strict: bool = True
) -> Iterator[list[bytes]]:
  """Yields the lines of a file, without line ends, in lists of up to `size`; only one list is in memory at a time.

  Args:
    path: path of a text file, as packed.opened takes it.
    size: number of lines in a list.
    progress: function called with the bytes of the file consumed since the last call.
    strict: whether a line that is not UTF-8, or has a NUL, is an error.

  Raises:
    UserError: the file cannot be read, or such a line (with its number).
  """
  number = 0
  with packed.opened(path) as (raw, contents):
    for batch in batches(contents, raw, progress, size):
      batch = [line.rstrip(b'\r\n') for line in batch]
      if strict:
        check(b'\n'.join(batch), path, number)
      number += len(batch)
      yield batch


def batches(items: Iterator[_T], raw: IO[bytes], progress: Progress | None, size: int = _BATCH) -> Iterator[list[_T]]:
  """Yields what is read from a file in lists of up to `size`; `progress` gets the bytes consumed since the last."""
  consumed = 0
  while batch := list(itertools.islice(items, size)):
    if progress:
      progress(raw.tell() - consumed)
      consumed = raw.tell()
    yield batch


def bad_byte(data: bytes) -> int:
  """Place of the first byte that is not UTF-8, or else of the first NUL; -1 if there is neither."""
  try:
    data.decode('utf-8')
    return data.find(0)
  except UnicodeDecodeError as e:
    return e.start


def check(data: bytes, path: str, before: int = 0) -> None:
  """Raises UserError at the first line of some lines that is not UTF-8, or has a NUL; `before` them are as many."""
  if (place := bad_byte(data)) >= 0:
    rule, seen, way_out = 'text must be UTF-8', 'is not', 'convert it, e.g. with iconv -f latin1 -t utf-8'
    if not data[place]:
      rule, seen, way_out = 'text has no NUL bytes', 'has one', "remove them with tr -d '\\000', if the rest is text"
    line, byte = data.count(b'\n', 0, place) + 1, place - data.rfind(b'\n', 0, place)
    raise UserError(
      f'{rule}; line {before + line} of {path} {seen} (byte {byte}: {data[place : place + 4]!r}): {way_out}'
    )


def shortened(text: str, length: int) -> str:
  """A text for people to see, of at most so many characters; what is cut ends in an ellipsis."""
  return text if len(text) <= length else text[: length - 1] + '…'


def lines(files: Iterable[str]) -> Iterator[str]:
  """Yields the lines of files, in order, read as a stream."""
  return (line.decode('utf-8') for path in files for batch in line_batches(path) for line in batch)


def count_lines(path: str) -> int:
  """Counts the lines of a file, read as a stream; a last line without LF counts."""
  return sum(len(batch) for batch in line_batches(path))
