"""State that one process holds whole, as a checkpoint saves it."""

import dataclasses
from collections.abc import Iterator, Mapping

import tensorflow as tf

from lingvo_moe.runtime.slices import Slice, named_slots


@dataclasses.dataclass(frozen=True)
class WholeState:
  """State held whole by one process: {'step', 'weights', 'slots'} of tensors (see program.py)."""

  state: Mapping
  process_index: int = 0
  process_count: int = 1

  @property
  def step(self) -> int:
    return int(self.state['step'])

  def slices(self) -> Iterator[Slice]:
    step = {'step': tf.cast(self.state['step'], tf.int64)}
    for name, value in {**step, **self.state['weights'], **named_slots(self.state['slots'])}.items():
      yield Slice(name, tuple(value.shape), (0,) * len(value.shape), value)

  def agree(self, flag: bool) -> bool:
    return flag
