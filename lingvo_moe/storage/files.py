"""Files of our own making: written whole or not at all, or added to; symbolic links in their places are not followed.

A log directory may be a stranger's, and a link in it may point to any file of the user's, which would be written to.

A path with a scheme, such as gs://bucket/run, is remote (remote_files.py). file:///tmp/run is the local path /tmp/run
(`plain`).
"""

import contextlib
import errno
import hashlib
import io
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from typing import IO

from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.storage import locks, remote_files

SCHEMES = ('file', 'gs', 'ram')  # of the file systems in TensorFlow's wheels
_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*)://')


def plain(path: str) -> str:
  """Path without the scheme of local files."""
  return path.removeprefix('file://') if path.startswith('file:///') else path


def is_remote(path: str) -> bool:
  """Whether tf.io.gfile is needed."""
  return bool(scheme(plain(path)))


def absolute(path: str) -> str:
  """Full path of a local file; a remote path is one."""
  return path if is_remote(path) else os.path.abspath(plain(path))


def is_inside(path: str, folder: str) -> bool:
  """Whether no link leads from a path in a local folder out of it, as one in someone else's folder may."""
  return is_remote(folder) or os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ''))


def local_copy_of(folder: str) -> str:
  """Local folder for what belongs to a folder but has to be local, such as caches; the folder itself if it is local."""
  if not is_remote(folder):
    return folder
  caches = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return os.path.join(caches, 'lingvo_moe', hashlib.sha256(folder.rstrip('/').encode()).hexdigest()[:16])


def scheme(path: str | os.PathLike) -> str:
  """Scheme of a path, 'gs' of gs://bucket/run; '' if it has none."""
  match = _SCHEME.match(os.fspath(path))
  return match[1] if match else ''


def check_scheme(what: str, path: str | os.PathLike, schemes: Collection[str] = ()) -> None:
  """Raises UserError for a path such as s3://bucket/run, for which Python would make a folder 's3:' here.

  `what` says whose path it is, for the message; `schemes` are known, without '://'.
  """
  if scheme(path) not in ('', *schemes):
    known = ', '.join(f'{name}://' for name in sorted(schemes)) or 'no scheme'
    raise UserError(
      f'{what} is a path of a file system that is mounted on this machine ({known} is known); saw {shown(path)}: mount '
      'it and give its folder'
    )


def check_for_tensorflow(what: str, path: str | os.PathLike) -> None:
  """Raises UserError for a folder in which TensorFlow would write files that it cannot read again.

  Its name, or that of a folder above it, has a bracket or a backslash, which TensorFlow reads as a pattern, or is not
  UTF-8. `what` says whose path it is, for the message.
  """
  text = os.fspath(path) if scheme(path) else os.path.abspath(path)
  if re.search(r'[\[\\\ud800-\udfff]', text):
    raise UserError(
      f'TensorFlow cannot read files in a folder with [ or \\ in its path, or a name that is not UTF-8; saw {what}='
      f'{shown(text)}: choose another name, or rename the folder'
    )


def exists(path: str) -> bool:
  return remote_files.call('exists', path) if is_remote(path) else os.path.exists(path)


def isdir(path: str) -> bool:
  if not is_remote(path):
    return os.path.isdir(path)
  with contextlib.suppress(FileNotFoundError):
    return remote_files.call('stat', path).is_directory
  return False


def isfile(path: str) -> bool:
  return exists(path) and not isdir(path) if is_remote(path) else os.path.isfile(path)


def size(path: str) -> int:
  return remote_files.call('stat', path).length if is_remote(path) else os.path.getsize(path)


def state(path: str) -> list[int]:
  """Size, two times in nanoseconds, and inode of a file: one of them differs when it has changed."""
  if is_remote(path):  # of which some file systems keep no time
    stat = remote_files.call('stat', path)
    return [stat.length, stat.mtime_nsec or time.time_ns(), 0, 0]
  stat = os.stat(path)
  return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def file_names(folder: str) -> list[str]:
  """Names of the files in a folder; of a remote one, names that a bucket does not mark as folders, to save calls."""
  if is_remote(folder):
    return [name for name in _remote_names(folder) if not name.endswith('/')]
  with os.scandir(folder) as entries:
    return [entry.name for entry in entries if entry.is_file()]


def listdir(path: str) -> list[str]:
  """Names in a folder; a remote one that is not there is empty."""
  return [name.rstrip('/') for name in _remote_names(path)] if is_remote(path) else os.listdir(path)


def _remote_names(folder: str) -> list[str]:
  """Names in a folder, those of folders with a slash if it is a bucket's; one that is not there is empty."""
  return remote_files.call('listdir', folder) if isdir(folder) else []


def makedirs(path: str) -> None:
  """Makes a folder, if it is not there, and those above it."""
  remote_files.call('makedirs', path) if is_remote(path) else os.makedirs(path, exist_ok=True)


def remove(path: str) -> None:
  """Removes a file, if it is there."""
  with contextlib.suppress(FileNotFoundError):
    remote_files.call('remove', path) if is_remote(path) else os.remove(path)


def set_aside(path: str) -> str:
  """Renames a file to the first of path.old, path.old.2 and so on that is not there, which is returned."""
  names = (f'{path}.old{"" if number == 1 else f".{number}"}' for number in itertools.count(1))
  old = next(name for name in names if not exists(name))
  if is_remote(path):
    write(old, read(path))
    remove(path)
  else:
    os.rename(path, old)
  return old


def rmtree(path: str) -> None:
  """Removes a folder and what is in it, as far as that can be done."""
  if not is_remote(path):
    shutil.rmtree(path, ignore_errors=True)
  elif isdir(path):
    with contextlib.suppress(OSError):
      remote_files.call('rmtree', path)


def read(path: str, size: int = -1, begin: int = 0) -> bytes:
  """Bytes of a file from one on; all that follow without a size."""
  if is_remote(path):
    return remote_files.read(path, size, begin)
  with open(path, 'rb') as f:
    f.seek(begin)
    return f.read(size)


def open_to_read(path: str) -> IO[bytes]:
  """Opens a file for reading in parts."""
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
    fd = locks.open_locked(partial, _open_partial)
    try:
      os.ftruncate(fd, 0)
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


def create(path: str, data: str) -> bool:
  """Writes a new file; False if it is there. Of two that write one in a bucket at a time, the last one has."""
  if is_remote(path):
    if not exists(path):
      write(path, data)
    return read(path) == data.encode()
  try:
    with open(path, 'x', encoding='utf-8') as f:
      f.write(data)
    return True
  except FileExistsError:
    return False


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


@contextlib.contextmanager
def lock(folder: str) -> Iterator[None]:
  """Creates a local folder if needed, and holds its lock for the block; the system releases that of a dead process.

  It avoids duplicate work on one machine. Files must still be renamed into place when complete, as other machines may
  share the folder without sharing the lock.
  """
  try:
    os.makedirs(folder, exist_ok=True)
    f = append(os.path.join(folder, '.lock'))
  except OSError as e:
    raise UserError(f'{folder} must be a folder that can be written to ({e.strerror}): give another') from None
  with f:
    locks.take(f.fileno())
    yield


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


def _open_partial(partial: str) -> int:
  """Descriptor of a file of this name, which is made if need be; follows no symbolic link."""
  if os.path.islink(partial):
    os.remove(partial)
  return _open(partial, os.O_RDWR | os.O_CREAT)


def sha256(path: str, progress: Callable[[int], object] = lambda size: None) -> str:
  """Hash of a file's contents, in hex; `progress` is called with the size of each part that is read."""
  digest = hashlib.sha256()
  with open_to_read(path) as f:
    while part := f.read(1 << 20):
      digest.update(part)
      progress(len(part))
  return digest.hexdigest()
