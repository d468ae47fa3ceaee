"""How TensorFlow's own kernels share the cores of a CPU.

Unless told otherwise, the threads of every kernel do. That suits the large products of training. The products of a
decoding step are so small that their threads mostly wait for each other: there it is better that a kernel has one core,
and that parts of a batch are decoded side by side.
"""

from __future__ import annotations

import os

import tensorflow as tf


def one_each() -> None:
  """From now on a kernel has one core. Does nothing where TensorFlow has computed already: it is then too late."""
  try:
    tf.config.threading.set_intra_op_parallelism_threads(1)
  except RuntimeError:
    pass


def side_by_side() -> int:
  """How many kernels had better run at once: as many as there are cores if each has one; else, or with a GPU, 1."""
  if tf.config.threading.get_intra_op_parallelism_threads() != 1 or tf.config.get_visible_devices('GPU'):
    return 1
  return len(os.sched_getaffinity(0))
