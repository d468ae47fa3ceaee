"""Files on remote file systems, read and written by TensorFlow's tf.io.gfile.

Nothing is expected of it but that a file appears whole when it is closed: it is never renamed nor appended to.
"""

from __future__ import annotations

import contextlib
import errno
import io
import time
from collections.abc import Iterator
from typing import Any

_BUFFER = 1 << 20  # bytes
_REWRITE_SECONDS = 30.0  # from one writing of a log to the next


def exists(path: str) -> bool:
  with _as_os_errors(path):
    return _gfile().exists(path)


def isdir(path: str) -> bool:
  with contextlib.suppress(FileNotFoundError):
    return _stat(path).is_directory
  return False


def isfile(path: str) -> bool:
  return exists(path) and not isdir(path)


def size(path: str) -> int:
  return _stat(path).length


def state(path: str) -> list[int]:
  """Size and time of a file, as files.state has them; now, where the file system keeps no time."""
  stat = _stat(path)
  return [stat.length, stat.mtime_nsec or time.time_ns(), 0, 0]


def listdir(path: str) -> list[str]:
  """Names in a folder; one that is not there is empty."""
  return [name.rstrip('/') for name in _entries(path)]


def file_names(folder: str) -> list[str]:
  """Names in a folder, but those that a bucket marks as folders; to ask about each would take long."""
  return [name for name in _entries(folder) if not name.endswith('/')]


def makedirs(path: str) -> None:
  with _as_os_errors(path):
    _gfile().makedirs(path)


def remove(path: str) -> None:
  with _as_os_errors(path):
    _gfile().remove(path)


def rmtree(path: str) -> None:
  """Removes a folder and what is in it, as far as that can be done."""
  if isdir(path):
    with contextlib.suppress(OSError), _as_os_errors(path):
      _gfile().rmtree(path)


def read(path: str, size: int = -1) -> bytes:
  """The first bytes of a file; all without a size."""
  with _as_os_errors(path), _gfile().GFile(path, 'rb') as f:
    return f.read(size)


def open_to_read(path: str) -> io.BufferedReader:
  return io.BufferedReader(_Stream(path), _BUFFER)


def write(path: str, data: str | bytes) -> None:
  with _as_os_errors(path), _gfile().GFile(path, 'wb') as f:
    f.write(data)


class _Stream(io.RawIOBase):
  """Contents of a file, as Python's readers take them."""

  def __init__(self, path: str):
    super().__init__()
    self.name = path
    _stat(path)  # GFile would miss a file only when it is read
    self._file = _gfile().GFile(path, 'rb')

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    with _as_os_errors(self.name):
      data = self._file.read(len(buffer))
    buffer[: len(data)] = data
    return len(data)

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    with _as_os_errors(self.name):
      self._file.seek(offset, whence)
    return self.tell()

  def tell(self) -> int:
    with _as_os_errors(self.name):
      return self._file.tell()

  def close(self) -> None:
    if not self.closed:
      self._file.close()
      super().close()


class Log(io.StringIO):
  """Text of a file that is added to, and written again whole: when it is closed, by `sync`, and now and then by `flush`."""

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


def _stat(path: str) -> Any:
  with _as_os_errors(path):
    return _gfile().stat(path)


def _entries(folder: str) -> list[str]:
  with _as_os_errors(folder):
    return _gfile().listdir(folder) if isdir(folder) else []


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
