"""SIGKILL at every change of the file system that a function makes."""

import os
import signal
import sys
from collections.abc import Callable

_CHANGES = ('os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.link', 'os.symlink', 'os.truncate')


def at_every_point(act: Callable[[], object], then: Callable[[int], object]) -> int:
  """Calls act() in forks that die before their 1st, 2nd, ... change of a file system; then(number) after each.

  Opening a file for writing is a change too. Ends with the first act() that outlives all its changes; returns how many
  were killed.
  """
  number = 0
  while True:
    child = os.fork()
    if not child:
      try:
        sys.addaudithook(_killer(number))
        act()
        os._exit(0)
      except BaseException as e:
        os.write(2, f'{type(e).__name__}: {e}\n'.encode())
        os._exit(1)
    _, status = os.waitpid(child, 0)
    if status == 0:
      return number
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f'point {number}: status {status}'
    then(number)
    number += 1


def _killer(number: int):
  left = [number]

  def hook(event, arguments):
    writes = event == 'open' and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in _CHANGES:
      if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
      left[0] -= 1

  return hook
