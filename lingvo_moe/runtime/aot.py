"""Ahead-of-time compilation of a Program without its devices: TPUs (libtpu), NVIDIA GPUs, or virtual CPU devices.

From TensorFlow's CPU build jax2tf cannot lower for a TPU. So the traced program is exported for a CPU, with its
sharding annotations, and the exported program is lowered and compiled for the devices of a topology description.
Nothing is allocated, and no TPU or GPU is accessed.
"""

import dataclasses
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.program import Program
from lingvo_moe.runtime.chips import Gpu, Topology

try:
  import jax
  from jax.experimental import topologies
except ImportError as e:
  raise errors.not_installed('compiling for a mesh needs JAX', e, 'spmd') from None

from lingvo_moe.runtime import lowering, spmd, torus_placement
from lingvo_moe.runtime.lowering import Lowering

# Without these settings libtpu queries the machine's metadata server and allows only one process at a time.
_LIBTPU = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5e-8',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
_ALLOCATION = re.compile(r'^allocation \d+: size (\d+), (.*):$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Compiled:
  """Compiled program: its text, its memory in bytes of one device, and the compile times."""

  text: str  # the HLO after all optimisations
  trace_seconds: float  # for TensorFlow to trace it, and JAX to lower it
  compile_seconds: float  # for XLA to compile it
  code: int  # machine code; 0 if XLA does not report it
  arguments: int  # the state and the batch
  outputs: int  # the new state and other results
  aliased: int  # the part of the outputs that is written over arguments
  temporaries: int  # peak of everything else while it runs
  devices: list[jax.Device]  # in the order in which the program numbers them
  refused: str = ''  # why the program does not fit in memory


class AotRuntime:
  """Runtime that compiles a Program's steps for a mesh and does not run them; it has no state.

  The mesh has as many devices as the topology, TPUs or GPUs; None stands for virtual devices of this CPU.
  """

  def __init__(self, program: Program, mesh: Mesh, topology: Topology | None = None):
    if topology:
      torus_placement.check_size(mesh, topology)
    self.program, self._topology = program, topology
    self._lowering = Lowering(program, mesh, devices_of(topology) if topology else spmd.connect(mesh))

  def train(self, batch: Mapping[str, Any]) -> Compiled:
    """Compiles the train step for batches of these shapes."""
    arguments = self._lowering.state(), self._lowering.batch(batch)
    out_shardings = self._lowering.shardings, None
    return self._compile(self.program.train_step, *arguments, out_shardings=out_shardings, donate_argnums=0)

  def function(self, f: Callable[[dict, dict], Any], batch: Mapping[str, Any], by_rows: bool = False) -> Compiled:
    """Compiles f(weights, batch), whose result is whole on every device, or with `by_rows` split as the batch is."""
    arguments = {'weights': self._lowering.state()['weights']}, self._lowering.batch(batch)
    call = lambda state, batch: f(state['weights'], batch)
    return self._compile(call, *arguments, out_shardings=self._lowering.rows if by_rows else self._lowering.whole)

  def _compile(self, f, *arguments, **options) -> Compiled:
    begun, chip = time.perf_counter(), self._topology.chip if self._topology else None
    for_gpu, for_tpu = isinstance(chip, Gpu), chip is not None and not isinstance(chip, Gpu)
    lowered = lowering.staged(f, self._lowering.mesh, *arguments, **options).lower()
    lowered_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
      # Of a program that does not fit in memory, the dump is the only result.
      options = {'xla_dump_to': folder, 'xla_dump_hlo_as_text': True} if for_tpu else {}
      try:
        compiled = _fields(lowered.compile(compiler_options=options), for_tpu)
      except jax.errors.JaxRuntimeError as e:
        if 'RESOURCE_EXHAUSTED' not in str(e):
          raise
        compiled = {**_dumped(folder), 'refused': str(e).splitlines()[0].removeprefix('RESOURCE_EXHAUSTED: ')}
        if not compiled['text']:
          raise UserError(
            f'the program does not fit in memory, and the compiler left no dump of it ({compiled["refused"]})'
          ) from None
    if for_gpu:
      compiled['refused'] = _too_large(compiled, chip)
    seconds = {'trace_seconds': lowered_at - begun, 'compile_seconds': time.perf_counter() - lowered_at}
    return Compiled(**compiled, **seconds, devices=self._lowering.devices)


def devices_of(topology: Topology) -> list[jax.Device]:
  """Devices of a TPU slice, or GPUs of a host, from the topology description of their compiler; none is needed.

  Raises:
    UserError: the compiler is not installed, or there is no such slice.
  """
  if isinstance(topology.chip, Gpu):
    gpus = {'target_config': topology.chip.target, 'topology': f'1x1x{topology.num_devices}'}  # of one host, process
    try:
      return topologies.get_topology_desc(platform='cuda', **gpus).devices
    except NotImplementedError as e:
      raise errors.not_installed('compiling for GPUs needs their compiler', e, 'gpu-aot') from None
  for name, value in _LIBTPU.items():
    os.environ.setdefault(name, value)
  os.environ.pop('TPU_LOAD_LIBRARY', None)
  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=str(topology)).devices
  except RuntimeError as e:
    line = str(e).splitlines()[0]
    if not isinstance(e, jax.errors.JaxRuntimeError):
      raise errors.not_installed('compiling for a TPU needs its compiler', line, 'tpu-aot') from None
    raise UserError(f'the TPU compiler does not know --topology={topology}: {line}') from None


def _fields(program: jax.stages.Compiled, for_tpu: bool) -> dict[str, Any]:
  """Fields of Compiled for a program that was compiled."""
  memory = program.memory_analysis()
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  peak = memory.peak_memory_in_bytes
  return {
    'text': program.as_text(),
    'code': memory.generated_code_size_in_bytes,
    'arguments': memory.argument_size_in_bytes,
    'outputs': memory.output_size_in_bytes,
    'aliased': memory.alias_size_in_bytes,
    # The TPU compiler's temp_size_in_bytes counts loop state more than once; the CPU's peak counts no temporaries.
    'temporaries': peak - held if for_tpu else memory.temp_size_in_bytes,
  }


def _too_large(compiled: Mapping[str, Any], gpu: Gpu) -> str:
  """Reason why a compiled program does not fit on a GPU, whose compiler refuses none; '' if it does."""
  needed = (sum(compiled[name] for name in ('arguments', 'outputs', 'temporaries')) - compiled['aliased']) / 2**30
  if needed <= gpu.usable:
    return ''
  memory = f'{gpu.usable:.1f} of {gpu.memory / 2**30:.1f} GiB unless XLA_PYTHON_CLIENT_MEM_FRACTION sets another share'
  return f'it takes {needed:.1f} GiB of a device, of which JAX takes {memory}'


def _dumped(folder: str) -> dict[str, Any]:
  """Fields of Compiled for a program that does not fit, read from the files that the compiler dumped."""
  sizes = dict.fromkeys(('parameter', 'preallocated-temp', 'maybe-live-out', 'aliased'), 0)
  for size, notes in _ALLOCATION.findall(_read(folder, '*after_optimizations-buffer-assignment.txt')):
    if kind := next((kind for kind in sizes if kind in notes), None):
      sizes[kind] += int(size)
    if 'parameter' in notes and 'maybe-live-out' in notes:
      sizes['aliased'] += int(size)
  return {
    'text': _read(folder, '*after_optimizations.txt'),
    'code': 0,
    'arguments': sizes['parameter'],
    'outputs': sizes['maybe-live-out'] + sizes['aliased'],
    'aliased': sizes['aliased'],
    'temporaries': sizes['preallocated-temp'],
  }


def _read(folder: str, pattern: str) -> str:
  return next((path.read_text(encoding='utf-8') for path in pathlib.Path(folder).glob(pattern)), '')
