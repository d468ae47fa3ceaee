"""A step that was exported gives the runtime's numbers, with neither TensorFlow nor this package."""

import json
import pathlib
import re
import subprocess
import sys

import forks
import numpy as np
import pytest
import tiny_config

from lingvo_moe.addons.analysis import flops
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.tasks.task import task_of

jax = pytest.importorskip('jax')
step_export = pytest.importorskip('step_export')

pytestmark = pytest.mark.compiled

TOOL = pathlib.Path(__file__).resolve().parents[2] / 'tools' / 'export_step.py'
MODEL = 'lm.shakespeare.Tiny'
SIZES = {'vocab_size': 40, 'window': 16, 'batch_tokens': 64, 'num_layers': 1, 'residual_dropout': 0.1}
CONFIG = configuration.resolve(MODEL, **SIZES)
TASK = task_of(CONFIG)
STEPS = 3
# None in place of a module is an ImportError for whoever imports it.
ALONE = (
  'import runpy, sys; sys.modules.update(tensorflow=None, lingvo_moe=None); '
  'runpy.run_path("run.py", run_name="__main__")'
)


def one_device(config=CONFIG):
  runtime = machine.connect(RuntimeOptions('data:1', runtime='spmd')).make_runtime(config.program())
  runtime.init()
  return runtime


def save(folder, mesh, kind='train', **options):
  program, batch = CONFIG.program(), TASK.random_batch()
  step_export.save(str(folder), MODEL, program, Mesh.parse(mesh), batch, TASK.token_counts, kind, **options)


def run(folder, *arguments):
  command = [sys.executable, '-c', ALONE, *arguments]
  return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def losses(said):
  return [float(loss) for loss in re.findall(r'^step \d+: loss (\S+), [0-9.]+ tokens/s$', said, re.MULTILINE)]


@pytest.fixture(scope='module')
def expected():
  runtime = one_device()
  return [float(runtime.train_step(TASK.random_batch())['loss']) for _ in range(STEPS)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Folder of the exported train step on a mesh."""
  folder = tmp_path_factory.mktemp('exported')
  save(folder, 'data:2,expert:2')
  return folder


def test_the_command_exports_a_step_that_trains_to_the_same_losses(tmp_path, expected):
  bindings = [f'--gin_bindings=Tiny.{name} = {value}' for name, value in SIZES.items()]
  command = [TOOL, f'--model={MODEL}', f'--out={tmp_path}/step', *bindings]
  forks.run(command, check=True, timeout=300)
  done = run(tmp_path / 'step', str(STEPS))
  assert done.returncode == 0, done.stderr
  np.testing.assert_allclose(losses(done.stdout), expected, rtol=1e-5)
  assert done.stdout.startswith(f'{MODEL}, train step on 1 x ')
  made = float(re.search(r'compiled in .* s: (\S+) FLOPs a step', done.stdout)[1])
  assert made == pytest.approx(sum(flops.train_step(CONFIG).values()), rel=1e-3)
  assert re.search(r'^median: [0-9.]+ tokens/s, \S+ TFLOP/s a device$', done.stdout, re.MULTILINE)


def test_a_step_for_a_mesh_trains_to_the_same_losses(folder, expected):
  done = run(folder, str(STEPS))
  assert done.returncode == 0, done.stderr
  assert 'train step on 4 x ' in done.stdout
  np.testing.assert_allclose(losses(done.stdout), expected, rtol=1e-5)


def test_a_step_stores_weights_as_another_mesh(tmp_path, expected):
  save(tmp_path, 'data:2/expert:2')
  state = json.loads((tmp_path / 'spec.json').read_text())['state']
  experts = [x for part in ('weights', 'slots') for name, x in state[part].items() if '/moe/wi' in name]
  assert experts and all(x['mesh'] == [['expert', 2]] and ['expert'] in x['split'] for x in experts)
  done = run(tmp_path, str(STEPS))
  np.testing.assert_allclose(losses(done.stdout), expected, rtol=1e-5, err_msg=done.stderr)


def test_an_evaluation_step_of_a_translation_model_leaves_the_state_as_it_is(tmp_path):
  config = tiny_config.make()
  task, program, runtime = task_of(config), config.program(), one_device(config)
  batch = task.random_batch()
  step_export.save(str(tmp_path), tiny_config.MODEL, program, runtime.mesh, batch, task.token_counts, 'eval')
  loss = float(runtime.eval_step(batch)['loss'])
  done = run(tmp_path, '2')
  np.testing.assert_allclose(losses(done.stdout), [loss, loss], rtol=1e-5, err_msg=done.stderr)
  assert 'FLOP' not in done.stdout


@pytest.mark.parametrize('platform', ['cuda', 'tpu'])
def test_one_file_is_lowered_for_every_platform(folder, platform):
  step = jax.export.deserialize(bytearray((folder / 'step.stablehlo').read_bytes()))
  arguments = jax.tree.unflatten(step.in_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in step.in_avals])
  lowered = jax.jit(step.call).trace(*arguments[0]).lower(lowering_platforms=(platform,))
  assert 'stablehlo.dot_general' in lowered.as_text()


def test_too_few_devices_are_told(folder):
  few = 'import jax; devices = jax.devices; jax.devices = lambda: devices()[:2]; ' + ALONE
  done = subprocess.run([sys.executable, '-c', few], cwd=folder, capture_output=True, text=True, timeout=120)
  assert done.returncode == 1 and 'this step is for 4 devices, and JAX finds 2 (cpu)' in done.stderr, done.stderr


def test_mistakes_are_told(tmp_path):
  with pytest.raises(UserError, match="cuDNN's attention is for a step of one device; saw --mesh=data:2"):
    save(tmp_path, 'data:2', 'train', cudnn_attention=True)
  with pytest.raises(UserError, match="there is no step 'tran' to export; closest: train"):
    save(tmp_path, 'data:1', 'tran')
  with pytest.raises(UserError, match=r'axis B \(rows of a batch\) has size 4'):
    save(tmp_path, 'data:3', 'train')
  assert not list(tmp_path.iterdir())
