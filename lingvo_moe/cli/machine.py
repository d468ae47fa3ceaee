"""Machine of a job: options that choose a runtime, its devices and processes, and the runtimes on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import process_group
from lingvo_moe.run.process_group import ProcessGroup

# Modules that import TensorFlow, which takes seconds, are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  from lingvo_moe.core.mesh import Mesh
  from lingvo_moe.program import Program
  from lingvo_moe.runtime.runtime import Runtime

# What options are for, the runtimes that take them, and their names.
_TAKEN = (
  ("TensorFlow's own kernels", ('local',), ('backend',)),
  ('a placed mesh', ('spmd', 'tpu'), ('topology',)),
  ('a mesh of devices', ('spmd', 'tpu'), ('mesh', 'placement', 'split_dense', 'split_update')),
  (
    *('a mesh of devices in several processes', ('spmd',)),
    ('coordinator', 'num_processes', 'process_id', 'distributed', 'connect_seconds'),
  ),
  ('a TPU', ('tpu',), ('tpu',)),
)


SPLIT_DENSE = 'Store a part of the dense layers on each device; default: a copy.'
SPLIT_UPDATE = 'Split the update of weights that devices copy, and its optimizer slots, over them.'


class MeshOptions(OptionGroup):
  """Mesh of devices, and what is split over them."""

  mesh: str = flag(
    '',
    "Devices by axis (data, expert, node, hidden, model, stage), such as 'data:2,expert:2', or 'data:8/expert:8'.",
  )
  split_dense: bool = flag(False, SPLIT_DENSE)
  split_update: bool = flag(False, SPLIT_UPDATE)
  topology: str = flag('', "A TPU slice, such as 'v3:8x8'.")
  placement: str = flag(
    '', "Chips that an axis of the mesh spans along each axis of the torus of --topology, such as 'expert:4x4'."
  )

  def parse_mesh(self) -> Mesh:
    """The mesh, on its slice if there is one."""
    from lingvo_moe.core.mesh import Mesh
    from lingvo_moe.runtime.chips import Topology
    from lingvo_moe.runtime.torus_placement import place

    mesh = Mesh.parse(self.mesh, self.split_dense, self.split_update)
    return place(mesh, Topology.parse(self.topology), self.placement) if self.topology else mesh


class RuntimeOptions(MeshOptions):
  """Runtime, mesh, and processes of a run."""

  runtime: str = flag(
    'local',
    'local: one CPU or GPU. spmd: a mesh of devices (XLA). tpu: a mesh of all cores of a TPU (TPUStrategy).',
    one_of=['local', 'spmd', 'tpu'],
  )
  coordinator: str = flag('', 'HOST:PORT where process 0 listens; for several processes.')
  num_processes: int = flag(1, 'Number of processes of the run.', lower_bound=1)
  process_id: int = flag(0, 'Number of this process, from 0.', lower_bound=0)
  tpu: str = flag('', "For --runtime=tpu: a TPU's name or address, or 'local' on a TPU VM.")
  backend: str = flag(
    'auto',
    'For --runtime=local. auto: kernels that suit the machine. reference: plain TensorFlow throughout, the same '
    'numbers.',
    one_of=['auto', 'reference'],
  )
  distributed: str = flag(
    'manual',
    'auto: takes the next three flags from Slurm, Open MPI, Kubernetes or a TPU pod, whichever started the process.',
    one_of=['manual', 'auto'],
  )
  connect_seconds: float = flag(300.0, 'Seconds to wait for the other processes.', lower_bound=1.0, upper_bound=1e6)

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
    for purpose, runtimes, names in _TAKEN:
      given = [name for name in names if getattr(self, name) != getattr(type(self), name)]
      if given and self.runtime not in runtimes:
        way_out = 'add' if self.runtime == 'local' else 'leave it out, or use'
        raise UserError(
          f'--{given[0]} is for {purpose}; saw --runtime={self.runtime}: {way_out} --runtime={runtimes[0]}'
        )

  @classmethod
  def from_flags(cls) -> RuntimeOptions:
    options = super().from_flags()
    return options if options.distributed == 'manual' else options.detected()

  def detected(self) -> RuntimeOptions:
    """Options with the processes that a cluster's scheduler has started, in place of --distributed=auto."""
    from lingvo_moe.runtime import processes

    if self.coordinator or self.num_processes > 1 or self.process_id:
      raise UserError(
        '--distributed=auto finds --coordinator, --num_processes and --process_id itself; saw '
        f'{self.coordinator!r}, {self.num_processes} and {self.process_id}: leave them out'
      )
    world = processes.detect(self.connect_seconds)
    return dataclasses.replace(self, coordinator=world.coordinator, num_processes=world.count, process_id=world.index)


LOCAL = RuntimeOptions()


def set_threads(options: RuntimeOptions, decoding: bool, jit: bool = False) -> None:
  """Sets how TensorFlow's kernels share the cores of a CPU; called by a job once, before anything is computed.

  Args:
    options: of the runtime.
    decoding: whether the job searches, and does not train or score.
    jit: whether XLA compiles the step. XLA has threads of its own, and TensorFlow's stay as they are, as they do with
      the reference backend.
  """
  if options.runtime == 'local' and options.backend != 'reference' and not jit:
    from lingvo_moe.ops.cpu import threads

    threads.set_policy(decoding=decoding)


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices and processes that are connected."""

  options: RuntimeOptions  # that chose them
  group: ProcessGroup = process_group.ALONE  # the processes
  mesh: Mesh | None = None
  devices: Sequence[Any] = ()  # of the mesh; cores of a TPU

  def describe(self) -> dict[str, Any]:
    """Name of the runtime, and the values that a user has chosen for it."""
    given = {
      name: getattr(self.options, name) for name in ('mesh', 'split_dense', 'split_update', 'num_processes', 'backend')
    }
    given = {name: value for name, value in given.items() if value != getattr(RuntimeOptions, name)}
    return {'name': self.options.runtime, **given}

  def make_runtime(self, program: Program, jit: bool = False) -> Runtime:
    if self.options.runtime == 'spmd':
      from lingvo_moe.runtime.spmd import SpmdRuntime

      return SpmdRuntime(program, self.mesh, self.devices)
    if self.options.runtime == 'tpu':
      from lingvo_moe.runtime.tpu import TpuRuntime

      return TpuRuntime(program, self.mesh, self.devices)
    from lingvo_moe.runtime.local import LocalRuntime

    runtime = LocalRuntime(program, jit=jit, backend=self.options.backend)
    if runtime.note:
      self.group.say(runtime.note)
    return runtime


def connect(options: RuntimeOptions) -> Machine:
  """Finds the devices, and prints which, and the other processes; before anything else is computed."""
  if options.runtime == 'local':
    return Machine(options)
  mesh = options.parse_mesh()
  if options.runtime == 'tpu':
    from lingvo_moe.runtime import tpu

    if mesh.size(['stage']) > 1:
      raise UserError(f'pipelines run on --runtime=spmd; saw --runtime=tpu --mesh={mesh}: use another mesh')
    return Machine(options, mesh=mesh, devices=tpu.connect(options.tpu, mesh))
  from lingvo_moe.runtime import processes, spmd

  auto, count = options.distributed == 'auto', options.num_processes
  of_run = processes.Processes(options.coordinator, count, options.process_id, auto, options.connect_seconds)
  devices = spmd.connect(mesh, of_run)
  group = ProcessGroup(count, processes.index() if count > 1 else 0)
  kind = 'virtual devices of the CPU' if devices[0].platform == 'cpu' else f'devices, {devices[0].device_kind}'
  group.say(f'--mesh={mesh} on {len(devices)} {kind}')
  return Machine(options, group, mesh, devices)
