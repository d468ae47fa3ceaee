"""Runtime: the interface that all runtimes have and that the jobs use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lingvo_moe.program import Program
from lingvo_moe.runtime.pieces import Piece

Batch = Mapping[str, np.ndarray]  # the rows that this process feeds
Function = Callable[[Batch], Any]  # applies the current weights to a batch; returns a nest of numpy values


class Runtime(Protocol):
  """Runtime, which holds the state of a Program and runs its steps. It is a checkpoint.Holder too.

  Attributes:
    program: the program that it runs.
    process_index: number of this process.
    process_count: number of processes.
    feed_index: number of the part of a batch's rows that this process feeds.
    feed_count: number of parts; processes whose devices share rows feed the same part.
    row_multiple: number of equal parts into which the mesh splits the rows of a batch.
    step: updates made so far.
  """

  program: Program
  process_index: int
  process_count: int
  feed_index: int
  feed_count: int
  row_multiple: int
  step: int

  def init(self) -> None:
    """Sets the state to initial values."""

  def load(self, state: Mapping) -> None:
    """Sets the state to given values, which have a shape and can be sliced; optimizer slots may be missing."""

  def state(self) -> Mapping:
    """Current state, {'step', 'weights', 'slots'}; values have a shape and can be sliced."""

  def pieces(self) -> Iterable[Piece]:
    """Pieces of the state that this process saves."""

  def gather(self, value: int) -> list[int]:
    """Values of all processes; waits for all of them."""

  def agree(self, flag: bool) -> bool:
    """True if the flag is set in every process; waits for all of them."""

  def not_finite(self) -> str | None:
    """Name of a weight with an infinite or NaN element; None if there is none."""

  def train_step(self, batch: Batch) -> dict:
    """Makes one update; returns metrics as numpy values."""

  def train_steps(self, batches: Sequence[Batch]) -> list[dict]:
    """Makes an update per batch, in order; the batches have one shape. Returns the metrics of each."""

  def eval_step(self, batch: Batch) -> dict:
    """Metrics of a batch at inference, as numpy values."""

  def function(self, f: Callable[[dict, dict], Any]) -> Function:
    """Function of a batch that calls the TensorFlow function f(weights, batch) with the weights at the time of the call.

    The batch is whole: every process passes the same one.
    """
