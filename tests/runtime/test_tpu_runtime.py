"""TPU runtime without a TPU: the parts on each core, and the steps after the passes of TensorFlow's TPU bridge.

A real TPUStrategy is given a faked topology and traces. Where steps are to run, the cores are this CPU: then what only
a TPU has (partitioned resources, XLA's annotations) is put aside, and the rest of the runtime is at work.
"""

import collections
import dataclasses
import re
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import WEIGHTS, Mesh
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend, xla
from lingvo_moe.optim import schedule
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.program import Program
from lingvo_moe.run import warm_start
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.runtime import tpu
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.xla_sharding import OpSharding

pytestmark = pytest.mark.compiled


@dataclasses.dataclass(frozen=True)
class Copier:
  """Experts that learn to give back their input."""

  moe: MoE

  def weights(self):
    return {'moe': self.moe.weights()}

  def loss(self, theta, batch, key=None):
    x_BTM = tf.ensure_shape(batch['x'], [None, None, 6])
    dropped = x_BTM if key is None else prng.dropout(x_BTM, 0.1, prng.fold(key, 'input'))
    y_BTM, routing = self.moe(theta['moe'], dropped, tf.zeros_like(x_BTM[..., 0]), key)
    error = tf.reduce_mean(tf.square(y_BTM - x_BTM))
    loss = error + 0.01 * routing.stats.aux_loss
    return loss, {'loss': loss, 'error': error, 'rows': tf.shape(x_BTM)[0], 'routing': {'layer_00': routing.stats}}


TASK = Copier(MoE(model_dim=6, hidden_dim=8, num_experts=4, num_groups=4))
PROGRAM = Program(TASK, Adafactor(), schedule.InverseSquareRoot(1.0, 100), clip_norm=1.0, seed=3)
MESH = Mesh.parse('data:2,expert:2')
CPU = ['/CPU:0'] * 4
# A chip of two cores in each of two hosts; TensorFlow's numbers of the cores run against the grid.
TOPOLOGY = tf.tpu.experimental.Topology(
  mesh_shape=[2, 1, 1, 2], device_coordinates=[[[1, 0, 0, 1], [1, 0, 0, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]]]
)
GRID = [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1)]


def batch_at(step):
  return {'x': np.random.default_rng(step).normal(size=[4, 5, 6]).astype(np.float32)}


SPECS = {'x': tf.TensorSpec([4, 5, 6])}


def fake_cores():
  """A strategy for the topology; TensorFlow asks a TPU for nothing until a program is run. Variables are on the CPU."""
  names = [f'/job:worker/replica:0/task:{task}/device:TPU:{i}' for task in range(2) for i in range(2)]
  metadata = types.SimpleNamespace(
    devices=[tf.config.LogicalDevice(name, 'TPU') for name in names], num_cores=4, num_hosts=2, num_of_cores_per_host=2
  )
  return tpu.cores(types.SimpleNamespace(get_tpu_system_metadata=lambda: metadata), TOPOLOGY, MESH)


def initial_state():
  runtime = LocalRuntime(PROGRAM)
  runtime.init()
  return runtime.state()


@pytest.fixture(scope='module')
def strategy():
  return fake_cores().strategy


@pytest.fixture(scope='module')
def traced(strategy):
  """(traced train step as the host runs it, runtime)."""
  runtime = tpu.TpuRuntime(PROGRAM, MESH, tpu.Cores(strategy, CPU))
  runtime.load(initial_state())
  return runtime._train.get_concrete_function(SPECS), runtime


def sharding_of(op):
  return OpSharding.FromString(op.get_attr('_XlaSharding'))


def devices_of(sharding):
  """(tiles, logical cores in the order of tiles) however it is written."""
  if sharding.iota_reshape_dims:
    iota = np.arange(np.prod(sharding.iota_reshape_dims)).reshape(sharding.iota_reshape_dims)
    cores = iota.transpose(sharding.iota_transpose_perm).flatten().tolist()
  else:
    cores = list(sharding.tile_assignment_devices)
  return tuple(sharding.tile_assignment_dimensions), tuple(cores)


def wanted(name, spec):
  return devices_of(MESH.stored_sharding(spec.shape, spec.dims, name).op_sharding)


def state_specs():
  slots = {f'slots/{name}': spec for name, spec in PROGRAM.slot_specs.items()}
  return {'step': WeightSpec((), '', Constant(0.0), dtype=tf.int64), **PROGRAM.weight_specs, **slots}


def test_places_of_the_mesh_follow_the_grid_of_the_tpu():
  assignment = tpu.device_assignment(TOPOLOGY, MESH)
  assert assignment.num_replicas == 1 and assignment.num_cores_per_replica == 4
  assert [tuple(map(int, c)) for c in assignment.core_assignment[0]] == GRID


def test_a_placed_mesh_puts_its_axes_along_those_of_the_grid():
  across = dataclasses.replace(MESH, topology=(2, 2), placement=((1,), (0,)))  # expert spans the chips
  coordinates = tpu.device_assignment(TOPOLOGY, across).core_assignment[0]
  assert [tuple(map(int, c)) for c in coordinates] == [GRID[i] for i in (0, 2, 1, 3)]


def test_the_names_of_cores_are_in_the_order_of_the_mesh():
  core = '/job:worker/task:{}/device:TPU:{}'.format
  assert list(fake_cores().devices) == [core(1, 1), core(1, 0), core(0, 1), core(0, 0)]


def test_a_mesh_that_is_not_the_tpus_is_told():
  with pytest.raises(
    UserError, match='takes all cores of a TPU; saw --mesh=expert:8 of 8, and a TPU of 4: use --mesh='
  ):
    tpu.device_assignment(TOPOLOGY, Mesh.parse('expert:8'))
  other = Mesh((('expert', 4),), topology=(4,), placement=((0,),))
  with pytest.raises(
    UserError, match=r'laid out for the grid of its TPU; saw topology=\(4,\), and a TPU of \(2, 1, 1, 2\)'
  ):
    tpu.device_assignment(TOPOLOGY, other)


def test_each_core_keeps_its_part_and_no_more():
  value = np.arange(8, dtype=np.float32).reshape(4, 2)
  spec = WeightSpec((4, 2), 'EM', Constant(0.0))
  held = tpu.Sliced('w', spec, MESH.op_sharding(MESH.spec('EM', WEIGHTS)), CPU)
  held.load(value)
  # Cores 0 1 / 2 3 are data x expert: 0 and 2 keep experts 0 and 1.
  for core, part in enumerate([value[:2], value[2:], value[:2], value[2:]]):
    np.testing.assert_array_equal(held.variables[core], part)
  np.testing.assert_array_equal(held[1:3], value[1:3])
  parts = list(held.parts())
  assert [(rows.start, columns.start) for (rows, columns), _ in parts] == [(0, 0), (2, 0)]
  np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), value)


def test_a_weight_that_is_not_split_is_whole_on_every_core():
  held = tpu.Sliced('w', WeightSpec((3,), 'M', Constant(0.0)), OpSharding(type=OpSharding.REPLICATED), CPU)
  held.load(np.array([1.0, 2.0, 3.0]))
  assert [v.numpy().tolist() for v in held.variables] == [[1.0, 2.0, 3.0]] * 4
  assert len(list(held.parts())) == 1


def test_a_weight_that_cannot_be_split_is_told_by_name(strategy):
  odd = dataclasses.replace(PROGRAM, model=Copier(dataclasses.replace(TASK.moe, num_experts=3)))
  with pytest.raises(UserError, match=r'moe/wi: axis E \(experts\) has size 3.*or --mesh=data:2,expert:1$'):
    tpu.TpuRuntime(odd, MESH, tpu.Cores(strategy, CPU)).init()


def test_the_state_enters_the_step_in_parts(traced):
  function, runtime = traced
  ops = {tuple(i.name for i in op.inputs): op for op in function.graph.get_operations() if 'PartitionedIn' in op.type}
  names = {id(handle): placeholder.name for handle, placeholder in function.graph.captures}
  held = {
    'step': runtime.state()['step'],
    **runtime.state()['weights'],
    **{f'slots/{name}': value for name, value in runtime.state()['slots'].items()},
  }
  specs = state_specs()
  assert held.keys() == specs.keys() and len(ops) == len(held)
  for name, value in held.items():
    tiles, cores = wanted(name, specs[name])
    order = cores or range(4)  # the bridge gives input i to the core of tile i
    op = ops[tuple(names[id(value.variables[core].handle)] for core in order)]
    assert tuple(op.get_attr('partition_dims')) == tiles, name
    assert not sharding_of(op).iota_reshape_dims and devices_of(sharding_of(op)) == (tiles, cores), name
  assert wanted('moe/wi', specs['moe/wi']) == ((2, 1, 1, 2), (0, 2, 1, 3))
  assert runtime.state()['weights']['moe/wi'].variables[0].shape == [2, 6, 8]


def test_the_strategy_makes_one_program_for_all_cores(traced):
  (metadata,) = (op for op in traced[0].graph.get_operations() if op.type == 'TPUReplicateMetadata')
  assert metadata.get_attr('use_spmd_for_xla_partitioning')
  assert metadata.get_attr('num_replicas') == 1 and metadata.get_attr('num_cores_per_replica') == 4
  assert metadata.get_attr('device_assignment') == np.ravel(GRID).tolist()
  partitioned = [op for op in traced[0].graph.get_operations() if op.type == 'TPUPartitionedInputV2']
  assert not any('_tpu_replicate' in op.node_def.attr for op in partitioned)  # the bridge wants them outside
  reads = [op for op in traced[0].graph.get_operations() if op.type in ('ReadVariableOp', 'AssignVariableOp')]
  assert len(reads) == 2 * len(partitioned) and all('_tpu_replicate' in op.node_def.attr for op in reads)


def test_the_step_carries_every_annotation_of_the_program(traced):
  """As many of each kind as in the program alone, and those of the batch's rows (split) and the metrics (whole)."""

  def annotations(graph):
    ops = [op for op in graph.get_operations() if op.type == 'XlaSharding']
    return collections.Counter(
      (devices_of(sharding_of(op)), tuple(op.outputs[0].shape)) for op in ops if sharding_of(op).iota_reshape_dims
    ), [op for op in ops if not sharding_of(op).iota_reshape_dims]

  state = initial_state()

  def alone(batch):
    return PROGRAM.train_step(state, batch)

  with xla_sharding.use(MESH), backend.use(xla.BACKEND):
    program, whole = annotations(tf.function(alone, autograph=False).get_concrete_function(SPECS).graph)
  step, boundary = annotations(traced[0].graph)
  assert step == program and sum(step.values()) > 20
  rows = [op for op in boundary if sharding_of(op).type == OpSharding.OTHER]
  assert [devices_of(sharding_of(op)) for op in rows] == [((4, 1, 1), (0, 1, 2, 3))]
  metrics = len(tf.nest.flatten(traced[0].structured_outputs))
  assert len(boundary) - len(rows) == len(whole) + metrics


def with_types_of_resources(function, runtime):
  """MLIR of a function of the host, with the resource types that convert_function drops."""
  state = runtime.state()
  held = [state['step'], *state['weights'].values(), *state['slots'].values()]
  variables = {id(v.handle): v for value in held for v in value.variables}
  handles = {placeholder.name: variables[id(handle)] for handle, placeholder in function.graph.captures}
  letters = {tf.float32: 'f32', tf.int64: 'i64'}
  resources = {}
  for i, x in enumerate(function.inputs):
    if x.dtype == tf.resource:
      held = 'x'.join([*map(str, handles[x.name].shape), letters[handles[x.name].dtype]])
      resources[f'%arg{i}'] = f'tensor<!tf_type.resource<tensor<{held}>>>'
  lines = tf.mlir.experimental.convert_function(function).splitlines()
  for i, line in enumerate(lines):
    if 'func.func @__inference' in line:
      typed = lambda m: f'{m[1]}: {resources[m[1]]}'
      lines[i] = re.sub(r'(%arg\d+): tensor<\*x!tf_type\.resource>', typed, line)
    partitioned = re.search(r'"tf.TPUPartitionedInputV2"\((.*?)\)', line)
    if partitioned:
      operands = ', '.join(resources[name] for name in partitioned[1].split(', '))
      lines[i] = re.sub(r': \(tensor<.*?\) ->', f': ({operands}) ->', line)
  return '\n'.join(lines)


def bridged(module):
  """MLIR of the host after the first half of TensorFlow's TPU bridge."""
  worker = '/job:worker/replica:0/task:{}/device:{}'.format
  devices = [worker(task, name) for task in range(2) for name in ('CPU:0', 'TPU:0', 'TPU:1', 'TPU_SYSTEM:0')]
  devices = ', '.join(f'"{device}"' for device in devices)
  module = module.replace('module attributes {', f'module attributes {{tf.devices = {{{devices}}}, ', 1)
  for passes in 'tf-replicated-clustering-bridge-v2', 'func.func(tf-tpu-resource-partition)':
    module = tf.mlir.experimental.run_pass_pipeline(module, passes)
  return module


def found(what, cluster):
  """Number of inputs or outputs of a program by their sharding."""
  (listed,) = re.findall(what + r'_sharding_configuration = \[(.*?)\]', cluster)
  protos = [unescape(text) for text in re.findall(r'"(.*?)"', listed)]
  return collections.Counter(devices_of(OpSharding.FromString(proto)) for proto in protos)


def the_cluster(module):
  """Line of MLIR that runs the program on the cores."""
  (cluster,) = (line for line in module.splitlines() if '"tf_device.cluster_func"' in line)
  assert 'use_spmd_for_xla_partitioning = true' in cluster  # it has not fallen back to one core
  return cluster


def test_tensorflows_bridge_finds_the_sharding_of_all_that_enters_and_leaves(traced):
  cluster = the_cluster(bridged(with_types_of_resources(*traced)))
  state = collections.Counter(wanted(name, spec) for name, spec in state_specs().items())
  inputs, outputs = found('input', cluster), found('output', cluster)
  assert inputs - state == {((4, 1, 1), (0, 1, 2, 3)): 1} and not state - inputs
  metrics = len(tf.nest.flatten(traced[0].structured_outputs)) - 1  # this model's loss is the objective: one output
  assert outputs - state == {((), ()): metrics} and not state - outputs


def test_tensorflows_bridge_has_each_core_read_and_assign_its_own_part(traced):
  module = bridged(with_types_of_resources(*traced))
  leaves = len(state_specs())
  assert (
    len(re.findall('"tf.ReadVariableOp"', module)) == len(re.findall('"tf.AssignVariableOp"', module)) == 4 * leaves
  )
  part, whole = 'tensor<2x6x8xf32>', 'tensor<4x6x8xf32>'  # of moe/wi
  parts = ', '.join([part] * 4)
  assert len(re.findall(rf'"tf.TPUPartitionedInputV2".*: \({parts}\) -> {whole}', module)) == 1
  assert len(re.findall(rf'"tf.TPUPartitionedOutputV2".*: \({whole}\) -> \({parts}\)', module)) == 1


def test_each_core_makes_its_own_part_of_the_initial_values(traced):
  _, runtime = traced
  cluster = the_cluster(bridged(with_types_of_resources(runtime._initial.get_concrete_function({}), runtime)))
  assert found('output', cluster) == collections.Counter(wanted(name, spec) for name, spec in state_specs().items())


def test_evaluation_reads_the_weights_alone(traced):
  _, runtime = traced
  function = runtime._eval.get_concrete_function(SPECS)
  module = bridged(with_types_of_resources(function, runtime))
  weights = collections.Counter(wanted(name, spec) for name, spec in PROGRAM.weight_specs.items())
  assert found('input', the_cluster(module)) == weights + collections.Counter({((4, 1, 1), (0, 1, 2, 3)): 1})
  assert 'AssignVariableOp' not in module


def test_several_steps_are_one_program_in_a_loop_of_the_host(traced):
  _, runtime = traced
  loop = runtime._train_loop.get_concrete_function({'x': tf.TensorSpec([3, 4, 5, 6])})
  module = bridged(tf.mlir.experimental.convert_function(loop))
  assert the_cluster(module) in module[module.index('"tf.WhileRegion"') :]
  assert [x.shape[0] for x in tf.nest.flatten(loop.structured_outputs)] == [3] * len(loop.outputs)


def unescape(text):
  """The bytes of a string of MLIR."""
  return re.sub(rb'\\([0-9A-F]{2})', lambda m: bytes([int(m[1], 16)]), text.encode('latin-1'))


@pytest.fixture
def on_cpu(monkeypatch):
  """A runtime whose cores are this CPU: their parts are joined and split here, one computation does for all."""

  def value(self):
    parts = [self.variables[holders[0]].value() for _, holders in self._tiles]
    tiles = [size // part for size, part in zip(self.shape, parts[0].shape, strict=True)]
    for axis, count in reversed(list(enumerate(tiles))):
      parts = [tf.concat(parts[i : i + count], axis) for i in range(0, len(parts), count)]
    return parts[0]

  def assign(self, value):
    for index, holders in self._tiles:
      for core in holders:
        self.variables[core].assign(value[index])

  monkeypatch.setattr(tpu.Sliced, 'value', value)
  monkeypatch.setattr(tpu.Sliced, 'assign', assign)
  monkeypatch.setattr(xla_sharding, 'current', lambda: None)
  here = types.SimpleNamespace(run=lambda f, args: f(*args))
  return tpu.TpuRuntime(PROGRAM, MESH, tpu.Cores(here, CPU))


def test_one_by_one_or_in_a_loop_steps_are_those_of_the_local_runtime(on_cpu, tmp_path):
  local = LocalRuntime(PROGRAM)
  local.init()
  on_cpu.init()
  assert on_cpu.row_multiple == 4
  wants = [local.train_step(batch_at(step)) for step in range(3)]
  got = [*on_cpu.train_steps([batch_at(0)]), *on_cpu.train_steps([batch_at(1), batch_at(2)])]
  assert on_cpu.step == 3 and on_cpu.not_finite() is None
  assert on_cpu._train.experimental_get_tracing_count() == 1
  for ours, theirs in zip(got, wants, strict=True):
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, theirs)

  # What it saves the local runtime goes on from.
  checkpoints = Checkpoints(str(tmp_path))
  checkpoints.save(on_cpu)
  warm_start.resume(local, checkpoints, 3)
  for kind in ('weights', 'slots'):
    for name, value in on_cpu.state()[kind].items():
      np.testing.assert_array_equal(value[...], local.state()[kind][name], err_msg=name)
  np.testing.assert_allclose(on_cpu.eval_step(batch_at(3))['error'], local.eval_step(batch_at(3))['error'], rtol=1e-5)

  poisoned = {**on_cpu.state()['weights'], 'moe/wo': np.full([4, 8, 6], np.nan, np.float32)}
  on_cpu.load({**on_cpu.state(), 'weights': poisoned})
  assert on_cpu.not_finite() == 'moe/wo' and on_cpu.step == 3


def test_a_batch_that_the_mesh_does_not_divide_is_told(on_cpu):
  on_cpu.init()
  with pytest.raises(UserError, match=r'axis B \(rows of a batch\) has size 6.*--mesh=data:2,expert:1$'):
    on_cpu.train_step({'x': np.zeros([6, 5, 6], np.float32)})


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'runtime': 'tpu', 'tpu': 'local'}, '--runtime=tpu needs --mesh'),
    ({'runtime': 'tpu', 'mesh': 'expert:8'}, '--runtime=tpu needs --tpu'),
    ({'tpu': 'local'}, '--tpu is for a TPU; saw --runtime=local: add --runtime=tpu'),
    ({'runtime': 'spmd', 'mesh': 'expert:2', 'tpu': 'local'}, 'saw --runtime=spmd: leave it out, or use --runtime=tpu'),
    (
      {'runtime': 'tpu', 'mesh': 'expert:2', 'tpu': 'local', 'num_processes': 2},
      '--num_processes is for .* several processes; saw --runtime=tpu: leave it out, or use --runtime=spmd',
    ),
  ],
)
def test_flags_that_do_not_go_together_are_told(fields, message):
  with pytest.raises(UserError, match=message):
    RuntimeOptions(**fields)


def test_a_tpu_that_is_not_there_is_told():
  if tf.config.list_physical_devices('TPU'):
    pytest.skip('there is one')
  with pytest.raises(UserError, match='needs a TPU that TensorFlow can reach; saw --tpu=local, .* --runtime=spmd'):
    machine.connect(RuntimeOptions('expert:8', runtime='tpu', tpu='local'))
