"""Allocator of TensorFlow's kernels: chosen by the commands before TensorFlow is imported, not by the library."""

import os
import subprocess
import sys

import forks
import pytest

from lingvo_moe.core import host_memory

VARIABLES = ('TF_CPU_ALLOCATOR_USE_BFC', 'TF_CPU_BFC_MEM_LIMIT_IN_MB')
SHOW = f'print([os.environ.get(name) for name in {VARIABLES}], "tensorflow" in sys.modules)'
# A command whose main, and a process that it starts, show the variables as they were when TensorFlow was not imported.
COMMAND = f"""
import os, subprocess, sys
from lingvo_moe.cli import app, allocator
at_choice = allocator.keep_memory
def keep_memory():
  at_choice()
  {SHOW}
  sys.stdout.flush()
  subprocess.run([sys.executable, '-c', {'import os, sys; ' + SHOW!r}])
allocator.keep_memory = keep_memory
@app.command(models=False)
def main(): print('tensorflow' in sys.modules)
main()
"""


def shown(code, **environment):
  env = {name: value for name, value in os.environ.items() if name not in VARIABLES} | environment
  return subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True).stdout


def test_a_command_and_its_processes_keep_memory_up_to_that_of_the_host():
  chosen = f"['1', '{host_memory.size() >> 20}'] False\n"
  assert shown(COMMAND) == chosen * 2 + 'True\n'


@pytest.mark.parametrize('value', ['0', 'false', '1'])
def test_what_the_user_has_set_stays(value):
  variables = {'TF_CPU_ALLOCATOR_USE_BFC': value, 'TF_CPU_BFC_MEM_LIMIT_IN_MB': '100'}
  code = f'import os, sys; from lingvo_moe.cli import allocator; allocator.keep_memory(); {SHOW}'
  assert shown(code, **variables) == f"['{value}', '100'] False\n"


def test_the_library_chooses_none():
  assert shown(f'import os, sys, lingvo_moe; {SHOW}') == '[None, None] False\n'


def test_a_tensor_without_room_is_answered_by_a_line():
  code = """
import sys
from lingvo_moe.cli import app
@app.command(models=False)
def main():
  import tensorflow as tf
  tf.zeros([2**20, 2**20])
main()
"""
  done = forks.run(['-c', code])
  assert done.returncode == 1
  assert done.stderr.startswith('error: a batch must fit into memory, ') and 'Traceback' not in done.stderr
  assert 'no room for a tensor with shape[1048576,1048576] and type float: use smaller batches' in done.stderr
