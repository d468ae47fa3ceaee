"""Runtime: the interface of all runtimes, which the jobs use."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lingvo_moe.program import Program
from lingvo_moe.runtime.slices import Slice
from lingvo_moe.tasks.task import Batch

Function = Callable[[Batch], Any]  # applies the current weights to a batch; returns a nest of numpy values


class Runtime:
  """Runtime, which holds the state of a Program and runs its steps; by default in one process."""

  program: Program  # that it runs
  step: int  # updates made so far
  process_index: int = 0  # number of this process
  process_count: int = 1
  feed_index: int = 0  # number of the part of a batch's rows that this process feeds
  feed_count: int = 1  # number of parts; processes whose devices share rows feed the same part
  row_multiple: int = 1  # number of equal parts into which the mesh splits the rows of a batch
  only_rows: bool = False  # whether all arrays of a batch must have its rows

  def init(self) -> None:
    """Sets the state to initial values, of which each device computes its own part."""

  def load(self, state: Mapping) -> None:
    """Sets the state to given values, which have a shape and can be sliced; optimizer slots may be missing.

    Only the slices that the devices of this process hold are read.
    """

  def state(self) -> Mapping:
    """Current state, {'step', 'weights', 'slots'}; values have a shape and can be sliced."""

  def slices(self) -> Iterable[Slice]:
    """Slices of the state that this process saves; over all processes, every element once."""

  def gather(self, value: int) -> list[int]:
    """Values of all processes; waits for all of them."""
    return [value]

  def agree(self, flag: bool) -> bool:
    """True if the flag is set in every process; waits for all of them."""
    return all(self.gather(flag))

  def not_finite(self) -> str | None:
    """Name of a weight with an infinite or NaN element; None if there is none."""

  def train_step(self, batch: Batch) -> dict:
    """Makes one update; returns metrics as numpy values."""

  def train_steps(self, batches: Sequence[Batch]) -> list[dict]:
    """Makes an update per batch, in order; the batches have one shape. Returns the metrics of each."""
    return [self.train_step(batch) for batch in batches]

  def eval_step(self, batch: Batch) -> dict:
    """Metrics of a batch at inference, as numpy values."""

  def function(self, f: Callable[[dict, dict], Any]) -> Function:
    """Function of a batch that calls the TensorFlow function f(weights, batch) with the weights of that moment.

    The batch is whole: every process passes the same one.
    """
