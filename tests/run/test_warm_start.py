"""Upcycling: a MoE model that begins with a dense one computes the same."""

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf
import tiny_config
from imported_model import FIXTURES
from whole_state import WholeState

from lingvo_moe.addons.interop import importing
from lingvo_moe.run import checkpoint, process_group, warm_start
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.mt.mt_task import TranslationTask
from lingvo_moe.tasks.task import Task, task_of

MOE = tiny_config.make(encoder_layers=2, decoder_layers=2, moe_every=2, aux_loss_weight=0.0)
DENSE = dataclasses.replace(MOE, num_experts=0)
SCANNED = {'scan_layers': True, 'remat': 'block'}


def loss_of(runtime):
  """Loss of a batch by the weights of a runtime; it is computed once, sooner than it is traced."""
  batch = {name: tf.constant(ids) for name, ids in TranslationTask(MOE).random_batch(3).items()}
  return float(runtime.program.eval_step(runtime.state()['weights'], batch)['loss'])


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
  """A dense run to read, and its dev loss; its biases are 0, as experts have none."""
  runtime = LocalRuntime(dataclasses.replace(DENSE.program(), seed=7))
  runtime.init()
  run = RunDir(str(tmp_path_factory.mktemp('dense')))
  run.checkpoints().save(WholeState(runtime.state()))
  return run, loss_of(runtime)


@pytest.mark.parametrize('changes', [{}, SCANNED])
def test_a_model_of_copied_experts_computes_what_the_dense_one_does(dense, changes):
  run, loss = dense
  config = dataclasses.replace(MOE, **changes)
  runtime = LocalRuntime(config.program())
  runtime.init()
  told = warm_start.take_weights(runtime, run.path, task_of(config)).splitlines()
  upcycled = loss_of(runtime)
  assert upcycled == pytest.approx(loss, rel=1e-6)
  # In each of two layers: scale and bias of the norm, wi, wo.
  assert '  upcycled: 8 weights of MoE layers copied from dense layers in their places' in told
  assert [line for line in told if 'not taken' in line] == [
    '  not taken: decoder/layer_01/moe/gate is not there',
    '  not taken: encoder/layer_01/moe/gate is not there',
  ]
  left = [f'  not used: {stack}/layer_01/ffn/{name}' for stack in ('decoder', 'encoder') for name in ('bi', 'bo')]
  assert [line for line in told if 'not used' in line] == left


def test_an_imported_model_of_copied_experts_computes_what_it_did(tmp_path):
  importing.import_folder(str(FIXTURES / 'marian'), str(tmp_path / 'run'))
  run = RunDir(str(tmp_path / 'run'))
  _, config = run.load()
  moe = dataclasses.replace(config, num_experts=8, expert='swish', expert_bias=True)
  batch = {
    name: tf.constant(ids)
    for name, ids in TranslationTask(dataclasses.replace(config, batch_tokens=1024)).random_batch(3).items()
  }
  logits = []
  for one in (config, moe):
    runtime = LocalRuntime(one.program())
    runtime.init()
    told = warm_start.take_weights(runtime, run.path, task_of(one))
    logits.append(one.model().logits(one.program().theta(runtime.state()['weights']), batch)[0])
  assert 'upcycled: 12 weights of MoE layers' in told and told.count('not taken') == 2 and 'not used' not in told
  np.testing.assert_allclose(*logits, atol=1e-5)


class Foreign(Task):
  """Task whose target vocabulary has two pieces of another one, in another order."""

  def foreign_weights(self, other):
    return {'target_embedding': ([4, 5], [5, 4])}


def test_new_rows_begin_as_the_seed_of_the_run_says(dense, monkeypatch):
  run, _ = dense
  monkeypatch.setattr(warm_start, '_task_of', lambda prefix: task_of(DENSE))
  name, tables = 'target_embedding/table', []
  theirs = checkpoint.load(run.checkpoints().path(0), {name: (50, MOE.model_dim)})[name][...]
  for seed in (3, 4):
    config = dataclasses.replace(MOE, seed=seed)
    state, loaded = config.program().init(), {}
    runtime = types.SimpleNamespace(program=config.program(), state=lambda state=state: state, load=loaded.update)
    usual = state['weights'][name].numpy()
    warm_start.take_weights(runtime, run.path, Foreign(config))
    tables.append(loaded['weights'][name])
    np.testing.assert_array_equal(tables[-1], np.concatenate([usual[:4], theirs[[5, 4]], usual[6:]]))
  assert np.all(np.any(tables[0] != tables[1], axis=1) == [row not in (4, 5) for row in range(50)])
  # Nothing in common: equal names and shapes mean nothing.
  monkeypatch.setattr(Foreign, 'foreign_weights', lambda *args: {'target_embedding': ([], [])})
  warm_start.take_weights(runtime, run.path, Foreign(config))
  np.testing.assert_array_equal(loaded['weights'][name], usual)


@pytest.mark.parametrize(
  'folder, source', [('', '.'), ('', 'checkpoints/step_00000000'), ('checkpoints/step_00000000', 'state')]
)
def test_a_relative_path_finds_the_configuration_beside_the_checkpoint(dense, monkeypatch, folder, source):
  run, _ = dense
  seen = []
  monkeypatch.setattr(RunDir, 'exists', True)
  monkeypatch.setattr(RunDir, 'load', lambda self: (seen.append(self.path), ('name', DENSE))[1])
  runtime = LocalRuntime(MOE.program())
  runtime.init()
  monkeypatch.chdir(run.file(folder))
  warm_start.take_weights(runtime, source, Task(MOE))  # which asks for no vocabularies
  assert seen == [run.path]


def test_an_imported_run_begins_with_its_weights_and_new_optimizer_slots(tmp_path, capsys):
  run, program = RunDir(str(tmp_path)), DENSE.program()
  state, theirs = program.init(), dataclasses.replace(program, seed=7).init()['weights']
  run.checkpoints().save(WholeState({'step': state['step'], 'weights': theirs, 'slots': {}}))
  (tmp_path / 'imported.json').touch()
  loaded = {}
  runtime = types.SimpleNamespace(program=program, init=lambda: None, state=lambda: state, load=loaded.update)
  assert warm_start.restore_or_init(runtime, run, run.checkpoints(), Task(DENSE), 'other', process_group.ALONE)
  assert loaded['slots'].keys() == state['slots'].keys() != set()
  np.testing.assert_array_equal(loaded['weights']['target_embedding/table'][...], theirs['target_embedding/table'])
  said = capsys.readouterr()
  assert 'going on from the weights that were imported; --init_from=other is for new runs' in said.out + said.err


def test_layers_of_other_sizes_are_not_copied(dense):
  run, _ = dense
  config = dataclasses.replace(MOE, ff_dim=MOE.ff_dim // 2, moe_every=1)
  runtime = LocalRuntime(config.program())
  runtime.init()
  before = np.array(runtime.state()['weights']['encoder/layer_01/moe/wi'])
  told = warm_start.take_weights(runtime, run.path, task_of(config))
  np.testing.assert_array_equal(runtime.state()['weights']['encoder/layer_01/moe/wi'], before)
  assert 'not taken: encoder/layer_01/moe/wi is not there' in told


def test_shared_experts_begin_at_zero(dense):
  run, loss = dense
  config = dataclasses.replace(MOE, shared_experts=1)
  runtime = LocalRuntime(config.program())
  runtime.init()
  told = warm_start.take_weights(runtime, run.path, task_of(config))
  upcycled = loss_of(runtime)
  assert upcycled == pytest.approx(loss, rel=1e-6) and '  shared experts of 2 layers begin with outputs of 0' in told


@pytest.mark.parametrize('expert', ['gelu', 'geglu', 'deep'])
def test_experts_that_compute_something_else_are_no_copies(dense, expert):
  run, _ = dense
  config = dataclasses.replace(MOE, expert=expert)
  runtime = LocalRuntime(config.program())
  runtime.init()
  before = np.array(runtime.state()['weights']['encoder/layer_01/moe/wi'])
  told = warm_start.take_weights(runtime, run.path, task_of(config)).splitlines()
  assert f"  not upcycled: experts are '{expert}', and the dense layers in their places 'relu'" in told
  assert not any('upcycled:' in line and 'copied' in line for line in told)
  np.testing.assert_array_equal(runtime.state()['weights']['encoder/layer_01/moe/wi'], before)
