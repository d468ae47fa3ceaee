"""Markup around text: one walker for HTML, XML and subtitles, which changes nothing but text.

A document is markup and paragraphs. Inline elements, such as <b>, are parts of a paragraph: its plain text is
translated, and each element is put around the words that come from those it had. No entity is expanded but those of
single characters.
"""

import collections
import html
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from lingvo_moe.addons.documents.formats import Markup
from lingvo_moe.text.inline_placement import WORD, Aligned, Atom, Path, placed, without_outer_spaces

_DEEPEST = 64  # inline elements within each other; more end the paragraph
_NESTED = 8  # paragraphs within each other, as of a note in a text box; more end the paragraph
_ENTITY = re.compile(r'&(?:#[0-9]++;?|#[xX][0-9a-fA-F]++;?|[^\t\n\f <&#;]{1,32};?)')
_SIGNS = ('&', '<', '#', '/', '!', '?')  # with which markup and entities begin
_LONGEST_ENTITY = 40  # characters
_SPACE = re.compile(r'[ \t\r\n\f]++')
_PIECE = re.compile(rf'{_SPACE.pattern}|{WORD}|.', re.S)
_LABEL = re.compile(r'<(?:meta|\?xml)\b[^<>]*?\b(?:charset|encoding)\s*+=\s*+["\']?+([\w.:-]++)', re.I)
_ATTRIBUTE = re.compile(r'([^\s"\'<>/=]++)(?:\s*+=\s*+("[^"]*+"|\'[^\']*+\'|[^\s"\'<>]++))?+')


class _Token(NamedTuple):
  """Text or markup of a document; `kind` is that of a part, 'empty' of a tag without an end."""

  kind: str
  begin: int
  end: int
  name: str = ''


class _Part(NamedTuple):
  """Text or markup of a document that ends, or is in, a paragraph."""

  kind: str  # 'text', 'void', 'open', 'close', or 'end' of a paragraph
  begin: int
  end: int
  name: str = ''
  inner: 'MarkedUp | None' = None  # what is within an element that has paragraphs of its own
  inner_begin: int = 0


class _Paragraph(NamedTuple):
  """Paragraph: its plain text, and the parts that it is made of."""

  text: str
  parts: Sequence[_Part]


class MarkedUp:
  """Document in markup; or what is within an element of one, `outer`, that has paragraphs of its own.

  `texts` are the plain texts of its paragraphs, without line breaks.
  """

  def __init__(self, document: str, markup: Markup, outer: 'MarkedUp | None' = None) -> None:
    self._document, self._markup = document, markup
    self._depth = outer._depth + 1 if outer else 0
    label = _LABEL.search(document) if markup.escaped else None
    # Whether new text is of ASCII: a document comes back in UTF-8, whatever it says.
    self._ascii = outer._ascii if outer else bool(label) and label[1].lower().replace('-', '') != 'utf8'
    self._pieces = list(self._paragraphs(list(self._parts())))
    self.texts: list[str] = []
    for piece in self._pieces:
      self.texts += [piece.text] if isinstance(piece, _Paragraph) else []
      for part in piece.parts if isinstance(piece, _Paragraph) else [piece]:
        self.texts += part.inner.texts if part.inner else []

  def written(self, translations: Sequence[Aligned]) -> str:
    """The document with a translation of each paragraph."""
    return self._written(iter(translations))

  def _written(self, following: Iterator[Aligned]) -> str:
    return ''.join(
      self._translated(piece.parts, next(following), following)
      if isinstance(piece, _Paragraph)
      else self._raw(piece, following)
      for piece in self._pieces
    )

  def _raw(self, part: _Part, following: Iterator[Aligned]) -> str:
    """Text of a part as it is in the document, but for the paragraphs within it."""
    raw = self._document[part.begin : part.end]
    if part.inner:
      begin = part.inner_begin - part.begin
      raw = raw[:begin] + part.inner._written(following) + raw[begin + len(part.inner._document) :]
    return raw

  def _paragraphs(self, parts: Sequence[_Part]) -> Iterator[_Paragraph | _Part]:
    """Paragraphs, and the parts between them."""
    begin = 0
    for end in [*_ends(parts), len(parts)]:
      paragraph_parts = parts[begin:end]
      text = ''
      if any(
        c.isalpha() or c == '&' for p in paragraph_parts if p.kind == 'text' for c in self._document[p.begin : p.end]
      ):
        text = ''.join(atom.text for atom in self._atoms(paragraph_parts, None))
      yield from [_Paragraph(text, paragraph_parts)] if any(map(str.isalpha, text)) else paragraph_parts
      yield from parts[end : end + 1]
      begin = end + 1

  def _parts(self) -> Iterator[_Part]:
    document, markup = self._document, self._markup
    tokens = list(_tokens(document, markup))
    nested = markup.nested if self._depth < _NESTED else frozenset()
    left_alone = [
      token.kind == 'open'
      and (
        token.name in nested or markup.leaves_alone(token.name) or _says_no(document[token.begin : token.end], markup)
      )
      for token in tokens
    ]
    elements = _elements(tokens, left_alone, markup)
    around: list[str] = []  # names of the elements around
    held: _Part | None = None  # which may get longer
    i = 0
    while i < len(tokens):
      token, following = tokens[i], elements.get(i, i + 1)
      name, inner, end = token.name, None, tokens[following - 1].end
      if token.kind == 'text':
        raw = document[token.begin : token.end]
        kind = 'text' if not markup.holders or (around and around[-1] in markup.holders) else 'end'
        is_joined = kind == 'end' and raw.isspace()
      elif i in elements:
        if name in nested:
          last = tokens[following - 1]
          inner = MarkedUp(document[token.end : last.begin if last.kind == 'close' else end], markup, self)
        kind = 'void' if name in nested or name in markup.kept or markup.is_inline(name) else 'end'
        is_joined = name in markup.properties
      else:
        kind = token.kind
        if kind == 'open' and markup.holders:
          around.append(name)
        elif kind == 'close' and around:
          around.pop()
        if name in markup.void or (kind == 'empty' and (name in markup.kept or markup.is_inline(name))):
          kind = 'void'
        elif kind != 'void' and not (kind != 'empty' and markup.is_inline(name)):
          kind = 'end'
        is_joined = name in markup.properties
      if held and is_joined and held.kind != 'text':
        held = held._replace(end=end)
      else:
        if held:
          yield held
        held = _Part(kind, token.begin, end, name, inner if inner and inner.texts else None, token.end)
      i = following
    if held:
      yield held

  def _atoms(self, parts: Sequence[_Part], following: Iterator[Aligned] | None) -> list[Atom]:
    """Atoms of a paragraph; `following` are translations of the paragraphs within it, None: they are not written."""
    atoms: list[Atom] = []
    path: Path = ()
    for i, part in enumerate(parts):
      raw = self._document[part.begin : part.end]
      if part.kind == 'open':
        path = (*path, i)
      elif part.kind == 'close':
        if not atoms or path[-1] not in atoms[-1].path:
          atoms.append(Atom(path, '', ''))
        path = path[:-1]
      elif part.kind == 'void':
        atoms.append(Atom(path, '', raw if following is None else self._raw(part, following)))
      else:
        atoms += [Atom(path, text, raw) for text, raw in _pieces(raw, self._markup.escaped)]
    return without_outer_spaces(atoms)

  def _translated(self, parts: Sequence[_Part], translation: Aligned, following: Iterator[Aligned]) -> str:
    atoms = self._atoms(parts, following)
    lines = 0
    if self._markup.lines:
      lines = 1 + ''.join(self._document[p.begin : p.end] for p in parts if p.kind == 'text').strip().count('\n')
    placed_atoms = [*placed(atoms, translation, lines), Atom((), '')]
    tags = self._tags(parts, {a.path[-1] for a in placed_atoms if a.path and not a.raw and a.text.isspace()})
    # A sign that is no markup stays as it is where what follows it does: it would be markup before other text.
    behind = {id(atom): after for atom, after in zip(atoms, [*atoms[1:], placed_atoms[-1]]) if atom.raw in _SIGNS}
    stays = [behind.get(id(atom), after) is after for atom, after in zip(placed_atoms, [*placed_atoms[1:], None])]
    written: list[str] = []
    path: Path = ()
    for atom, *are_same in zip(placed_atoms, stays, [*stays[1:], True]):
      common = next((i for i, (a, b) in enumerate(zip(path, atom.path)) if a != b), min(len(path), len(atom.path)))
      written += [tags[number][1] for number in reversed(path[common:])]
      written += [tags[number][0] for number in atom.path[common:]]
      is_new = not atom.raw or (atom.raw in _SIGNS and not all(are_same))
      written.append(self._escaped(atom.text) if is_new else atom.raw)
      path = atom.path
    return ''.join(written)

  def _tags(self, parts: Sequence[_Part], spaced: Collection[int]) -> dict[int, tuple[str, str]]:
    """Tags (begin, end) of the elements of a paragraph; those that are `spaced` have a new space at an edge."""
    tags: dict[int, tuple[str, str]] = {}
    opened: list[int] = []
    for i, part in enumerate(parts):
      tag = self._document[part.begin : part.end]
      if part.kind == 'open':
        opened.append(i)
        # A text of DOCX keeps a space at its edges only where its tag says so.
        tags[i] = tag.replace('<w:t>', '<w:t xml:space="preserve">') if i in spaced else tag, ''
      elif part.kind == 'close':
        number = opened.pop()
        tags[number] = tags[number][0], tag
    return tags

  def _escaped(self, text: str) -> str:
    text = html.escape(text, quote=False) if self._markup.escaped else text
    return text.encode('ascii', 'xmlcharrefreplace').decode() if self._ascii else text


def _pieces(raw: str, escaped: bool) -> Iterator[tuple[str, str]]:
  """(text, as it is in the document) of the words, spaces, marks and entities of a text."""
  begin = 0
  for entity in _ENTITY.finditer(raw) if escaped else ():
    text = html.unescape(entity[0]) if len(entity[0]) <= _LONGEST_ENTITY else entity[0]
    if text == entity[0]:  # none
      continue
    yield from _plain(raw, begin, entity.start())
    rest = text[1:] if entity[0].endswith(text[1:]) else ''  # behind an entity without a semicolon
    begin = entity.end() - len(rest)
    text = text.removesuffix(rest) if len(text) == 1 + len(rest) else ''  # none of several characters is expanded
    yield _SPACE.sub(' ', text), raw[entity.start() : begin]
  yield from _plain(raw, begin, len(raw))


def _plain(raw: str, begin: int, end: int) -> Iterator[tuple[str, str]]:
  return ((_SPACE.sub(' ', piece), piece) for piece in _PIECE.findall(raw, begin, end))


def _tokens(document: str, markup: Markup) -> Iterator[_Token]:
  end = 0
  for match in markup.token.finditer(document):
    if match.start() > end:
      yield _Token('text', end, match.start())
    end, groups = match.end(), match.groupdict()
    name = groups['name'] or groups.get('raw') or ''
    name = name if markup.holders else name.lower()
    kind = 'open'
    if groups['note'] or groups.get('raw'):
      kind = 'end' if name in markup.apart else 'void'
    elif not name:
      kind = 'end'
    elif groups['close']:
      kind = 'close'
    elif groups.get('empty') or name in markup.endless:
      kind = 'empty'
    yield _Token(kind, match.start(), end, name)
  if end < len(document):
    yield _Token('text', end, len(document))


def _elements(tokens: Sequence[_Token], is_wanted: Sequence[bool], markup: Markup) -> dict[int, int]:
  """Number of the token behind each element, by that of its begin, of those that are wanted."""
  ends: dict[int, int] = {}
  around: list[int] = []
  counts = collections.Counter()  # by name
  for i, token in enumerate(tokens):
    ended: list[int] = []
    if token.kind == 'open':
      while around and token.name in markup.ended_by.get(tokens[around[-1]].name, ()):
        ended.append(around.pop())
      around.append(i)
      counts[token.name] += 1
    elif token.kind == 'close' and counts[token.name]:
      while tokens[around[-1]].name != token.name:
        ended.append(around.pop())
      ends[around[-1]] = i + 1
      counts[tokens[around.pop()].name] -= 1
    for number in ended:
      ends[number] = i
      counts[tokens[number].name] -= 1
  ends |= dict.fromkeys(around, len(tokens))
  return {number: end for number, end in ends.items() if is_wanted[number]}


def _says_no(tag: str, markup: Markup) -> bool:
  """Whether a tag of HTML says that its element is not to be translated."""
  if not markup.is_html or 'translate' not in tag.lower():
    return False
  attributes = {name.lower(): value.strip('"\'').lower() for name, value in reversed(_ATTRIBUTE.findall(tag))}
  return attributes.get('translate') == 'no' or 'notranslate' in attributes.get('class', '').split()


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
