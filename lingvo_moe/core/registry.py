"""Models by name: 'mt.m4.MoE2048E36L' is class MoE2048E36L of lingvo_moe/params/mt/m4.py.

Only the module a name asks for is imported, so a gin binding cannot reach a class of the same name elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import closest

_ROOT = 'lingvo_moe.params.'
_models: dict[str, type] = {}


def register(cls: type) -> type:
  """Class decorator: gives a model params class its name, its module below lingvo_moe.params and its own."""
  if not cls.__module__.startswith(_ROOT):
    raise ValueError(f'{cls.__module__}.{cls.__name__}: registered models live in {_ROOT}*')
  name = name_of(cls)
  if name in _models and _models[name].__module__ != cls.__module__:
    raise ValueError(f'two classes are called {name}')
  _models[name] = cls
  return cls


def name_of(cls: type) -> str:
  """The name of a registered class."""
  return f'{cls.__module__[len(_ROOT) :]}.{cls.__name__}'


def get(name: str) -> type:
  """The class registered as `name`; UserError with the closest names if there is none."""
  module = _ROOT + name.rpartition('.')[0]
  try:
    is_dotted = '.' in name and all(part.isidentifier() for part in name.split('.'))
    found = is_dotted and importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:
    found = False
  if found:
    importlib.import_module(module)
  if name not in _models:
    raise UserError(f'no model is called {name!r}; {closest(name, names())} (tools/models.py lists all)')
  return _models[name]


def siblings(name: str) -> dict[str, type]:
  """The other models that the import of `name` registered."""
  return {n: c for n, c in _models.items() if n != name}


def module_of(cls: type) -> list[type]:
  """The registered classes of the module that `cls` is in."""
  return [c for c in _models.values() if c.__module__ == cls.__module__]


def names() -> list[str]:
  """Every registered name; imports every params module."""
  root = importlib.import_module(_ROOT[:-1])
  for info in pkgutil.walk_packages(root.__path__, _ROOT):
    importlib.import_module(info.name)
  return sorted(_models)
