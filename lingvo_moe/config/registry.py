"""Models by name: 'mt.m4.MoE2048E36L' is class MoE2048E36L of lingvo_moe/params/mt/m4.py.

Of the zoo, only the module that a name is in is imported, and only if the name is looked up. A user's own models have
the names of their modules, 'harbour.MoE16E', and are there once `install` has imported the file or module, or if an
installed package names it by the entry point group lingvo_moe.models.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lingvo_moe.config import bindings, fields, imports
from lingvo_moe.core.errors import UserError, closest, shown
from lingvo_moe.storage import files

_ROOT = 'lingvo_moe.params.'
_LONGEST = 200  # characters of a name: Python imports the parts of a module's name one within the other
_models: dict[str, type] = {}
_T = TypeVar('_T')


@typing.dataclass_transform(frozen_default=True, field_specifiers=(fields.field,))
def register(cls: type[_T]) -> type[_T]:
  """Class decorator: makes a frozen dataclass, whose fields gin can bind, and registers it by module and name.

  Raises:
    ValueError: for a name that is taken or begins as one of the zoo's, or a field that no parent declares.
  """
  name = name_of(cls)
  if not cls.__module__.startswith(_ROOT) and name.partition('.')[0] in (*_families(), 'lingvo_moe'):
    first = name.partition('.')[0]
    raise ValueError(f'{name} begins as names of the zoo do ({first}.): give the file, or the package, another name')
  if name in _models:
    raise ValueError(f'two classes are called {name}')
  fields.check_overrides(cls)
  _models[name] = bindings.bindable(dataclasses.dataclass(frozen=True)(cls))
  return _models[name]


def install(names: Sequence[str]) -> None:
  """Imports a user's files ('harbour.py') and modules ('package.module'), whose classes register themselves.

  Raises:
    UserError: one cannot be imported, or registers no model; none of its models is then registered.
  """
  for name in names:
    before = dict(_models)
    try:
      module = imports.run(name)
    except UserError:
      _models.clear()
      _models.update(before)
      raise
    if not any(cls.__module__ == module for cls in _models.values()):
      sys.modules.pop(module)
      raise UserError(f'--import={name} is for what registers models; saw none: decorate a class, @registry.register')


def tiny(giant: type, counts: str, **sizes: Any) -> type:
  """Registers <giant>Tiny, a subclass of the same graph at other sizes, and returns it.

  `counts` are its weights, for its docstring: '484k weights, 179k used by a token'.
  """
  body = {
    '__doc__': f'{giant.__name__} at a size that runs anywhere: {counts}.',
    '__module__': giant.__module__,
    '__annotations__': {name: fields.types(giant).get(name) for name in sizes},
  }
  return register(type(f'{giant.__name__}Tiny', (giant,), body | sizes))


def name_of(cls: type) -> str:
  return f'{cls.__module__.removeprefix(_ROOT)}.{cls.__name__}'


def get(name: str) -> type:
  """Class registered as `name`; UserError with the closest names if there is none."""
  module_name, is_zoo = name.rpartition('.')[0], name.partition('.')[0] in _families()
  is_dotted = '.' in name and len(name) <= _LONGEST and all(part.isidentifier() for part in name.split('.'))
  if is_dotted and is_zoo:
    spec = None
    with contextlib.suppress(ModuleNotFoundError):  # where 'mt.m4' is asked for as a package
      spec = importlib.util.find_spec(_ROOT + module_name)
    if spec is not None:
      importlib.import_module(spec.name)
  elif is_dotted and name not in _models and module_name in imports.installed():
    install([module_name])
  if name not in _models:
    way_out = 'lingvo-moe models lists all'
    if is_dotted and not is_zoo:
      module = module_name if '.' in module_name else f'{module_name}.py'
      way_out = f'a model of your own needs the file or module that registers it: --import={module}'
    raise UserError(f'no model is called {shown(name)}; {closest(name, [*names(), *own_names()])} ({way_out})')
  return _models[name]


def checksum(name: str) -> str | None:
  """SHA-256 of the file that registered a user's own model; None for the zoo's, and for one without a file."""
  path = getattr(sys.modules.get(get(name).__module__), '__file__', None)
  return files.sha256(path) if path and name.partition('.')[0] not in _families() else None


def about(name: str) -> str:
  """Docstring of a model, with the trainer's command where it has no 'Run:' of its own."""
  doc = inspect.getdoc(get(name))
  if 'Run:' in doc:
    return doc
  text, result, rest = doc.partition('\nResult:')
  run = f'Run:     lingvo-moe train --model={name} --logdir=DIR --data_dir=CORPUS'
  return f'{text}\n{run}{result}{rest}' if result else f'{text}\n\n{run}'


def registered() -> Mapping[str, type]:
  """All models that are registered by now, by name."""
  return _models


def names() -> list[str]:
  """Every name of the zoo; imports every params module."""
  root = _root()
  for info in pkgutil.walk_packages(root.__path__, _ROOT):
    importlib.import_module(info.name)
  return sorted(name for name, cls in _models.items() if cls.__module__.startswith(_ROOT))


def own_names() -> list[str]:
  """Every name of a user's own that is registered by now."""
  return sorted(name for name, cls in _models.items() if not cls.__module__.startswith(_ROOT))


@functools.cache
def _families() -> list[str]:
  """First parts of the names of the zoo: folders of params/."""
  return [info.name for info in pkgutil.iter_modules(_root().__path__)]


def checkout() -> str:
  """The folder that holds params/: the root of a checkout that is installed in place, else the installed package."""
  return os.path.dirname(os.path.dirname(os.path.realpath(_root().__file__)))


def _root() -> types.ModuleType:
  """The package lingvo_moe.params.

  A checkout has it in the folder params/ beside lingvo_moe/, and setup.py puts it in its place. Where the working
  directory is a checkout that is not installed in place, Python imports the checkout's lingvo_moe, which then lacks it.
  """
  name = _ROOT[:-1]
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as e:
    if e.name != name:
      raise
  checkout = pathlib.Path(__file__).resolve().parents[2]
  file = checkout / 'params' / '__init__.py'
  if not file.exists():
    raise UserError(
      f'the models, lingvo_moe.params, are not beside {checkout / "lingvo_moe"}: run this elsewhere, or install the '
      'checkout that you are in, with pip install -e .'
    )
  spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
  module = sys.modules[name] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
