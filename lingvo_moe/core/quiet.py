"""TensorFlow's import without its messages at start-up, of which no log level turns off all.

`import lingvo_moe` installs it: the next `import tensorflow`, whoever makes it, prints what is not such a message.
"""

import contextlib
import importlib
import importlib.machinery
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator

from lingvo_moe.core.errors import UserError

_KNOWN = re.compile(
  rb'WARNING: All log messages before absl::InitializeLog\(\)|[IW]\d{4} [\d:. ]+\d+ +\S+:\d+\] |'
  rb'\d{4}-\d\d-\d\d [\d:. ]+: [IW] |To enable the following instructions: '
)

_redirecting = threading.RLock()  # of two threads, one would restore what the other has redirected


def install() -> None:
  """Sets the log level, unless the user did, and makes the first import of TensorFlow quiet."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  if 'tensorflow' not in sys.modules and _Finder not in sys.meta_path:
    sys.meta_path.insert(0, _Finder)


def import_tensorflow() -> None:
  try:
    importlib.import_module('tensorflow')
  except ModuleNotFoundError as e:
    if e.name != 'tensorflow':
      raise
    raise UserError(
      'a log directory needs TensorFlow, which is not installed: pip install tensorflow tensorflow-text, or give what '
      'lingvo-moe export --format=litert wrote'
    ) from None


class _Finder:
  """Finds TensorFlow as Python does, once, and lets its loader print no message of its start-up."""

  @classmethod
  def find_spec(cls, fullname, path=None, target=None):
    if fullname != 'tensorflow':
      return None
    sys.meta_path.remove(cls)
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
      spec.loader.exec_module = without_messages(_KNOWN)(spec.loader.exec_module)
    return spec


@contextlib.contextmanager
def without_messages(known: re.Pattern[bytes]) -> Iterator[None]:
  """Holds back what native code writes to stderr in the block; prints the lines that do not match, or all on errors."""
  try:
    os.fstat(2)
  except OSError:  # there is none
    yield
    return
  with _redirecting, tempfile.TemporaryFile() as printed:
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(printed.fileno(), 2)
    failed = True
    try:
      yield
      failed = False
    finally:
      sys.stderr.flush()
      os.dup2(stderr, 2)
      printed.seek(0)
      os.write(stderr, b''.join(line for line in printed if failed or not known.match(line)))
      os.close(stderr)
