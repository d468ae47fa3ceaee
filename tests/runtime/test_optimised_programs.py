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
import json, sys
import tensorflow as tf
from lingvo_moe.cli.machine import connect
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import registry
from lingvo_moe.tasks.task import task_of

config = registry.get(sys.argv[1])(**json.loads(sys.argv[2]), num_experts=4, num_groups=2, batch_tokens=64)
program, batch = config.program(), task_of(config).random_batch()
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


TRANSLATION = {'source_vocab_size': 60, 'target_vocab_size': 50, 'max_length': 16}
TRANSLATION |= {'encoder_layers': 1, 'decoder_layers': 1, 'moe_every': 1}


@pytest.mark.parametrize(
  'model, sizes',
  [
    ('lm.shakespeare.Tiny', {'vocab_size': 60, 'num_layers': 1}),
    pytest.param('mt.cldr.Tiny', TRANSLATION, marks=pytest.mark.slow),
  ],
  ids=['language model', 'translation'],
)
def test_losses_are_those_of_the_operations_one_by_one(model, sizes):
  env = {name: value for name, value in os.environ.items() if name not in FEWER}
  env['PYTHONPATH'] = str(pathlib.Path(__file__).parent.parent)
  done = forks.run(['-c', JOB, model, json.dumps(sizes)], env=env, check=True)
  *found, expected = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('[')]
  assert len(found) == 3 and len(set(expected)) == 3
  for losses in found:
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
