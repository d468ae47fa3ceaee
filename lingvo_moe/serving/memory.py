"""Memory that the C library keeps after batches of many shapes: given back to the system now and then."""

from __future__ import annotations

import contextlib
import ctypes
import time


class Trimmer:
  """Gives back free memory when called, at most every `seconds`.

  Batches of all shapes leave free pieces in the heaps of TensorFlow's threads, which otherwise grow slowly for hours.
  """

  def __init__(self, seconds: float = 60.0):
    self._seconds = seconds
    self._last = time.monotonic()

  def __call__(self) -> bool:
    """Returns whether it did; not with C libraries that cannot."""
    if time.monotonic() < self._last + self._seconds:
      return False
    self._last = time.monotonic()
    with contextlib.suppress(OSError, AttributeError):
      ctypes.CDLL('libc.so.6').malloc_trim(0)
      return True
    return False
