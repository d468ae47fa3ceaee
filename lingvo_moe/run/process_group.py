"""Process group of a run: calls that all of its processes make together, or the leader process makes for all."""

import dataclasses
import sys
from collections.abc import Callable
from typing import TypeVar

from lingvo_moe.core.errors import PeerError, ProcessLostError

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
  """Processes of a run. The leader alone reads and writes the log directory, and prints."""

  count: int = 1  # number of processes
  index: int = 0  # number of this one; 0 leads. On a TPU pod it may be another than --process_id

  @property
  def is_leader(self) -> bool:
    return self.index == 0

  def on_all(self, f: Callable[[], T]) -> T:
    """Calls f in every process; returns its value here, when all are done.

    An error in one process ends all: it is raised there, and the others raise PeerError.
    """
    if self.count == 1:
      return f()
    from lingvo_moe.runtime import processes

    try:
      value, error = f(), None
    except ProcessLostError:
      raise  # the processes that are left cannot be reached
    except Exception as e:
      value, error = None, e
    failed = [number for number, bad in enumerate(processes.gather(error is not None)) if bad]
    if not failed:
      return value
    if failed[0] == self.index:
      raise error
    raise PeerError(f'process {failed[0]} could not go on, and says why')

  def on_leader(self, f: Callable[[], T]) -> T:
    """Calls f in the leader process; returns its value, a small one that JSON can hold, in every process.

    Raises as `on_all` does.
    """
    value = self.on_all(lambda: f() if self.is_leader else None)
    if self.count == 1:
      return value
    from lingvo_moe.runtime import processes

    return processes.share(value)

  def say(self, text: str) -> None:
    """Prints a line to stderr, in the leader process alone."""
    if self.is_leader:
      print(text, file=sys.stderr, flush=True)


ALONE = ProcessGroup()
