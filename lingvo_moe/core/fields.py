"""Fields of a configuration: default, range, choices, meaning and whether a run may change it, stated once.

  ff_dim: int = field(256, 'H, of the dense feed-forward layers and of every expert.', at_least=1)

Errors, lingvo-moe models and the check of a run that goes on are made of this line. A subclass states another default and
nothing else (`ff_dim: int = 512`); the rest is that of the parent.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Sequence
from typing import Any

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import closest
from lingvo_moe.core.errors import shown

_KEY = 'spec'  # in the metadata of a dataclasses.Field
_LARGEST_INTEGER = 2**31 - 1  # sizes and counters on devices are int32
_LARGEST_FLOAT = 3.4028234e38  # of float32


@dataclasses.dataclass(frozen=True)
class Spec:
  """Rules and meaning of a field; see `field`."""

  meaning: str
  at_least: float | None = None
  above: float | None = None
  at_most: float | None = None
  below: float | None = None
  choices: tuple[str, ...] = ()
  way_out: str = ''
  may_change: bool = False
  settled: bool = False

  @property
  def rule(self) -> str:
    """Values that are allowed, in words: 'at least 0 and below 1'; empty if the type is the only limit."""
    if self.choices:
      return 'one of ' + ', '.join(self.choices)
    if self.at_least is not None and self.at_most is not None:
      return f'from {self.at_least} to {self.at_most}'
    bounds = {'at least': self.at_least, 'above': self.above, 'at most': self.at_most, 'below': self.below}
    return ' and '.join(f'{word} {bound}' for word, bound in bounds.items() if bound is not None)

  def allows(self, value: Any) -> bool:
    """Whether a value of the right type is in range."""
    return value is None or (
      (not self.choices or value in self.choices)
      and (self.at_least is None or value >= self.at_least)
      and (self.above is None or value > self.above)
      and (self.at_most is None or value <= self.at_most)
      and (self.below is None or value < self.below)
    )

  @property
  def text(self) -> str:
    """Meaning, range, and whether a run may change the field, as sentences."""
    rule = f' {self.rule[0].upper()}{self.rule[1:]}.' if self.rule else ''
    return f'{self.meaning}{rule}{" A run may change it." if self.may_change else ""}'


def field(
  default: Any,
  meaning: str,
  *,
  at_least: float | None = None,
  above: float | None = None,
  at_most: float | None = None,
  below: float | None = None,
  choices: Sequence[str] = (),
  way_out: str = '',
  may_change: bool = False,
  settled: bool = False,
) -> Any:
  """Declares a field of a configuration.

  Args:
    default: its value, unless a subclass or a binding states another.
    meaning: one or more sentences, with units.
    at_least: smallest value.
    above: exclusive lower limit.
    at_most: largest value; of an integer without it 2^31 - 1.
    below: exclusive upper limit.
    choices: all values there are.
    way_out: advice that ends the error about a value out of range.
    may_change: whether a run that goes on in its log directory may have another value than it began with.
    settled: whether a run puts a value in the place of None when it begins; one of an earlier version still has None.
  """
  spec = Spec(meaning, at_least, above, at_most, below, tuple(choices), way_out, may_change, settled)
  return dataclasses.field(default=default, metadata={_KEY: spec})


@functools.cache
def specs(cls: type) -> dict[str, Spec]:
  """Spec of each field of a configuration class, in order; of the nearest parent that declares it by `field`."""
  found = {}
  for parent in reversed(cls.__mro__):
    declared = parent.__dict__.get('__dataclass_fields__', {})
    found |= {name: f.metadata[_KEY] for name, f in declared.items() if _KEY in f.metadata}
  return {f.name: found[f.name] for f in dataclasses.fields(cls)}


@functools.cache
def types(cls: type) -> dict[str, Any]:
  """Type of each field."""
  hints = typing.get_type_hints(cls)
  return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def may_change(cls: type) -> list[str]:
  """Names of the fields that may change when a run goes on."""
  return [name for name, spec in specs(cls).items() if spec.may_change]


def refuse(config: Any, name: str, rule: str, way_out: str = '') -> typing.NoReturn:
  """Raises the UserError about a field: `name must be rule; saw value: way out`."""
  raise UserError(f'{name} must be {rule}; saw {shown(getattr(config, name))}' + (f': {way_out}' if way_out else ''))


def check(config: Any) -> None:
  """Checks type, finiteness, range and choices of every field; call it in __post_init__.

  Stores integers as floats where the type is float, and lists and dicts as tuples where it is a tuple.

  Raises:
    UserError: with the rule, the value, and the way out where the field has one.
  """
  for name, spec in specs(type(config)).items():
    hint = types(type(config))[name]
    try:
      value = _converted(getattr(config, name), hint)
    except TypeError:
      refuse(config, name, _TYPES.get(hint, f'of type {hint}'), spec.way_out)
    except OverflowError:  # an integer that no float can hold
      value = math.inf
    _check_size(config, name, value, spec)
    object.__setattr__(config, name, value)
    if not spec.allows(value):
      refuse(config, name, spec.rule, spec.way_out)


def _check_size(config: Any, name: str, value: Any, spec: Spec) -> None:
  """Refuses numbers, also those of a tuple, that are not finite or too large for a device."""
  if isinstance(value, tuple):
    for part in value:
      _check_size(config, name, part, spec)
  elif isinstance(value, float) and not math.isfinite(value):
    many = isinstance(getattr(config, name), (tuple, list, dict))
    refuse(config, name, 'finite numbers' if many else 'a finite number', spec.way_out)
  elif isinstance(value, float) and abs(value) > _LARGEST_FLOAT:
    refuse(config, name, f'from -{_LARGEST_FLOAT} to {_LARGEST_FLOAT}, as float32 has it', spec.way_out)
  elif isinstance(value, int) and spec.at_most is None and abs(value) > _LARGEST_INTEGER:
    refuse(config, name, f'at most {_LARGEST_INTEGER}' if value > 0 else f'at least -{_LARGEST_INTEGER}', spec.way_out)


def check_overrides(cls: type) -> None:
  """Checks that a subclass, not yet a dataclass, states only fields that have a spec, each with its type.

  Python itself takes a misspelt override for a new field, and ignores one without a type.

  Raises:
    ValueError: with the field, and the line to write.
  """
  known = {name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for name in specs(base)}
  annotated = inspect.get_annotations(cls)
  for name in annotated:
    value = cls.__dict__.get(name)
    if name not in known and not (isinstance(value, dataclasses.Field) and _KEY in value.metadata):
      raise ValueError(
        f'{cls.__name__}.{name} overrides no field: {closest(name, known)}; a new one is declared by '
        "core.fields.field(default, 'meaning.')"
      )
  for name in known - set(annotated):
    if name in cls.__dict__:
      raise ValueError(f'{cls.__name__}.{name} overrides a field and needs its type: write {name}: <type> = ...')


_TYPES = {
  str: 'a string',
  int: 'an integer',
  float: 'a number',
  bool: 'True or False',
  bool | None: 'True, False or None',
  float | None: 'a number or None',
  str | None: 'a string or None',
  tuple[tuple[str, float], ...]: 'a dict of numbers by name',
}


def _converted(value: Any, hint: Any) -> Any:
  """The value as its type has it; TypeError if it is of another."""
  if typing.get_origin(hint) is tuple:
    return _converted_tuple(value, typing.get_args(hint))
  if hint == float | None:
    return None if value is None else _converted(value, float)
  is_number = hint in (int, float)
  if not isinstance(value, (int, float) if hint is float else hint) or (is_number and isinstance(value, bool)):
    raise TypeError  # to Python, True is an integer
  return float(value) if hint is float else value


def _converted_tuple(value: Any, hints: tuple[Any, ...]) -> tuple[Any, ...]:
  """A tuple of a tuple, a list, or the items of a dict; `hints` as in tuple[int, ...] or tuple[str, str]."""
  if not isinstance(value, (tuple, list, dict)):
    raise TypeError
  items = list(value.items() if isinstance(value, dict) else value)
  hints = hints[:1] * len(items) if hints[-1] is Ellipsis else hints
  if len(items) != len(hints):
    raise TypeError
  return tuple(map(_converted, items, hints))
