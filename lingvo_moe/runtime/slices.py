"""Slices of a state's tensors, for checkpoints: each process saves those that its devices hold."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

_SLOTS = 'slots/'  # begins the names of optimizer slots in a checkpoint


class Slice(NamedTuple):
  """Slice of a logical tensor."""

  name: str
  shape: tuple[int, ...]  # of the whole tensor
  begin: tuple[int, ...]  # where the slice begins in it
  value: np.ndarray | tf.Tensor


def named_slots(slots: Mapping[str, Any]) -> dict[str, Any]:
  """Optimizer slots of a state by their names in a checkpoint."""
  return {_SLOTS + name: value for name, value in slots.items()}


def slots_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
  """Optimizer slots among the tensors of a checkpoint, by their names in a state."""
  return {name.removeprefix(_SLOTS): value for name, value in tensors.items() if is_slot(name)}


def is_slot(name: str) -> bool:
  """True for the name of an optimizer slot in a checkpoint."""
  return name.startswith(_SLOTS)


def slice_spec(shape: Sequence[int], begin: Sequence[int], sizes: Sequence[int]) -> str:
  """Slice in the notation of TensorFlow's SaveV2, such as '8 3 4,4:0,3'; '' for the whole tensor."""
  if tuple(sizes) == tuple(shape):
    return ''
  extents = ':'.join(f'{at},{size}' for at, size in zip(begin, sizes, strict=True))
  return ' '.join(map(str, shape)) + ' ' + extents
