"""Placement of inline elements in a translation: around the words that come from those they had in the source."""

import bisect
import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# Words; characters of scripts that have no spaces between words, and marks, are each alone.
WORD = r'[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]++'
_UNIT = re.compile(rf'{WORD}|\S')
_MOST_LINES = 9  # of a paragraph that is broken anew

Path = tuple[int, ...]  # numbers of the elements around a text, outermost first


class Aligned(NamedTuple):
  """Translation of a paragraph; without links, its words are taken to come in the order of the source."""

  text: str
  links: Sequence[tuple[int, int, int, int]] = ()  # source begin and end, target begin and end, in characters


class Atom(NamedTuple):
  """Piece of a paragraph in a path of elements: (a part of) a word, a space, or markup without text.

  `text` is what is translated of it, and `raw` what the document has. What is written without `raw` is new text.
  """

  path: Path
  text: str
  raw: str = ''

  @property
  def is_space(self) -> bool:
    return (self.raw or self.text).isspace() or self.text.isspace()


class _Word(NamedTuple):
  """Word or punctuation mark of a source, with the numbers of its first atom and of the one behind its last."""

  text: str
  begin: int
  first: int
  end: int


def placed(atoms: Sequence[Atom], translation: Aligned, lines: int = 0, in_order: bool = True) -> Iterator[Atom]:
  """Atoms of a translation, given those of its source: what has no text stays, with the spaces around it.

  Where two words come from neighbours of the source in their order, all between these is as it was.

  Args:
    atoms: those of the source; their texts together are the text that was translated.
    translation: of that text.
    lines: into which a translation is broken that does not have all words of its source in their order; 0: as it is.
    in_order: whether what has no text keeps its order; otherwise each part of it goes beside a word beside it.
  """
  words = _words(atoms)
  units = list(_UNIT.finditer(translation.text))
  paths = [next(atom.path for atom in atoms[word.first : word.end] if atom.text) for word in words]
  owners = _owners(words, paths, units, translation)
  _keep(paths, owners)
  begin, end = words[0].first, words[-1].end
  yield from atoms[:begin]
  text, inner = translation.text, list(atoms)
  if lines and owners != list(range(len(words))):
    text = _broken(text, lines, '\r\n' if any('\r\n' in atom.raw for atom in atoms) else '\n')
    inner = [a._replace(raw=a.text) if '\n' in a.raw and begin <= i < end else a for i, a in enumerate(atoms)]
    units = list(_UNIT.finditer(text))
  gaps = [inner[a.end : b.first] for a, b in itertools.pairwise(words)]  # behind each word but the last
  joints = list(zip([None, *owners], [*owners, None]))  # words of the source before and behind each place
  places = {a: place for place, (a, b) in reversed(list(enumerate(joints))) if a is not None and b == a + 1}
  moved = _moved(inner, words, paths, owners, gaps, places)
  betweens, written = _betweens(moved, joints, words, in_order), set()
  for place, (before, after) in enumerate(joints):
    between = betweens[place]
    space = text[units[place - 1].end() : units[place].start()] if 0 < place < len(units) else ''
    follows = after is not None and units[place][0].isalnum()
    gap_atoms = gaps[before] if places.get(before) == place else []
    is_same = gap_atoms and not between and words[after].text.isalnum() == follows
    if is_same and ''.join(atom.text for atom in gap_atoms) in (space, space and '\xa0'):
      yield from gap_atoms
    else:
      edges = (paths[before] if before is not None else ()), (paths[after] if after is not None else ())
      yield from _spaced([*between, *gap_atoms], space, follows, before is None, after is None, edges)
    if after is not None:
      word = words[after]
      yield from _written(inner[word.first : word.end], word.text, units[place][0], after not in written)
      written.add(after)
  yield from atoms[end:]


def without_outer_spaces(atoms: Sequence[Atom]) -> list[Atom]:
  """Atoms of which spaces at the ends of the text, and behind another space, are no text."""
  seen = [i for i, atom in enumerate(atoms) if atom.text and not atom.text.isspace()]
  first, last = (seen[0], seen[-1]) if seen else (0, -1)
  left: list[Atom] = []
  space = False  # whether the text so far ends with one
  for i, atom in enumerate(atoms):
    if not first <= i <= last or (space and atom.text == ' '):
      atom = atom._replace(text='') if atom.text else atom
    elif atom.text:
      space = atom.text == ' '
    left.append(atom)
  return left


def _words(atoms: Sequence[Atom]) -> list[_Word]:
  """Words of a source, whose ends are ends of atoms."""
  with_text = [i for i, atom in enumerate(atoms) if atom.text]
  begins = list(itertools.accumulate((len(atoms[i].text) for i in with_text), initial=0))
  words, at = [], 0
  for unit in _UNIT.finditer(''.join(atom.text for atom in atoms)):
    first = bisect.bisect_left(begins, unit.start(), at)
    at = bisect.bisect_left(begins, unit.end(), first)
    words.append(_Word(unit[0], unit.start(), with_text[first], with_text[at - 1] + 1))
  return words


def _owners(
  words: Sequence[_Word], paths: Sequence[Path], units: Sequence[re.Match], translation: Aligned
) -> list[int]:
  """Number of the source word from which each word of a translation comes."""
  begins = [word.begin for word in words]
  votes = collections.defaultdict(collections.Counter)  # by character
  for begin, end, target_begin, target_end in translation.links:
    word = max(bisect.bisect_right(begins, (begin + end) // 2) - 1, 0)
    for at in range(target_begin, target_end):
      votes[at][word] += 1
  owners: list[int] = []
  for number, unit in enumerate(units):
    of_unit = sum((votes[i] for i in range(*unit.span()) if i in votes), collections.Counter())
    if of_unit:
      of_path = collections.Counter()
      for word, count in of_unit.items():
        of_path[paths[word]] += count
      owners.append(max(of_unit, key=lambda word: (of_path[paths[word]], of_unit[word], -word)))
    elif votes and owners:
      owners.append(owners[-1])
    else:
      owners.append(min((2 * number + 1) * len(words) // (2 * len(units)), len(words) - 1))
  return owners


def _keep(paths: Sequence[Path], owners: list[int]) -> None:
  """Gives a word to each element that had words and has none, of words of a path that has several."""
  counts = collections.Counter(paths[owner] for owner in owners)
  elements = {element for path in counts for element in path}
  for number, path in enumerate(paths):
    if not elements.issuperset(path):
      at = len(owners) * number // len(paths)
      near = sorted(range(max(0, at - 8), min(at + 8, len(owners))), key=lambda i: abs(i - at))
      word = next((i for i in near if counts[paths[owners[i]]] > 1), None)
      if word is not None:
        counts[paths[owners[word]]] -= 1
        owners[word] = number
        elements.update(path)


def _moved(
  atoms: Sequence[Atom],
  words: Sequence[_Word],
  paths: Sequence[Path],
  owners: Sequence[int],
  gaps: Sequence[Sequence[Atom]],
  places: Mapping[int, int],
) -> Iterator[tuple[int, list[Atom]]]:
  """(number of the next word, atoms) of the gaps that have no place, and of what words had within that are gone."""
  kept = set(owners)
  kept_elements = {element for owner in kept for element in paths[owner]}
  for number, word in enumerate(words):
    word_atoms = atoms[word.first : word.end] if number not in kept else []
    left = [
      a._replace(text='', raw='' if a.text else a.raw)
      for a in word_atoms
      if not a.text or not kept_elements.issuperset(a.path)
    ]
    if left:
      yield number + 1, left
    if number < len(gaps) and number not in places and any(not atom.is_space for atom in gaps[number]):
      yield number + 1, [*gaps[number]]


def _betweens(
  moved: Iterable[tuple[int, Sequence[Atom]]],
  joints: Sequence[tuple[int | None, int | None]],
  words: Sequence[_Word],
  in_order: bool,
) -> dict[int, list[Atom]]:
  """Atoms that are moved, by the place in the translation that they move to: before the next of their words or later.

  Out of order they go before the word that was behind them, or, where a mark was, behind that before them.
  """
  betweens, at = collections.defaultdict(list), 0
  first_before = {after: i for i, (_, after) in reversed(list(enumerate(joints)))}  # places, by word of the source
  last_behind = {owner: i for i, (owner, _) in enumerate(joints)}
  for number, atoms in moved:
    while joints[at][1] is not None and joints[at][1] < number:
      at += 1
    place = at
    if not in_order:
      place = last_behind.get(number - 1, at)
      if number in first_before and words[number].text[0].isalnum():
        place = first_before[number]
    betweens[place] += atoms
  return betweens


def _spaced(
  atoms: Sequence[Atom], space: str, follows: bool, is_first: bool, is_last: bool, edges: tuple[Path, Path]
) -> Iterator[Atom]:
  """Markup between two words with the spaces around it, or the space of the translation where there is no markup.

  Args:
    atoms: markup and spaces.
    space: of the translation.
    follows: whether a word follows, and no punctuation mark.
    is_first, is_last: whether nothing comes before, or behind.
    edges: paths of the words before and behind.
  """
  has_space = any(atom.is_space for atom in atoms)
  if not any(atom.raw and not atom.is_space for atom in atoms):
    atoms, has_space = [atom for atom in atoms if not atom.is_space], False
  held: list[Atom] = []  # a space is written when something comes behind it
  begins = is_first
  for atom in atoms:
    if atom.is_space:
      held = held or [atom] * (not begins)
    else:
      yield from [*held, atom]
      begins, held = False, []
  if held and not is_last and (space or follows):
    yield from held
  elif (follows and (space or has_space)) or (space and not has_space):
    before, after = edges
    yield Atom(after if before[: len(after)] == after else before, space or ' ')


def _written(atoms: Sequence[Atom], source: str, text: str, is_whole: bool) -> Iterator[Atom]:
  """Word of a translation in place of the atoms of its source; of the same length, it is divided as that is.

  `is_whole` says whether what the source has within the word is written too.
  """
  at = 0
  if len(source) != len(text):
    [first, *_] = [atom for atom in atoms if atom.text]
    yield Atom(first.path, text)
    at = len(text)
    atoms = [a._replace(text='', raw='') if a.text and a.path != first.path[: len(a.path)] else a for a in atoms]
  for atom in atoms:
    if not atom.text:
      yield from [atom] * is_whole
    elif at < len(text):
      written_text = text[at : at + len(atom.text)]
      yield atom if written_text == atom.text else Atom(atom.path, written_text)
      at += len(written_text)


def _broken(text: str, lines: int, end: str) -> str:
  """A text in `lines` lines of similar length, 9 at most, broken at spaces."""
  for line in range(1, min(lines, _MOST_LINES)):
    middle = len(text) * line // lines
    spaces = [at for at in (text.rfind(' ', 0, middle), text.find(' ', middle)) if at > 0]
    if spaces:
      at = min(spaces, key=lambda at: abs(at - middle))
      text = f'{text[:at]}\n{text[at + 1 :]}'
  return text.replace('\n', end)
