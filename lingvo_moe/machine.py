"""The machine of a job: the devices and processes that its options choose, and runtimes on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lingvo_moe.run import process_group
from lingvo_moe.run.process_group import ProcessGroup
from lingvo_moe.runtime_flags import RuntimeOptions

# Modules that import TensorFlow, which takes seconds, are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  from lingvo_moe.program import Program
  from lingvo_moe.runtime.runtime import Runtime
  from lingvo_moe.xla_sharding import Mesh


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
  """Devices and processes that are connected.

  Attributes:
    options: that chose them.
    group: the processes.
    mesh: the mesh; None without one.
    devices: of the mesh; cores of a TPU.
  """

  options: RuntimeOptions
  group: ProcessGroup = process_group.ALONE
  mesh: Mesh | None = None
  devices: Sequence[Any] = ()

  def describe(self) -> dict[str, Any]:
    """Name of the runtime, and the values that a user has chosen for it."""
    given = {name: getattr(self.options, name) for name in ('mesh', 'split_dense', 'num_processes', 'backend')}
    given = {name: value for name, value in given.items() if value != getattr(RuntimeOptions, name)}
    return {'name': self.options.runtime, **given}

  def make_runtime(self, program: Program, jit: bool = False) -> Runtime:
    """The runtime for a program."""
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
  from lingvo_moe.xla_sharding import Mesh

  mesh = Mesh.parse(options.mesh, split_dense=options.split_dense)
  if options.placement:
    from lingvo_moe.runtime.chips import Topology
    from lingvo_moe.runtime.placement import place

    mesh = place(mesh, Topology.parse(options.topology), options.placement)
  if options.runtime == 'tpu':
    from lingvo_moe.runtime import tpu

    return Machine(options, mesh=mesh, devices=tpu.connect(options.tpu, mesh))
  from lingvo_moe.runtime import processes, spmd

  auto, count = options.distributed == 'auto', options.num_processes
  of_run = processes.Processes(options.coordinator, count, options.process_id, auto, options.connect_seconds)
  devices = spmd.connect(mesh, of_run)
  group = ProcessGroup(count, processes.index() if count > 1 else 0)
  kind = 'virtual devices of the CPU' if devices[0].platform == 'cpu' else f'devices, {devices[0].device_kind}'
  group.say(f'--mesh={mesh} on {len(devices)} {kind}')
  return Machine(options, group, mesh, devices)
