"""Programs with all optimisations of Grappler and XLA, as a user's have; those of other tests have few."""

import json
import os
import pathlib

import forks
import numpy as np
import pytest

pytestmark = pytest.mark.compiled

FEWER = 'XLA_FLAGS', 'JAX_DISABLE_MOST_OPTIMIZATIONS'  # set by conftest.py
JOB = """
import json, tiny_config
import tensorflow as tf
from lingvo_moe.cli.machine import connect
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.tasks.task import task_of

program, batch = (config := tiny_config.make(num_experts=4, num_groups=2)).program(), task_of(config).random_batch()
mesh = RuntimeOptions(runtime='spmd', mesh='data:2')
for runtime in (
  connect(RuntimeOptions()).make_runtime(program),
  connect(RuntimeOptions()).make_runtime(program, jit=True),
  connect(mesh).make_runtime(program),
):
  runtime.init()
  print(json.dumps([float(runtime.train_step(batch)['loss']) for _ in range(3)]))

batch, state = {name: tf.constant(x) for name, x in batch.items()}, program.init()
losses = []
for _ in range(3):  # operation by operation, which nothing rewrites
  state, metrics = program.train_step(state, batch)
  losses.append(float(metrics['loss']))
print(json.dumps(losses))
"""


def test_losses_are_those_of_the_operations_one_by_one():
  env = {name: value for name, value in os.environ.items() if name not in FEWER}
  env['PYTHONPATH'] = str(pathlib.Path(__file__).parent.parent)
  done = forks.run(['-c', JOB], env=env, check=True)
  *found, expected = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('[')]
  assert len(found) == 3 and len(set(expected)) == 3
  for losses in found:
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
