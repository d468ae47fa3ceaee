"""What is decoded side by side depends on how kernels share the cores, which is settled once in a process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os
import tensorflow as tf
from lingvo_moe import cores
tf.config.set_visible_devices([], 'GPU')
before = cores.side_by_side()
cores.one_each()
after = cores.side_by_side()
tf.zeros([])  # the threads are there now
cores.one_each()
print(before, after == len(os.sched_getaffinity(0)), cores.side_by_side() == after)
"""

LATE = """
import tensorflow as tf
from lingvo_moe import cores
tf.zeros([])
cores.one_each()
print(cores.side_by_side())
"""


def run(script):
  return subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True).stdout.split()


def test_where_kernels_have_a_core_each_all_cores_are_used_side_by_side():
  assert run(SCRIPT) == ['1', 'True', 'True']


def test_once_tensorflow_has_computed_it_is_too_late():
  assert run(LATE) == ['1']
