"""A folder that appears whole or not at all: it is written beside its place, and renamed at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from lingvo_moe.core import paths
from lingvo_moe.core.errors import UserError


def check(path: str, what: str) -> None:
  """Raises UserError if something is at the path, or it has a scheme; `what` goes there, such as 'an export'."""
  paths.check('--out', path)
  if os.path.lexists(path):
    raise UserError(f'--out={path} exists: {what} goes to a new directory; choose another, or remove that one')


@contextlib.contextmanager
def writing(path: str) -> Iterator[str]:
  """The path at which to write the folder; after an error nothing is left of it."""
  path = os.path.abspath(path)
  partial = os.path.join(os.path.dirname(path), f'.partial_{os.path.basename(path)}')
  shutil.rmtree(partial, ignore_errors=True)  # of a command that was killed
  try:
    os.makedirs(partial)
    yield partial
    os.rename(partial, path)
  except OSError as e:
    raise UserError(f'--out={path} could not be written ({e.strerror or e}): choose another place') from None
  finally:
    shutil.rmtree(partial, ignore_errors=True)
