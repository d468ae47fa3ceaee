"""Processes of a run under --runtime=spmd: how they find each other, and what they tell each other.

By explicit number and address, or as a cluster's scheduler has started them (`detect`): Slurm, Open MPI, Kubernetes or
a TPU pod, by JAX's own detection.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from lingvo_moe.core import errors
from lingvo_moe.core.errors import ProcessLostError, UserError
from lingvo_moe.runtime import rendezvous

try:
  import jax
  from jax._src import clusters  # jax.distributed.initialize() detects by it, but does not say what it has found
  from jax.experimental import multihost_utils
except ImportError as e:
  raise errors.not_installed('--runtime=spmd runs on JAX', e, 'spmd') from None

_INITIALIZE_SECONDS = 120  # of JAX, when all processes are there
_HEARTBEAT_SECONDS = 60  # a process that is silent for so long counts as lost
_SHUTDOWN_SECONDS = 20  # to wait for the other processes at the end


@dataclasses.dataclass(frozen=True)
class Processes:
  """Processes of a run: their number, the number of this one, and the coordinator's address."""

  coordinator: str = ''  # HOST:PORT at which process 0 listens; '' with one process
  count: int = 1
  index: int = 0  # number of this process. On a TPU pod, `jax.process_index()` may be another
  detected: bool = False  # whether the cluster's scheduler gave these values
  seconds: float = 300.0  # to wait for the others

  def __post_init__(self):
    if not 0 <= self.index < self.count or (self.count > 1) != bool(self.coordinator):
      raise UserError(
        'several processes need --coordinator=HOST:PORT, --num_processes=N and --process_id=0..N-1, one process '
        f'none of them; saw {self.coordinator!r}, {self.count} and {self.index}'
      )

  def connect(self) -> None:
    """Waits for the other processes and initializes JAX's distributed runtime; before JAX computes anything."""
    if self.count == 1:
      return
    rendezvous.meet(self.coordinator, self.count, self.index, self.seconds, lambda text: print(text, file=sys.stderr))
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from us
    given = {'coordinator_address': self.coordinator, 'num_processes': self.count, 'process_id': self.index}
    try:
      jax.distributed.initialize(
        **({} if self.detected else given),
        initialization_timeout=_INITIALIZE_SECONDS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
      )
    except RuntimeError as e:
      raise UserError(
        f'process {self.index} of {self.count} met the others at {self.coordinator}, but JAX could not connect them '
        f'within {_INITIALIZE_SECONDS} s ({str(e).splitlines()[0]}): start all again'
      ) from None


ALONE = Processes()


def detect(seconds: float = Processes.seconds) -> Processes:
  """Processes as the cluster's scheduler has started them, by JAX's detection.

  Raises:
    UserError: nothing was detected, or less than is needed.
  """
  try:
    address, count, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
      os.environ.get('JAX_COORDINATOR_ADDRESS'), None, None, None, None, int(seconds)
    )
  except (RuntimeError, LookupError, ValueError, OSError) as e:
    raise UserError(f'--distributed=auto could not read what the scheduler says ({type(e).__name__}: {e})') from None
  if None in (address, count, index):
    raise UserError(
      '--distributed=auto takes the processes of a run from Slurm (srun), Open MPI (mpirun), Kubernetes (an indexed '
      "Job, with Python's package kubernetes) or a TPU pod; saw none of them: start by one, or give --coordinator, "
      '--num_processes and --process_id'
    )
  return Processes(address if count > 1 else '', count, index, True, seconds)


def index() -> int:
  """Number of this process; 0 is the leader. Known once the processes are connected."""
  return jax.process_index()


def gather(value: bool | int) -> list:
  """Values of all processes, in the order of their jax.process_index(); waits for all of them."""
  if jax.process_count() == 1:
    return [value]
  with loss_reported():
    return multihost_utils.process_allgather(np.asarray(value)).tolist()


def share(value: Any) -> Any:
  """Broadcasts process 0's value, a small one that JSON can hold, to all processes; the others' values are ignored."""
  if jax.process_count() == 1:
    return value
  text = json.dumps(value).encode() if jax.process_index() == 0 else b''
  with loss_reported():
    size = int(multihost_utils.broadcast_one_to_all(np.asarray(len(text), np.int32)))
    room = 1 << size.bit_length()  # a power of two, as a program is compiled for each size
    padded = np.frombuffer(text.ljust(room), np.uint8)
    return json.loads(multihost_utils.broadcast_one_to_all(padded).tobytes())


@contextlib.contextmanager
def loss_reported() -> Iterator[None]:
  """Turns XLA's error about a lost process into a ProcessLostError."""
  try:
    yield
  except jax.errors.JaxRuntimeError as e:
    if jax.process_count() == 1:
      raise
    raise ProcessLostError(
      f'another process of this run was lost ({str(e).splitlines()[0][:200]}): the last checkpoint stands; start all '
      'processes again, and they go on from it'
    ) from None
