"""What is computed side by side depends on how kernels share the cores, which is settled once in a process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os
import tensorflow as tf
from lingvo_moe.ops import cores
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
from lingvo_moe.ops import cores
tf.zeros([])
cores.one_each()
print(cores.side_by_side())
"""

RUNTIME = """
import sys
import tensorflow as tf
from lingvo_moe.ops import cores, optimizer, schedule
from lingvo_moe.program import Program
from lingvo_moe.runtime.local import LocalRuntime
tf.config.set_visible_devices([], 'GPU')
cores.count = lambda: int(sys.argv[2])
LocalRuntime(Program(None, optimizer.Adafactor(), schedule.Constant(0.1)), jit=sys.argv[1] == 'jit')
print(cores.side_by_side())
"""


def run(script, *args):
  return subprocess.run(
    [sys.executable, '-c', script, *args], capture_output=True, text=True, check=True
  ).stdout.split()


def test_where_kernels_have_a_core_each_all_cores_are_used_side_by_side():
  assert run(SCRIPT) == ['1', 'True', 'True']


def test_a_runtime_gives_kernels_one_core_each_where_cores_are_few_and_the_step_is_no_program_of_xla():
  assert run(RUNTIME, 'kernels', '2') == ['2']
  assert run(RUNTIME, 'kernels', '64') == ['1']
  assert run(RUNTIME, 'jit', '2') == ['1']


def test_once_tensorflow_has_computed_it_is_too_late():
  assert run(LATE) == ['1']
