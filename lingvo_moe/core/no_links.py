"""Files that are opened in place in a log directory: a symbolic link among them is refused.

A log directory may be a stranger's, and a link in it may point to any file of the user's, which would be written to.
"""

from __future__ import annotations

import errno
import os
from typing import IO

from lingvo_moe.core.errors import UserError


def append(path: str) -> IO:
  """Opens a text file to add to it; makes it if it is not there.

  Raises:
    UserError: it is a symbolic link.
  """
  return open(path, 'a', encoding='utf-8', opener=_open)


def _open(path: str, flags: int) -> int:
  try:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
  except OSError as e:
    if e.errno != errno.ELOOP:
      raise
  target = os.readlink(path) if os.path.islink(path) else 'somewhere'
  raise UserError(f'{path} must be a file of its own; saw a symbolic link to {target}: remove it')
