"""File lock for a folder, so that one process at a time adds to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from lingvo_moe.core import files
from lingvo_moe.core.errors import UserError


@contextlib.contextmanager
def lock(folder: str) -> Iterator[None]:
  """Creates the folder if needed, and holds its lock for the block; the system releases that of a process that dies.

  The lock avoids duplicate work on one machine. Files must still be renamed into place when complete, as other machines
  may share the folder without sharing the lock.
  """
  try:
    os.makedirs(folder, exist_ok=True)
    f = files.append(os.path.join(folder, '.lock'))
  except OSError as e:
    raise UserError(f'{folder} must be a folder that can be written to ({e.strerror}): give another') from None
  with f:
    fcntl.flock(f, fcntl.LOCK_EX)
    yield
