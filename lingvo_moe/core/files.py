"""Files of our own making: written whole or not at all, or added to; symbolic links in their places are not followed.

A log directory may be a stranger's, and a link in it may point to any file of the user's, which would be written to.

A path with a scheme, such as gs://bucket/run, is remote (remote_files.py). file:///tmp/run is the local path /tmp/run
(`plain`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import itertools
import os
import shutil
from collections.abc import Iterator
from typing import IO

from lingvo_moe.core import paths
from lingvo_moe.core import remote_files
from lingvo_moe.core.errors import UserError

SCHEMES = ('file', 'gs', 'ram')  # of the file systems in TensorFlow's wheels


def plain(path: str) -> str:
  """Path without the scheme of local files."""
  return path.removeprefix('file://') if path.startswith('file:///') else path


def is_remote(path: str) -> bool:
  """Whether tf.io.gfile is needed."""
  return bool(paths.scheme(plain(path)))


def absolute(path: str) -> str:
  """Full path of a local file; a remote path is one."""
  return path if is_remote(path) else os.path.abspath(plain(path))


def is_inside(path: str, folder: str) -> bool:
  """Whether no link leads from a path in a local folder out of it; a folder of someone else must not make us go there."""
  return is_remote(folder) or os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ''))


def local_copy_of(folder: str) -> str:
  """Local folder for what belongs to a folder but has to be local, such as caches; the folder itself if it is local."""
  if not is_remote(folder):
    return folder
  name = hashlib.sha256(folder.rstrip('/').encode()).hexdigest()[:16]
  caches = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return os.path.join(caches, 'lingvo_moe', name)


def exists(path: str) -> bool:
  return remote_files.exists(path) if is_remote(path) else os.path.exists(path)


def isdir(path: str) -> bool:
  return remote_files.isdir(path) if is_remote(path) else os.path.isdir(path)


def isfile(path: str) -> bool:
  return remote_files.isfile(path) if is_remote(path) else os.path.isfile(path)


def size(path: str) -> int:
  return remote_files.size(path) if is_remote(path) else os.path.getsize(path)


def state(path: str) -> list[int]:
  """Size, two times in nanoseconds, and inode of a file: one of them differs when it has changed."""
  if is_remote(path):
    return remote_files.state(path)
  stat = os.stat(path)
  return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def file_names(folder: str) -> list[str]:
  """Names of the files in a folder, without those of folders."""
  if is_remote(folder):
    return remote_files.file_names(folder)
  with os.scandir(folder) as entries:
    return [entry.name for entry in entries if entry.is_file()]


def listdir(path: str) -> list[str]:
  """Names in a folder; a remote one that is not there is empty."""
  return remote_files.listdir(path) if is_remote(path) else os.listdir(path)


def makedirs(path: str) -> None:
  """Makes a folder, if it is not there, and those above it."""
  if is_remote(path):
    remote_files.makedirs(path)
  else:
    os.makedirs(path, exist_ok=True)


def remove(path: str) -> None:
  (remote_files.remove if is_remote(path) else os.remove)(path)


def set_aside(path: str) -> str:
  """Renames a file to the first of path.old, path.old.2 and so on that is not there, which is returned."""
  names = itertools.chain([f'{path}.old'], (f'{path}.old.{number}' for number in itertools.count(2)))
  kept = next(name for name in names if not exists(name))
  if is_remote(path):
    write(kept, read(path))
    remove(path)
  else:
    os.rename(path, kept)
  return kept


def rmtree(path: str) -> None:
  """Removes a folder and what is in it, as far as that can be done."""
  if is_remote(path):
    remote_files.rmtree(path)
  else:
    shutil.rmtree(path, ignore_errors=True)


def read(path: str, size: int = -1) -> bytes:
  """The first bytes of a file; all without a size."""
  if is_remote(path):
    return remote_files.read(path, size)
  with open(path, 'rb') as f:
    return f.read(size)


def open_to_read(path: str) -> IO[bytes]:
  """Opens a file, whose parts are read as they are asked for."""
  return remote_files.open_to_read(path) if is_remote(path) else open(path, 'rb')


@contextlib.contextmanager
def replacing(path: str, binary: bool = False) -> Iterator[IO]:
  """Opens `path`.partial for writing; it takes the place of `path` when the block ends, and is removed on an error.

  What a killed process left under that name is written over. Of several writers one writes at a time.

  Raises:
    OSError: as of a full disk; it names the file.
    UserError: there is something other than a file.
  """
  if is_remote(path):
    with io.BytesIO() if binary else io.StringIO() as f:
      yield f
      remote_files.write(path, f.getvalue())
    return
  if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
    raise UserError(f'{path} must be a file; saw a pipe or a device, which would be replaced: give another path')
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

  A remote one is written again whole, when it is closed, by `sync`, and by `flush` at most every 30 seconds: what a
  process that is killed had not written is lost.

  Raises:
    UserError: it is a symbolic link.
  """
  if is_remote(path):
    return remote_files.Log(path)
  return open(path, 'a', encoding='utf-8', opener=_open)


def sync(file: IO) -> None:
  """Writes what was added to a file that `append` opened."""
  file.sync() if isinstance(file, remote_files.Log) else file.flush()


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
  with open_to_read(path) as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()
