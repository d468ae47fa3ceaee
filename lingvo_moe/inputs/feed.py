"""Batches as jobs take them: for training and for the dev loss, and the part of each that a process feeds."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.models.batches import Batch

if TYPE_CHECKING:
  import tensorflow as tf

  from lingvo_moe.inputs.batch_config import BatchConfig


@dataclasses.dataclass(frozen=True)
class Feed:
  """Which part of each batch's rows a process feeds."""

  process_index: int = 0  # its number
  process_count: int = 1  # the number of parts
  quiet: bool = False  # whether to leave out progress bars, as all processes but one do


class TrainInput:
  """Batches for training, the same for any number of processes and after any restart.

  A subclass has `batch`, or a `dataset` of its own.
  """

  stats: Any  # describes the corpus in a line of the log
  # steps, about, in which as many examples are read as the text has; None: the text has no end
  steps_per_epoch: float | None = None
  # number of examples of each part of the corpus, by the names of Task.subset; {}: not known
  examples: Mapping[str, int] = types.MappingProxyType({})
  keys: Sequence[str]  # names of the arrays of a batch

  def __init__(self, config: BatchConfig, feed: Feed):
    if config.num_groups % feed.process_count:
      raise UserError(
        f'every process takes as many rows of each batch; saw num_groups={config.num_groups} for {feed.process_count} '
        f'processes: use a multiple of {feed.process_count}'
      )
    self._config = config
    self._feed = feed

  def batch(self, step: int) -> dict[str, np.ndarray]:
    """This process's rows of the batch of a step, int32 [B, T] each.

    It depends on the configuration, the corpus and the step alone. Steps count from 0; calls may be in any order.
    """
    raise NotImplementedError

  def dataset(self, start_step: int = 0) -> Iterable[Batch]:
    """The endless stream of batches from a step on, made in the background while earlier ones are used."""
    import tensorflow as tf

    def values(step: np.ndarray) -> list[np.ndarray]:
      batch = self.batch(int(step))
      return [batch[key] for key in self.keys]

    def one(step: tf.Tensor) -> dict[str, tf.Tensor]:
      tensors = tf.numpy_function(values, [step], [tf.int32] * len(self.keys), stateful=False)
      return {key: tf.ensure_shape(tensor, [None, None]) for key, tensor in zip(self.keys, tensors, strict=True)}

    return tf.data.Dataset.range(start_step, 2**62).map(one).prefetch(8)


class DevInput:
  """Batches for the dev loss, the same and in the same order each time."""

  stats: Any  # as in TrainInput
  subsets: Sequence[str]  # names of the parts of the text by which losses are reported; see Task.subset
  # numbers of 'words' and 'bytes' of the text, by which the loss is reported too; {}: not counted
  units: Mapping[str, int] = types.MappingProxyType({})
  positions: int = 0  # of all batches, padding included; 0: not known
  content_hash: str  # of all that the loss is computed on, over all processes. Losses are compared where it is equal.

  def __iter__(self) -> Iterator[Batch]:
    raise NotImplementedError
