"""Options that choose a runtime, the same for every job."""

from __future__ import annotations

import dataclasses

from lingvo_moe import options
from lingvo_moe.core.errors import UserError
from lingvo_moe.options import flag

# What options are for, the runtimes that take them, and their names.
_TAKEN = (
  ("TensorFlow's own kernels", ('local',), ('backend',)),
  ('a placed mesh', ('spmd', 'tpu'), ('topology',)),
  ('a mesh of devices', ('spmd', 'tpu'), ('mesh', 'placement', 'split_dense')),
  (
    *('a mesh of devices in several processes', ('spmd',)),
    ('coordinator', 'num_processes', 'process_id', 'distributed', 'connect_seconds'),
  ),
  ('a TPU', ('tpu',), ('tpu',)),
)


@dataclasses.dataclass(frozen=True)
class RuntimeOptions(options.Options):
  """Runtime, mesh, and processes of a run."""

  runtime: str = flag(
    'local',
    'local: one CPU or GPU. spmd: a mesh of devices (XLA). tpu: a mesh of all cores of a TPU (TPUStrategy).',
    one_of=['local', 'spmd', 'tpu'],
  )
  mesh: str = flag('', "Devices by axis for --runtime=spmd or tpu, such as 'expert:4' or 'data:2,expert:2'.")
  split_dense: bool = flag(False, 'Store a part of the dense layers on each device; default: a copy.')
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
  topology: str = flag('', "For --placement: chips of the TPU slice, such as 'v3:8x8'.")
  placement: str = flag('', "Chips that an axis of the mesh spans along each axis of the torus, such as 'expert:4x4'.")
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
    found = super().from_flags()
    return found if found.distributed == 'manual' else found.detected()

  def detected(self) -> RuntimeOptions:
    """Options with the processes that a cluster's scheduler has started, in place of --distributed=auto."""
    from lingvo_moe.runtime import processes

    if self.coordinator or self.num_processes > 1 or self.process_id:
      raise UserError(
        '--distributed=auto finds --coordinator, --num_processes and --process_id itself; saw '
        f'{self.coordinator!r}, {self.num_processes} and {self.process_id}: leave them out'
      )
    found = processes.detect(self.connect_seconds)
    return dataclasses.replace(self, coordinator=found.coordinator, num_processes=found.count, process_id=found.index)


LOCAL = RuntimeOptions()
