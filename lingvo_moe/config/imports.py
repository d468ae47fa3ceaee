"""Imports of a user's own code: files and modules that a command line, a caller or an installed package names.

Nothing else is executed: no path that a run, a corpus or an export names, and no file for being in the working
directory, which is not put on sys.path.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator

from lingvo_moe.core import quiet
from lingvo_moe.core.errors import UserError, shown

_GROUP = 'lingvo_moe.models'  # of the entry points by which a package names its modules


def run(name: str) -> str:
  """Imports a file ('harbour.py') or an installed module ('package.module'), once; returns the module's name.

  Raises:
    UserError: with what is wrong, and the file and line where it raised something.
  """
  if name.endswith('.py') or os.sep in name:
    return _run_file(name)
  if not all(part.isidentifier() for part in name.split('.')):
    raise UserError(f'--import={shown(name)}: give a file, such as harbour.py, or an installed module, package.module')
  with _in_words(name, name):
    importlib.import_module(name)
  return name


def installed() -> list[str]:
  """Modules that installed packages name by the entry point group lingvo_moe.models."""
  from importlib import metadata  # takes long, and few ask

  return sorted({point.module for point in metadata.entry_points(group=_GROUP)})


def _run_file(path: str) -> str:
  """Executes a file as the module of its name without '.py', which later files may import."""
  name, ending = os.path.splitext(os.path.basename(path))
  if not os.path.isfile(path):
    raise UserError(f'--import={path}: there is no such file')
  if not name.isidentifier() or ending != '.py':
    raise UserError(f'--import={path}: a file is named as a module of Python is, such as harbour.py')
  module = sys.modules.get(name)
  spec = None if module else importlib.util.find_spec(name)
  spec = spec if spec and spec.loader else None  # not for a folder of that name
  module_file = getattr(module, '__file__', None) if module else spec and spec.origin
  if (module or spec) and not (module_file and os.path.realpath(module_file) == os.path.realpath(path)):
    raise UserError(
      f'--import={path}: there is a module {name} already ({module_file or "a part of Python"}): rename the file'
    )
  if module:
    return name
  with _in_words(path, name):
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(path))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    # What is compiled already, which may be of another text, is neither read nor written.
    exec(compile(spec.loader.get_data(spec.origin), spec.origin, 'exec'), vars(module))
  return name


@contextlib.contextmanager
def _in_words(given: str, name: str) -> Iterator[None]:
  """Imports TensorFlow quietly first, as the code may; turns what the code raises into a UserError of one line."""
  quiet.import_tensorflow()
  try:
    yield
  except KeyboardInterrupt:
    raise
  except BaseException as e:  # also SystemExit
    module = sys.modules.pop(name, None)
    path = os.path.abspath(given) if given.endswith('.py') else getattr(module, '__file__', None)
    lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
    lines = [e.lineno] if isinstance(e, SyntaxError) and e.filename == path else lines
    where = f', line {lines[-1]}' if lines else ''
    text = e.msg if isinstance(e, SyntaxError) else str(e).partition('\n')[0]
    if isinstance(e, ModuleNotFoundError):
      raise UserError(f'--import={given}{where} needs the module {e.name}, which is not installed') from None
    kind = '' if isinstance(e, UserError) else f'{type(e).__name__}: '
    raise UserError(f'--import={given}{where} raised {kind}{text}'.rstrip(': ')) from None
