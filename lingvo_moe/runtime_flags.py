"""Flags that choose a runtime, the same for every job; and what the processes of a run do together."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from absl import flags

from lingvo_moe.core.errors import ProcessLostError
from lingvo_moe.core.errors import ToldElsewhereError
from lingvo_moe.core.errors import UserError

if TYPE_CHECKING:
  from lingvo_moe.runtime.runtime import Runtime

T = TypeVar('T')


def define() -> None:
  """Called where a job defines its own flags."""
  flags.DEFINE_enum(
    'runtime',
    'local',
    ['local', 'spmd', 'tpu'],
    'local: one CPU or GPU. spmd: a mesh of devices (XLA). tpu: a mesh of all cores of a TPU (TPUStrategy).',
  )
  flags.DEFINE_enum(
    'backend',
    'auto',
    ['auto', 'reference'],
    'For --runtime=local. auto: kernels that suit the machine. reference: plain TensorFlow throughout, the same numbers.',
  )
  flags.DEFINE_string('mesh', '', "Devices by axis for --runtime=spmd or tpu, such as 'expert:4' or 'data:2,expert:2'.")
  flags.DEFINE_string('topology', '', "For --placement: chips of the TPU slice, such as 'v3:8x8'.")
  flags.DEFINE_string(
    'placement', '', "Chips that an axis of the mesh spans along each axis of the torus, such as 'expert:4x4'."
  )
  flags.DEFINE_bool('split_dense', False, 'Store a part of the dense layers on each device; default: a copy.')
  flags.DEFINE_enum(
    'distributed',
    'manual',
    ['manual', 'auto'],
    'auto: takes the next three flags from Slurm, Open MPI, Kubernetes or a TPU pod, whichever started the process.',
  )
  flags.DEFINE_string('coordinator', '', 'HOST:PORT where process 0 listens; for several processes.')
  flags.DEFINE_integer('num_processes', 1, 'Number of processes of the run.', lower_bound=1)
  flags.DEFINE_integer('process_id', 0, 'Number of this process, from 0.', lower_bound=0)
  flags.DEFINE_float('connect_seconds', 300.0, 'Seconds to wait for the other processes.', 1.0, 1e6)
  flags.DEFINE_string('tpu', '', "For --runtime=tpu: a TPU's name or address, or 'local' on a TPU VM.")


# Flag -> (what it is for, the runtimes that take it).
_TAKEN = {
  'backend': ("TensorFlow's own kernels", ('local',)),
  'mesh': ('a mesh of devices', ('spmd', 'tpu')),
  'topology': ('a placed mesh', ('spmd', 'tpu')),
  'placement': ('a mesh of devices', ('spmd', 'tpu')),
  'split_dense': ('a mesh of devices', ('spmd', 'tpu')),
  'coordinator': ('a mesh of devices in several processes', ('spmd',)),
  'num_processes': ('a mesh of devices in several processes', ('spmd',)),
  'process_id': ('a mesh of devices in several processes', ('spmd',)),
  'distributed': ('a mesh of devices in several processes', ('spmd',)),
  'connect_seconds': ('a mesh of devices in several processes', ('spmd',)),
  'tpu': ('a TPU', ('tpu',)),
}


@dataclasses.dataclass(frozen=True)
class Choice:
  """Values of the flags, one field each."""

  runtime: str = 'local'
  mesh: str = ''
  split_dense: bool = False
  coordinator: str = ''
  num_processes: int = 1
  process_id: int = 0
  tpu: str = ''
  backend: str = 'auto'
  topology: str = ''
  placement: str = ''
  distributed: str = 'manual'
  connect_seconds: float = 300.0

  def __post_init__(self):
    if self.runtime != 'local' and not self.mesh:
      raise UserError(f'--runtime={self.runtime} needs --mesh, such as --mesh=expert:4 or --mesh=data:2,expert:2')
    if self.runtime == 'tpu' and not self.tpu:
      raise UserError("--runtime=tpu needs --tpu, a TPU's name or address, or --tpu=local on a TPU VM")
    if bool(self.topology) != bool(self.placement):
      raise UserError(
        'a placement is that of a mesh on a slice, such as --topology=v3:8x8 --placement=expert:4x4; saw '
        f'--topology={self.topology} --placement={self.placement}: give both or neither'
      )
    for field in dataclasses.fields(self)[1:]:
      purpose, runtimes = _TAKEN[field.name]
      if self.runtime not in runtimes and getattr(self, field.name) != field.default:
        way_out = 'add' if self.runtime == 'local' else 'leave it out, or use'
        raise UserError(
          f'--{field.name} is for {purpose}; saw --runtime={self.runtime}: {way_out} --runtime={runtimes[0]}'
        )

  @classmethod
  def from_flags(cls) -> Choice:
    choice = cls(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(cls)})
    return choice if choice.distributed == 'manual' else choice.detected()

  def detected(self) -> Choice:
    """With the processes that a cluster's scheduler has started, in place of --distributed=auto."""
    from lingvo_moe.runtime import processes

    if self.coordinator or self.num_processes > 1 or self.process_id:
      raise UserError(
        '--distributed=auto finds --coordinator, --num_processes and --process_id itself; saw '
        f'{self.coordinator!r}, {self.num_processes} and {self.process_id}: leave them out'
      )
    found = processes.detect(self.connect_seconds)
    return dataclasses.replace(self, coordinator=found.coordinator, num_processes=found.count, process_id=found.index)

  @functools.cached_property
  def _index(self) -> int:
    """Number of this process in the order of the processes' devices, which on a TPU pod may not be that of process_id."""
    if self.num_processes == 1:
      return 0
    from lingvo_moe.runtime import processes

    return processes.index()

  @property
  def leads(self) -> bool:
    """Whether this is the leader process, which alone writes the log directory and prints; known once connected."""
    return self._index == 0

  def require_one_process(self, job: str) -> None:
    if self.num_processes > 1:
      raise UserError(
        f'the {job} is one process, with as many devices as it finds; saw --num_processes={self.num_processes}: leave it out'
      )

  def set_threads(self, decoding: bool, jit: bool = False) -> None:
    """Sets how TensorFlow's kernels share the cores of a CPU; called by a job once, before anything is computed.

    Args:
      decoding: whether the job searches, and does not train or score.
      jit: whether XLA compiles the step. XLA has threads of its own, and TensorFlow's stay as they are, as they do with
        the reference backend.
    """
    if self.runtime != 'local' or jit or self.backend == 'reference':
      return
    from lingvo_moe.ops.cpu import threads

    threads.set_policy(decoding=decoding)

  def check_fits(self, program: Callable[[], Any]) -> None:
    """Raises UserError for a program whose state alone is larger than the memory; with a mesh it is not looked at."""
    if self.runtime == 'local':
      from lingvo_moe.runtime import local

      local.check_fits(program())

  def connect(self) -> None:
    """Finds the devices, and says which, and the other processes; before anything else is computed."""
    if self.runtime == 'local':
      return
    mesh, devices = self._mesh_and_devices  # found once
    if self.runtime == 'spmd':
      kind = 'virtual devices of the CPU' if devices[0].platform == 'cpu' else f'devices, {devices[0].device_kind}'
      self.say(f'--mesh={mesh} on {len(devices)} {kind}')

  def together(self, f: Callable[[], T]) -> T:
    """Calls f in every process; returns its value here, when all are done.

    An error in one process ends all: it is raised there, and the others raise ToldElsewhereError.
    """
    if self.num_processes == 1:
      return f()
    from lingvo_moe.runtime import processes

    value, error = None, None
    try:
      value = f()
    except ProcessLostError:
      raise  # the processes that are left cannot be reached
    except Exception as e:
      error = e
    failed = [number for number, bad in enumerate(processes.gather(error is not None)) if bad]
    if not failed:
      return value
    if failed[0] == self._index:
      raise error
    raise ToldElsewhereError(f'process {failed[0]} could not go on, and says why')

  def lead(self, f: Callable[[], T]) -> T:
    """Calls f in the leader process; returns its value, a small one that JSON can hold, in every process.

    Raises as `together` does.
    """
    value = self.together(lambda: f() if self.leads else None)
    if self.num_processes == 1:
      return value
    from lingvo_moe.runtime import processes

    return processes.share(value)

  def say(self, text: str) -> None:
    """Prints a line to stderr, in the leader process alone."""
    if self.leads:
      print(text, file=sys.stderr, flush=True)

  def make(self, program: Any, jit: bool = False) -> Runtime:
    """The runtime for a program."""
    if self.runtime == 'spmd':
      from lingvo_moe.runtime.spmd import SpmdRuntime

      mesh, devices = self._mesh_and_devices
      return SpmdRuntime(program, mesh, devices)
    if self.runtime == 'tpu':
      from lingvo_moe.runtime.tpu import TpuRuntime

      mesh, cores = self._mesh_and_devices
      return TpuRuntime(program, mesh, cores)
    from lingvo_moe.runtime.local import LocalRuntime

    return LocalRuntime(program, jit=jit, backend=self.backend)

  @functools.cached_property
  def _mesh_and_devices(self):
    from lingvo_moe.xla_sharding import Mesh

    mesh = Mesh.parse(self.mesh, split_dense=self.split_dense)
    if self.placement:
      from lingvo_moe.runtime.chips import Topology
      from lingvo_moe.runtime.placement import place

      mesh = place(mesh, Topology.parse(self.topology), self.placement)
    if self.runtime == 'tpu':
      from lingvo_moe.runtime import tpu

      return mesh, tpu.connect(self.tpu, mesh)
    from lingvo_moe.runtime import processes
    from lingvo_moe.runtime import spmd

    auto = self.distributed == 'auto'
    of_run = processes.Processes(self.coordinator, self.num_processes, self.process_id, auto, self.connect_seconds)
    return mesh, spmd.connect(mesh, of_run)


LOCAL = Choice()
