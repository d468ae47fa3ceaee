"""Small JSON files of our own making, read with limits on size and depth and with a type for each key.

What `dump` made, a file or a line of one, holds its own checksum, so that a byte that was changed is noticed; what has
none is taken as it is. A last line that is cut short, as a crash leaves it, is skipped.
"""

import dataclasses
import itertools
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.storage import files

MOST_BYTES = 64 << 20  # of a file, or of a line
_DEEPEST = 32  # brackets within each other
_CHECKSUM = 'crc32'
_LONG = re.compile(r'\d{19}')
_NO_TEXT = re.compile(r'[\ud800-\udfff]|(?<!\\)\\u0000')


@dataclasses.dataclass(frozen=True)
class Kind:
  """Type of the value of a key: its name in messages, and whether a value is one."""

  name: str
  fits: Callable[[Any], bool]


TEXT = Kind('a string', lambda value: isinstance(value, str))
INTEGER = Kind('an integer', lambda value: type(value) is int)  # True is none
NUMBER = Kind('a number', lambda value: type(value) in (int, float))
BOOLEAN = Kind('true or false', lambda value: isinstance(value, bool))
OBJECT = Kind('an object', lambda value: isinstance(value, dict))
PLAIN_OBJECT = Kind(
  'an object whose strings have neither NUL nor half of a surrogate pair',
  lambda value: isinstance(value, dict) and not _NO_TEXT.search(json.dumps(value, ensure_ascii=False)),
)


class NotJsonError(ValueError):
  """Text that is no JSON at all."""


def by_name(kind: Kind, empty: bool = True) -> Kind:
  """Object whose values are of a kind; `empty` says whether it may have none."""
  fits = lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())) and (empty or value != {})
  return Kind(f'an object, each value {kind.name}', fits)


def list_of(kind: Kind) -> Kind:
  """List whose items are of a kind."""
  return Kind(f'a list, each item {kind.name}', lambda value: isinstance(value, list) and all(map(kind.fits, value)))


def between(kind: Kind, least: float, most: float) -> Kind:
  """INTEGER or NUMBER within bounds."""
  return Kind(f'{kind.name} from {least} to {most}', lambda value: kind.fits(value) and least <= value <= most)


def one_of(*texts: str) -> Kind:
  """One of some strings."""
  return Kind(' or '.join(map(repr, texts)), lambda value: isinstance(value, str) and value in texts)


def optional(kind: Kind) -> Kind:
  """Value of a kind, or null, or no such key."""
  return Kind(f'{kind.name} or null', lambda value: value is None or kind.fits(value))


def dump(value: Mapping[str, Any], indent: int | None = None) -> str:
  """Text of a JSON object with its checksum."""
  text = json.dumps(value, ensure_ascii=False)
  return json.dumps({**value, _CHECKSUM: _checksum(json.loads(text))}, indent=indent, ensure_ascii=False) + '\n'


def parse(text: str | bytes, *, long_integers: bool = False, **kinds: Kind) -> dict[str, Any]:
  """The JSON object in a text, UTF-8 if bytes, without its checksum, which is verified if there is one.

  `kinds` are what the values of these keys must be; `long_integers` allows integers of more than 64 bits.

  Raises:
    ValueError: says what is wrong.
  """
  if len(text) > MOST_BYTES:
    raise ValueError(f'over {MOST_BYTES >> 20} MiB')
  try:
    text = text.decode('utf-8') if isinstance(text, bytes) else text
    value = json.loads(text, parse_int=_int64 if not long_integers and _LONG.search(text) else None)
  except ValueError as e:
    raise NotJsonError(str(e)) from None
  except RecursionError:
    raise ValueError('brackets too deep in each other') from None
  if text.count('[') + text.count('{') > _DEEPEST and _is_deep(value):
    raise ValueError(f'brackets more than {_DEEPEST} deep in each other')
  if not isinstance(value, dict):
    raise ValueError(f'no JSON object, but {shown(value, 60)}')
  if _CHECKSUM in value and (stated := value.pop(_CHECKSUM)) != (computed := _checksum(value)):
    raise ValueError(f'it was changed since it was written: its {_CHECKSUM} is {computed}, not {shown(stated, 60)}')
  check(value, **kinds)
  return value


def check(value: Mapping[str, Any], **kinds: Kind) -> None:
  """Raises ValueError for a key whose value is not of its kind."""
  for name, kind in kinds.items():
    if not kind.fits(value.get(name)):
      raise ValueError(f'{name!r} must be {kind.name}; saw {shown(value[name], 60) if name in value else "none"}')


def read(
  path: str,
  what: str = 'what was written there',
  way_out: str = 'restore it from a copy, or make it again',
  *,
  long_integers: bool = False,
  **kinds: Kind,
) -> dict[str, Any]:
  """The JSON object in a file; see `parse`.

  `what` is what it should be, for the message: 'a configuration written by the trainer'; `way_out` ends the message.

  Raises:
    FileNotFoundError: there is none.
    UserError: it is not such a file.
  """
  try:
    return parse(files.read(path, MOST_BYTES + 1), long_integers=long_integers, **kinds)
  except NotJsonError as e:
    problem = f'JSON ({e}), so it is not {what}'
  except ValueError as e:
    problem = f'{what} ({e})'
  raise UserError(f'{path} is not {problem}: {way_out}')


def read_if_any(path: str, *messages: str, **kinds: Kind) -> dict[str, Any] | None:
  """The JSON object in a file, None if there is no file; see `read`."""
  try:
    return read(path, *messages, **kinds)
  except FileNotFoundError:
    return None


def lines(path: str, **kinds: Kind) -> Iterator[tuple[str, dict[str, Any]]]:
  """(text, JSON object with its step) of each line of a file; none if it is not there.

  Raises:
    UserError: a line is damaged, other than a last one that is cut short.
  """
  try:
    file = files.open_to_read(path)
  except FileNotFoundError:
    return
  with file:
    for number in itertools.count(1):
      if not (line := file.readline(MOST_BYTES + 1)):
        return
      try:
        value = parse(line, step=INTEGER, **kinds)
      except ValueError as e:
        if not line.endswith(b'\n') and not file.read(1):
          return
        raise UserError(
          f'each line of {path} is a JSON object with its step; line {number} is not ({e}; saw {line[:40]!r}): '
          'restore the file from a copy, or remove the line'
        ) from None
      yield line.decode('utf-8').rstrip('\n') + '\n', value


def keep_lines_up_to(path: str, step: int, note: Callable[[Mapping], None] = lambda line: None, **kinds: Kind) -> None:
  """Drops later lines of a log, and a last one that a crash cut short.

  At step 0 the whole log becomes PATH.old, or PATH.old.2 and so on: it is of a run whose checkpoints are gone. `note`
  is called with each line that stays. UserError where another line than the last is damaged.
  """
  if not files.exists(path):
    return
  if step == 0 and files.size(path):
    print(f'there is no checkpoint, so step 1 is next; {path} is kept as {files.set_aside(path)}', file=sys.stderr)
    return
  with files.replacing(path) as new:
    for line, values in lines(path, **kinds):
      if values['step'] <= step:
        new.write(line)
        note(values)


def _int64(digits: str) -> int:
  if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < 2**63:
    raise ValueError(f'an integer has more than 64 bits: {digits:.30}')
  return value


def _checksum(value: Mapping[str, Any]) -> str:
  return f'{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}'


def _is_deep(value: Any) -> bool:
  level = [value]
  for _ in range(_DEEPEST):
    level = [item for v in level if isinstance(v, (dict, list)) for item in (v.values() if isinstance(v, dict) else v)]
  return any(isinstance(v, (dict, list)) for v in level)
