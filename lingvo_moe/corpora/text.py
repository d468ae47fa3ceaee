"""Lines of text files, local or remote: UTF-8, packed or not, read as a stream; and sentences as they compare."""

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple, TypeVar

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import Advance
from lingvo_moe.core.visible_text import FORMAT
from lingvo_moe.core.visible_text import INVISIBLE as INVISIBLE
from lingvo_moe.core.visible_text import is_empty as is_empty
from lingvo_moe.corpora import packed
from lingvo_moe.storage import files as files_lib

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


class FilePart(NamedTuple):
  """Part of a text file: lines `first` up to `last` of those that begin at bytes `begin` up to `end`.

  None stands for the end. A file that is packed has no other parts by bytes than the whole.
  """

  path: str
  begin: int = 0
  end: int | None = None
  first: int = 0
  last: int | None = None

  def batches(self, progress: Advance | None = None) -> Iterator[list[bytes]]:
    """Yields the lines as line_batches does; no list is empty."""
    done = 0
    for batch in line_batches(self.path, progress=progress, begin=self.begin, end=self.end):
      last = len(batch) if self.last is None else max(self.last - done, 0)
      if part_batch := batch[max(self.first - done, 0) : last]:
        yield part_batch
      done += len(batch)
      if last < len(batch):
        return

  def number(self, place: int) -> int:
    """Number in the file, from 1, of the line at a place among those of the part, from 0."""
    return _lines_before(self.path, self.begin) + self.first + place + 1


def parts(path: str, size: int) -> list[FilePart]:
  """Parts of a file that are read apart: of `size` bytes each, or the whole if it is packed."""
  total = files_lib.size(path)
  if total <= size or packed.is_packed(path):
    return [FilePart(path)]
  return [FilePart(path, begin, min(begin + size, total)) for begin in range(0, total, size)]


def line_batches(
  path: str,
  size: int = _BATCH,
  progress: Advance | None = None,
  strict: bool = True,
  begin: int = 0,
  end: int | None = None,
) -> Iterator[list[bytes]]:
  """Yields the lines of a file, without line ends, in lists of up to `size`; only one list is in memory at a time.

  Args:
    path: path of a text file, as packed.opened takes it.
    size: number of lines in a list.
    progress: function called with the bytes of the file consumed since the last call.
    strict: whether a line that is not UTF-8, or has a NUL, is an error.
    begin, end: bytes of the file between which lines begin; see FilePart.

  Raises:
    UserError: the file cannot be read, or such a line (with its number).
  """
  number = 0
  with packed.opened(path) as (raw, contents):
    for batch in batches(_between(contents, begin, end), raw, progress, size, begin):
      batch = [line.rstrip(b'\r\n') for line in batch]
      if strict and bad_byte(data := b'\n'.join(batch)) >= 0:
        check(data, path, number + _lines_before(path, begin))
      number += len(batch)
      yield batch


def _between(contents: IO[bytes], begin: int, end: int | None) -> Iterator[bytes]:
  """Lines that begin at these bytes of the contents."""
  if begin:
    contents.seek(begin - 1)
    contents.readline()  # the rest of a line that begins before
  if end is None:
    yield from contents
    return
  place = contents.tell()
  for line in contents if place < end or not begin else ():  # a byte order mark may be beyond the end
    yield line
    place += len(line)
    if place >= end:
      return


def _lines_before(path: str, begin: int) -> int:
  """Number of lines that begin before a byte of a file at which, or after which, a part begins."""
  if not begin:
    return 0
  return sum(map(len, line_batches(path, strict=False, end=begin)))


def batches(
  items: Iterator[_T], raw: IO[bytes], progress: Advance | None, size: int = _BATCH, consumed: int = 0
) -> Iterator[list[_T]]:
  """Yields what is read from a file in lists of up to `size`; `progress` gets the bytes consumed since the last."""
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
  """A text for people to see, of at most `length` characters; what is cut ends in an ellipsis."""
  return text if len(text) <= length else text[: length - 1] + '…'


def lines(files: Iterable[str]) -> Iterator[str]:
  """Yields the lines of files, in order, read as a stream."""
  return (line.decode('utf-8') for path in files for batch in line_batches(path) for line in batch)


def count_lines(path: str) -> int:
  """Counts the lines of a file, read as a stream; a last line without LF counts."""
  return sum(len(batch) for batch in line_batches(path))
