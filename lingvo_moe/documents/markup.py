"""Markup around text: one walker for HTML, XML and subtitles, which changes nothing but text.

A document is markup and paragraphs. Inline elements, such as <b>, are parts of a paragraph: its plain text is
translated, and each element is put around the words that come from those it had. No entity is expanded but those of
single characters.
"""

import dataclasses
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lingvo_moe.documents.placement import Aligned, Leaf, Path, placed

_SPACE = re.compile(r'[ \t\r\n\f]+')
_DEEPEST = 64  # inline elements within each other; more end the paragraph
_TAG = r"""<(?P<close>/)?(?P<name>[A-Za-z][^\s/<>]*+)(?:[^'"<>/]++|"[^"]*+"|'[^']*+'|(?P<empty>/(?=>))|/)*+>"""
_NOTES = r'<!--.*?(?:-->|\Z)|<\?.*?(?:\?>|\Z)'


def _names(text: str) -> frozenset[str]:
  return frozenset(text.split())


@dataclasses.dataclass(frozen=True)
class Markup:
  """Kind of markup. A token that is neither inline nor void ends a paragraph."""

  # matches what is no text. Groups: `note`, inline without text; `run`, the begin of a run with its properties;
  # `name` of a tag, `close` of an end tag, `empty` of a tag without an end.
  token: re.Pattern[str]
  inline: frozenset[str]  # names of elements within paragraphs
  void: frozenset[str] = frozenset()  # names of inline tags without an end
  holders: frozenset[str] = frozenset()  # names of the elements whose own text is translated; none: of all
  escaped: bool = True  # whether text has entities
  lines: bool = False  # whether a translation has as many lines as its source


_INLINE = _names(
  'a abbr acronym b bdi bdo big cite del dfn em font i ins label mark nobr q s small span strike strong sub sup time tt'
  ' u'
)
HTML = Markup(
  re.compile(
    rf'(?P<note>{_NOTES}|<(?P<inner>script|style|code|kbd|samp|var)\b[^<>]*+>.*?(?:</(?P=inner)\s*>|\Z))|'
    rf'<(?P<outer>pre|textarea|template|svg|math|object|iframe)\b[^<>]*+>.*?(?:</(?P=outer)\s*>|\Z)|<![^<>]*+>|{_TAG}',
    re.S | re.I,
  ),
  inline=_INLINE,
  void=_names('img wbr input'),
)
# Properties belong to the tag of their paragraph or run. They are not sought beyond it, so that time is linear.
DOCX = Markup(
  re.compile(
    rf'(?P<note>{_NOTES})|<w:pPr>(?:(?!</?w:p[ >]|<w:pPr>).)*</w:pPr>|'
    rf'(?P<run><w:r(?:\s[^<>]*+)?>(?:\s*+<w:rPr>(?:(?!</?w:r[ >]).)*</w:rPr>)?)|{_TAG}',
    re.S,
  ),
  inline=_names('w:r w:t w:hyperlink w:ins w:smartTag'),
  void=_names('w:proofErr w:bookmarkStart w:bookmarkEnd w:lastRenderedPageBreak w:footnoteReference'),
  holders=_names('w:t'),
)
ODT = Markup(
  re.compile(rf'(?P<note>{_NOTES})|{_TAG}', re.S),
  inline=_names('text:span text:a'),
  void=_names('text:s text:bookmark text:bookmark-start text:bookmark-end text:soft-page-break'),
  holders=_names('text:p text:h text:span text:a'),
)
SRT = Markup(
  re.compile(
    r'(?:^\d+[ \t]*\r?\n)?^[^\n]*?-->[^\n]*$|\n[ \t\r]*(?=\n)|(?P<note>\{\\[^{}\n]*+\})|'
    r'<(?P<close>/)?(?P<name>[A-Za-z]+)[^<>]*+>',
    re.M,
  ),
  inline=_names('b c font i u v'),
  escaped=False,
  lines=True,
)


class _Part(NamedTuple):
  """Text or markup of a document."""

  kind: str  # 'text', 'void', 'open', 'close', or 'end' of a paragraph
  raw: str
  name: str = ''


class _Paragraph(NamedTuple):
  """Paragraph: `text` is translated; the tags (begin, end) of its elements by the numbers of their leaves."""

  text: str
  leaves: Sequence[Leaf]
  elements: Mapping[int, tuple[str, str]]
  lines: int


class MarkedUp:
  """Document in markup."""

  def __init__(self, document: str, markup: Markup) -> None:
    self._markup = markup
    self._pieces = list(_pieces(document, markup))
    self.texts = [piece.text for piece in self._pieces if isinstance(piece, _Paragraph)]  # without line breaks

  def written(self, translations: Sequence[Aligned]) -> str:
    """The document with a translation of each paragraph."""
    following = iter(translations)
    return ''.join(p if isinstance(p, str) else self._translated(p, next(following)) for p in self._pieces)

  def _translated(self, paragraph: _Paragraph, translation: Aligned) -> str:
    if self._markup.lines:
      translation = translation._replace(text=_broken(translation.text, paragraph.lines))
    written: list[str] = []
    path: Path = ()
    for leaf in [*placed(paragraph.leaves, translation), Leaf((), '')]:
      common = next((i for i, (a, b) in enumerate(zip(path, leaf.path)) if a != b), min(len(path), len(leaf.path)))
      written += [paragraph.elements[number][1] for number in reversed(path[common:])]
      written += [paragraph.elements[number][0] for number in leaf.path[common:]]
      written.append(html.escape(leaf.text, quote=False) if self._markup.escaped else leaf.text)
      written.append(leaf.raw)
      path = leaf.path
    return ''.join(written)


def _parts(document: str, markup: Markup) -> Iterator[_Part]:
  around: list[str] = []  # names of the elements around
  end = 0
  for token in [*markup.token.finditer(document), None]:
    if text := document[end : token.start() if token else None]:
      held = not markup.holders or (around and around[-1] in markup.holders)
      yield _Part('text' if held else 'end' if text.strip() else 'void', text)
    if token is None:
      return
    end, found = token.end(), token.groupdict()
    name = 'w:r' if found.get('run') else found['name'] or ''
    name = name if markup.holders else name.lower()
    kind = 'close' if found['close'] else 'void' if found.get('empty') else 'open'
    if markup.holders and name and kind == 'open':
      around.append(name)
    elif markup.holders and name and kind == 'close' and around:
      around.pop()
    is_void = found['note'] or name in markup.void
    yield _Part('void' if is_void else kind if name in markup.inline else 'end', token[0], name)


def _pieces(document: str, markup: Markup) -> Iterator[_Paragraph | str]:
  """Paragraphs, and what is between them."""
  parts = list(_parts(document, markup))
  ends = _ends(parts)
  begin = 0
  for end in [*ends, len(parts)]:
    yield _paragraph(parts[begin:end], markup)
    yield from (part.raw for part in parts[end : end + 1])
    begin = end + 1


def _ends(parts: Sequence[_Part]) -> list[int]:
  """Numbers of the parts between paragraphs: also of tags whose element is not within one paragraph."""
  ends, opened = [], []
  for i, part in enumerate(parts):
    if part.kind == 'open' and len(opened) < _DEEPEST:
      opened.append(i)
    elif part.kind == 'close' and opened and parts[opened[-1]].name == part.name:
      opened.pop()
    elif part.kind not in ('text', 'void'):
      ends += [*opened, i]
      opened = []
  return sorted([*ends, *opened])


def _paragraph(parts: Sequence[_Part], markup: Markup) -> _Paragraph | str:
  """A paragraph of some parts, or their markup where no letter is among them."""
  raw = ''.join(part.raw for part in parts)
  if not any(c.isalpha() for part in parts if part.kind == 'text' for c in part.raw):
    return raw
  seen = [i for i, part in enumerate(parts) if part.kind == 'text' and part.raw.strip()]
  leaves: list[Leaf] = []
  elements: dict[int, tuple[str, str]] = {}
  path: list[int] = []
  space = True  # whether the text so far ends with one
  for i, part in enumerate(parts):
    if part.kind == 'open':
      path.append(i)
    elif part.kind == 'close':
      if not leaves or path[-1] not in leaves[-1].path:
        leaves.append(Leaf(tuple(path), ''))
      elements[path[-1]] = parts[path[-1]].raw, part.raw
      path.pop()
    elif part.kind == 'void' or not seen[0] <= i <= seen[-1]:
      leaves.append(Leaf(tuple(path), '', part.raw))
    else:
      body = part.raw.lstrip() if i == seen[0] else part.raw
      before, after = part.raw[: len(part.raw) - len(body)], ''
      if i == seen[-1]:
        body, after = body.rstrip(), body[len(body.rstrip()) :]
      text = _SPACE.sub(' ', html.unescape(body) if markup.escaped else body)
      text = text.removeprefix(' ') if space else text
      space = text.endswith(' ') if text else space
      edges = Leaf(tuple(path), '', before), Leaf(tuple(path), text), Leaf(tuple(path), '', after)
      leaves += [leaf for leaf in edges if leaf.text or leaf.raw]
  lines = 1 + ''.join(part.raw for part in parts if part.kind == 'text').strip().count('\n')
  return _Paragraph(''.join(leaf.text for leaf in leaves), leaves, elements, lines)


def _broken(text: str, lines: int) -> str:
  """A text in so many lines of similar length, 9 at most, broken at spaces; of the same length in all."""
  for line in range(1, min(lines, 9)):
    middle = len(text) * line // lines
    spaces = [at for at in (text.rfind(' ', 0, middle), text.find(' ', middle)) if at > 0]
    if spaces:
      at = min(spaces, key=lambda at: abs(at - middle))
      text = f'{text[:at]}\n{text[at + 1 :]}'
  return text
