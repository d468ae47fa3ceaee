"""Placement of inline elements in a translation: around the words that come from those they had in the source."""

import collections
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Words, spaces and punctuation; characters of scripts that have no spaces between words, each alone.
_UNIT = re.compile(r'[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]+|\s+|.', re.S)

Path = tuple[int, ...]  # numbers of the elements around a text, outermost first


class Aligned(NamedTuple):
  """Translation of a paragraph; without links, its words are taken to come in the order of the source."""

  text: str
  links: Sequence[tuple[int, int, int, int]] = ()  # source begin and end, target begin and end, in characters


class Leaf(NamedTuple):
  """Text in a path of elements; or markup without text, which is kept as it is."""

  path: Path
  text: str
  raw: str = ''


def placed(leaves: Sequence[Leaf], translation: Aligned) -> Iterator[Leaf]:
  """Leaves of a translation, given those of its source.

  Args:
    leaves: those of the source; their texts together are the text that was translated.
    translation: of that text.
  """
  units = _UNIT.findall(translation.text)
  owners = _owners(leaves, units, translation)
  _keep(leaves, units, owners)
  _place_spaces(leaves, units, owners)
  without_text = collections.deque(number for number, leaf in enumerate(leaves) if not leaf.text)
  for owner, unit in zip(owners, units, strict=True):
    while without_text and without_text[0] < owner:
      yield leaves[without_text.popleft()]
    yield Leaf(leaves[owner].path, unit)
  yield from (leaves[number] for number in without_text)


def _owners(leaves: Sequence[Leaf], units: Sequence[str], translation: Aligned) -> list[int]:
  """Number of the leaf from which each unit comes."""
  of_source = [number for number, leaf in enumerate(leaves) for _ in leaf.text]  # by character
  words = [match.start() for match in _UNIT.finditer(''.join(leaf.text for leaf in leaves)) if not match[0].isspace()]
  votes = collections.defaultdict(collections.Counter)  # by character
  for begin, end, target_begin, target_end in translation.links:
    for at in range(target_begin, target_end):
      votes[at][of_source[min((begin + end) // 2, len(of_source) - 1)]] += 1
  count = sum(not unit.isspace() for unit in units)
  owners, at, word = [], 0, 0
  for unit in units:
    of_unit = sum((votes[i] for i in range(at, at + len(unit)) if i in votes), collections.Counter())
    if of_unit:
      owners.append(of_unit.most_common(1)[0][0])
    elif votes and owners:
      owners.append(owners[-1])
    else:
      owners.append(of_source[words[min((2 * word + 1) * len(words) // (2 * count or 1), len(words) - 1)]])
    at += len(unit)
    word += not unit.isspace()
  return owners


def _keep(leaves: Sequence[Leaf], units: Sequence[str], owners: list[int]) -> None:
  """Gives a word to each element that had words and has none, of a leaf that has several."""
  words = [i for i, unit in enumerate(units) if not unit.isspace()]
  counts = collections.Counter(owners[i] for i in words)
  found = {element for number in counts for element in leaves[number].path}
  for number, leaf in enumerate(leaves):
    if leaf.text.strip() and not found.issuperset(leaf.path):
      at = len(words) * number // len(leaves)
      near = sorted(words[max(0, at - 8) : at + 8], key=lambda i: abs(i - words[at]))
      word = next((i for i in near if counts[owners[i]] > 1), None)
      if word is not None:
        counts[owners[word]] -= 1
        owners[word] = number
        found.update(leaf.path)


def _place_spaces(leaves: Sequence[Leaf], units: Sequence[str], owners: list[int]) -> None:
  """Gives each space to the unit before it, or to the next one if that is in fewer of the same elements."""
  for i, unit in enumerate(units):
    if unit.isspace() and 0 < i < len(units) - 1:
      before, after = leaves[owners[i - 1]].path, leaves[owners[i + 1]].path
      owners[i] = owners[i + 1] if before[: len(after)] == after else owners[i - 1]
