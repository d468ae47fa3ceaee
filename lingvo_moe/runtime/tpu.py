"""TPU runtime on tf.distribute.TPUStrategy: one replica over all cores of a TPU, partitioned by XLA's SPMD partitioner.

NOT RUN ON HARDWARE: no TPU was at hand. The tests trace the steps for a faked topology with the real TPUStrategy, and
run the passes of TensorFlow's TPU bridge that its CPU wheel has over the result; nothing was executed.

Under SPMD, TPUStrategy keeps each variable whole on every core (TPUReplicatedVariable). Here a weight has one variable
per core with that core's part (Sliced). All of them enter the step by one TPUPartitionedInputV2, as TensorFlow's own
do, but with partition dims: the bridge reads and assigns each core's part on that core. This file creates and places
the variables; the strategy only compiles one program for all cores and runs it.

Inputs and outputs of the program have their sharding written as a list of devices instead of the iota form: the bridge
distributes parts by that list (ExtractInputsForLogicalDevices), and only recent versions, such as TensorFlow 2.21's,
expand an iota first; earlier ones distribute nothing. Annotations within the program are in the iota form, as
elsewhere.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import ACTIVATIONS, Mesh
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.ops import backend as backend_lib
from lingvo_moe.ops import xla
from lingvo_moe.ops.backend import Backend
from lingvo_moe.program import Program
from lingvo_moe.runtime import slices
from lingvo_moe.runtime.local import LocalRuntime, to_numpy
from lingvo_moe.runtime.runtime import Batch
from lingvo_moe.runtime.slices import Slice
from lingvo_moe.xla_sharding import OpSharding


class Cores(NamedTuple):
  """Cores of an initialized TPU."""

  strategy: tf.distribute.Strategy  # runs a function on all cores, as one replica
  devices: Sequence[str]  # TensorFlow's name of the core at each position of the mesh, its last axis fastest


def connect(name: str, mesh: Mesh) -> Cores:
  """Connects to a TPU and initializes it; call it once in a process, before anything is computed.

  `name` is that of a Cloud TPU, its address (grpc://HOST:PORT), or 'local' on a TPU VM; the mesh has all its cores.

  Raises:
    UserError: TensorFlow cannot reach the TPU, or its number of cores is not the mesh's.
  """
  try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
    tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
  except (tf.errors.OpError, ImportError, OSError, RuntimeError, ValueError) as e:
    raise UserError(
      f'--runtime=tpu needs a TPU that TensorFlow can reach; saw --tpu={name}, for which it says '
      f"{errors.reason(e)!r}: on a TPU VM give --tpu=local, elsewhere the TPU's name or grpc://HOST:PORT, and a "
      "TensorFlow 2.21 that is built for TPUs (PyPI's tensorflow-tpu ends at 2.20); or use --runtime=spmd, which needs "
      'JAX alone'
    ) from None
  return cores(resolver, topology, mesh)


def cores(
  resolver: tf.distribute.cluster_resolver.TPUClusterResolver, topology: tf.tpu.experimental.Topology, mesh: Mesh
) -> Cores:
  """Cores of an initialized TPU, in the order of the mesh."""
  assignment = device_assignment(topology, mesh)
  strategy = tf.distribute.TPUStrategy(
    resolver, experimental_device_assignment=assignment, experimental_spmd_xla_partitioning=True
  )
  job = tf.DeviceSpec.from_string(strategy.extended.worker_devices[0]).job
  return Cores(strategy, [assignment.tpu_device(0, place, job=job) for place in range(mesh.num_devices)])


def device_assignment(topology: tf.tpu.experimental.Topology, mesh: Mesh) -> tf.tpu.experimental.DeviceAssignment:
  """Device assignment of one replica: logical core i, the number used by annotations, is at position i of the mesh.

  Mesh.device_ids() gives a core's physical number: its position in the TPU's grid (x, y, z, core of a chip), the last
  axis fastest. UserError if the TPU has another number of cores than the mesh, or another grid than its topology.
  """
  coordinates = np.array(sorted(map(tuple, topology.device_coordinates.reshape(-1, topology.mesh_rank).tolist())))
  if len(coordinates) != mesh.num_devices:
    raise UserError(
      f'a mesh takes all cores of a TPU; saw --mesh={mesh} of {mesh.num_devices}, and a TPU of {len(coordinates)}: '
      f'use --mesh=expert:{len(coordinates)}, or other axes with that product'
    )
  if mesh.topology and not _divides(mesh.topology, topology.mesh_shape):
    raise UserError(
      f'a mesh is laid out for the grid of its TPU; saw topology={mesh.topology}, and a TPU of '
      f'{tuple(int(size) for size in topology.mesh_shape)}: give the mesh that topology, or none'
    )
  return tf.tpu.experimental.DeviceAssignment(topology, coordinates[np.newaxis, mesh.device_ids().reshape(-1)])


def _divides(fine: Sequence[int], grid: Sequence[int]) -> bool:
  """Whether a grid is another one with its axes divided: (2, 2, 4, 2) divides (4, 4, 1, 2)."""
  ends = lambda sizes: {math.prod(sizes[:i]) for i in range(len(sizes) + 1)}
  return math.prod(fine) == math.prod(grid) and ends(grid) <= ends(fine)


class Sliced:
  """Logical tensor stored as one variable per core, each with a part of it; cores may hold copies of a part.

  Indexing it gives a numpy array; in a step it is read as a whole tensor.
  """

  def __init__(self, name: str, spec: WeightSpec, sharding: OpSharding, devices: Sequence[str]):
    """Creates zeros of the spec's shape and type, split by `sharding` over the devices of logical cores 0, 1, ..."""
    self.shape, self.dtype = spec.shape, spec.dtype
    self._sharding = _listed(sharding)
    self._tiles = list(_tiles(self.shape, self._sharding, len(devices)))
    variables = {}
    for index, cores in self._tiles:
      sizes = [part.stop - part.start for part in index]
      for core in cores:
        with tf.device(devices[core]):
          variables[core] = tf.Variable(tf.zeros(sizes, spec.dtype), trainable=False, name=f'{name}/core_{core}')
    self.variables = [variables[core] for core in range(len(devices))]
    self._latest: tf.Tensor | None = None  # handle

  def parts(self) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yields (index, value) of each part, without copies."""
    for index, cores in self._tiles:
      yield index, self.variables[cores[0]].numpy()

  def __getitem__(self, index) -> np.ndarray:
    whole = np.zeros(self.shape, self.dtype.as_numpy_dtype)
    for place, value in self.parts():
      whole[place] = value
    return whole[index]

  def __int__(self) -> int:
    return int(self[()])

  def load(self, value: Any) -> None:
    """Assigns from a value with a shape that can be sliced, part by part."""
    for index, cores in self._tiles if value is not self else ():
      part = np.asarray(value[index])
      for core in cores:
        self.variables[core].assign(tf.cast(part, self.dtype))

  def value(self) -> tf.Tensor:
    """Reads the whole tensor, in a step."""
    whole = tf.raw_ops.ReadVariableOp(resource=self._handle(), dtype=self.dtype)
    whole.set_shape(self.shape)
    return whole

  def assign(self, value: tf.Tensor) -> None:
    """Assigns the whole tensor, in a step."""
    tf.raw_ops.AssignVariableOp(resource=self._handle(), value=tf.cast(value, self.dtype))

  def _handle(self) -> tf.Tensor:
    """Resource handle for all variables together, built as in TPUReplicatedVariable.handle and TPUVariableMixin.handle.

    There is one per graph, so that TensorFlow sees that reads and assignments are of the same resource. It is created
    outside the replicated computation, hence control_dependencies(None).
    """
    if self._latest is None or self._latest.graph is not tf.compat.v1.get_default_graph():
      # Inputs are in the order of tiles, copies of a tile next to each other; without tiles, in the order of cores.
      inputs = [self.variables[core].handle for _, cores in self._tiles for core in cores]
      tiles = list(self._sharding.tile_assignment_dimensions)
      with tf.control_dependencies(None):
        parts = tf.raw_ops.TPUPartitionedInputV2(inputs=inputs, partition_dims=tiles, is_packed=False)
        xla_sharding.mark(parts, self._sharding)
        self._latest = tf.raw_ops.TPUReplicatedInput(inputs=[parts], is_mirrored_variable=True)
    return self._latest


class TpuRuntime(LocalRuntime):
  """Runtime for the cores of a TPU: a LocalRuntime whose state is Sliced and whose steps run on all cores.

  One process drives the whole TPU, with any number of hosts, and feeds it whole batches. A program is compiled for each
  shape of batch.
  """

  def __init__(self, program: Program, mesh: Mesh, cores: Cores):
    self.mesh, self._cores = mesh, cores
    self._rows = mesh.spec('B', ACTIVATIONS)
    self.only_rows = True
    self.row_multiple = mesh.size(self._rows[0])
    super().__init__(program, jit=True)
    finite = lambda weights, _: {name: tf.reduce_all(tf.math.is_finite(w)) for name, w in weights.items()}
    self._finite = self.function(finite)
    self._initial = self._traced(lambda _: self._assign(self.program.init()))
    self._train_loop = tf.function(self._train_stacked, autograph=False)

  def init(self) -> None:
    self._make(with_slots=True)
    self._initial({})

  def load(self, state: Mapping) -> None:
    slots = state.get('slots', {})
    self._make(with_slots=bool(slots))
    self._step.load(state['step'])
    for tensors, values in ((self._weights, state['weights']), (self._slots, slots)):
      for name, value in values.items():
        tensors[name].load(value)

  def state(self) -> dict:
    return self._variables()

  def slices(self) -> Iterator[Slice]:
    yield Slice('step', (), (), np.asarray(self.step, np.int64))
    for name, value in {**self._weights, **slices.named_slots(self._slots)}.items():
      for index, part in value.parts():
        yield Slice(name, value.shape, tuple(axis.start for axis in index), part)

  def not_finite(self) -> str | None:
    return next((name for name, finite in self._finite({}).items() if not finite), None)

  def train_steps(self, batches: Sequence[Batch]) -> list[dict]:
    """Makes an update per batch, all of one shape, by one call of a loop on the TPU's host; returns their metrics."""
    if len(batches) == 1:
      return [self.train_step(batches[0])]
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    metrics = to_numpy(self._train_loop(stacked))
    return [tf.nest.map_structure(lambda x, i=i: x[i], metrics) for i in range(len(batches))]

  def _traced(self, f: Callable[[dict], Any], backend: Backend = xla.BACKEND, jit: bool = True):
    """Function of a batch that runs f once on all cores, compiled by XLA; results are whole on every core."""
    del jit, backend

    def on_cores(batch):
      with xla_sharding.use(self.mesh), backend_lib.use(xla.BACKEND):
        outputs = f({name: self._split_rows(x) for name, x in batch.items()})
        return tf.nest.map_structure(xla_sharding.replicate, {} if outputs is None else outputs)

    def on_host(batch):  # not a lambda, whose name TensorFlow could not give to the program
      return self._cores.strategy.run(on_cores, args=(batch,))

    return tf.function(on_host, autograph=False)

  def _train_stacked(self, stacked):
    """Runs the train step for each of the batches that are stacked along a first axis."""
    specs = {name: tf.TensorSpec(x.shape[1:], x.dtype) for name, x in stacked.items()}
    once = self._train.get_concrete_function(specs)
    shapes = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), once.structured_outputs)
    return tf.map_fn(once, stacked, parallel_iterations=1, fn_output_signature=shapes)

  def _split_rows(self, x: tf.Tensor) -> tf.Tensor:
    self.mesh.check(x.shape[:1], 'B', self._rows)
    sharding = self.mesh.op_sharding(self._rows + ((),) * (x.shape.rank - 1))
    return x if xla_sharding.current() is None else xla_sharding.annotate(x, _listed(sharding))

  def _make(self, with_slots: bool) -> None:
    """Creates the variables that do not exist yet."""
    if self._step is None:
      whole = OpSharding(type=OpSharding.REPLICATED)
      self._step = Sliced('step', WeightSpec((), '', tf.zeros, dtype=tf.int64), whole, self._cores.devices)
      self._weights = self._sliced(self.program.weight_specs)
    if with_slots and not self._slots:
      self._slots = self._sliced(self.program.slot_specs)

  def _sliced(self, specs: Mapping[str, WeightSpec]) -> dict[str, Sliced]:
    split = lambda name, s: self.mesh.stored_sharding(s.shape, s.dims, name, s.slot).op_sharding
    return {name: Sliced(name, spec, split(name, spec), self._cores.devices) for name, spec in specs.items()}


def _listed(sharding: OpSharding) -> OpSharding:
  """Sharding with a list of devices in place of its iota form."""
  listed = OpSharding()
  listed.CopyFrom(sharding)
  if sizes := list(sharding.iota_reshape_dims):
    iota = np.arange(np.prod(sizes)).reshape(sizes)
    listed.tile_assignment_devices.extend(iota.transpose(sharding.iota_transpose_perm).flat)
    listed.ClearField('iota_reshape_dims')
    listed.ClearField('iota_transpose_perm')
  return listed


def _tiles(
  shape: tuple[int, ...], sharding: OpSharding, num_cores: int
) -> Iterator[tuple[tuple[slice, ...], list[int]]]:
  """Yields (slices, logical cores that hold it) of each part, in XLA's order of tiles."""
  if sharding.type == OpSharding.REPLICATED:
    yield tuple(slice(0, size) for size in shape), list(range(num_cores))
    return
  tiles = tuple(sharding.tile_assignment_dimensions)[: len(shape)]
  cores = np.reshape(sharding.tile_assignment_devices, (*tiles, -1))
  sizes = [size // parts for size, parts in zip(shape, tiles, strict=True)]
  for place in np.ndindex(*tiles):
    yield tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, sizes, strict=True)), cores[place].tolist()
