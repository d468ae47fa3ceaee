"""The flags that choose a runtime, the same for every job."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from absl import flags

from lingvo_moe.errors import UserError

if TYPE_CHECKING:
  from lingvo_moe.runtime.runtime import Runtime


def define() -> None:
  """Called where a job defines its own flags."""
  flags.DEFINE_enum('runtime', 'local', ['local', 'spmd'], 'local: one CPU or GPU; spmd: a mesh of devices.')
  flags.DEFINE_string('mesh', '', "Devices by axis for --runtime=spmd, such as 'expert:4' or 'data:2,expert:2'.")
  flags.DEFINE_bool('split_dense', False, 'A device stores a part of the dense layers too, and not a copy of them.')
  flags.DEFINE_string('coordinator', '', 'HOST:PORT at which process 0 listens, with several processes.')
  flags.DEFINE_integer('num_processes', 1, 'Processes in all.', lower_bound=1)
  flags.DEFINE_integer('process_id', 0, "This process's number.", lower_bound=0)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A runtime that was asked for; the fields are the flags."""

  runtime: str = 'local'
  mesh: str = ''
  split_dense: bool = False
  coordinator: str = ''
  num_processes: int = 1
  process_id: int = 0

  def __post_init__(self):
    if self.runtime == 'spmd':
      if not self.mesh:
        raise UserError('--runtime=spmd needs --mesh, such as --mesh=expert:4 or --mesh=data:2,expert:2')
      return
    for field in dataclasses.fields(self)[1:]:
      if getattr(self, field.name) != field.default:
        raise UserError(f'--{field.name} is for a mesh of devices; saw --runtime={self.runtime}: add --runtime=spmd')

  @classmethod
  def from_flags(cls) -> Choice:
    return cls(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(cls)})

  @property
  def leads(self) -> bool:
    """Whether this is the process that does what one process does for all."""
    return self.process_id == 0

  def require_one_process(self, job: str) -> None:
    if self.num_processes > 1:
      raise UserError(
        f'the {job} is one process, with as many devices as it finds; saw --num_processes={self.num_processes}: leave it out'
      )

  def connect(self) -> None:
    """Finds the devices, and the other processes; before anything else is computed."""
    if self.runtime == 'spmd':
      _ = self._mesh_and_devices  # found once

  def wait_for_all(self) -> None:
    """Returns when every process is here."""
    if self.num_processes > 1:
      from lingvo_moe.runtime import spmd

      spmd.agree(True)

  def make(self, program: Any, jit: bool = False) -> Runtime:
    """The runtime for a program."""
    if self.runtime == 'spmd':
      from lingvo_moe.runtime.spmd import SpmdRuntime

      mesh, devices = self._mesh_and_devices
      return SpmdRuntime(program, mesh, devices)
    from lingvo_moe.runtime.local import LocalRuntime

    return LocalRuntime(program, jit=jit)

  @functools.cached_property
  def _mesh_and_devices(self):
    from lingvo_moe.runtime import spmd
    from lingvo_moe.xla_sharding import Mesh

    mesh = Mesh.parse(self.mesh, split_dense=self.split_dense)
    processes = spmd.Processes(self.coordinator, self.num_processes, self.process_id)
    return mesh, spmd.connect(mesh, processes)


LOCAL = Choice()
