"""Threads of TensorFlow's kernels on a CPU: a job sets the policy once, before anything is computed.

Unless set otherwise all threads share every kernel, and wait for each other at its end. The smaller the kernels, the
more of the time goes there, and the better it is that each has one core, and that as many sub-batches of rows as there
are cores are computed side by side (sub_batches.py).
"""

from __future__ import annotations

import os

import tensorflow as tf

MAX_SUB_BATCHES = 4  # in one traced program: with more it becomes long, and they small


def num_cores() -> int:
  """Cores that this process may use."""
  return len(os.sched_getaffinity(0))


def set_policy(*, decoding: bool = False) -> None:
  """One core a kernel from now on: always in decoding, in training where cores are few enough for a sub-batch each.

  Does nothing where TensorFlow has computed already: it is then too late.
  """
  if decoding or num_cores() <= MAX_SUB_BATCHES:
    try:
      tf.config.threading.set_intra_op_parallelism_threads(1)
    except RuntimeError:
      pass


def parallel_kernels() -> int:
  """Kernels that should run at once: as many as there are cores if each kernel has one; else 1."""
  return num_cores() if tf.config.threading.get_intra_op_parallelism_threads() == 1 else 1
