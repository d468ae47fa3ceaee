"""Incremental decoding: the arguments of one step that layers need."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class Now(NamedTuple):
  """Position of a decoding step in the flat key/value cache; see search/flat_sequence.py."""

  time: tf.Tensor  # int32 scalar; number of steps made before
  start: tf.Tensor  # int32 scalar; hypothesis w writes flat position start + w
  mask_BWU: tf.Tensor  # float32 0/1; positions of each hypothesis, including the one written now
  live_BW: tf.Tensor | None = None  # whether there is a hypothesis: others are sent to no expert; None: all there are
  position_BW: tf.Tensor | None = None  # int32; of the symbol in its sequence, for rotary positions; None: time
