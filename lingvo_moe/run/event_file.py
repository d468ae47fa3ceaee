"""TensorBoard event files of scalars, written without TensorBoard installed, which tf.summary.scalar needs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping

import tensorflow as tf

from lingvo_moe.core import errors


class EventFile:
  """Appends scalars to a new event file in a directory; OSError where that cannot be written."""

  def __init__(self, directory: str):
    self._directory = directory
    with self._told():
      self._writer = tf.summary.create_file_writer(directory)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """All of a step's scalars by tag, as one event."""
    value = [tf.compat.v1.Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
    with self._told(), self._writer.as_default():
      tf.summary.experimental.write_raw_pb(tf.compat.v1.Summary(value=value).SerializeToString(), step=step)

  def close(self) -> None:
    with self._told():
      self._writer.close()

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    try:
      yield
    except tf.errors.OpError as e:
      raise OSError(errno.EIO, errors.reason(e), self._directory) from None
