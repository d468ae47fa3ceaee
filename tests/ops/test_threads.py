"""Thread policy of a CPU: it sets the number of sub-batches and parallel calls, and only a job sets it."""

import forks

SCRIPT = """
import os, sys
import tensorflow as tf
from lingvo_moe.ops import cpu
from lingvo_moe.ops.cpu import threads
cores = int(sys.argv[2])
threads.num_cores = lambda: cores
found = lambda: (cpu.backend(training=True).sub_batches, cpu.backend(training=True).parallel_calls)
before = found()
threads.set_policy(decoding=sys.argv[1] == 'decoding')
after = found()
tf.zeros([])  # creates the threads
threads.set_policy(decoding=True)
print(before, after, found() == after)
"""

LATE = """
import tensorflow as tf
from lingvo_moe.ops.cpu import threads
tf.zeros([])
threads.set_policy(decoding=True)
print(threads.parallel_kernels())
"""

RUNTIME = """
import tensorflow as tf
from lingvo_moe.ops.cpu import threads
from lingvo_moe.optim import adafactor, schedule
from lingvo_moe.program import Program
from lingvo_moe.runtime.local import LocalRuntime
LocalRuntime(Program(None, adafactor.Adafactor(), schedule.ConstantRate(0.1)))
print(tf.config.threading.get_intra_op_parallelism_threads(), threads.parallel_kernels())
"""


def run(script, *args):
  return forks.run(['-c', script, *args], check=True).stdout.strip()


def test_training_has_one_core_a_kernel_where_cores_are_few():
  assert run(SCRIPT, 'training', '2') == '(1, 1) (2, 2) True'
  assert run(SCRIPT, 'training', '64') == '(1, 1) (1, 1) True'


def test_decoding_has_one_core_a_kernel_and_few_sub_batches_in_one_program():
  assert run(SCRIPT, 'decoding', '64') == '(1, 1) (4, 64) True'


def test_making_a_runtime_sets_no_policy():
  assert run(RUNTIME) == '0 1'


def test_once_tensorflow_has_computed_it_is_too_late():
  assert run(LATE) == '1'
