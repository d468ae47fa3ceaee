"""Claims on pieces of work that processes on any machines share, by files in a folder that all of them see.

A claim is a file that names its holder, who renews it. Another process takes it over if it has not changed for
`_STALE_SECONDS` of that process's own clock, or at once if its holder ran on the same machine and has ended. Where a
file cannot be made exclusively, as in a bucket, two processes may hold one claim: work must have the same result then.
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lingvo_moe.storage import files

WAIT_SECONDS = 2.0  # between looks at what other processes make
_RENEW_SECONDS = 20.0
_STALE_SECONDS = 120.0


class Claims(contextlib.AbstractContextManager):
  """Claims that one process holds, by the paths of their files; at the end of a `with` they are given back."""

  def __init__(self):
    self._holder = f'{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}'
    self._held: dict[str, float] = {}  # time of the last renewal
    self._others: dict[str, tuple[bytes, float]] = {}  # contents, and the time at which they were first seen
    self._is_closed = False

  def take(self, path: str) -> bool:
    """Takes a claim; False if another process holds it."""
    if self._is_closed:
      return False
    if files.exists(path):
      if not self._is_stale(path):
        return False
      files.remove(path)
    if not files.create(path, self._holder):
      return False
    self._held[path] = time.monotonic()
    return True

  def _is_stale(self, path: str) -> bool:
    try:
      contents = files.read(path)
    except FileNotFoundError:
      return True
    host, pid, *_ = [*contents.decode().split(), '', '']
    if host == socket.gethostname() and pid.isdecimal() and not _is_running(int(pid)):
      return True
    before, since = self._others.get(path, (None, 0.0))
    if before != contents:
      self._others[path] = contents, time.monotonic()
      return False
    return time.monotonic() - since > _STALE_SECONDS

  def free(
    self, pieces: Iterable[Any], claim_of: Callable[[Any], str], is_made: Callable[[Any], bool]
  ) -> Iterator[Any]:
    """Yields pieces that are not made, and whose claims it could take; they are to be released."""
    for piece in pieces:
      if is_made(piece) or not self.take(claim_of(piece)):
        continue
      if is_made(piece):  # by another since
        self.release(claim_of(piece))
        continue
      yield piece

  def until_made(self, pieces: Callable[[], Iterable[Any]], claim_of, is_made) -> Iterator[Any]:
    """Yields free pieces, each claimed while it is made, and waits until other processes have made the rest."""
    while not all(map(is_made, pieces())):
      is_idle = True
      for piece in self.free(pieces(), claim_of, is_made):
        yield piece
        self.release(claim_of(piece))
        is_idle = False
      if is_idle:
        time.sleep(WAIT_SECONDS)

  def renew(self) -> None:
    """Shows that this process still works on what it holds; call it often."""
    for path, renewed in list(self._held.items()):
      if (now := time.monotonic()) - renewed > _RENEW_SECONDS:
        files.write(path, f'{self._holder} {now}')
        self._held[path] = now

  def release(self, path: str) -> None:
    files.remove(path)
    self._held.pop(path, None)

  def __exit__(self, *error) -> None:
    self._is_closed = True
    for path in list(self._held):
      self.release(path)


def _is_running(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:  # it is another user's
    pass
  return True
