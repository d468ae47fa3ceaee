"""Training input: batches by step, the same for any number of processes and after any restart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import task
from lingvo_moe.tasks.batches import BATCH_KEYS
from lingvo_moe.tasks.task import Feed
from lingvo_moe.tasks.transformer_config import BatchConfig

Batch = dict[str, np.ndarray]


class TrainInput(task.TrainInput):
  """Training input, an endless stream of batches: batch(step) depends only on configuration, corpus and step.

  Attributes:
    stats: of the corpus; its str() is for the log.
  """

  _keys: Sequence[str] = BATCH_KEYS

  def __init__(self, config: BatchConfig, feed: Feed):
    if config.num_groups % feed.process_count:
      raise UserError(
        f'every process takes as many rows of each batch; saw num_groups={config.num_groups} for {feed.process_count} '
        f'processes: use a multiple of {feed.process_count}'
      )
    self._config = config
    self._feed = feed

  def batch(self, step: int) -> Batch:
    """This process's rows of the batch of a step; steps count from 0, and calls may be in any order of steps."""
    raise NotImplementedError

  def dataset(self, start_step: int = 0, prefetch: int = 8) -> tf.data.Dataset:
    """Dataset of the batches from `start_step` on, made in the background while earlier ones are used."""

    def values(step: np.ndarray) -> list[np.ndarray]:
      batch = self.batch(int(step))
      return [batch[key] for key in self._keys]

    def one(step: tf.Tensor) -> dict[str, tf.Tensor]:
      tensors = tf.numpy_function(values, [step], [tf.int32] * len(self._keys), stateful=False)
      return {key: tf.ensure_shape(tensor, [None, None]) for key, tensor in zip(self._keys, tensors, strict=True)}

    return tf.data.Dataset.range(start_step, 2**62).map(one).prefetch(prefetch)
