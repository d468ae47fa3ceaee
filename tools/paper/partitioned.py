"""Partitioned operators: runs one on D virtual devices of this CPU, and compares its cost and result with one device.

Arguments and result are annotated as split or replicated (`split` and `replicate`, section 3.2); XLA partitions the
computation between them. jax.jit takes and returns only equal parts. So if a size is not a multiple of D, the argument
has padding at its end, which the program cuts off first, and the result is padded likewise: neither moves data between
devices, as XLA's own parts have the same length.
"""

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe.addons.analysis import hlo, hlo_collectives
from lingvo_moe.core import errors
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.runtime.chips import Topology
from lingvo_moe.xla_sharding import replicate, split
from paper.operators import Operator, Split

try:
  import jax
except ImportError as e:
  raise errors.not_installed('partitioning an operator needs JAX', e, 'spmd') from None

from lingvo_moe.runtime import aot, lowering, spmd
from lingvo_moe.runtime.lowering import Lowering

_AXIS = 'expert'  # the only axis of the mesh


class Measured(NamedTuple):
  """Measurements of an operator on some devices."""

  devices: int
  difference: float  # from one device: max|a - b| / max|a|
  flops: int  # on a device, as XLA counts them
  collectives: dict[str, int]  # number by kind
  bytes: int  # that a device sends or receives in all of them


def measure(operator: Operator, num_devices: int) -> Measured:
  """Runs an operator with random arguments, and measures it."""
  placed = _Placed(operator, num_devices)
  rng = np.random.default_rng(0)
  arrays = [rng.standard_normal(argument.shape).astype(np.float32) for argument in placed.arguments]
  compiled = placed.compile()
  got = np.asarray(compiled(*placed.put(arrays)))
  want = (operator.reference or operator.function)(*map(tf.constant, arrays)).numpy()
  got = got[tuple(map(slice, want.shape))]
  counts, size = _collectives(compiled.as_text())
  return Measured(
    devices=num_devices,
    difference=float(np.max(np.abs(got - want)) / np.max(np.abs(want))),
    flops=int(compiled.cost_analysis().get('flops', 0)),
    collectives=counts,
    bytes=size,
  )


def compile_only(operator: Operator, topology: Topology) -> dict[str, int]:
  """Number of collectives by kind in an operator that is compiled for a TPU slice; nothing is allocated.

  Raises:
    UserError: libtpu is not installed.
  """
  placed = _Placed(operator, topology.num_devices, aot.devices_of(topology))
  return _collectives(placed.compile(exported=True).as_text())[0]


def growth(values: Sequence[float], devices: Sequence[int]) -> str:
  """Growth of a figure with D, from its first and last values: '0', 'O(1)', 'O(sqrt D)', 'O(D)' or 'O(D^1.5)'."""
  if not values[0]:
    return '0'
  power = math.log(values[-1] / values[0]) / math.log(devices[-1] / devices[0])
  nearest = round(2 * power) / 2
  return {0.0: 'O(1)', 0.5: 'O(sqrt D)', 1.0: 'O(D)'}.get(nearest, f'O(D^{nearest:g})')


class _Placed:
  """Operator on a mesh of devices, which need not exist."""

  def __init__(self, operator: Operator, num_devices: int, devices: Sequence[jax.Device] | None = None):
    mesh = Mesh.parse(f'{_AXIS}:{num_devices}')
    self._operator, self._parts = operator, num_devices
    self._lowering = Lowering(None, mesh, spmd.connect(mesh) if devices is None else devices)
    self.arguments = tuple(operator.arguments(num_devices))

  def compile(self, exported: bool = False) -> jax.stages.Compiled:
    """Compiles the partitioned program; `exported`: for devices of another platform, as in aot.py."""
    shapes = [jax.ShapeDtypeStruct(self._padded(argument), np.float32) for argument in self.arguments]
    mesh = self._lowering.mesh
    program = lowering.exported(self._program, mesh, *shapes).call if exported else lowering.traced(self._program, mesh)
    split_shapes = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(argument.axis, len(x.shape)))
      for x, argument in zip(shapes, self.arguments)
    ]
    rank = len(jax.eval_shape(program, *shapes).shape)
    return jax.jit(program, out_shardings=self._sharding(self._operator.result, rank)).lower(*split_shapes).compile()

  def put(self, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
    """Pads arguments and places them on the devices."""
    placed = []
    for x, argument in zip(arrays, self.arguments, strict=True):
      x = np.pad(x, [(0, after - n) for n, after in zip(x.shape, self._padded(argument))])
      placed.append(jax.device_put(x, self._sharding(argument.axis, x.ndim)))
    return placed

  def _program(self, *padded: tf.Tensor) -> tf.Tensor:
    arguments = []
    for x, argument in zip(padded, self.arguments, strict=True):
      x = tf.slice(x, [0] * len(argument.shape), argument.shape)
      arguments.append(self._annotated(x, argument.axis))
    axis = self._operator.result
    y = self._annotated(self._operator.function(*arguments), axis)
    after = self._padded(Split(tuple(y.shape), axis))
    return self._annotated(tf.pad(y, [(0, a - n) for n, a in zip(y.shape, after)]), axis)

  def _annotated(self, x: tf.Tensor, axis: int | None) -> tf.Tensor:
    return replicate(x) if axis is None else split(x, axis, self._parts)

  def _padded(self, tensor: Split) -> tuple[int, ...]:
    """Shape padded to equal parts."""
    return tuple(-(-n // self._parts) * self._parts if i == tensor.axis else n for i, n in enumerate(tensor.shape))

  def _sharding(self, axis: int | None, rank: int) -> jax.sharding.NamedSharding:
    return self._lowering.sharding(tuple((_AXIS,) if i == axis else () for i in range(rank)))


def _collectives(text: str) -> tuple[dict[str, int], int]:
  """Number of collectives by kind, and the bytes of a device in all of them."""
  found = hlo_collectives.collectives(hlo.parse(text))
  return dict(sorted(collections.Counter(c.kind for c in found).items())), sum(c.bytes * c.times for c in found)
