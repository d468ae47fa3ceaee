"""Files of our own making: written whole or not at all, or added to; symbolic links in their places are not followed.

A log directory may be a stranger's, and a link in it may point to any file of the user's, which would be written to.

A path with a scheme, such as gs://bucket/run, is remote and read and written by TensorFlow's tf.io.gfile. Nothing is
expected of it but that a file appears whole when it is closed: it is never renamed nor appended to. file:///tmp/run is
the local path /tmp/run (`plain`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Iterator
from typing import IO, Any

from lingvo_moe.core.errors import UserError

SCHEMES = ('file', 'gs', 'ram')  # of the file systems in TensorFlow's wheels
_SCHEME = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://')
_REWRITE_SECONDS = 30.0  # from one writing of a remote log to the next


def plain(path: str) -> str:
  """Path without the scheme of local files."""
  return path.removeprefix('file://') if path.startswith('file:///') else path


def is_remote(path: str) -> bool:
  """Whether tf.io.gfile is needed."""
  return bool(_SCHEME.match(plain(path)))


def local_copy_of(folder: str) -> str:
  """Local folder for what belongs to a folder but has to be local, such as caches; the folder itself if it is local."""
  if not is_remote(folder):
    return folder
  name = hashlib.sha256(folder.rstrip('/').encode()).hexdigest()[:16]
  caches = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return os.path.join(caches, 'lingvo_moe', name)


def exists(path: str) -> bool:
  return _gfile().exists(path) if is_remote(path) else os.path.exists(path)


def isdir(path: str) -> bool:
  return _gfile().isdir(path) if is_remote(path) else os.path.isdir(path)


def listdir(path: str) -> list[str]:
  """Names in a folder; a remote one that is not there is empty."""
  if not is_remote(path):
    return os.listdir(path)
  return [name.rstrip('/') for name in _gfile().listdir(path)] if _gfile().isdir(path) else []


def makedirs(path: str) -> None:
  """Makes a folder, if it is not there, and those above it."""
  if is_remote(path):
    with _as_os_errors(path):
      _gfile().makedirs(path)
  else:
    os.makedirs(path, exist_ok=True)


def remove(path: str) -> None:
  if is_remote(path):
    with _as_os_errors(path):
      _gfile().remove(path)
  else:
    os.remove(path)


def rmtree(path: str) -> None:
  """Removes a folder and what is in it, as far as that can be done."""
  if not is_remote(path):
    shutil.rmtree(path, ignore_errors=True)
  elif isdir(path):
    with contextlib.suppress(OSError), _as_os_errors(path):
      _gfile().rmtree(path)


def read(path: str, size: int = -1) -> bytes:
  """The first bytes of a file; all without a size."""
  if not is_remote(path):
    with open(path, 'rb') as f:
      return f.read(size)
  with _as_os_errors(path), _gfile().GFile(path, 'rb') as f:
    return f.read(size)


def open_to_read(path: str) -> IO[bytes]:
  """A file, of which a remote one is read whole."""
  return io.BytesIO(read(path)) if is_remote(path) else open(path, 'rb')


@contextlib.contextmanager
def replacing(path: str, binary: bool = False) -> Iterator[IO]:
  """Opens `path`.partial for writing; it takes the place of `path` when the block ends, and is removed on an error.

  What a killed process left under that name is written over. Of several writers one writes at a time.

  Raises:
    OSError: as of a full disk; it names the file.
  """
  if is_remote(path):
    with io.BytesIO() if binary else io.StringIO() as f:
      yield f
      with _as_os_errors(path), _gfile().GFile(path, 'wb') as remote:
        remote.write(f.getvalue())
    return
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
    return _RemoteLog(path)
  return open(path, 'a', encoding='utf-8', opener=_open)


def sync(file: IO) -> None:
  """Writes what was added to a file that `append` opened."""
  file.sync() if isinstance(file, _RemoteLog) else file.flush()


class _RemoteLog(io.StringIO):
  """Text of a remote file, which is written again whole."""

  def __init__(self, path: str):
    super().__init__()
    self._path = path
    self._written = time.monotonic()
    self.write(read(path).decode() if exists(path) else '')

  def flush(self) -> None:
    if time.monotonic() - self._written > _REWRITE_SECONDS:
      self.sync()

  def sync(self) -> None:
    write(self._path, self.getvalue())
    self._written = time.monotonic()

  def close(self) -> None:
    if not self.closed:
      self.sync()
      super().close()


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


def _gfile() -> Any:
  import tensorflow as tf  # takes seconds, and local files do not need it

  return tf.io.gfile


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
  """Turns TensorFlow's errors into Python's."""
  import tensorflow as tf

  try:
    yield
  except tf.errors.NotFoundError:
    raise FileNotFoundError(errno.ENOENT, 'no such file', path) from None
  except tf.errors.OpError as e:
    raise OSError(errno.EIO, e.message.splitlines()[0] if e.message else type(e).__name__, path) from None
