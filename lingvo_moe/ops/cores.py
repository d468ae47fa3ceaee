"""How TensorFlow's own kernels share the cores of a CPU.

Unless told otherwise, the threads of every kernel do, and wait for each other at its end. The smaller the kernels, the
more of the time goes there, and the better it is that each has one core, and that as many parts of a batch as there are
cores are computed side by side: see layers/rows.py and, for decoding, tasks/mt/decoding.py.
"""

from __future__ import annotations

import os

import tensorflow as tf

FEW = 4  # parts of a batch that are laid out in a traced program, at most: with more it becomes long, and they small


def count() -> int:
  """The cores that this process may use."""
  return len(os.sched_getaffinity(0))


def one_each() -> None:
  """From now on a kernel has one core. Does nothing where TensorFlow has computed already: it is then too late."""
  try:
    tf.config.threading.set_intra_op_parallelism_threads(1)
  except RuntimeError:
    pass


def one_each_of_few() -> None:
  """The same, where there are so few that a traced program can have a part of its batch for each."""
  if count() <= FEW:
    one_each()


def side_by_side() -> int:
  """How many kernels had better run at once: as many as there are cores if each has one; else, or with a GPU, 1."""
  return count() if tf.config.threading.get_intra_op_parallelism_threads() == 1 and on_cpu() else 1


def traced_side_by_side() -> int:
  """The same, for parts that are laid out in one traced program."""
  return min(side_by_side(), FEW)


def on_cpu() -> bool:
  """Whether TensorFlow's kernels run on the CPU."""
  return not tf.config.get_visible_devices('GPU')
