"""A TPU through tf.distribute.TPUStrategy: one replica over all its cores, cut up by XLA's SPMD partitioner.

NOT RUN ON HARDWARE: no TPU was at hand. The tests trace the steps for a faked topology with the real TPUStrategy, and
pass what comes out through the passes of TensorFlow's own TPU bridge that its CPU wheel has; nothing was executed.

Under SPMD, TPUStrategy keeps each variable whole on every core (TPUReplicatedVariable). Here a weight is one variable a
core with that core's part (Sliced), and all of them enter the step by one TPUPartitionedInputV2, as TensorFlow's own do
but with partition dims: the bridge reads and assigns each core's part on that core. Variables are made and placed here,
not by the strategy, which is left with what it alone does: to compile one program for all cores and to run it.

What enters or leaves the program has its sharding written as a list of devices and not in the iota form: the bridge
deals out parts by that list (ExtractInputsForLogicalDevices), and only late versions, such as TensorFlow 2.21's, make
one of an iota first; earlier ones deal out nothing. Annotations within the program are in the iota form, as everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.ops import backend as backend_lib
from lingvo_moe.ops import xla
from lingvo_moe.ops.backend import Backend
from lingvo_moe.program import Program
from lingvo_moe.runtime import pieces
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.runtime.local import to_numpy
from lingvo_moe.runtime.pieces import Piece
from lingvo_moe.xla_sharding import Mesh
from lingvo_moe.xla_sharding import OpSharding


@dataclasses.dataclass(frozen=True)
class Cores:
  """The cores of a TPU, ready to run programs.

  Attributes:
    strategy: runs a function on all cores, as one replica.
    devices: TensorFlow's name of the core at each place of the mesh, the last axis of the mesh fastest.
  """

  strategy: tf.distribute.Strategy
  devices: Sequence[str]


def connect(name: str, mesh: Mesh) -> Cores:
  """Finds a TPU and makes it ready: once in a process, before anything is computed.

  Args:
    name: of the Cloud TPU, its address (grpc://HOST:PORT), or 'local' on a TPU VM.
    mesh: over all of its cores.

  Raises:
    UserError: there is no such TPU, or it has another number of cores than the mesh.
  """
  try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
    tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
  except (tf.errors.OpError, ImportError, OSError, RuntimeError, ValueError) as e:
    raise UserError(
      f'--runtime=tpu needs a TPU that TensorFlow can reach; saw --tpu={name}, for which it says '
      f'{str(e).splitlines()[0]!r}: on a TPU VM give --tpu=local, with the TensorFlow that was built for it, elsewhere '
      "the TPU's name or grpc://HOST:PORT; without a TPU use --runtime=spmd"
    ) from None
  return cores(resolver, topology, mesh)


def cores(
  resolver: tf.distribute.cluster_resolver.TPUClusterResolver, topology: tf.tpu.experimental.Topology, mesh: Mesh
) -> Cores:
  """The cores of a TPU that is ready, in the order of the mesh."""
  assignment = device_assignment(topology, mesh)
  strategy = tf.distribute.TPUStrategy(
    resolver, experimental_device_assignment=assignment, experimental_spmd_xla_partitioning=True
  )
  job = tf.DeviceSpec.from_string(strategy.extended.worker_devices[0]).job
  return Cores(strategy, [assignment.tpu_device(0, place, job=job) for place in range(mesh.num_devices)])


def device_assignment(topology: tf.tpu.experimental.Topology, mesh: Mesh) -> tf.tpu.experimental.DeviceAssignment:
  """One replica whose logical core i, by which number annotations call it, is the core at place i of the mesh.

  Mesh.device_ids() gives the core's physical number: its place in the TPU's grid (x, y, z, core of a chip), the last
  fastest.

  Raises:
    UserError: the mesh has another number of devices than the TPU, or was laid out for another grid.
  """
  coordinates = np.array(sorted(map(tuple, topology.device_coordinates.reshape(-1, topology.mesh_rank).tolist())))
  if len(coordinates) != mesh.num_devices:
    raise UserError(
      f'a mesh takes all cores of a TPU; saw --mesh={mesh} of {mesh.num_devices}, and a TPU of {len(coordinates)}: '
      f'use --mesh=expert:{len(coordinates)}, or other axes with that product'
    )
  without_ones = lambda sizes: [int(size) for size in sizes if size > 1]
  if mesh.topology and without_ones(mesh.topology) != without_ones(topology.mesh_shape):
    raise UserError(
      f'a mesh is laid out for the grid of its TPU; saw topology={mesh.topology}, and a TPU of '
      f'{tuple(int(size) for size in topology.mesh_shape)}: give the mesh that topology, or none'
    )
  return tf.tpu.experimental.DeviceAssignment(topology, coordinates[np.newaxis, mesh.device_ids().reshape(-1)])


class Sliced:
  """A logical tensor of which each core keeps a part, as a variable of its own; some may keep the same.

  Reads as a numpy array where it is indexed, as a whole tensor in a step.
  """

  def __init__(self, name: str, spec: WeightSpec, sharding: OpSharding, devices: Sequence[str]):
    """Zeros, of the spec's shape and type, split as the sharding says over the devices (by logical core)."""
    self.shape, self.dtype = spec.shape, spec.dtype
    self._sharding = _listed(sharding)
    self._tiles = list(_tiles(self.shape, self._sharding, len(devices)))
    self._variables = {}
    for index, holders in self._tiles:
      sizes = [part.stop - part.start for part in index]
      for core in holders:
        with tf.device(devices[core]):
          self._variables[core] = tf.Variable(tf.zeros(sizes, spec.dtype), trainable=False, name=f'{name}/core_{core}')
    self._latest: tf.Tensor | None = None  # handle

  @property
  def variables(self) -> list[tf.Variable]:
    """The part of each core, by its logical number."""
    return [self._variables[core] for core in range(len(self._variables))]

  def parts(self) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(where it begins, value) of each part, once."""
    for index, holders in self._tiles:
      yield tuple(part.start for part in index), self._variables[holders[0]].numpy()

  def __getitem__(self, index) -> np.ndarray:
    whole = np.zeros(self.shape, self.dtype.as_numpy_dtype)
    for part, holders in self._tiles:
      whole[part] = self._variables[holders[0]].numpy()
    return whole[index]

  def __int__(self) -> int:
    return int(self[()])

  def load(self, value: Any) -> None:
    """Takes the values of anything with a shape that can be sliced; of one part at a time."""
    if value is self:
      return
    for index, holders in self._tiles:
      part = np.asarray(value[index])
      for core in holders:
        self._variables[core].assign(tf.cast(part, self.dtype))

  def read_value(self) -> tf.Tensor:
    """The whole, in a step."""
    whole = tf.raw_ops.ReadVariableOp(resource=self._handle(), dtype=self.dtype)
    whole.set_shape(self.shape)
    return whole

  def assign(self, value: tf.Tensor) -> None:
    """A new whole, in a step."""
    tf.raw_ops.AssignVariableOp(resource=self._handle(), value=tf.cast(value, self.dtype))

  def _handle(self) -> tf.Tensor:
    """All variables as one resource, as TPUReplicatedVariable.handle and TPUVariableMixin.handle make it.

    One a graph, so that TensorFlow sees that a read and an assignment are of the same thing. It lies outside of the
    replicated computation, which control_dependencies(None) leaves.
    """
    if self._latest is None or self._latest.graph is not tf.compat.v1.get_default_graph():
      # Inputs come in the order of tiles, and with equal ones of their copies; without tiles, in the order of cores.
      inputs = [self._variables[core].handle for _, holders in self._tiles for core in holders]
      tiles = list(self._sharding.tile_assignment_dimensions)
      with tf.control_dependencies(None):
        parts = tf.raw_ops.TPUPartitionedInputV2(inputs=inputs, partition_dims=tiles, is_packed=False)
        xla_sharding.mark(parts, self._sharding)
        self._latest = tf.raw_ops.TPUReplicatedInput(inputs=[parts], is_mirrored_variable=True)
    return self._latest


class TpuRuntime(LocalRuntime):
  """Runs a Program's steps on the cores of a TPU: LocalRuntime's, with a state in slices and all cores at work.

  One process drives the whole TPU, of however many hosts, and feeds it whole batches. A program is compiled for each
  shape of batch.
  """

  def __init__(self, program: Program, mesh: Mesh, cores: Cores):
    self.mesh = mesh
    self._cores = cores
    rows = mesh.spec('B', xla_sharding.ACTIVATIONS)
    self.row_multiple = mesh.size(rows[0])
    self._rows = rows
    super().__init__(program, jit=True)
    finite = lambda weights, _: {name: tf.reduce_all(tf.math.is_finite(w)) for name, w in weights.items()}
    self._finite = self.function(finite)
    self._initial = self._traced(lambda _: self._assign(self.program.init()))
    self._train_loop = tf.function(self._train_in_turn, autograph=False)

  def init(self) -> None:
    """Starts from initial values, each core making its part alone."""
    self._make(with_slots=True)
    self._initial({})

  def load(self, state: Mapping) -> None:
    """Starts from a given state, of anything with a shape that can be sliced; slots may be left out.

    No more than a part is read at a time.
    """
    slots = state.get('slots', {})
    self._make(with_slots=bool(slots))
    self._step.load(state['step'])
    for held, values in ((self._weights, state['weights']), (self._slots, slots)):
      for name, value in values.items():
        held[name].load(value)

  def state(self) -> dict:
    """The current state, of Sliced."""
    return {'step': self._step, 'weights': self._weights, 'slots': self._slots}

  def pieces(self) -> Iterator[Piece]:
    """The state, part by part, to be saved."""
    yield Piece('step', (), (), np.asarray(self.step, np.int64))
    slots = dict(zip(pieces.slot_names(self._slots), self._slots.values(), strict=True))
    for name, value in {**self._weights, **slots}.items():
      for begin, part in value.parts():
        yield Piece(name, value.shape, begin, part)

  def not_finite(self) -> str | None:
    """The name of a weight that is not finite everywhere; None if all are."""
    return next((name for name, finite in self._finite({}).items() if not finite), None)

  def train_steps(self, batches: Sequence[Mapping[str, np.ndarray]]) -> list[dict]:
    """Updates by batches of one shape, in one call of a loop on the TPU's host; returns the metrics of each."""
    if len(batches) == 1:
      return [self.train_step(batches[0])]
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    metrics = to_numpy(self._train_loop(stacked))
    of_step = lambda i: tf.nest.map_structure(lambda x: x[i], metrics)
    return [of_step(i) for i in range(len(batches))]

  def _traced(
    self, f: Callable[[dict], Any], backend: Backend = xla.BACKEND, jit: bool = True
  ) -> tf.types.experimental.PolymorphicFunction:
    """f of a batch, once on all cores, always compiled by XLA. Its results are whole on every core."""
    del jit, backend

    def on_cores(batch):
      with xla_sharding.use(self.mesh), backend_lib.use(xla.BACKEND):
        outputs = f({name: self._split_rows(x) for name, x in batch.items()})
        return tf.nest.map_structure(xla_sharding.replicate, {} if outputs is None else outputs)

    def on_host(batch):  # TensorFlow names the program after it, and does not take a lambda's name
      return self._cores.strategy.run(on_cores, args=(batch,))

    return tf.function(on_host, autograph=False)

  def _train_in_turn(self, stacked):
    """The train step for each of some batches that are stacked along a first axis."""
    specs = {name: tf.TensorSpec(x.shape[1:], x.dtype) for name, x in stacked.items()}
    once = self._train.get_concrete_function(specs)
    shapes = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), once.structured_outputs)
    return tf.map_fn(once, stacked, parallel_iterations=1, fn_output_signature=shapes)

  def _split_rows(self, x: tf.Tensor) -> tf.Tensor:
    self.mesh.check(x.shape[:1], 'B', self._rows)
    sharding = self.mesh.op_sharding(self._rows + ((),) * (x.shape.rank - 1))
    return x if xla_sharding.current() is None else xla_sharding.annotate(x, _listed(sharding))

  def _make(self, with_slots: bool) -> None:
    """Makes the variables that are not there yet."""
    if self._step is None:
      whole = OpSharding(type=OpSharding.REPLICATED)
      self._step = Sliced('step', WeightSpec((), '', tf.zeros, dtype=tf.int64), whole, self._cores.devices)
      self._weights = self._sliced(self.program.weight_specs)
    if with_slots and not self._slots:
      self._slots = self._sliced(self.program.slot_specs)

  def _sliced(self, specs: Mapping[str, WeightSpec]) -> dict[str, Sliced]:
    split = lambda name, spec: self.mesh.op_sharding(self.mesh.stored_spec(spec.shape, spec.dims, name))
    return {name: Sliced(name, spec, split(name, spec), self._cores.devices) for name, spec in specs.items()}


def _listed(sharding: OpSharding) -> OpSharding:
  """A sharding in the iota form, with its devices as a list."""
  listed = OpSharding()
  listed.CopyFrom(sharding)
  if sharding.iota_reshape_dims:
    iota = np.arange(np.prod(sharding.iota_reshape_dims)).reshape(sharding.iota_reshape_dims)
    listed.tile_assignment_devices.extend(iota.transpose(sharding.iota_transpose_perm).flat)
    listed.ClearField('iota_reshape_dims')
    listed.ClearField('iota_transpose_perm')
  return listed


def _tiles(
  shape: tuple[int, ...], sharding: OpSharding, num_cores: int
) -> Iterator[tuple[tuple[slice, ...], list[int]]]:
  """(where it is, the logical cores that hold it) of each part, in XLA's order of tiles."""
  if sharding.type == OpSharding.REPLICATED:
    yield tuple(slice(0, size) for size in shape), list(range(num_cores))
    return
  tiles = tuple(sharding.tile_assignment_dimensions)[: len(shape)]
  holders = np.reshape(sharding.tile_assignment_devices, (*tiles, -1))
  sizes = [size // parts for size, parts in zip(shape, tiles, strict=True)]
  for place in np.ndindex(*tiles):
    yield tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, sizes, strict=True)), holders[place].tolist()
