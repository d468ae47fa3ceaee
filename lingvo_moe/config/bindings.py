"""gin bindings: statements are read by gin's parser, checked against the selected model, and resolved to its values.

A binding names the model or a parent of it. One to a parent counts unless the model, or a class between the two, states
the field itself: gin would pass over it in silence, here it is refused with the line to write. Macros
(`size = 64`, then `%size`) and `include 'file.gin'` work as in gin; imports, scopes and references (`@f`), with which
gin binds more than values, are refused.
"""

import dataclasses
import importlib.util
import inspect
import os
import re
import tokenize
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import gin
from gin import config_parser

from lingvo_moe.config import fields
from lingvo_moe.core.errors import UserError, closest, shown

_T = TypeVar('_T')


def bindable(cls: type[_T]) -> type[_T]:
  """Lets gin bind the fields of a class, for programs with a gin.parse_config of their own; our jobs use `read`."""
  with gin.config.interactive_mode():  # a file that failed may be imported again
    return gin.configurable(cls)


def read(
  name: str, models: Mapping[str, type], gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = ()
) -> dict[str, Any]:
  """Values that files, then bindings, give to fields of a model; the last statement counts.

  `models` are all that are registered, by name; the others are for errors about bindings to them.
  """
  reader = _Reader(name, models)
  try:
    for path in gin_files:
      reader.read_file(path, f'--gin_file={path}')
    for text in gin_bindings:
      reader.read(text)
    return reader.values()
  except RecursionError:
    raise UserError('files, macros and values lie hundreds deep in each other: write them flatter') from None


# One line whose value is neither a string in quotes, nor a macro or a reference, nor a list.
_UNQUOTED = re.compile(r"""\s*(?P<key>[\w./]*\.(?P<field>\w+))\s*=\s*(?P<value>[^\s'"%@\[({#][^'"\n]*?)\s*""")


class _Name(NamedTuple):
  """%macro, @reference or @reference(), where a value is expected."""

  sign: str
  name: str
  call: str = ''

  def __repr__(self):
    return ''.join(self)


class _Delegate(config_parser.ParserDelegate):
  """Makes what gin's parser leaves to its caller."""

  def configurable_reference(self, scoped_configurable_name, evaluate):
    return _Name('@', scoped_configurable_name, '()' * evaluate)

  def macro(self, macro_name):
    return _Name('%', macro_name)


_Stated = tuple[Any, str]  # the right side of a statement, and the prefix of an error about it: the file, or nothing


class _Reader:
  """Collects statements, then resolves them: a macro may be defined after it is used."""

  def __init__(self, name: str, models: Mapping[str, type]):
    self._name, self._cls, self._models = name, models[name], models
    # From the model to its farthest parent.
    self._classes = [c for c in self._cls.__mro__ if dataclasses.is_dataclass(c)]
    self._fields = [f.name for f in dataclasses.fields(self._cls)]
    self._bound: dict[str, _Stated] = {}
    self._macros: dict[str, _Stated] = {}
    # Class that gives a field its value so far: the nearest to the model that states it.
    self._giver = {f: next(c for c in self._classes if f in inspect.get_annotations(c)) for f in self._fields}

  def read_file(self, path: str, named: str, where: str = '', including: tuple[str, ...] = ()) -> None:
    """Reads a file and those that it includes; `named` as the user named it, `including` the files that led here."""
    try:
      with open(path, encoding='utf-8') as f:
        text = f.read()
    except FileNotFoundError:
      raise UserError(f'{where}{named}: there is no such file') from None
    except (OSError, ValueError) as e:  # a folder; other bytes, or a name with a zero
      raise UserError(f'{where}{named} cannot be read as UTF-8 text: {e}') from None
    real = os.path.realpath(path)
    if real in including:
      raise UserError(f'{where}{named} includes itself: take that line out')
    self.read(text, f'{where}{named}: ', (*including, real))

  def read(self, text: str, where: str = '', including: tuple[str, ...] = ()) -> None:
    """Reads statements of gin's language."""
    for statement in self._parse(text, where):
      match statement:
        case config_parser.BindingStatement():
          self._add(statement, where)
        case config_parser.IncludeStatement(filename=path):
          self.read_file(_located(path), f'include {shown(path, 200)}', where, including)
        case config_parser.ImportStatement():
          line = shown(statement.format())
          raise UserError(f'{where}bindings bind values and import nothing; saw {line}: take it out')

  def values(self) -> dict[str, Any]:
    """Values of fields, macros replaced by theirs."""
    used: set[str] = set()
    resolved = {f: self._resolve(value, where, (), used) for f, (value, where) in self._bound.items()}
    for macro, (value, where) in self._macros.items():
      if macro not in used:
        line = self._line(macro, value if macro in self._fields else _Name('%', macro))
        raise UserError(f'{where}{macro} binds no value of the model: write {line}')
    return resolved

  def _parse(self, text: str, where: str) -> list[Any]:
    parser = None
    try:
      parser = config_parser.ConfigParser(text, _Delegate())
      return list(parser)
    except SyntaxError as e:
      reason, line = e.msg, e.text
    except (tokenize.TokenError, TypeError, ValueError, RecursionError) as e:  # an open bracket, {[1]: 2}, ((((...
      reason, line = e.args[0], parser and parser.current_token.line
    if (quoted := self._with_quotes(text)) != text:
      return self._parse(quoted, where)
    reason = reason.splitlines()[-1].strip().rstrip('.')
    raise UserError(
      f'{where}gin could not read a binding: {reason[:80]}; saw {(line or text).strip()[:80]!r} '
      f'(bindings are written {self._line("max_steps", 100)}, and text in quotes)'
    )

  def _with_quotes(self, text: str) -> str:
    """A line `MoE8E.pairs = de-en` with quotes around its value: text is meant where a field holds text."""
    line = _UNQUOTED.fullmatch(text)
    if not line or not fields.holds_text(self._cls, line['field']):
      return text
    return f'{line["key"]} = {line["value"]!r}'

  def _add(self, statement: config_parser.BindingStatement, where: str) -> None:
    scope, selector, field, value, _ = statement
    if scope:
      key = '.'.join(filter(None, (f'{scope}/{selector}', field)))
      raise UserError(f'{where}{key} binds no value of the model: write {self._line(field or selector, value)}')
    if not field:
      self._macros[selector] = value, where
      return
    # Other models that have been imported, those of the same module first.
    others = sorted(self._models.values(), key=lambda c: c.__module__ != self._cls.__module__)
    dotted = lambda c: f'.{c.__module__}.{c.__qualname__}'  # a selector is the end, or all, of it
    called = next((c for c in (*self._classes, *others) if dotted(c).endswith(f'.{selector}')), None)
    if called is None:
      raise UserError(
        f'{where}{shown(selector)} is not the chosen model; its bindings are written {self._cls.__name__}.<field>: '
        f'write {self._line(field, value)}'
      )
    if field not in self._fields:
      raise UserError(f'{where}{self._cls.__name__} has no field {shown(field)}; {closest(field, self._fields)}')
    giver = self._giver[field]
    if called in self._classes and self._classes.index(giver) >= self._classes.index(called):
      self._giver[field] = called
      self._bound[field] = value, where
      return
    label = next((name for name, c in self._models.items() if c is called), called.__name__)
    why = f'for which {giver.__name__} sets {field}' if called in self._classes else f'of which {label} is no parent'
    raise UserError(
      f'{where}{called.__name__}.{field} is bound, a value of {label}, but the model is {self._name}, {why}: write '
      f'{self._line(field, value)}'
    )

  def _line(self, field: str, value: Any) -> str:
    """Binding to the model, as a user would type it."""
    return f'{self._cls.__name__}.{field if field in self._fields else "<field>"} = {shown(value)}'

  def _resolve(self, value: Any, where: str, within: tuple[str, ...], used: set[str]) -> Any:
    """A value without macros; `within` are the macros on the way to it, `used` collects all."""
    resolve = lambda part: self._resolve(part, where, within, used)
    match value:
      case _Name('%', name) if name in within:
        chain = ' = '.join(f'%{macro}' for macro in (*within, name))
        raise UserError(f'{where}a macro has a value of its own; saw {chain}: write {name} = <value>')
      case _Name('%', name) if name not in self._macros:
        raise UserError(f'{where}%{name} is not defined; {closest(name, self._macros)}: write {name} = <value>')
      case _Name('%', name):
        used.add(name)
        return self._resolve(*self._macros[name], (*within, name), used)
      case _Name():
        raise UserError(f'{where}bindings bind values, not functions or classes; saw {shown(value)}: write a value')
      case dict():
        return tuple((resolve(key), resolve(part)) for key, part in value.items())  # as fields.check has it
      case list() | tuple():
        return tuple(map(resolve, value))
    return value


def _located(path: str) -> str:
  """A path, or that of a file in an installed package: 'lingvo_moe/params/mt/base.gin' is found from any folder.

  Nothing is imported: a package within a package would be looked for by importing that, so it is taken as a folder of
  it.
  """
  package, _, rest = path.partition('/')
  if not rest or not package.isidentifier() or os.path.exists(path):
    return path
  try:
    spec = importlib.util.find_spec(package)
  except ValueError:  # a module without a spec, such as __main__
    return path
  return os.path.join(((spec and spec.submodule_search_locations) or [package])[0], rest)
