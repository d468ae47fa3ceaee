"""How a Program is handed to XLA for the devices of a mesh: the shapes and shardings of what goes in, and the trace."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe import xla_sharding
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.ops import backend
from lingvo_moe.ops import xla
from lingvo_moe.program import Program
from lingvo_moe.xla_sharding import Mesh

try:
  import jax
  from jax import export
  from jax.experimental.jax2tf import call_tf
except ImportError as e:
  raise UserError(
    f'a mesh of devices needs JAX, which is not installed ({e}): pip install "lingvo_moe[spmd]"'
  ) from None

logging.getLogger('jax').setLevel(logging.WARNING)  # it tells of every backend that is not there


class Lowering:
  """A program on a mesh of some devices, which need not exist: nothing here allocates or runs anything.

  Args:
    program: what is to run.
    mesh: how the devices are arranged.
    devices: of the mesh, by their physical numbers.
  """

  def __init__(self, program: Program, mesh: Mesh, devices: Sequence[jax.Device]):
    # TensorFlow writes the annotations of XLA's GSPMD partitioner; Shardy, JAX's default, would hand them on with a warning.
    jax.config.update('jax_use_shardy_partitioner', False)
    self.program = program
    self.mesh = mesh
    self._devices = np.array(devices)[mesh.device_ids()]
    self.whole = self.sharding(())
    self.rows = self.sharding(mesh.spec('B', xla_sharding.ACTIVATIONS))

  @property
  def devices(self) -> list[jax.Device]:
    """By the numbers that a compiled program gives them: their places in the mesh, the last axis fastest."""
    return list(self._devices.flat)

  def sharding(self, spec: xla_sharding.Spec) -> jax.sharding.NamedSharding:
    """A spec in JAX's form."""
    factors = self.mesh.factors(spec)
    mesh = jax.sharding.Mesh(self._devices.reshape([size for _, size in factors]), tuple(name for name, _ in factors))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(names or None for names in spec)))

  def stored(self, name: str, spec: WeightSpec) -> jax.sharding.NamedSharding:
    """Of a named weight or slot between steps."""
    return self.sharding(self.mesh.stored_spec(spec.shape, spec.dims, name))

  @functools.cached_property
  def shardings(self) -> dict:
    """Of the state's leaves."""
    of = lambda specs: {name: self.stored(name, spec) for name, spec in specs.items()}
    return {'step': self.whole, 'weights': of(self.program.weight_specs), 'slots': of(self.program.slot_specs)}

  def state(self) -> dict:
    """The state of the program, as shapes."""
    of = lambda specs: {
      name: jax.ShapeDtypeStruct(s.shape, s.dtype.as_numpy_dtype, sharding=self.stored(name, s))
      for name, s in specs.items()
    }
    return {
      'step': jax.ShapeDtypeStruct((), np.int32, sharding=self.whole),  # 32 bits here, as JAX's integers have
      'weights': of(self.program.weight_specs),
      'slots': of(self.program.slot_specs),
    }

  def batch(self, batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of anything with shapes, as shapes."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.rows) for name, x in batch.items()}

  def traced(self, f: Callable) -> Callable:
    """f of TensorFlow as a function for JAX, traced with the mesh."""
    return traced(f, self.mesh)


def traced(f: Callable, mesh: Mesh) -> Callable:
  """f of TensorFlow as a function for JAX, traced with a mesh, so that it carries the annotations for it."""

  def with_mesh(*args):
    with xla_sharding.use(mesh), backend.use(xla.BACKEND):
      return f(*args)

  return call_tf(with_mesh, has_side_effects=False)


def exported(f: Callable, mesh: Mesh, *arguments: Any) -> export.Exported:
  """A traced f as StableHLO for devices of any kind; how its arguments are split, who calls it says.

  TensorFlow's CPU build lowers for CPUs alone. What it writes has no platform's own operations in it, so the check that
  would tie it to CPUs is left out.

  Args:
    f: of TensorFlow.
    mesh: see `traced`.
    *arguments: nested values with shapes and types.
  """
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
  anywhere = [export.DisabledSafetyCheck.platform()]
  return export.export(jax.jit(traced(f, mesh)), platforms=('cpu',), disabled_checks=anywhere)(*shapes)
