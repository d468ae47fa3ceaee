"""Pipelined dispatch: the slots of experts in chunks, each sent, computed and returned independently of the others.

While experts compute one chunk, the network can carry the AllToAlls of the others (Tutel, Hwang et al., arXiv
2206.03382: adaptive pipelining). Whether it does is the compiler's choice: it orders operations that do not depend on
each other as it likes. Each choice of an expert is in exactly one chunk, so the sum over chunks is the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_moe.core.shapes import Size


def serve_in_chunks(
  serve: Callable[..., tf.Tensor],
  inputs: Any,
  weight_GSR: tf.Tensor,
  slot_GSR: tf.Tensor,
  capacity: Size,
  chunks: int,
) -> tf.Tensor:
  """Sum of serve(inputs, weight_GSR, slot_GSR, capacity) over chunks of the slots; C is rounded up to a multiple of `chunks`.

  Args:
    serve: outputs y_GSM of the experts for the choices with a weight above 0, whose slots are below the capacity.
    inputs: first argument of `serve`.
    weight_GSR: 0 where the choice is not served.
    slot_GSR: int32, below the capacity where the weight is above 0.
    capacity: C.
    chunks: number of chunks.
  """
  if chunks == 1:
    return serve(inputs, weight_GSR, slot_GSR, capacity)
  size = (capacity + chunks - 1) // chunks
  within = lambda chunk: weight_GSR * tf.cast(slot_GSR // size == chunk, weight_GSR.dtype)
  return tf.add_n([serve(inputs, within(chunk), slot_GSR % size, size) for chunk in range(chunks)])
