"""Files on remote file systems, read and written by TensorFlow's tf.io.gfile.

Nothing is expected of it but that a file appears whole when it is closed: it is never renamed nor appended to.
"""

import contextlib
import errno
import io
import time
from collections.abc import Iterator
from typing import Any

_BUFFER = 1 << 20  # bytes
_REWRITE_SECONDS = 30.0  # from one writing of a log to the next


def call(name: str, path: str) -> Any:
  """Result of a function of tf.io.gfile: exists, stat, makedirs, remove, ..."""
  with _as_os_errors(path):
    return getattr(_gfile(), name)(path)


def read(path: str, size: int = -1, begin: int = 0) -> bytes:
  """Bytes of a file from one on; all that follow without a size."""
  with _as_os_errors(path), _gfile().GFile(path, 'rb') as f:
    f.seek(begin)
    return f.read(size)


def write(path: str, data: str | bytes) -> None:
  with _as_os_errors(path), _gfile().GFile(path, 'wb') as f:
    f.write(data)


def open_to_read(path: str) -> io.BufferedReader:
  return io.BufferedReader(_Stream(path), _BUFFER)


class _Stream(io.RawIOBase):
  """Contents of a file, as Python's readers take them."""

  def __init__(self, path: str):
    super().__init__()
    self.name = path
    call('stat', path)  # GFile would miss a file only when it is read
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
      return self._file.tell()

  def close(self) -> None:
    if not self.closed:
      self._file.close()
      super().close()


class Log(io.StringIO):
  """Text of a file that is added to; it is written again whole by `close`, by `sync`, and now and then by `flush`."""

  def __init__(self, path: str):
    super().__init__()
    self._path = path
    self._written = time.monotonic()
    self.write(read(path).decode() if call('exists', path) else '')

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
