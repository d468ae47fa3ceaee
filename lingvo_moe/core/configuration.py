"""From a model's name and gin bindings to its resolved configuration, and that to and from a file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import gin

from lingvo_moe.core import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import closest


def resolve(name: str, gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = (), **overrides) -> Any:
  """The model registered as `name`, with gin's values, then `overrides`, in place of its own.

  Raises:
    UserError: for an unknown model or field, a value out of its range, or a binding to another model: a binding
      reaches only the class it names, never a subclass, so one to a parent would be silently without effect.
  """
  cls = registry.get(name)
  gin.clear_config()
  for path in gin_files:
    _bind(cls, _read(path), f'--gin_file={path}: ')
  for binding in gin_bindings:
    _bind(cls, binding, '')
  _refuse_what_binds_nothing(cls)
  for other, other_cls in registry.siblings(name).items():
    if bound := gin.get_bindings(other_cls, resolve_references=False):
      wrong, right = (', '.join(f'{c.__name__}.{field}' for field in bound) for c in (other_cls, cls))
      raise UserError(
        f'{wrong} is bound, a value of {other}, but the model is {name}: write {right} '
        '(bindings do not reach subclasses)'
      )
  return _make(cls, name, overrides)


def _refuse_what_binds_nothing(cls: type) -> None:
  """gin takes `max_steps = 5` for a macro and `train/Tiny.max_steps = 5` for a scope: here neither has an effect."""
  text = gin.config_str()
  for bound in re.findall(r'^([\w./]+)\s*=', text, flags=re.MULTILINE):
    field = re.split(r'[./]', bound)[-1]
    if '/' in bound or ('.' not in bound and not re.search(rf'%{re.escape(bound)}\b', text)):
      raise UserError(f'{bound} binds no value of the model: write {cls.__name__}.{field} = ...')


def save(name: str, config: Any, path: str) -> None:
  """Writes {'model': name, 'values': every field} as JSON, whole or not at all."""
  text = json.dumps({'model': name, 'values': dataclasses.asdict(config)}, indent=2, ensure_ascii=False)
  with open(path + '.partial', 'w', encoding='utf-8') as f:
    f.write(text + '\n')
  os.replace(path + '.partial', path)


def load(path: str) -> tuple[str, Any]:
  """(model name, configuration) of a file that `save` wrote; gin has no say in it."""
  try:
    with open(path, encoding='utf-8') as f:
      read = json.load(f)
    name, values = read['model'], read['values']
  except FileNotFoundError:
    raise UserError(
      f'there is no run in {os.path.dirname(path) or "."} (no file {path}): train one there first, '
      'or give the --logdir of another'
    ) from None
  except (ValueError, KeyError, TypeError) as e:
    raise UserError(f'{path} is not a configuration written by the trainer ({e}): restore it from a copy') from None
  gin.clear_config()
  cls = registry.get(name)
  known = {f.name for f in dataclasses.fields(cls)}
  for field in values:
    if field not in known:
      raise UserError(f'{path}: {name} has no field {field!r} in this version; {closest(field, known)}')
  return name, _make(cls, f'{path}: {name}', {k: _as_tuples(v) for k, v in values.items()})


def differences(old: Any, new: Any, ignore: Sequence[str] = ()) -> list[str]:
  """'field=old, now new' for every field in which two configurations differ."""
  return [
    f'{f.name}={getattr(old, f.name)!r}, now {getattr(new, f.name)!r}'
    for f in dataclasses.fields(old)
    if f.name not in ignore and getattr(old, f.name) != getattr(new, f.name)
  ]


def _as_tuples(value):
  return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _make(cls: type, label: str, values: dict[str, Any]) -> Any:
  try:
    return cls(**values)
  except UserError as e:
    raise UserError(f'{label}: {str(e).splitlines()[0]}') from None  # gin adds lines of its own
  except TypeError as e:
    raise UserError(f'{label} cannot be made: {str(e).splitlines()[0]}') from None


def _read(path: str) -> str:
  try:
    with open(path, encoding='utf-8') as f:
      return f.read()
  except FileNotFoundError:
    raise UserError(f'--gin_file={path}: there is no such file') from None
  except (OSError, UnicodeDecodeError) as e:
    raise UserError(f'--gin_file={path} cannot be read as UTF-8 text: {e}') from None


def _bind(cls: type, text: str, where: str) -> None:
  """Hands bindings to gin, the names of a model's module spelt in full: other data sets have classes so called, too."""
  peers = '|'.join(c.__name__ for c in registry.module_of(cls))
  try:
    gin.parse_config(re.sub(rf'(?m)^(\s*(?:\w+/)*)((?:{peers})\.)', rf'\g<1>{cls.__module__}.\g<2>', text))
  except (ImportError, ValueError, SyntaxError, KeyError, NameError, TypeError, OSError) as e:
    raise UserError(f'{where}{_explain(cls, e)}') from None


def _explain(cls: type, error: Exception) -> str:
  message = str(error)
  fields = [f.name for f in dataclasses.fields(cls)]
  if match := re.search(r"doesn't have a parameter named '(\w+)'", message):
    return f'{cls.__name__} has no field {match[1]!r}; {closest(match[1], fields)}'
  if match := re.search(r"(?:No configurable matching|Ambiguous selector) '([\w./]+)'", message):
    return (
      f'{match[1]!r} is not the chosen model; its bindings are written {cls.__name__}.<field>, '
      f'e.g. {cls.__name__}.max_steps = 100'
    )
  return (
    f'gin could not read a binding: {" ".join(message.split())} (bindings are written {cls.__name__}.max_steps = 100)'
  )
