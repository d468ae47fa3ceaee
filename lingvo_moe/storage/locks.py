"""Locks of files and folders on one machine, which the system releases when their holder ends.

Machines that share a folder need not share its locks: see claims.py for work that these divide.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable


def take(fd: int, wait: bool = True, required: bool = True) -> bool:
  """Takes the lock of an open file or folder until it is closed; False if another has it and is not waited for.

  On a file system without locks it raises OSError, or if the lock is not `required` keeps nobody out.
  """
  try:
    fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
  except BlockingIOError:
    return False
  except OSError:
    if required:
      raise
  return True


def open_locked(path: str, open_: Callable[[str], int], wait: bool = True, required: bool = True) -> int | None:
  """Descriptor, locked, of what `open_` makes or finds at a path; None if another has the lock and is not waited for.

  A holder may rename what it had locked, so the descriptor is that of the path only if it still is there afterwards.
  """
  while True:
    fd = open_(path)
    if not take(fd, wait, required):
      os.close(fd)
      return None
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.fstat(fd), os.stat(path)):
        return fd
    os.close(fd)
