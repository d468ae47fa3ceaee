"""SPMD runtime: N devices in one or several processes run a TensorFlow program that XLA partitions, on PJRT.

TensorFlow traces a step with the mesh as the ambient one, so that the step has the layers' sharding annotations;
jax2tf.call_tf lowers it to StableHLO; and jax.jit compiles it for all devices, with XLA's SPMD partitioner. One
program is compiled for each shape of batch. JAX only compiles, runs and holds the arrays; no model code is JAX's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import errors
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import ACTIVATIONS, Mesh
from lingvo_moe.core.progress import doing
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.program import Program
from lingvo_moe.runtime.runtime import Batch, Function, Runtime
from lingvo_moe.runtime.slices import Slice, named_slots

try:
  import jax
  from jax.experimental import mesh_utils, multihost_utils
except ImportError as e:
  raise errors.not_installed('--runtime=spmd runs on JAX', e, 'spmd') from None

from lingvo_moe.runtime import lowering
from lingvo_moe.runtime import processes as processes_lib
from lingvo_moe.runtime.lowering import Lowering
from lingvo_moe.runtime.processes import ALONE, Processes

Arrays = dict[str, jax.Array]

_MOST_DEVICES = 1024  # of a process; a CPU makes as many virtual ones as the mesh needs


def release() -> None:
  """Frees compiled programs, which JAX keeps: call it between the runtimes of a process that makes many."""
  jax.clear_caches()
  gc.collect()  # traced functions and their graphs refer to each other in circles


def connect(mesh: Mesh, processes: Processes = ALONE) -> list[jax.Device]:
  """Initializes the devices of a mesh; call it once in a process, before anything is computed.

  On CPUs it creates as many virtual devices as the mesh needs. GPUs are hidden from TensorFlow, a build of which for
  CUDA would take most of the memory that JAX is to have.

  Returns:
    The devices of the mesh, process by process; those of a TPU along its torus.
  """
  seen = f'saw --mesh={mesh} of {mesh.num_devices} for {processes.count}'
  local, rest = divmod(mesh.num_devices, processes.count)
  if rest:
    raise UserError(f'every process holds as many devices; {seen} processes')
  if jax.config.jax_platforms is None:  # keeps libtpu, which may be installed for its compiler, from searching for TPUs
    os.environ.setdefault('TPU_LOAD_LIBRARY', '0')
  if local > _MOST_DEVICES:
    raise UserError(
      f'a process holds at most {_MOST_DEVICES} devices; {seen} of them: use a smaller mesh, or more processes'
    )
  if max(jax.config.jax_num_cpu_devices, 1) < local:
    with contextlib.suppress(RuntimeError):  # the devices exist already
      jax.config.update('jax_num_cpu_devices', local)
  with contextlib.suppress(RuntimeError):  # TensorFlow has initialized its devices already
    tf.config.set_visible_devices([], 'GPU')
  processes.connect()
  devices = []
  for process in range(processes.count):
    of_process = [device for device in jax.devices() if device.process_index == process]
    if len(of_process) < local:
      raise UserError(
        f'--mesh={mesh} needs {local} devices of each process; process {process} has {len(of_process)} '
        f'({jax.default_backend()}): use a smaller mesh'
      )
    devices += of_process[:local]
  return along_torus(mesh, devices)


def along_torus(mesh: Mesh, devices: Sequence[jax.Device]) -> list[jax.Device]:
  """Devices of a mesh in an order in which its axes follow the links of a TPU's torus; others stay as they are.

  A mesh that is placed numbers its devices by their coordinates, and keeps them too.
  """
  if devices[0].platform != 'tpu' or mesh.topology:
    return list(devices)
  return list(mesh_utils.create_device_mesh(mesh.shape, devices, allow_split_physical_axes=True).flat)


class SpmdRuntime(Runtime):
  """Runtime for a mesh of devices.

  The state consists of jax.Arrays, of which each device holds its part; every step donates its buffers to the next.
  Batches are arrays of the rows that this process feeds: part `feed_index` of `feed_count`.
  """

  def __init__(self, program: Program, mesh: Mesh, devices: Sequence[jax.Device] | None = None):
    self.program = program
    self.mesh = mesh
    self._lowering = Lowering(program, mesh, connect(mesh) if devices is None else devices)
    self._whole, self._rows = self._lowering.whole, self._lowering.rows
    self.process_index, self.process_count = jax.process_index(), jax.process_count()
    self.only_rows = True
    self.row_multiple = mesh.size(mesh.spec('B', ACTIVATIONS)[0])
    self.feed_index, self.feed_count = self._feed()
    self._current: dict[str, Any] = {}  # state, shared by the runtimes of `under`
    self._train = _Compiled(program.train_step, mesh, out_shardings=(self._lowering.shardings, None), donate_argnums=0)
    self._eval = _Compiled(program.eval_step, mesh, out_shardings=self._whole)
    finite = lambda weights: {name: jax.numpy.isfinite(w).all() for name, w in weights.items()}
    self._finite = jax.jit(finite, out_shardings=self._whole)

  def under(self, mesh: Mesh) -> SpmdRuntime:
    """Runtime with the same state and devices that computes under another mesh; weights stay stored as they are here.

    Either runtime may make the next step. Programs are compiled once for each mesh, and a change of mesh between two
    steps moves no weights; each step gathers the parts that it needs.
    """
    other = SpmdRuntime(self.program, dataclasses.replace(mesh, storage=self.mesh.stored), self._lowering.devices)
    other._current = self._current
    return other

  @property
  def step(self) -> int:
    return int(self._current['step'])

  def init(self) -> None:
    self._current |= {
      'step': _place(np.zeros([], np.int32), self._whole),  # 32 bits here, as JAX's integers have
      'weights': self._initial(self.program.weight_specs),
      'slots': self._initial(self.program.slot_specs),
    }

  def load(self, state: Mapping) -> None:
    place = lambda values, shardings: {name: _place(value, shardings[name]) for name, value in values.items()}
    self._current |= {
      'step': _place(np.asarray(state['step'][...], np.int32), self._whole),
      'weights': place(state['weights'], self._lowering.shardings['weights']),
      'slots': self._current.get('slots', {}) | place(state.get('slots', {}), self._lowering.shardings['slots']),
    }

  def state(self) -> dict:
    return dict(self._current)

  def slices(self) -> Iterator[Slice]:
    """Slices of the state that this process saves.

    A part that several devices hold is saved by one of them, chosen by the tensor's name, which divides the work.
    """
    if self.process_index == 0:
      yield Slice('step', (), (), np.asarray(self.step, np.int64))
    for name, value in {**self._current['weights'], **named_slots(self._current['slots'])}.items():
      parts = math.prod(value.shape) // math.prod(value.sharding.shard_shape(value.shape))
      copy = zlib.crc32(name.encode()) % (self.mesh.num_devices // parts)
      for part in value.addressable_shards:
        if part.replica_id == copy:
          begin = tuple(index.start or 0 for index in part.index)
          yield Slice(name, value.shape, begin, np.asarray(part.data))

  def not_finite(self) -> str | None:
    finite = jax.device_get(self._finite(self._current['weights']))
    return next((name for name, ok in finite.items() if not ok), None)

  def train_step(self, batch: Batch) -> dict:
    with processes_lib.loss_reported():
      state, metrics = self._train(self.state(), self._place_batch(batch, self.feed_index, self.feed_count))
      self._current |= state
      return jax.tree.map(_to_numpy, metrics)

  def eval_step(self, batch: Batch) -> dict:
    with processes_lib.loss_reported():
      fed = self._place_batch(batch, self.feed_index, self.feed_count)
      return jax.device_get(self._eval(self._current['weights'], fed))

  def function(self, f: Callable[[dict, dict], Any]) -> Function:
    compiled = _Compiled(f, self.mesh, out_shardings=self._whole)

    def call(batch):
      with processes_lib.loss_reported():
        return jax.device_get(compiled(self._current['weights'], self._place_batch(batch, 0, 1)))

    return call

  def train_program(self, batch: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compiled train step for batches of this shape, for tools that read programs. It needs no state."""
    return self._train.program(self._lowering.state(), self._lowering.batch(batch))

  def gather(self, value: int) -> list[int]:
    return processes_lib.gather(value)

  def _initial(self, specs: Mapping[str, WeightSpec]) -> Arrays:
    """Initial values by name. Equal specs share one program, to which the name is passed as a random key."""
    programs: dict[tuple, jax.stages.Compiled] = {}
    values = {}
    for name, spec in specs.items():
      key = weights_lib.initial_key(self.program.seed, name, spec).numpy()
      stored = self._lowering.stored(name, spec)
      if (spec, stored) not in programs:
        make = lambda key, spec=spec: xla_sharding.store(spec.init(key, spec), spec.dims, spec.slot)
        programs[spec, stored] = lowering.staged(make, self.mesh, key, out_shardings=stored).lower().compile()
      values[name] = programs[spec, stored](key)
    return values

  def _place_batch(self, batch: Batch, part: int, parts: int) -> Arrays:
    """Places a batch on the devices; this process has part number `part` of the `parts` parts of its rows."""

    def place(x):
      rows, first = x.shape[0] * parts, x.shape[0] * part
      self.mesh.check((rows,), 'B', self.mesh.spec('B', ACTIVATIONS))

      def rows_of(index):
        start, stop, _ = index[0].indices(rows)
        return x[start - first : stop - first]

      return jax.make_array_from_callback((rows, *x.shape[1:]), self._rows, rows_of)

    return {name: place(np.asarray(x)) for name, x in batch.items()}

  def _feed(self) -> tuple[int, int]:
    """(feed_index, feed_count): the part of a batch's rows on this process's devices, and the number of parts.

    Where the rows of some process do not follow each other, as on a torus, every process makes the whole batch.
    """
    parts = self.row_multiple
    rows: dict[int, set[int]] = {}  # by process
    for device, index in self._rows.devices_indices_map((parts,)).items():
      rows.setdefault(device.process_index, set()).add(index[0].indices(parts)[0])
    local_rows = rows[self.process_index]
    size = len(local_rows)
    blocks = {tuple(range(begin, begin + size)) for begin in range(0, parts, size)}
    if parts % size or any(tuple(sorted(numbers)) not in blocks for numbers in rows.values()):
      return 0, 1
    return min(local_rows) // size, parts // size


class _Compiled:
  """Function of (state or weights, batch), compiled for each shape of batch; process 0 prints how long that took."""

  def __init__(self, f: Callable, mesh: Mesh, **options: Any):
    self._stage = functools.partial(lowering.staged, f, mesh, **options)
    self._programs: dict[tuple, jax.stages.Compiled] = {}

  def __call__(self, state, batch):
    return self.program(state, batch)(state, batch)

  def program(self, state, batch) -> jax.stages.Compiled:
    """Compiled program for arguments of these shapes."""
    shapes = tuple((name, x.shape) for name, x in batch.items())
    if shapes not in self._programs:
      begun = time.perf_counter()
      with doing(lambda: 'compiling'):
        self._programs[shapes] = self._stage(state, batch).lower().compile()
      if jax.process_index() == 0:
        rows, length = next(iter(batch.values())).shape[:2]
        seconds = time.perf_counter() - begun
        print(f'compiled for batches of {rows} rows of {length} in {seconds:.1f} s', file=sys.stderr, flush=True)
    return self._programs[shapes]


def _to_numpy(x: jax.Array) -> np.ndarray:
  """Whole array, gathered from all processes if need be."""
  if x.is_fully_addressable or x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


def _place(value: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
  return jax.make_array_from_callback(tuple(value.shape), sharding, lambda index: np.asarray(value[index]))
