"""TensorBoard event files of scalars, written without TensorBoard installed, which tf.summary.scalar needs."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf


class EventFile:
  """Appends scalars to a new event file in a directory."""

  def __init__(self, directory: str):
    self._writer = tf.summary.create_file_writer(directory)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """All of a step's scalars by tag, as one event."""
    value = [tf.compat.v1.Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
    with self._writer.as_default():
      tf.summary.experimental.write_raw_pb(tf.compat.v1.Summary(value=value).SerializeToString(), step=step)

  def close(self) -> None:
    self._writer.close()
