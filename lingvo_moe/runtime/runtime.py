"""What every runtime offers: the small interface that the jobs are written against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lingvo_moe.program import Program
from lingvo_moe.runtime.pieces import Piece

Batch = Mapping[str, np.ndarray]  # the rows that this process feeds
Function = Callable[[Batch], Any]  # of the current weights and a batch; returns a nest of numpy values


class Runtime(Protocol):
  """Holds the state of a Program and runs its steps. It is a checkpoint.Holder too.

  Attributes:
    program: what it runs.
    process_index: this process's number,
    process_count: of how many.
    feed_index: which part of a batch's rows this process feeds,
    feed_count: of how many; processes whose devices share rows feed the same part.
    row_multiple: what the mesh divides the rows of a batch into.
    step: updates made.
  """

  program: Program
  process_index: int
  process_count: int
  feed_index: int
  feed_count: int
  row_multiple: int
  step: int

  def init(self) -> None:
    """Starts from initial values."""

  def load(self, state: Mapping) -> None:
    """Starts from a given state, of anything with a shape that can be sliced; slots may be left out."""

  def pieces(self) -> Iterable[Piece]:
    """What of the state this process is to save."""

  def agree(self, flag: bool) -> bool:
    """Whether the flag is set in every process; waits for all of them."""

  def not_finite(self) -> str | None:
    """The name of a weight that is not finite everywhere; None if all are."""

  def train_step(self, batch: Batch) -> dict:
    """One update; returns metrics of numpy values."""

  def train_steps(self, batches: Sequence[Batch]) -> list[dict]:
    """An update by each of some batches of one shape, in their order; returns the metrics of each."""

  def eval_step(self, batch: Batch) -> dict:
    """Metrics of a batch at inference, of numpy values."""

  def function(self, f: Callable[[dict, dict], Any]) -> Function:
    """f(weights, batch), in TensorFlow, as a function of the batch for whatever weights there are at the time.

    The batch is whole: every process gives the same.
    """
