"""TensorFlow's import without its messages at start-up, of which no log level turns off all.

`import lingvo_moe` installs it: the next `import tensorflow`, whoever makes it, prints what is not such a message.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
import tempfile
import types

_KNOWN = re.compile(
  rb'WARNING: All log messages before absl::InitializeLog\(\)|[IW]\d{4} [\d:. ]+\d+ +\S+:\d+\] |'
  rb'\d{4}-\d\d-\d\d [\d:. ]+: [IW] |To enable the following instructions: '
)


def install() -> None:
  """Sets the log level, unless the user did, and makes the first import of TensorFlow quiet."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  if 'tensorflow' not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())


def import_tensorflow() -> None:
  """Imports TensorFlow, quietly."""
  install()
  importlib.import_module('tensorflow')


class _Finder(importlib.abc.MetaPathFinder):
  """Finds TensorFlow as Python does, once, and has it loaded by _load."""

  def find_spec(self, fullname, path=None, target=None):
    if fullname != 'tensorflow':
      return None
    sys.meta_path.remove(self)
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
      spec.loader.exec_module = functools.partial(_load, spec.loader)
    return spec


def _load(loader: importlib.abc.Loader, module: types.ModuleType) -> None:
  """Loads a module with stderr held back; prints what is no message of its start-up, or everything if it fails."""
  del loader.exec_module  # which leaves that of its class
  try:
    stderr = os.dup(2)
  except OSError:  # there is none
    return loader.exec_module(module)
  with tempfile.TemporaryFile() as printed:
    sys.stderr.flush()
    os.dup2(printed.fileno(), 2)
    failed = True
    try:
      loader.exec_module(module)
      failed = False
    finally:
      sys.stderr.flush()
      os.dup2(stderr, 2)
      printed.seek(0)
      os.write(stderr, b''.join(line for line in printed if failed or not _KNOWN.match(line)))
      os.close(stderr)
