"""One step of incremental decoding, as the layers see it."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Now(NamedTuple):
  """Position of a decoding step in the flat key/value cache; see search/flat_sequence.py."""

  time: tf.Tensor  # int32 scalar; the steps made before
  start: tf.Tensor  # int32 scalar; hypothesis w writes flat position start + w
  mask_BWU: tf.Tensor  # float32 0/1; the positions of each hypothesis, the one it writes now included
