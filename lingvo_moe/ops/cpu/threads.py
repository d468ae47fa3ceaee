"""Thread policy of TensorFlow's kernels on a CPU: a job sets it once, before anything is computed.

By default all threads share every kernel and wait for each other at its end. The smaller the kernels, the larger the
share of that waiting; then it is faster to give each kernel one core, and to compute one sub-batch of rows per core
side by side (sub_batches.py).
"""

import os

import tensorflow as tf

MAX_SUB_BATCHES = 4  # in one traced program: more make the program long and the sub-batches small


def num_cores() -> int:
  """Number of cores that this process may use."""
  return len(os.sched_getaffinity(0))


def set_policy(*, decoding: bool = False) -> None:
  """Gives each kernel one core: in decoding always, in training if the cores are few enough for a sub-batch each.

  Does nothing if TensorFlow has computed already, as its threads then exist.
  """
  if decoding or num_cores() <= MAX_SUB_BATCHES:
    try:
      tf.config.threading.set_intra_op_parallelism_threads(1)
    except RuntimeError:
      pass


def parallel_kernels() -> int:
  """Number of kernels that should run at once: the number of cores if each kernel has one core, else 1."""
  return num_cores() if tf.config.threading.get_intra_op_parallelism_threads() == 1 else 1
