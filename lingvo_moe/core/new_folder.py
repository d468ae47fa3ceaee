"""A folder that appears whole or not at all: it is written beside its place, and renamed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator

from lingvo_moe.core import paths
from lingvo_moe.core.errors import UserError


def check(path: str, what: str) -> None:
  """Raises UserError if something is at the path, or TensorFlow could not read it; `what` goes there: 'an export'."""
  paths.check('--out', path)
  paths.check_for_tensorflow('--out', path)
  if os.path.lexists(path):
    raise UserError(f'--out={path} exists: {what} goes to a new directory; choose another, or remove that one')


@contextlib.contextmanager
def writing(path: str) -> Iterator[str]:
  """The path at which to write the folder; after an error nothing is left of it.

  Raises:
    UserError: it cannot be written, or another command is writing it.
  """
  path = os.path.abspath(path)
  partial = os.path.join(os.path.dirname(path), f'.partial_{os.path.basename(path)}')
  with contextlib.ExitStack() as stack:
    try:
      os.makedirs(partial, exist_ok=True)
      stack.enter_context(_held(partial, path))
      stack.callback(shutil.rmtree, partial, ignore_errors=True)
      for name in os.listdir(partial):  # of a command that was killed
        shutil.rmtree(os.path.join(partial, name), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
          os.remove(os.path.join(partial, name))
      yield partial
      os.rename(partial, path)
    except OSError as e:
      raise UserError(f'--out={path} could not be written ({e.strerror or e}): choose another place') from None


@contextlib.contextmanager
def _held(partial: str, path: str) -> Iterator[None]:
  """Keeps other commands out of a folder; a file system without locks cannot."""
  folder = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
  try:
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(folder)
    raise UserError(f'another command is writing --out={path}: wait for it, or choose another') from None
  except OSError:
    pass
  try:
    yield
  finally:
    os.close(folder)
