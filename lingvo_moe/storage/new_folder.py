"""Atomic creation of a folder, also in place of an existing one, and if the command is killed.

It is written beside its place, as `.partial_<name>`, which the command locks, and renamed at the end, when all of it is
on the disk: after a power cut too, its name has all of it, or what was there before. What a killed command left under
the hidden name is removed by the next command that writes the folder.
"""

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files, locks

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def check(path: str, what: str, flag: str = '--out') -> None:
  """Raises UserError if something is at the path, or TensorFlow could not read it; `what` goes there: 'an export'."""
  files.check_scheme(flag, path)
  files.check_for_tensorflow(flag, path)
  if os.path.lexists(path):
    raise UserError(f'{flag}={path} exists: {what} goes to a new directory; choose another, or remove that one')


@contextlib.contextmanager
def writing(path: str, replace: bool = False) -> Iterator[str]:
  """The path at which to write the folder that appears at `path`; after an error nothing is left of it.

  Folders above it are made; with `replace` it takes the place of one that is there.

  Raises:
    UserError: it cannot be written, or another command is writing it.
  """
  path = os.path.realpath(path) if replace else os.path.abspath(path)
  parent, name = os.path.split(path)
  partial, replaced = (os.path.join(parent, f'.{kind}_{name}') for kind in ('partial', 'replaced'))
  with contextlib.ExitStack() as stack:
    try:
      os.makedirs(parent, exist_ok=True)
      _lock(partial, path, stack)
      stack.callback(shutil.rmtree, partial, ignore_errors=True)
      if os.path.lexists(path):
        shutil.rmtree(replaced, ignore_errors=True)
      elif os.path.isdir(replaced):  # a command was killed between two renames
        os.rename(replaced, path)
      for name in os.listdir(partial):  # of a command that was killed
        shutil.rmtree(os.path.join(partial, name), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
          os.remove(os.path.join(partial, name))
      yield partial
      _sync(partial)
      if replace and os.path.isdir(path):
        _exchange(partial, path, replaced)
      else:
        os.rename(partial, path)
      _sync_one(parent)
    except OSError as e:
      raise UserError(f'{path} could not be written ({e.strerror or e}): make room, or choose another place') from None


def _sync(folder: str) -> None:
  """Writes a folder and all in it to the disk, so that after a power cut its new name has it whole."""
  for path, _, names in os.walk(folder):
    for name in (*names, ''):
      if not os.path.islink(os.path.join(path, name)):
        _sync_one(os.path.join(path, name))


def _sync_one(path: str) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError as e:
    if e.errno != errno.EINVAL:  # of a folder, where the file system has none
      raise
  finally:
    os.close(descriptor)


def _exchange(partial: str, path: str, replaced: str) -> None:
  """Puts a folder in the place of another, which is removed: in one operation where the file system has it."""
  with contextlib.ExitStack() as stack:
    _lock(path, path, stack)  # under the name of `partial` no other command may take it before it is removed
    try:
      _rename_exchange(partial, path)
      shutil.rmtree(partial, ignore_errors=True)
    except OSError as e:
      if e.errno not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise
      os.rename(path, replaced)
      os.rename(partial, path)
      shutil.rmtree(replaced, ignore_errors=True)


def _rename_exchange(a: str, b: str) -> None:
  """renameat2(2) with RENAME_EXCHANGE, which Linux has on most local file systems."""
  rename = getattr(ctypes.CDLL(None, use_errno=True), 'renameat2', None)
  if rename is None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
  if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), a, None, b)


def _lock(folder: str, path: str, stack: contextlib.ExitStack) -> None:
  """Makes a folder, if need be, and keeps other commands that write `path` out of it until the stack is closed."""
  fd = locks.open_locked(folder, _open_or_make, wait=False, required=False)
  if fd is None:
    raise UserError(f'another command is writing {path}: wait for it, or choose another place')
  stack.callback(os.close, fd)


def _open_or_make(folder: str) -> int:
  while True:
    with contextlib.suppress(FileExistsError):
      os.mkdir(folder)
    with contextlib.suppress(FileNotFoundError):  # another command has just ended, and renamed it
      return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
