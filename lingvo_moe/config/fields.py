"""Fields of a configuration: default, range, choices, meaning and whether a run may change it, stated once.

  ff_dim: int = field(256, 'H, of the dense feed-forward layers and of every expert.', at_least=1)

Errors, lingvo-moe models and the check of a run that goes on are made of this line. A subclass states another default
and nothing else (`ff_dim: int = 512`); the rest is that of the parent.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import operator
import typing
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, Literal

from lingvo_moe.core.errors import UserError, closest, shown

_KEY = 'spec'  # in the metadata of a dataclasses.Field
_LARGEST_INTEGER = 2**31 - 1  # sizes and counters on devices are int32
_LARGEST_FLOAT = 3.4028234e38  # of float32
ON = None  # in Spec.when: any value but 0, '', None and False
_When = Mapping[str, Collection[Any] | None]


@dataclasses.dataclass(frozen=True)
class Spec:
  """Rules and meaning of a field."""

  meaning: str  # one or more sentences, with units
  at_least: float | None = None
  above: float | None = None
  at_most: float | None = None  # of an integer without it 2^31 - 1
  below: float | None = None
  choices: Collection[str] = ()  # all values there are
  way_out: str = ''  # advice that ends the error about a value out of range
  may_change: bool = False  # whether a run that goes on in its log directory may have another value
  settled: bool = False  # whether a run puts a value in the place of None; one of an earlier version still has None
  open: Collection[Any] = ()  # values in whose place every run that begins chooses one, also one with another's values
  chosen_by: str = ''  # property with the value that is chosen; empty: the corpus decides
  # values of other fields with which this one has an effect, all of them; of several mappings, those of any. Fields
  # and properties that a configuration has not, count as having one.
  when: _When | tuple[_When, ...] = ()

  @property
  def rule(self) -> str:
    """Values that are allowed, in words: 'at least 0 and below 1'; empty if the type is the only limit."""
    if self.choices:
      return 'one of ' + ', '.join(self.choices)
    if self.at_least is not None and self.at_most is not None:
      return f'from {self.at_least} to {self.at_most}'
    return ' and '.join(f'{word} {bound}' for word, bound, _ in self._bounds())

  def allows(self, value: Any) -> bool:
    """Whether a value of the right type is in range."""
    in_choices = not self.choices or value in self.choices
    is_number = isinstance(value, (int, float))
    return value is None or (in_choices and all(holds(value, bound) for _, bound, holds in self._bounds() if is_number))

  @property
  def condition(self) -> str:
    """Values of other fields with which the field has an effect, in words: 'schedule=cosine or wsd'; empty: any."""
    return ', or '.join(' and '.join(itertools.starmap(_condition, when.items())) for when in self._alternatives)

  @property
  def text(self) -> str:
    """Meaning, range, when the field has an effect, and whether a run may change it, as sentences."""
    rule = f' {self.rule[0].upper()}{self.rule[1:]}.' if self.rule else ''
    condition = f' Only with {self.condition}.' if self.condition else ''
    return f'{self.meaning}{rule}{condition}{" A run may change it." if self.may_change else ""}'

  def blockers(self, config: Any) -> dict[str, Collection[Any] | None]:
    """Fields by whose values this one has no effect in a configuration, with those by which it would; or none."""
    holds = lambda value, values: bool(value) if values is ON else value in values
    blocking = {}
    for when in self._alternatives:
      blocking = {n: v for n, v in when.items() if hasattr(config, n) and not holds(getattr(config, n), v)}
      if not blocking:
        break
    return blocking

  @property
  def _alternatives(self) -> tuple[_When, ...]:
    return self.when if isinstance(self.when, tuple) else (self.when,)

  def _bounds(self) -> list[tuple[str, float, Callable[[float, float], bool]]]:
    bounds = ('at least', self.at_least, operator.ge), ('above', self.above, operator.gt)
    bounds += ('at most', self.at_most, operator.le), ('below', self.below, operator.lt)
    return [(word, bound, holds) for word, bound, holds in bounds if bound is not None]


def field(default: Any, meaning: str, **rules: Any) -> Any:
  """Declares a field of a configuration, by its default, its meaning and the other attributes of a Spec."""
  return dataclasses.field(default=default, metadata={_KEY: Spec(meaning, **rules)})


def changeable(default: Any, meaning: str, **rules: Any) -> Any:
  """Declares a field, as `field` does, that a run may change."""
  return field(default, meaning, may_change=True, **rules)


@functools.cache
def specs(cls: type) -> dict[str, Spec]:
  """Spec of each field of a configuration class, in order; of the nearest parent that declares it by `field`."""
  return {name: vars(parent)['__dataclass_fields__'][name].metadata[_KEY] for name, parent in _declaring(cls).items()}


@functools.cache
def types(cls: type) -> dict[str, Any]:
  """Type of each field, as the nearest parent states it that declares it by `field`."""
  declaring = _declaring(cls)
  hints = {parent: typing.get_type_hints(parent) for parent in set(declaring.values())}
  return {name: hints[parent][name] for name, parent in declaring.items()}


def holds_text(cls: type, name: str) -> bool:
  """Whether a field may hold text; False for a name that is no field."""
  hint = types(cls).get(name)
  return any(part is str or typing.get_origin(part) is Literal for part in (hint, *typing.get_args(hint)))


def _declaring(cls: type) -> dict[str, type]:
  """Nearest parent that declares each field by `field`, in the order of the fields."""
  fields_of = lambda parent: vars(parent).get('__dataclass_fields__', {}).items()
  declaring = {name: parent for parent in reversed(cls.__mro__) for name, f in fields_of(parent) if _KEY in f.metadata}
  return {f.name: declaring[f.name] for f in dataclasses.fields(cls)}


def may_change(cls: type) -> list[str]:
  """Names of the fields that a resumed run may change."""
  return [name for name, spec in specs(cls).items() if spec.may_change]


def left_open(config: Any) -> dict[str, Any]:
  """Values, by field, in whose place a run chooses one when it begins."""
  return {name: value for name, spec in specs(type(config)).items() if (value := getattr(config, name)) in spec.open}


def with_choices(config: Any) -> Any:
  """The configuration with values in the place of open ones, but for those that the corpus decides."""
  chosen = {name: spec.chosen_by for name, spec in specs(type(config)).items() if spec.chosen_by}
  return dataclasses.replace(config, **{name: getattr(config, by) for name, by in chosen.items()})


def check_effects(config: Any, names: Collection[str], changed: Set[str] = frozenset()) -> None:
  """Refuses fields that were set, by their names, where they have no effect.

  Those pass that have none by the value of a field in `changed`, as what a class sets where its user changes it.
  """
  for name in names:
    blocking = specs(type(config))[name].blockers(config)
    if blocking and not blocking.keys() & changed:
      by, values = next(iter(blocking.items()))
      rule = f'left out with {by}={shown(getattr(config, by))}, with which it has no effect'
      about = f': {inspect.getdoc(part)}' if isinstance(part := getattr(type(config), by), property) else ''
      refuse(config, name, rule, f'it is for {_condition(by, values)}{about}')


def _condition(name: str, values: Collection[Any] | None) -> str:
  return name if values is ON else f'{name}={" or ".join(str(value) or repr(value) for value in values)}'


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
      value = converted(getattr(config, name), hint)
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
  rule = ''
  if isinstance(value, tuple):
    for part in value:
      _check_size(config, name, part, spec)
  elif isinstance(value, float) and not math.isfinite(value):
    rule = 'finite numbers' if isinstance(getattr(config, name), (tuple, list, dict)) else 'a finite number'
  elif isinstance(value, float) and abs(value) > _LARGEST_FLOAT:
    rule = f'from -{_LARGEST_FLOAT} to {_LARGEST_FLOAT}, as float32 has it'
  elif isinstance(value, int) and spec.at_most is None and abs(value) > _LARGEST_INTEGER:
    rule = f'at most {_LARGEST_INTEGER}' if value > 0 else f'at least -{_LARGEST_INTEGER}'
  if rule:
    refuse(config, name, rule, spec.way_out)


def check_overrides(cls: type) -> None:
  """Checks that a subclass, not yet a dataclass, states only fields that have a spec, each with its type.

  Python itself takes a misspelt override for a new field, and ignores one without a type.

  Raises:
    ValueError: with the field, and the line to write.
  """
  known = {name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for name in specs(base)}
  annotated, attributes = inspect.get_annotations(cls), vars(cls)
  for name in annotated:
    if name not in known and _KEY not in getattr(attributes.get(name), 'metadata', ()):
      raise ValueError(
        f'{cls.__name__}.{name} overrides no field: {closest(name, known)}; a new one is declared by '
        "config.fields.field(default, 'meaning.')"
      )
  for name in known - set(annotated):
    if name in attributes:
      raise ValueError(f'{cls.__name__}.{name} overrides a field and needs its type: write {name}: <type> = ...')


_TYPES = {
  str: 'a string',
  int: 'an integer',
  float: 'a number',
  bool: 'True or False',
  bool | None: 'True, False or None',
  int | None: 'an integer or None',
  float | None: 'a number or None',
  float | Literal['auto'] | None: "a number, 'auto' or None",
  str | None: 'a string or None',
  tuple[tuple[str, float], ...]: 'a dict of numbers by name',
}


def converted(value: Any, hint: Any) -> Any:
  """A value as its type has it, a tuple also of a list or of the items of a dict; TypeError for another type."""
  if typing.get_origin(hint) is tuple:  # tuple[int, ...] or tuple[str, str]
    if not isinstance(value, (tuple, list, dict)):
      raise TypeError
    items, hints = list(value.items() if isinstance(value, dict) else value), typing.get_args(hint)
    hints = hints[:1] * len(items) if hints[-1] is Ellipsis else hints
    if len(items) != len(hints):
      raise TypeError
    return tuple(map(converted, items, hints))
  if float in typing.get_args(hint):  # or one of the constants beside it
    constants = {None, *(constant for part in typing.get_args(hint) for constant in typing.get_args(part))}
    return value if isinstance(value, (str, type(None))) and value in constants else converted(value, float)
  if hint == int | None:
    return value if value is None else converted(value, int)
  is_number = hint in (int, float)
  if not isinstance(value, (int, float) if hint is float else hint) or (is_number and isinstance(value, bool)):
    raise TypeError  # to Python, True is an integer
  return float(value) if hint is float else value
