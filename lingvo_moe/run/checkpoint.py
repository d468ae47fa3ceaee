"""Checkpoint of a state: TensorFlow's TensorBundle, one logical tensor per weight, read slice by slice.

It holds 'step', every weight under its name ('decoder/layer_03/moe/wi') and every optimizer slot under
'slots/<name>/<slot>'. `tf.train.load_checkpoint` reads it on any machine. Weights that a scanned stack keeps stacked,
[L, ...], are written and read layer by layer under the names of the unrolled stack. Of a run with adapters, the weights
that they adapt are in the checkpoint of step 0 alone.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core import errors
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers import lora as lora_lib
from lingvo_moe.layers.lora import Lora
from lingvo_moe.runtime.slices import Slice, slice_spec
from lingvo_moe.storage import files

STATE = 'state'  # a checkpoint's prefix in its folder
PART_BYTES = 64 << 20  # of what write_parts writes at once
_TYPES = {'step': tf.int64}  # of all other tensors: float32
# Raised by TensorFlow's reader on a bad file; IndexError by a file cut short.
_READ_ERRORS = (tf.errors.OpError, RuntimeError, ValueError, IndexError)


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor in a checkpoint, read slice by slice: stored[...] or stored[0:2, 3:4]."""

  prefix: str
  name: str
  shape: tuple[int, ...]
  dtype: tf.DType

  def __getitem__(self, index) -> np.ndarray:
    index = self._of_every_axis(index)
    ranges = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
    begin, sizes = [start for start, _ in ranges], [stop - start for start, stop in ranges]
    try:
      slices = [slice_spec(self.shape, begin, sizes)]
      return tf.raw_ops.RestoreV2(
        prefix=self.prefix, tensor_names=[self.name], shape_and_slices=slices, dtypes=[self.dtype]
      )[0].numpy()
    except _READ_ERRORS as e:
      raise _damaged(self.prefix, e) from None

  def _of_every_axis(self, index) -> tuple[slice, ...]:
    index = () if index is ... else index if isinstance(index, tuple) else (index,)
    return (*index, *(slice(None),) * (len(self.shape) - len(index)))


@dataclasses.dataclass(frozen=True)
class Merged(Stored):
  """A weight in a checkpoint with the product of its adapters added."""

  a: Stored
  b: Stored
  lora: Lora

  def __getitem__(self, index) -> np.ndarray:
    index, rank, inputs = self._of_every_axis(index), len(self.shape), len(self.a.shape) - 1
    shared = index[: lora_lib.shared_axes(self.a, self.b, rank)]
    a, b = self.a[index[:inputs]], self.b[(*shared, slice(None), *index[inputs:])]
    return super().__getitem__(index) + self.lora.product(a, b, rank).numpy()


@dataclasses.dataclass(frozen=True)
class StoredLayers:
  """Tensors of several layers in a checkpoint, stacked along a leading axis for a scanned stack; read as Stored is."""

  layers: tuple[Stored, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    return (len(self.layers), *self.layers[0].shape)

  @property
  def dtype(self) -> tf.DType:
    return self.layers[0].dtype

  def __getitem__(self, index) -> np.ndarray:
    index = (index,) if not isinstance(index, tuple) else index
    layers, rest = (slice(None), ...) if index == (...,) else (index[0], index[1:] or ...)
    return np.stack([layer[rest] for layer in self.layers[layers]])


def path(directory: str, step: int) -> str:
  """The prefix of a run's checkpoint."""
  return os.path.join(directory, f'step_{step:08d}', STATE)


def shapes(prefix: str) -> dict[str, tuple[int, ...]]:
  """Name -> shape of everything in a checkpoint."""
  return {name: stored.shape for name, stored in _everything(prefix).items()}


def load(
  prefix: str, specs: Mapping[str, tuple[int, ...]], merge: Lora | None = None
) -> dict[str, Stored | StoredLayers]:
  """Tensors by name, stacked ones too, read when they are sliced; with `merge`, the sums of weights and adapters.

  Raises:
    UserError: a tensor is missing or has another shape or type; or, when it is read, fails its checksum.
  """
  tensors = _everything(prefix)
  for name, shape in by_layer(specs).items():
    if (tensor := tensors.get(name)) is None:
      why = 'it is a checkpoint of another model; use the --model and bindings that it was trained with'
      if name.startswith('slots/') and not any(other.startswith('slots/') for other in tensors):
        why = 'it has weights alone: begin another run with them, by --init_from and another --logdir'
      elif any(map(lora_lib.is_adapter, tensors)):
        why = f'of a run with adapters, {path("", 0)} beside it has the weights that they adapt: restore it from a copy'
      raise UserError(f'{prefix} has no tensor {name!r}: {why}')
    if tensor.shape != tuple(shape):
      raise UserError(
        f'{prefix}: {name!r} has shape {tensor.shape}, but this model has {tuple(shape)}; '
        'use the --model, bindings and vocabulary that it was trained with'
      )
    if tensor.dtype != (wanted := _TYPES.get(name, tf.float32)):
      raise UserError(
        f'{prefix}: {name!r} has type {tensor.dtype.name}, but a model has {wanted.name} there: it was not written by '
        'the trainer, or was converted; use the checkpoint that the trainer wrote'
      )

  def stored(name):
    parts = [tensors.get(lora_lib.part(name, letter)) for letter in 'ab']
    return Merged(**vars(tensors[name]), a=parts[0], b=parts[1], lora=merge) if merge and all(parts) else tensors[name]

  stacked = lambda layers: StoredLayers(tuple(map(stored, layers)))
  layers = {name: _layers(name, shape) for name, shape in specs.items()}
  return {name: stored(name) if names is None else stacked(names) for name, names in layers.items()}


def _everything(prefix: str) -> dict[str, Stored]:
  """Tensors of a checkpoint; with adapters also those of step 0, which alone has the weights that they adapt."""
  reader = _reader(prefix)
  types, sizes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
  tensors = {name: Stored(prefix, name, tuple(sizes[name]), types[name]) for name in sizes}
  first = path(os.path.dirname(os.path.dirname(prefix)), 0)
  if prefix == first or not any(map(lora_lib.is_adapter, tensors)) or not files.exists(first + '.index'):
    return tensors
  return _everything(first) | tensors


def by_layer(specs: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
  """Names and shapes as in a checkpoint, where stacked layers are separate tensors."""
  unstacked = {}
  for name, shape in specs.items():
    layers = _layers(name, shape)
    unstacked |= {name: tuple(shape)} if layers is None else dict.fromkeys(layers, tuple(shape[1:]))
  return unstacked


def _layers(name: str, shape: tuple[int, ...]) -> list[str] | None:
  """Names of the layers of a stacked tensor; None for any other."""
  return weights_lib.names_by_layer(name, shape[0]) if shape else None


def slices_by_layer(slices: Iterable[Slice]) -> Iterator[Slice]:
  """Splits slices of stacked layers into one a layer."""
  for part in slices:
    layers = _layers(part.name, part.shape)
    if layers is None:
      yield part
    else:
      for number, value in enumerate(part.value, part.begin[0]):
        yield Slice(layers[number], part.shape[1:], part.begin[1:], value)


def write(prefix: str, slices: Sequence[Slice]) -> None:
  """Writes slices, one of each tensor at most, to a bundle."""
  tf.raw_ops.SaveV2(
    prefix=prefix,
    tensor_names=[part.name for part in slices],
    shape_and_slices=[slice_spec(part.shape, part.begin, part.value.shape) for part in slices],
    tensors=[tf.convert_to_tensor(part.value) for part in slices],
  )


def write_parts(prefix: str, parts: Iterable[Slice]) -> None:
  """Writes a bundle, never holding much more than PART_BYTES of it."""
  bundles, held = [], []

  def flush():
    bundles.append(f'{prefix}_part_{len(bundles):05d}')
    write(bundles[-1], held)
    held.clear()

  for part in parts:
    # A bundle holds one slice of a tensor at most.
    if held and (sum(p.value.nbytes for p in held) + part.value.nbytes > PART_BYTES or held[-1].name == part.name):
      flush()
    held.append(part)
  flush()
  merge(bundles, prefix)


def merge(prefixes: Sequence[str], prefix: str) -> None:
  """Makes one bundle of several, whose files it takes."""
  tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=False)


def blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
  """Indices of blocks of at most `most` elements, at least a row of the last axis, that make up a tensor."""
  if math.prod(shape) <= most or len(shape) < 2:
    yield tuple(slice(0, size) for size in shape)
    return
  rows = max(1, most // math.prod(shape[1:]))
  for start in range(0, shape[0], rows):
    yield from ((slice(start, min(start + rows, shape[0])), *row) for row in blocks(shape[1:], most))


def _reader(prefix: str):
  if not files.exists(prefix + '.index'):
    raise UserError(f'there is no checkpoint {prefix} (no file {prefix}.index)')
  files.check_for_tensorflow('checkpoint', prefix)
  try:
    return tf.compat.v1.train.NewCheckpointReader(prefix)
  except _READ_ERRORS as e:
    raise _damaged(prefix, e) from None


def _damaged(prefix: str, error: Exception) -> UserError:
  return UserError(
    f'checkpoint {prefix} is damaged or cut short ({errors.reason(error)}): restore it from a copy, or move '
    f'{os.path.dirname(prefix)} away to go on from the one before'
  )
