"""Sharding annotations: which devices hold which part of a tensor (GShard, arXiv 2006.16668, sections 3.1 and 3.2).

Layers name the axes of a tensor, and the tables of core/mesh.py map them to mesh axes: `x_EGCM = shard(x_EGCM, 'EGCM')`
looks up each letter in ACTIVATIONS, which lists the mesh axes that may split it. Letters take mesh axes from left to
right, and an axis already taken is skipped: on a mesh of data x expert, G takes both axes in GSM; in EGCM, E takes
expert, and only data is left for G. The resharding between these two tensors is the paper's AllToAll. With an axis
`node` beside `expert`, `reshard` makes it in two steps, within nodes and between them.

Beside it is the paper's own interface: `replicate`, `split`, `shard` with a device assignment (appendix A.3),
and the manual regions of section 3.2. A runtime sets the mesh, the one ambient value, while it traces. Without a mesh,
or on one device, every call returns its argument. Shardings are written in XLA's iota form (devices=[2048,1]<=[2048]),
which keeps a program's size constant in the number of devices.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tf2xla
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.xla_data_pb2 import OpSharding
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.ops.parallel_for import pfor

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import ACTIVATIONS, WEIGHTS, Mesh, tiled

_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar('mesh', default=None)
_recorded: contextvars.ContextVar[list | None] = contextvars.ContextVar('recorded', default=None)
_manual: contextvars.ContextVar[bool] = contextvars.ContextVar('manual', default=False)
_leading: contextvars.ContextVar[str] = contextvars.ContextVar('leading', default='')  # 'Z' inside `over_stages`


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value: Any) -> Iterator[Any]:
  token = variable.set(value)
  try:
    yield value
  finally:
    variable.reset(token)


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager:
  """Sets the ambient mesh for a block; None hides an outer one. For runtimes, while they trace."""
  return _set(_mesh, mesh)


def recorded() -> contextlib.AbstractContextManager[list[tuple[tf.Tensor, OpSharding]]]:
  """Records the annotations made in the block, those in loop bodies too, as a list of (tensor, sharding)."""
  return _set(_recorded, [])


def current() -> Mesh | None:
  """Ambient mesh to annotate for; None if none is set, it has one device, or inside a manual region."""
  mesh = _mesh.get()
  return mesh if mesh is not None and mesh.num_devices > 1 and not _manual.get() else None


def shard(x: tf.Tensor, assignment: str | np.ndarray, first: str = '') -> tf.Tensor:
  """Shards a tensor: annotates it with its axis letters or with a device assignment.

  Args:
    assignment: axis letters, which are looked up in ACTIVATIONS for the ambient mesh; or, as in appendix A.3, the
      device numbers of the tiles: an integer array of x's rank, or with one more axis along which tiles are copied. It
      names every device of the mesh once. XLA pads a size that the tiles do not divide.
    first: letters that take mesh axes before the others.

  Raises:
    UserError: the mesh does not divide the size of a letter, or an assignment does not name its devices.
  """
  if isinstance(assignment, str):
    return _shard_letters(x, assignment, ACTIVATIONS, first)
  mesh = current()
  if mesh is None:
    return x
  assignment = np.asarray(assignment)
  copies = assignment.ndim - x.shape.rank
  if copies not in (0, 1):
    raise UserError(
      f'a device assignment has the rank of its tensor, or one more to copy along; saw {assignment.ndim} for a tensor '
      f'of rank {x.shape.rank}'
    )
  if assignment.size != mesh.num_devices:
    raise UserError(
      f'a device assignment names every device of the mesh once; saw {assignment.size} for the {mesh.num_devices} of '
      f'{mesh}: with fewer tiles than devices, add a last axis along which tiles are copied'
    )
  if sorted(assignment.flat) != list(range(assignment.size)):
    raise UserError(f'a device assignment names the devices 0 to {assignment.size - 1} once each; saw {assignment}')
  sharding = tiled(assignment.shape, partial=copies == 1)
  if iota := _as_iota(assignment):
    sharding.iota_reshape_dims.extend(iota[0])
    sharding.iota_transpose_perm.extend(iota[1])
  else:
    sharding.tile_assignment_devices.extend(assignment.flat)
  return annotate(x, sharding)


def reshard(x: tf.Tensor, dims: str, source: str, target: str) -> tf.Tensor:
  """Reshards a tensor from one axis to another, one mesh axis at a time: an AllToAll along each, in smaller groups.

  On a mesh of node x expert this is the two-level AllToAll of Tutel (Hwang et al., arXiv 2206.03382: 2DH).
  Each device sends a message to the other devices of its node, then to one device of each other node, where an AllToAll
  over all devices sends as many small messages as there are devices.

  Args:
    x: tensor, sharded as by `shard(x, dims, first=source)`.
    source: the letter that has the mesh axes to be moved.
    target: the letter that gets them; x comes back sharded as by `shard(x, dims, first=target)`.
  """
  if mesh := current():
    all_dims = _leading.get() + dims
    before, after = (dict(zip(all_dims, mesh.spec(all_dims, ACTIVATIONS, first))) for first in (source, target))
    moved = [name for name in after[target] if name in before[source]]
    for done in range(1, len(moved)):
      left = tuple(name for name in before[source] if name not in moved[:done])
      taken = tuple(name for name in after[target] if name not in moved[done:])
      spec = {**before, source: left, target: taken}
      x = annotate(x, mesh.op_sharding(tuple(spec[letter] for letter in all_dims)))
  return shard(x, dims, first=target)


def store(x: tf.Tensor, dims: str, update: bool = False) -> tf.Tensor:
  """Shards a weight as it is stored between steps, or a gradient or slot as the `update` is (Mesh.stored_sharding)."""
  if mesh := current():
    return annotate(x, mesh.stored_sharding(*_as_led(x, dims), update=update).op_sharding)
  return x


def gather(x: tf.Tensor, dims: str) -> tf.Tensor:
  """Gathers a stored weight for use in a layer: whole, but for the axes by which devices share the work (WEIGHTS)."""
  return _shard_letters(x, dims, WEIGHTS, '')


def replicate(x: tf.Tensor) -> tf.Tensor:
  """Replicates a tensor: annotates it to be whole on every device."""
  return x if current() is None else annotate(x, OpSharding(type=OpSharding.REPLICATED))


def split(x: tf.Tensor, split_dimension: int, num_partitions: int) -> tf.Tensor:
  """Splits a tensor along one axis, over the devices in their order.

  XLA pads a size that num_partitions does not divide. With fewer partitions than devices, each partition is held by
  num_devices / num_partitions devices.
  """
  mesh = current()
  if mesh is None:
    return x
  rank = x.shape.rank
  if not -rank <= split_dimension < rank or num_partitions < 1 or mesh.num_devices % num_partitions:
    raise UserError(
      f'a split names an axis of its tensor and a number of partitions that divides the devices; saw axis '
      f'{split_dimension} of {rank} and {num_partitions} partitions on {mesh.num_devices} devices'
    )
  tiles = [1] * rank
  tiles[split_dimension] = num_partitions
  copies = [] if num_partitions == mesh.num_devices else [-1]
  return shard(x, np.arange(mesh.num_devices).reshape(tiles + copies))


def auto_to_manual(x: tf.Tensor, dims: str, first: str = '') -> tf.Tensor:
  """Enters a manual region (section 3.2): x split as by `shard(x, dims, first)` -> the smaller part on each device."""
  if mesh := current():
    spec = mesh.spec(dims, ACTIVATIONS, first)
    mesh.check(x.shape, dims, spec)
    shape, sharding = [n // mesh.size(names) for n, names in zip(x.shape, spec, strict=True)], mesh.op_sharding(spec)
    x = tf2xla.spmd_full_to_shard_shape(annotate(x, sharding), manual_sharding=sharding.SerializeToString())
    x = tf.ensure_shape(x, shape)
  return x


def manual_to_auto(x: tf.Tensor, dims: str, first: str = '') -> tf.Tensor:
  """Leaves a manual region: the part x on each device -> the whole tensor; the inverse of `auto_to_manual`."""
  if mesh := current():
    spec = mesh.spec(dims, ACTIVATIONS, first)
    shape, sharding = [n * mesh.size(names) for n, names in zip(x.shape, spec, strict=True)], mesh.op_sharding(spec)
    manual, shape = sharding.SerializeToString(), tf.TensorShape(shape)
    x = annotate(tf2xla.spmd_shard_to_full_shape(x, manual_sharding=manual, full_shape=shape), sharding)
  return x


auto_to_manual_spmd_partition, manual_to_auto_spmd_partition = auto_to_manual, manual_to_auto  # the paper's names


def manually(
  function: Callable[..., tf.Tensor], *args: tuple[tf.Tensor, str], returns: str, first: str = ''
) -> tf.Tensor:
  """Runs a function in a manual region: on each device's parts, with their shapes and no access to other devices.

  On a mesh that splits none of these axes, such as one of `model` alone, every part is the whole. There is no region
  then: the arguments and the result are annotated as replicated. (XLA's sharding propagation aborts the process at a
  region whose tensors are replicated.)

  Args:
    function: function of tensors. Annotations in it have no effect.
    *args: (tensor, axis letters) of each argument.
    returns: axis letters of the result.
    first: letters that take mesh axes before the others.
  """
  mesh = current()
  if mesh is None:
    return function(*(x for x, _ in args))
  is_whole = not any(any(mesh.spec(dims, ACTIVATIONS, first)) for dims in (*(dims for _, dims in args), returns))
  parts = [replicate(x) if is_whole else auto_to_manual(x, dims, first) for x, dims in args]
  with _set(_manual, True):
    part = function(*parts)
  return replicate(part) if is_whole else manual_to_auto(part, returns, first)


def stages() -> int:
  """Number of stages of the ambient mesh; 1 without one."""
  mesh = current()
  return mesh.size(['stage']) if mesh else 1


def in_stage() -> bool:
  """Whether a function of `over_stages` is being traced."""
  return bool(_leading.get())


def over_stages(function: Callable[..., Any], *args: Any) -> Any:
  """Function of nested tensors, vectorised over a leading axis Z (stages, and parts of a micro-batch) of all of them.

  XLA partitions the result over Z, so each device computes the function for one place on that axis. Annotations inside
  name the other axes. Weights are not shared along Z.
  """
  with _set(_leading, 'Z'):
    return tf.vectorized_map(lambda args: function(*args), args, fallback_to_while_loop=False)


@pfor.RegisterPFor('Bitcast')
def _bitcast_over_stages(values):
  return pfor.wrap(tf.bitcast(values.stacked_input(0), values.get_attr('type')), True)


@pfor.RegisterPFor('XlaOptimizationBarrier')
def _barrier_over_stages(values):
  results = tf2xla.optimization_barrier(*(x.t for x in values.inputs))
  return [pfor.wrap(y, x.is_stacked) for y, x in zip(results, values.inputs, strict=True)]


def barrier(tensors: Sequence[tf.Tensor], compiled: bool = False) -> list[tf.Tensor]:
  """Optimization barrier: returns the tensors, each available only once all are.

  The compiler then does not merge operations after it with equal ones before. It is XLA's barrier where a runtime has
  set a mesh, of one device or more, or with `compiled`, by XLA in any case; elsewhere TensorFlow's control
  dependencies, across which XLA may still merge.
  """
  if compiled or _mesh.get() is not None:
    return list(tf2xla.optimization_barrier(*tensors))
  with tf.control_dependencies(tensors):
    return [tf.identity(x) for x in tensors]


def update_slice(x: tf.Tensor, part: tf.Tensor, begin: Sequence[int | tf.Tensor]) -> tf.Tensor:
  """x with `part` written over the slice that begins at these indices: XLA's dynamic-update-slice, only for XLA."""
  return tf2xla.dynamic_update_slice(x, part, tf.stack([tf.cast(i, tf.int32) for i in begin]))


def dot(equation: str, x: tf.Tensor, y: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Einsum 'ab,cb->ac' of two tensors, summed and returned in a type of more bits than theirs; only for XLA.

  A letter that both have is summed over.
  """
  operands, axes = equation.split('->')
  x_axes, y_axes = operands.split(',')
  summed = [letter for letter in x_axes if letter in y_axes]
  dimensions = xla_data_pb2.DotDimensionNumbers(
    lhs_contracting_dimensions=[x_axes.index(letter) for letter in summed],
    rhs_contracting_dimensions=[y_axes.index(letter) for letter in summed],
  )
  made = [letter for letter in x_axes + y_axes if letter not in summed]
  product = tf2xla.dot_general(x, y, dimensions, preferred_element_type=dtype)
  return product if made == list(axes) else tf.transpose(product, [made.index(letter) for letter in axes])


def custom_call(
  target: str, operands: Sequence[tf.Tensor], results: Sequence[tf.TensorSpec], config: str
) -> list[tf.Tensor]:
  """Results of a kernel that the compiler of one platform knows by name; only for XLA, which does not partition it."""
  return list(tf2xla.custom_call_v2(target, operands, results, backend_config=config))


def _shard_letters(x, dims, rules, first):
  if mesh := current():
    shape, dims = _as_led(x, dims)
    spec = mesh.spec(dims, rules, first)
    mesh.check(shape, dims, spec)
    return annotate(x, mesh.op_sharding(spec))
  return x


def _as_led(x, dims):
  """Shape and axis letters of a tensor, with the leading axis that `over_stages` gives it."""
  return [*[None] * len(_leading.get()), *x.shape], _leading.get() + dims


def _as_iota(assignment: np.ndarray) -> tuple[list[int], list[int]] | None:
  """Iota form of an assignment, (sizes, perm) with iota(sizes).transpose(perm) = assignment; None if it has none.

  Along each axis of a transposed iota, device numbers grow by a constant stride: the product of the faster axes' sizes.
  """
  axes = [axis for axis, size in enumerate(assignment.shape) if size > 1]
  if not axes:
    return [1], [0]
  stride = lambda axis: int(np.take(assignment, 1, axis).flat[0] - assignment.flat[0])
  slowest_first = sorted(axes, key=stride, reverse=True)
  sizes, perm = [assignment.shape[axis] for axis in slowest_first], [slowest_first.index(axis) for axis in axes]
  same = np.arange(assignment.size).reshape(sizes).transpose(perm).reshape(assignment.shape)
  return (sizes, perm) if np.array_equal(same, assignment) else None


def annotate(x: tf.Tensor, sharding: OpSharding) -> tf.Tensor:
  """Annotates a tensor with an OpSharding."""
  y = tf2xla.sharding(x, sharding=sharding.SerializeToString())
  if _leading.get():  # the sharding is of what over_stages makes of it
    return y
  mark(y, sharding)
  if _recorded.get() is not None:
    _recorded.get().append((y, sharding))
  return y


def mark(x: tf.Tensor, sharding: OpSharding) -> None:
  """Sets the attribute _XlaSharding, which TPUStrategy's passes read, on the operation that produces x."""
  x.op._set_attr('_XlaSharding', attr_value_pb2.AttrValue(s=sharding.SerializeToString()))
