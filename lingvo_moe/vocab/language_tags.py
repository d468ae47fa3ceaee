"""Symbols around the tokens of a sentence: its end, and tags of languages, where a model has them."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from lingvo_moe.core.errors import UserError, closest

# Languages whose tags a sentence gets: of its translation, or of both sides, (source, target); None: no tag.
Languages = str | tuple[str, str] | None

# Where tags are: that of the target language before the source; or each language's on its own side, before both, or
# the source's behind its end.
SIDES = ('source', 'both', 'both_source_last')


class Around(NamedTuple):
  """Ids before and after the tokens of a sentence."""

  before: list[int]
  after: list[int]

  @property
  def count(self) -> int:
    return len(self.before) + len(self.after)

  def put(self, ids: Sequence[int], most: int) -> list[int]:
    """A sentence of at most `most` ids in all; tokens beyond are left out."""
    return [*self.before, *ids[: most - self.count], *self.after]


def around(sides: str, tag_id: Callable[[str], int], eos: int, languages: Languages) -> tuple[Around, Around]:
  """Symbols around (sources, targets).

  Args:
    sides: one of SIDES.
    tag_id: gives the id of a language's tag, or refuses a language that has none.
    eos: id of the end.
    languages: those whose tags there are.
  """
  plain = Around([], [eos])
  if languages is None:
    return plain, plain
  if isinstance(languages, str):
    return Around([tag_id(languages)], [eos]), plain
  source, target = map(tag_id, languages)
  return Around([], [eos, source]) if sides == 'both_source_last' else Around([source], [eos]), Around([target], [eos])


def of_pair(tagged: bool | None, sides: str, source: str, target: str) -> Languages:
  """The languages whose tags sentences of a pair get, if a model has tags."""
  if not tagged:
    return None
  return target if sides == 'source' else (source, target)


def choose_target(
  languages: Sequence[str] | None, requested: str | None, source: str | None = None, both: bool = False
) -> Languages:
  """Languages whose tags a sentence gets, given those requested; None: no tag.

  Args:
    languages: those with a tag; None: the model takes no tag.
    requested: target language, or None.
    source: source language, or None; not read unless both sides have tags.
    both: whether both sides have tags.

  Raises:
    UserError: a model of several languages needs a target language; others take none.
  """
  if languages is None:
    if requested:
      raise UserError(f'this model has one target language and takes no tag; saw target={requested!r}: leave it out')
    return None
  if both and not source:
    raise UserError('this model reads the language of its source: give source= too, a language as of target=')
  if both and source not in languages:
    raise UserError(f'this model does not translate from {source!r}; {closest(source, languages)}')
  if not requested and len(languages) == 1:
    return languages[0]
  if not requested:
    raise UserError(
      f'this model translates into several languages and must be told which: target=, one of {", ".join(languages)}'
    )
  if requested not in languages:
    raise UserError(f'this model does not translate into {requested!r}; {closest(requested, languages)}')
  return (source, requested) if both else requested


def check_pair(languages: Languages, pairs: Collection[Sequence[str]]) -> Languages:
  """The languages of a request, if they are one of these pairs or there are none; else a UserError."""
  if pairs and languages and list(languages) not in map(list, pairs):
    raise UserError(f'this model translates {", ".join(map("-".join, pairs))}; saw {"-".join(languages)}')
  return languages


def check_known(role: str, code: str | None, known: Collection[str]) -> None:
  """Raises UserError where a language is asked that a model does not have; nothing where none is known."""
  if code is not None and known and code not in known:
    raise UserError(f'{code:.40} is not a {role} language of this model; it has {", ".join(sorted(known))}')
