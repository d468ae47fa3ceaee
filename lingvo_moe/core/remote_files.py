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

_REWRITE_SECONDS = 30.0  # from one writing of a log to the next


def exists(path: str) -> bool:
  with _as_os_errors(path):
    return _gfile().exists(path)


def isdir(path: str) -> bool:
  with _as_os_errors(path):
    return _gfile().isdir(path)


def listdir(path: str) -> list[str]:
  """Names in a folder; one that is not there is empty."""
  with _as_os_errors(path):
    return [name.rstrip('/') for name in _gfile().listdir(path)] if isdir(path) else []


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


def write(path: str, data: str | bytes) -> None:
  with _as_os_errors(path), _gfile().GFile(path, 'wb') as f:
    f.write(data)


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
