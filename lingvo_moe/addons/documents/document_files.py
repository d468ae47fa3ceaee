"""Files to translate: plain text, HTML, subtitles (.srt), and office documents (.docx, .odt), which are zip archives.

>>> document = files.read('letter.docx', data, most=1 << 20)
>>> translated = document.written([Aligned(text) for text in run.translate(document.texts)])
"""

import io
import os
import re
import zipfile
from collections.abc import Sequence

from lingvo_moe.addons.documents.formats import DOCX, HTML, ODT, SRT, Markup
from lingvo_moe.addons.documents.markup import MarkedUp
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.packed import DAMAGE
from lingvo_moe.text.inline_placement import Aligned

_MARKUPS = {'.html': HTML, '.htm': HTML, '.srt': SRT}
_OFFICE = {  # markup, entries with text, that of the body, and a declaration of its namespace by another prefix
  '.docx': (
    DOCX,
    re.compile(r'word/(document|header\d*|footer\d*|footnotes|endnotes|comments)\.xml'),
    'word/document.xml',
    re.compile(r'xmlns(?!:w=)(?::[\w.-]++)?+=["\']http://[^"\'<>]*?/wordprocessingml/(?:2006/)?main["\']'),
  ),
  '.odt': (
    ODT,
    re.compile(r'(content|styles)\.xml'),
    'content.xml',
    re.compile(r'xmlns(?!:text=)(?::[\w.-]++)?+=["\']urn:oasis:names:tc:opendocument:xmlns:text:1\.0["\']'),
  ),
}
SUFFIXES = ('.txt', *_MARKUPS, *_OFFICE)
_MOST_ENTRIES = 10_000


class Lines:
  """Plain text, of which each line is a paragraph."""

  def __init__(self, text: str) -> None:
    self._parts = re.split(r'(\A\ufeff|\r?\n|\r)', text)
    self.texts = self._parts[::2]

  def written(self, translations: Sequence[Aligned]) -> str:
    ends = [*self._parts[1::2], '']
    return ''.join(line.text + end for line, end in zip(translations, ends, strict=True))


class _Office:
  """Office document: a zip archive with markup in some of its entries."""

  def __init__(self, data: bytes, suffix: str, most: int) -> None:
    self._entries = _unpacked(data, suffix, most)
    markup, has_text, body, other_prefix = _OFFICE[suffix]
    if not any(entry.filename == body for entry, _ in self._entries):
      seen = len(self._entries)
      raise UserError(f'a {suffix} file has its text in {body}; none of its {seen} entries is that: save it again')
    self._marked_up = {
      entry.filename: _xml(content, markup, entry.filename, other_prefix)
      for entry, content in self._entries
      if has_text.fullmatch(entry.filename)
    }
    self.texts = [text for part in self._marked_up.values() for text in part.texts]

  def written(self, translations: Sequence[Aligned]) -> bytes:
    following, packed = iter(translations), io.BytesIO()
    with zipfile.ZipFile(packed, 'w', zipfile.ZIP_DEFLATED) as archive:
      for entry, content in self._entries:
        if part := self._marked_up.get(entry.filename):
          content = part.written([next(following) for _ in part.texts]).encode()
        archive.writestr(entry.filename, content, entry.compress_type)
    return packed.getvalue()


Document = Lines | MarkedUp | _Office  # its `texts` are paragraphs without line breaks; `written` puts others there


def read(name: str, data: bytes, most: int) -> Document:
  """A document of the kind that the suffix of its name says; UserError where it is not one.

  Args:
    name: of the file.
    data: its contents.
    most: bytes of an archive's entries in all, unpacked.
  """
  suffix = os.path.splitext(name)[1].lower()
  if suffix in _OFFICE:
    return _Office(data, suffix, most)
  if suffix not in SUFFIXES:
    raise UserError(f'a file must be one of {", ".join(SUFFIXES)}; saw {name:.60}')
  text = _decoded(data, name)
  if suffix == '.srt' and '\n' not in text:
    text = text.replace('\r', '\n')
  return MarkedUp(text, _MARKUPS[suffix]) if suffix in _MARKUPS else Lines(text)


def _decoded(data: bytes, name: str) -> str:
  try:
    return data.decode()
  except UnicodeDecodeError as e:
    raise UserError(f'text must be UTF-8; {name:.60} is not from byte {e.start} on: save it as UTF-8') from None


def _xml(content: bytes, markup: Markup, name: str, other_prefix: re.Pattern[str]) -> MarkedUp:
  """A part in XML, which declares no document type: entities of its own could grow without a limit."""
  text = _decoded(content, name)
  if '<!DOCTYPE' in text or '<!ENTITY' in text:
    raise UserError(f'a document must not declare entities; {name} has a document type: save it again')
  if other := other_prefix.search(text):
    raise UserError(f'a document names its elements as word processors do; {name} has {other[0]:.80}: save it again')
  return MarkedUp(text, markup)


def _unpacked(data: bytes, suffix: str, most: int) -> list[tuple[zipfile.ZipInfo, bytes]]:
  """Entries of an archive; UserError where it is damaged, too large, or has names that are no plain paths."""
  entries, left = [], most
  try:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
      infos = archive.infolist()
      names = {info.filename for info in infos}
      if len(infos) > _MOST_ENTRIES or len(names) < len(infos):
        raise UserError(f'an archive has at most {_MOST_ENTRIES} entries, each once; saw {len(infos)}')
      for info in infos:
        if info.filename.startswith('/') or '\\' in info.filename or '..' in info.filename.split('/'):
          raise UserError(f'entries of an archive have plain paths; saw {info.filename!r:.60}')
        with archive.open(info) as entry:  # whose header may say less than there is
          entries.append((info, entry.read(left + 1)))
        left -= len(entries[-1][1])
        if left < 0:
          raise UserError(f'a file must unpack to at most {most} bytes: send a smaller one')
  except UserError:
    raise
  except DAMAGE as e:
    raise UserError(f'the file is not a whole {suffix} file: {e!s:.100}') from None
  return entries
