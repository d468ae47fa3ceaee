"""Lowering of a Program to XLA for a mesh: shapes and shardings of the arguments, and the traced function."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe import xla_sharding
from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import ACTIVATIONS, Mesh, Spec
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.ops import backend, cudnn, xla
from lingvo_moe.ops.backend import Backend
from lingvo_moe.program import Program
from lingvo_moe.runtime import torus_placement

try:
  import jax
  from jax import export
  from jax.experimental.jax2tf import call_tf
except ImportError as e:
  raise errors.not_installed('a mesh of devices needs JAX', e, 'spmd') from None

logging.getLogger('jax').setLevel(logging.WARNING)  # at INFO it logs every backend that is missing


class Lowering:
  """Shapes and shardings of a program on a mesh, given the devices in the order of their physical numbers.

  Allocates and runs nothing; the devices need not exist.

  Raises:
    UserError: the mesh does not divide the program's weights or groups, or the devices do not compute its types; the
      message suggests what does.
  """

  def __init__(self, program: Program | None, mesh: Mesh, devices: Sequence[jax.Device]):
    if program is not None:
      _check_divides(mesh, program)
      check_types(program, devices)
    # TensorFlow writes annotations for XLA's GSPMD partitioner; JAX's default, Shardy, falls back to it with a warning.
    jax.config.update('jax_use_shardy_partitioner', False)
    self.program, self.mesh = program, mesh
    self._devices = np.array(torus_placement.ordered(devices) if mesh.topology else devices)[mesh.device_ids()]
    self.whole = self.sharding(())
    self.rows = self.sharding(mesh.spec('B', ACTIVATIONS))

  @property
  def devices(self) -> list[jax.Device]:
    """Devices in the order in which a compiled program numbers them: by position in the mesh, the last axis fastest."""
    return list(self._devices.flat)

  def sharding(self, spec: Spec, mesh: Mesh | None = None) -> jax.sharding.NamedSharding:
    """NamedSharding (JAX's form) of a spec, by default one of the mesh."""
    names, sizes = zip(*(mesh or self.mesh).factors(spec)) if (mesh or self.mesh).axes else ((), ())
    spec = jax.sharding.PartitionSpec(*(axes or None for axes in spec))
    return jax.sharding.NamedSharding(jax.sharding.Mesh(self._devices.reshape(sizes), names), spec)

  def stored(self, name: str, spec: WeightSpec) -> jax.sharding.NamedSharding:
    """Sharding of a weight or optimizer slot as it is stored between steps."""
    mesh, stored = self.mesh.stored_sharding(spec.shape, spec.dims, name, spec.slot)
    return self.sharding(stored, mesh)

  def state(self) -> dict:
    """Shapes, types and shardings of the program's state."""
    array = lambda name, s: jax.ShapeDtypeStruct(s.shape, s.dtype.as_numpy_dtype, sharding=self.stored(name, s))
    arrays_of = lambda specs: {name: array(name, spec) for name, spec in specs.items()}
    return {
      'step': jax.ShapeDtypeStruct((), np.int32, sharding=self.whole),  # 32 bits here, as JAX's integers have
      'weights': arrays_of(self.program.weight_specs),
      'slots': arrays_of(self.program.slot_specs),
    }

  @functools.cached_property
  def shardings(self) -> dict:
    """Shardings of the state, nested as it is."""
    return jax.tree.map(lambda array: array.sharding, self.state())

  def batch(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, types and shardings of a batch, whose values may be anything with a shape and a dtype."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.rows) for name, x in batch.items()}


def _check_divides(mesh: Mesh, program: Program) -> None:
  """Raises UserError, before anything is compiled, if the mesh does not divide the program's weights or groups."""
  specs = {**program.weight_specs, **program.slot_specs}
  for name, spec in specs.items():
    for each in dict.fromkeys((mesh.computing, mesh)):
      each.stored_sharding(spec.shape, spec.dims, name, spec.slot)
  if mesh.size(['stage']) > 1 and not any(spec.dims.startswith('L') for spec in specs.values()):
    raise UserError(
      f'mesh axis stage splits the layers of scanned stacks; saw --mesh={mesh} for a model without any: bind '
      'scan_layers = True, or use another mesh'
    )
  if any('E' in spec.dims for spec in specs.values()):
    try:
      mesh.check((program.num_groups // program.micro_batches,), 'G', mesh.spec('G', ACTIVATIONS))
    except UserError as e:
      parts = f' in micro_batches={program.micro_batches}' if program.micro_batches > 1 else ''
      raise UserError(f'num_groups={program.num_groups}{parts}: {e}') from None


def check_types(program: Program, devices: Sequence[jax.Device]) -> None:
  """Raises UserError if the program computes in bfloat16 and a device is an NVIDIA GPU without it, before Ampere."""
  if all(dtype.name != 'bfloat16' for dtype in program.used_dtypes.values()):
    return
  for device in devices:
    capability = str(getattr(device, 'compute_capability', ''))  # '7.5'; AMD's, 'gfx90a', all have it
    if device.platform in ('gpu', 'cuda') and capability[:1].isdigit() and float(capability) < 8:
      raise UserError(
        'bfloat16 needs a GPU of compute capability 8.0 or later; saw activation_dtype=bfloat16 on '
        f'{device.device_kind} of {capability}: use --set activation_dtype=float32'
      )


def traced(f: Callable, mesh: Mesh, in_force: Backend = xla.BACKEND) -> Callable:
  """TensorFlow function f as a function for JAX, traced with the mesh, so that it has the mesh's annotations."""

  def with_mesh(*args):
    with xla_sharding.use(mesh), backend.use(in_force):
      return f(*args)

  return call_tf(with_mesh, has_side_effects=False)


def staged(f: Callable, mesh: Mesh, *arguments: Any, **options: Any) -> jax.stages.Traced:
  """TensorFlow function f under options of jax.jit for arguments of these shapes; lowers for devices of any kind."""
  try:
    return jax.jit(exported(f, mesh, *arguments).call, **options).trace(*arguments)
  except UserError as e:  # its other lines are JAX's tracing history
    raise UserError(str(e).split('\n')[0]) from None


def exported(f: Callable, mesh: Mesh, *arguments: Any, in_force: Backend = xla.BACKEND) -> export.Exported:
  """Exports TensorFlow function f, of nested values with shapes and types, as StableHLO for devices of any kind.

  The caller chooses the shardings of its arguments. TensorFlow's CPU build lowers only for CPUs; the StableHLO has no
  operations that are specific to a platform, so the check that would tie it to CPUs is disabled; but for those of
  cuDNN, if the backend in force has them.
  """
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
  anywhere = [export.DisabledSafetyCheck.platform(), *map(export.DisabledSafetyCheck.custom_call, cudnn.CALLS)]
  return export.export(jax.jit(traced(f, mesh, in_force)), platforms=('cpu',), disabled_checks=anywhere)(*shapes)
