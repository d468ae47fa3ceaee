"""Contents of a text file: gzip, xz and bzip2 are unpacked; a file that holds no text is refused by what it is.

What a file is, its first bytes say, whatever its name. A byte order mark of UTF-8 at its beginning is no text and is
left out.
"""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files

# Most that a packed file may unpack to: times its size, or bytes if that is more. Text comes to 3 to 10 times.
_MOST_TIMES = 100
_ALWAYS_BYTES = 8 << 20
_BUFFER = 1 << 17  # bytes
LOOK = 4096  # bytes by which a file is known

ENDING = re.compile(r'\.(gz|xz|bz2|zst)\Z', re.IGNORECASE)  # of the name of a packed file
_PACKED = {  # by ending: what packs it, how a file begins, and what opens it
  'gz': ('gzip', rb'\x1f\x8b', gzip.open),
  'xz': ('xz', rb'\xfd7zXZ\0', lzma.open),
  'bz2': ('bzip2', rb'BZh[1-9](1AY&SY|\x17rE8P\x90)', bz2.open),
}
_NOT_TEXT = (  # (place of a signature, signature, what has it, way out)
  (257, b'ustar\0', 'a tar archive', 'unpack it with tar -xf, and give a file of it'),
  (257, b'ustar  \0', 'a tar archive', 'unpack it with tar -xf, and give a file of it'),  # of GNU
  (0, b'PK\3\4', 'a zip archive', 'unpack it with unzip, and give a file of it'),
  (0, b'7z\xbc\xaf\x27\x1c', 'a 7z archive', 'unpack it with 7z x, and give a file of it'),
  (0, b'Rar!\x1a\7', 'a rar archive', 'unpack it with unrar x, and give a file of it'),
  (0, b'\x28\xb5\x2f\xfd', 'packed by zstd', 'unpack it with zstd -d, and give that file, or pack it with gzip or xz'),
  (0, b'\x04\x22\x4d\x18', 'packed by lz4', 'unpack it with lz4 -d, and give that file, or pack it with gzip or xz'),
  (0, b'\x1f\x8b', 'packed twice', 'unpack it once with gunzip, and give that file'),
  (0, b'PAR1\x15', 'a Parquet table', 'write its columns as text or JSON lines first'),
  (0, b'%PDF-', 'a PDF document', 'take its text out first, e.g. with pdftotext'),
)
# What is raised where an entry of a zip is damaged, whatever packs it, or locked by a password.
DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError, EOFError, OSError, ValueError)
_MARKS = (  # that of UTF-32 begins as that of UTF-16 does
  (codecs.BOM_UTF32_LE, 'utf-32'),
  (codecs.BOM_UTF32_BE, 'utf-32'),
  (codecs.BOM_UTF16_LE, 'utf-16'),
  (codecs.BOM_UTF16_BE, 'utf-16'),
)


def named(folder: str) -> list[tuple[str, str, str]]:
  """(stem, ending, path) of each file named stem.ending, or else so with the ending of a packed file."""
  paths = {}
  for name in sorted(files.file_names(folder)):  # 'x.txt' comes before 'x.txt.gz'
    stem, dot, ending = ENDING.sub('', name).rpartition('.')
    if dot and stem:
      paths.setdefault((stem, ending), os.path.join(folder, name))
  return [(*name, path) for name, path in paths.items()]


def is_packed(path: str) -> bool:
  """Whether a file that is there is packed, by its first bytes or its name."""
  return bool(_packing(path, files.read(path, LOOK)))


def _packing(path: str, first: bytes) -> str:
  """Ending of files packed as a file is, whose first bytes and path are given; '' if it is not packed."""
  by_bytes = [ending for ending, (_, begin, _) in _PACKED.items() if re.match(begin, first)]
  by_name = [ending.lower() for ending in ENDING.findall(path) if ending.lower() in _PACKED]
  return next(iter(by_bytes + by_name), '')


@contextlib.contextmanager
def opened(path: str, any_encoding: bool = False) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
  """Opens a text file: yields (the file as it lies there, its contents).

  Args:
    path: of a local or remote file, or a pipe.
    any_encoding: whether text may be other than UTF-8, as that of XML may.

  Raises:
    UserError: here or while it is read; the file is missing, damaged or no text, or unpacks to too much.
  """
  packing = ''
  try:
    with files.open_to_read(path) as raw:
      contents = raw
      if ending := _packing(path, raw.peek(LOOK)):
        packing, _, open_packed = _PACKED[ending]
        contents = io.BufferedReader(_Bounded(open_packed(raw), raw, path), _BUFFER)
      first = contents.peek(LOOK)[:LOOK]
      refuse_what_is_no_text(path, first, any_encoding)
      if first.startswith(codecs.BOM_UTF8):
        contents.read(len(codecs.BOM_UTF8))
      yield raw, contents
  except FileNotFoundError:
    raise UserError(f'no such file: {path}') from None
  except (EOFError, zlib.error, lzma.LZMAError, OSError) as e:
    if isinstance(e, OSError) and (e.errno is not None or not packing):  # without a number it is of gzip or bz2
      raise UserError(f'cannot read {path}: {e.strerror or e}') from None
    raise UserError(f'{path} is damaged or not {packing} ({e}): make or fetch it again') from None


def most_bytes(packed: int) -> int:
  """Bytes that `packed` packed bytes may unpack to."""
  return max(_MOST_TIMES * packed, _ALWAYS_BYTES)


class _Bounded(io.RawIOBase):
  """Contents of a packed file, up to a limit, so that a small file cannot keep a reader busy forever."""

  def __init__(self, unpacked: IO[bytes], packed: IO[bytes], path: str):
    self._unpacked, self._packed, self._path = unpacked, packed, path

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    size = self._unpacked.readinto(buffer)
    unpacked, packed = self._unpacked.tell(), self._packed.tell()
    if unpacked > most_bytes(packed):
      raise UserError(
        f'a packed file may unpack to {_MOST_TIMES} times its size beyond its first {_ALWAYS_BYTES >> 20} MiB; saw '
        f'{unpacked:,} bytes in the first {packed:,} of {self._path}: see what is in it, and unpack it yourself if it '
        'is text'
      )
    return size


def refuse_what_is_no_text(path: str, first: bytes, any_encoding: bool = False) -> None:
  """Raises UserError where the first LOOK bytes of contents say that they are no text, or none of UTF-8 in lines."""
  for place, signature, what, way_out in _NOT_TEXT:
    if first.startswith(signature, place):
      raise UserError(f'a corpus is text; {path} is {what}: {way_out}')
  if any_encoding:
    return
  nuls = first.count(0)
  encoding = next((name for mark, name in _MARKS if first.startswith(mark)), '')
  if not encoding and nuls and (nuls * 50 > len(first) or _decoded(first, 'utf-8') is None):
    encoding = _encoding_without_mark(first)
  if encoding:
    raise UserError(f'text must be UTF-8; {path} is {encoding.upper()}: convert it with iconv -f {encoding} -t utf-8')
  if b'\n' not in first and b'\r' in first.rstrip(b'\r'):
    raise UserError(f"lines end with LF; {path} has CR alone: convert it with tr '\\r' '\\n' < FILE > OTHER")
  if nuls * 50 > len(first):
    raise UserError(
      f'a corpus is text; {path} is a binary file ({nuls} of its first {len(first)} bytes are NUL): give its text, or '
      "remove them with tr -d '\\000' if it is text"
    )


def _decoded(first: bytes, encoding: str) -> str | None:
  """Text of the beginning of a file, which may end within a character; None if that is not of the encoding."""
  with contextlib.suppress(UnicodeDecodeError):
    return codecs.getincrementaldecoder(encoding)().decode(first)


def _encoding_without_mark(first: bytes) -> str:
  """Encoding in which the beginning of a file is text without NUL, with most spaces and line ends; '' if in none."""
  spaces = {'': 0}
  for encoding in ('utf-32-le', 'utf-32-be', 'utf-16-le', 'utf-16-be'):
    text = _decoded(first, encoding) or '\0'
    spaces[encoding] = (text.count(' ') + text.count('\n')) * ('\0' not in text)
  return max(spaces, key=spaces.get)
