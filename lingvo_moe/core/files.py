"""Files of our own making: written whole or not at all, or added to; symbolic links in their places are not followed.

A log directory may be a stranger's, and a link in it may point to any file of the user's, which would be written to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from typing import IO

from lingvo_moe.core.errors import UserError


@contextlib.contextmanager
def replacing(path: str, binary: bool = False) -> Iterator[IO]:
  """Opens `path`.partial for writing; it takes the place of `path` when the block ends, and is removed on an error.

  What a killed process left under that name is written over. Of several writers one writes at a time.

  Raises:
    OSError: as of a full disk; it names the file.
  """
  partial = path + '.partial'
  try:
    fd = _claimed(partial)
    try:
      with open(fd, 'wb') if binary else open(fd, 'w', encoding='utf-8', newline='\n') as f:
        yield f
        f.flush()
        os.fsync(fd)
        os.replace(partial, path)
    except BaseException:
      with contextlib.suppress(FileNotFoundError):
        os.remove(partial)
      raise
  except OSError as e:
    if e.filename is not None:
      raise
    raise OSError(e.errno, e.strerror, path) from None  # a write that fails does not say to which file


def write(path: str, data: str | bytes) -> None:
  """Writes a file, whole or not at all."""
  with replacing(path, binary=isinstance(data, bytes)) as f:
    f.write(data)


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


def _claimed(partial: str) -> int:
  """Descriptor of an empty file under that name, which no other writer has; a symbolic link there is not followed."""
  while True:
    try:
      fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as e:
      if e.errno != errno.ELOOP:
        raise
      os.remove(partial)
      continue
    fcntl.flock(fd, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.fstat(fd), os.stat(partial)):
        os.ftruncate(fd, 0)
        return fd
    os.close(fd)  # another writer has renamed it meanwhile


def sha256(path: str) -> str:
  """Hash of a file's contents, in hex."""
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()
