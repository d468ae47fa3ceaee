"""Pieces of a state, slices of its tensors, for checkpoints: each process saves the pieces that its devices hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

_SLOTS = 'slots/'


class Piece(NamedTuple):
  """Slice of a logical tensor."""

  name: str
  shape: tuple[int, ...]  # of the whole tensor
  begin: tuple[int, ...]  # where the slice begins in it
  value: np.ndarray | tf.Tensor

  @property
  def slice_spec(self) -> str:
    """Slice in the notation of TensorFlow's SaveV2, such as '8 3 4,4:0,3'; '' for the whole tensor."""
    return slice_spec(self.shape, self.begin, tuple(self.value.shape))


@dataclasses.dataclass(frozen=True)
class WholeState:
  """State held whole by one process: {'step', 'weights', 'slots'} of tensors (see program.py)."""

  state: Mapping
  process_index: int = 0
  process_count: int = 1

  @property
  def step(self) -> int:
    return int(self.state['step'])

  def pieces(self) -> Iterator[Piece]:
    yield _whole('step', tf.cast(self.state['step'], tf.int64))
    for name, value in self.state['weights'].items():
      yield _whole(name, value)
    for name, value in self.state['slots'].items():
      yield _whole(_SLOTS + name, value)

  def agree(self, flag: bool) -> bool:
    return flag


def slots_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
  """Optimizer slots among the tensors of a checkpoint, by their names in a state."""
  return {name.removeprefix(_SLOTS): value for name, value in tensors.items() if name.startswith(_SLOTS)}


def slot_names(names: Iterable[str]) -> list[str]:
  """Names in a checkpoint of the optimizer slots with these names in a state."""
  return [_SLOTS + name for name in names]


def is_slot(name: str) -> bool:
  """True for the name of an optimizer slot in a checkpoint."""
  return name.startswith(_SLOTS)


def _whole(name: str, value: tf.Tensor) -> Piece:
  return Piece(name, tuple(value.shape), (0,) * len(value.shape), value)


def slice_spec(shape, begin, sizes) -> str:
  if tuple(sizes) == tuple(shape):
    return ''
  extents = ':'.join(f'{at},{size}' for at, size in zip(begin, sizes, strict=True))
  return ' '.join(map(str, shape)) + ' ' + extents
