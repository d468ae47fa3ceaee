"""SPMD runtime: the parts on each device, checkpoints that another mesh resumes from, and error messages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tiny_config

from lingvo_moe import xla_sharding
from lingvo_moe.addons.analysis import hlo, hlo_collectives
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.run import warm_start
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.task import task_of

jax = pytest.importorskip('jax')
spmd = pytest.importorskip('lingvo_moe.runtime.spmd')
lowering = pytest.importorskip('lingvo_moe.runtime.lowering')

pytestmark = pytest.mark.compiled

# Of one stack, the decoder, whose heads are as those of mt.cldr.Tiny.
CONFIG = registry.get('lm.shakespeare.Tiny')(
  vocab_size=60, batch_tokens=64, num_layers=1, num_heads=4, num_kv_heads=0, head_dim=8, residual_dropout=0.1
)
WI = 'decoder/layer_00/moe/wi'  # [8, 32, 64]
WQ = 'decoder/layer_00/attention/wq'  # [32, 4, 8]


def runtime_on(mesh, config=CONFIG, split_dense=False, split_update=False):
  options = RuntimeOptions(mesh, split_dense, runtime='spmd', split_update=split_update)
  return machine.connect(options).make_runtime(config.program())


def parts_of(runtime, name):
  return {shard.data.shape for shard in runtime.state()['weights'][name].addressable_shards}


def arrays(runtime):
  state = runtime.state()
  return {name: np.asarray(value) for kind in ('weights', 'slots') for name, value in state[kind].items()}


@pytest.mark.parametrize(
  'mesh, split_dense, expert_part, dense_part',
  [
    ('expert:4', False, (2, 32, 64), (32, 4, 8)),
    ('data:2,expert:2', False, (4, 32, 64), (32, 4, 8)),
    ('expert:2,model:2', False, (4, 32, 32), (32, 2, 8)),
    ('data:2,expert:2', True, (4, 16, 64), (8, 4, 8)),
  ],
)
def test_no_device_holds_more_than_the_rules_give_it(mesh, split_dense, expert_part, dense_part):
  runtime = runtime_on(mesh, split_dense=split_dense)
  runtime.init()
  assert parts_of(runtime, WI) == {expert_part}
  assert parts_of(runtime, WQ) == {dense_part}
  moments = runtime.state()['slots'][WI + '/mean'].addressable_shards
  assert {shard.data.shape for shard in moments} == {expert_part}


def test_an_update_that_is_split_has_equal_numbers_and_resumes_either_way(tmp_path):
  config = dataclasses.replace(CONFIG, optimizer='adafactor', schedule='constant', learning_rate=0.01, clip_norm=1.0)
  batches = [task_of(config).random_batch(seed, full=False) for seed in range(3)]
  whole, split = runtime_on('data:2', config), runtime_on('data:2', config, split_update=True)
  losses = {}
  for one, other in ((whole, split), (split, whole)):
    one.init()
    checkpoints = Checkpoints(str(tmp_path / str(one is split)))
    begun = [float(one.train_step(batch)['loss']) for batch in batches[:2]]
    checkpoints.save(one)
    warm_start.resume(other, checkpoints, 2)
    for name, value in arrays(other).items():
      np.testing.assert_array_equal(value, arrays(one)[name], err_msg=name)
    losses[one] = [*begun, float(other.train_step(batches[2])['loss'])]
  np.testing.assert_allclose(losses[whole], losses[split], rtol=1e-6)
  # Of WQ Adafactor keeps means over M and over K.
  held = lambda runtime, slot: {part.data.shape for part in runtime.state()['slots'][slot].addressable_shards}
  assert parts_of(split, WQ) == {(32, 4, 8)}
  assert (held(split, WQ + '/row'), held(split, WQ + '/column')) == ({(16, 4)}, {(4, 8)})
  assert held(whole, WQ + '/row') == {(32, 4)}
  # Each weight that is split is gathered once, whole, and nothing else is gathered.
  module = hlo.parse(split.train_program(batches[0]).as_text())
  gathered = [c.bytes for c in hlo_collectives.collectives(module) if c.kind == 'all-gather']
  specs = config.program().weight_specs
  expected = [4 * s.size for s in specs.values() if 'M' in s.dims and s.shape[s.dims.index('M')] >= 16]
  assert sum(gathered) == sum(expected)


def test_initial_values_are_those_of_the_local_runtime():
  there, here = runtime_on('data:2,expert:2'), LocalRuntime(CONFIG.program())
  there.init()
  here.init()
  expected = arrays(here)
  for name, value in arrays(there).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_checkpoint_goes_on_anywhere(tmp_path):
  batches = [task_of(CONFIG).random_batch(seed, full=False) for seed in range(4)]
  first = runtime_on('expert:4')
  first.init()
  metrics = [first.train_step(batch) for batch in batches[:2]]
  checkpoints = Checkpoints(str(tmp_path))
  checkpoints.save(first)
  saved = arrays(first)
  metrics += [first.train_step(batch) for batch in batches[2:]]
  losses = [float(m['loss']) for m in metrics]
  for make in (lambda: runtime_on('data:2,expert:2'), lambda: LocalRuntime(CONFIG.program())):
    second = make()
    warm_start.resume(second, checkpoints, 2)
    assert second.step == 2
    for name, value in arrays(second).items():
      np.testing.assert_array_equal(value, saved[name], err_msg=name)
    again = [second.train_step(batch) for batch in batches[2:]]
    np.testing.assert_allclose([float(m['loss']) for m in again], losses[2:], rtol=1e-5)
    for one, other in zip(again, metrics[2:], strict=True):
      assert one['routing'].keys() == other['routing'].keys()
      for layer, stats in one['routing'].items():  # of the whole batch, whatever the mesh
        np.testing.assert_array_equal(stats.tokens_E, other['routing'][layer].tokens_E, err_msg=layer)
  warm_start.resume(first, checkpoints, 2)
  assert [float(first.train_step(b)['loss']) for b in batches[2:]] == losses[2:]  # bit for bit on the same mesh


def test_choices_by_pair_are_those_of_the_whole_batch():
  config = tiny_config.make(num_groups=4)
  batch = task_of(config).random_batch(full=False)
  rows = next(iter(batch.values())).shape[0]
  batch['pairs'] = np.eye(3, dtype=np.int32)[np.arange(rows) % 3]
  there, here = runtime_on('data:2,expert:2', config), LocalRuntime(config.program())
  here.init()
  there.load({'step': np.asarray(0), 'weights': {name: w.numpy() for name, w in here.state()['weights'].items()}})
  expected = here.eval_step(batch)
  found = there.eval_step(batch)
  for layer, choices_PE in expected['choices_by_pair'].items():
    np.testing.assert_array_equal(found['choices_by_pair'][layer], choices_PE, err_msg=layer)
    np.testing.assert_array_equal(choices_PE.sum(axis=0), expected['routing'][layer].tokens_E, err_msg=layer)


def test_every_element_is_saved_once():
  runtime = runtime_on('data:2,expert:2')
  runtime.init()
  saved = {}
  for piece in runtime.slices():
    saved[piece.name] = saved.get(piece.name, 0) + piece.value.size
  program = CONFIG.program()
  sizes = {name: spec.size for name, spec in program.weight_specs.items()}
  sizes |= {f'slots/{name}': spec.size for name, spec in program.slot_specs.items()}
  assert saved == {'step': 1, **sizes}


def test_weights_that_are_not_finite_are_named():
  runtime = runtime_on('expert:2')
  runtime.init()
  assert runtime.not_finite() is None
  bad = {name: value * np.nan if name == WI else value for name, value in runtime.state()['weights'].items()}
  runtime.load({'step': np.asarray(0), 'weights': bad})
  assert runtime.not_finite() == WI


def test_a_mesh_that_does_not_divide_the_model_is_told_with_one_that_does():
  odd = dataclasses.replace(CONFIG, num_experts=6)
  with pytest.raises(UserError, match=r'moe/.*axis E \(experts\) has size 6.*use a multiple of 4, or --mesh=expert:2$'):
    runtime_on('expert:4', odd)
  two_groups = dataclasses.replace(CONFIG, num_groups=2, batch_tokens=128)
  with pytest.raises(UserError, match=r'num_groups=2: axis G .* has size 2.*--mesh=expert:2$'):
    runtime_on('expert:4', two_groups)
  in_parts = dataclasses.replace(CONFIG, micro_batches=2)
  with pytest.raises(UserError, match=r'num_groups=4 in micro_batches=2: axis G .* has size 2.*--mesh=expert:2$'):
    runtime_on('expert:4', in_parts)
  with pytest.raises(UserError, match=r'axis N \(.*\) has size 4.*--mesh=model:1$'):
    runtime_on('model:3')
  runtime_on('expert:4', dataclasses.replace(two_groups, num_experts=0))  # a dense model has no groups to split


@pytest.mark.parametrize(
  'annotate', [lambda x: xla_sharding.split(x, 0, 4), lambda x: xla_sharding.shard(x, np.array([[2], [0], [1], [3]]))]
)
def test_a_split_and_an_assignment_pad_a_size_that_they_do_not_divide(annotate):
  mesh = Mesh.parse('expert:4')
  lowered = lowering.Lowering(None, mesh, spmd.connect(mesh))
  function = lowering.traced(lambda x: xla_sharding.replicate(tf.sin(annotate(x))), mesh)
  x = np.arange(18, dtype=np.float32).reshape(6, 3)
  compiled = jax.jit(function, in_shardings=lowered.whole, out_shardings=lowered.whole).lower(x).compile()
  np.testing.assert_allclose(compiled(x), np.sin(x), rtol=1e-5)
  assert 'f32[2,3]' in compiled.as_text()  # parts of 2, 2, 2 and 0 rows


def test_a_placement_changes_devices_and_no_number():
  options = RuntimeOptions('data:2,expert:2', runtime='spmd', topology='v5e:2x2', placement='expert:2x1')
  placed, plain = machine.connect(options).make_runtime(CONFIG.program()), runtime_on('data:2,expert:2')
  batch = task_of(CONFIG).random_batch(0, full=False)
  losses, devices = [], []
  for runtime in placed, plain:
    runtime.init()
    losses.append(float(runtime.train_step(batch)['loss']))
    parts = runtime.state()['weights'][WI].addressable_shards
    devices.append(sorted(part.device.id for part in parts if part.index[0].start == 0))
  assert losses[0] == pytest.approx(losses[1], rel=1e-6)
  assert devices == [[0, 1], [0, 2]]  # that hold the first experts: column 0 of the torus, or every second device


def test_more_devices_than_there_are_is_told():
  with pytest.raises(UserError, match=r'--mesh=expert:64 needs 64 devices of each process; process 0 has \d+'):
    runtime_on('expert:64')


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'runtime': 'spmd'}, '--runtime=spmd needs --mesh'),
    ({'mesh': 'expert:2'}, '--mesh is for a mesh of devices; saw --runtime=local: add --runtime=spmd'),
    ({'num_processes': 2}, '--num_processes is for a mesh of devices'),
    (
      {'runtime': 'spmd', 'mesh': 'expert:2', 'placement': 'expert:2x1'},
      'such as --topology=v3:8x8 .*: give both or neither',
    ),
    ({'topology': 'v3:2x2', 'placement': 'expert:2x2'}, '--topology is for a placed mesh; saw --runtime=local'),
  ],
)
def test_flags_that_do_not_go_together_are_told(fields, message):
  with pytest.raises(UserError, match=message):
    RuntimeOptions(**fields)


def test_processes_need_each_other():
  with pytest.raises(UserError, match='several processes need --coordinator'):
    machine.connect(RuntimeOptions('expert:2', runtime='spmd', num_processes=2))
  with pytest.raises(UserError, match='every process holds as many devices; saw --mesh=expert:3 of 3 for 2'):
    machine.connect(RuntimeOptions('expert:3', runtime='spmd', coordinator='127.0.0.1:1', num_processes=2))


def test_more_devices_than_a_process_makes_are_refused_at_once():
  with pytest.raises(UserError, match='a process holds at most 1024 devices; saw --mesh=expert:65536 of 65536 for 1'):
    spmd.connect(Mesh.parse('expert:65536'))
