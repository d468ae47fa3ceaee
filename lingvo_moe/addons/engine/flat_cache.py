"""Flat key/value cache of a beam in the decoder's input buffers: hypotheses write interleaved positions (GShard, A.1).

The symbols of all W hypotheses of a row interleave in one sequence, which is never reordered. Each step writes W
positions, and a 0/1 mask says which positions belong to each hypothesis; see search/flat_sequence.py, which does the
same in TensorFlow. The graph reads the mask of earlier positions, and attends to the new ones by itself.
"""

import math
import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lingvo_moe.addons.engine.stages import StagedGraph

# Steps for which there is room after a resize, at least. Sizes are multiples of ROOM * W: a new size costs copies, and
# a larger one costs attention to unused positions.
ROOM = 8
# Memory where caches wait while their buffers get other sizes, as long as there is a search: of all lanes, each in its
# turn. New memory for each change would take more time than the copies.
_SCRATCH, _TURN = weakref.WeakValueDictionary(), threading.Lock()


class Prompt(NamedTuple):
  """Text that the hypotheses of each row continue."""

  last_B: np.ndarray  # its last symbol
  lengths_B: np.ndarray  # number of symbols before that
  mask_BP: np.ndarray  # which of P positions have one
  caches: Mapping[str, np.ndarray]  # their keys and values [B, N, P, K] by the decoder's names
  symbols_BP: np.ndarray  # all its symbols, after pad


class FlatCache:
  """Cache of some rows while the decoder runs on them; rows leave it when they are finished.

  Args:
    graph: the decoder, whose inputs this object writes, except `ids`, `time` and `live`.
    memory: what the decoder reads of the sources, by the names of its inputs; rows are the first axis. Keys and values
      are taken out of it: the decoder's buffers have them.
    width: W.
    steps: the most steps that will be run.
    prompt: what comes before the first step; None: nothing.
  """

  def __init__(
    self, graph: StagedGraph, memory: dict[str, np.ndarray], width: int, steps: int, prompt: Prompt | None = None
  ) -> None:
    self._graph, self._width, self._block, self._steps = graph, width, ROOM * width, steps
    rows = len(next(iter(memory.values())))
    mask_BP, caches = (prompt.mask_BP, prompt.caches) if prompt else (np.zeros([rows, 0]), {})
    self._mask_BWU = np.repeat(mask_BP[:, np.newaxis], width, axis=1).astype(np.float32)
    kept = dict(caches) | {name: memory.pop(name) for name in [*memory] if name.startswith('memory_')}
    self._memory, used = dict(memory), mask_BP.shape[1]
    # Buffers for the most positions there can be: none grows and is copied, and what is not written takes no memory.
    graph.resize(largest := self._shapes(used + steps * width))
    self._caches, self._memories = ([n for n in largest if n.startswith(part)] for part in ('cache_', 'memory_'))
    size, self._scratch = sum(math.prod(largest[n]) for n in (*self._caches, *self._memories)), _SCRATCH.get('')
    if self._scratch is None or self._scratch.size < size:
      _SCRATCH[''] = self._scratch = np.empty(size, np.float32)
    self._resize(kept, used)

  @property
  def is_full(self) -> bool:
    """Whether there is no room for another step: `keep` must be called."""
    return self._start + self._width > self._mask_BWU.shape[2]

  def keep(self, rows: np.ndarray, live_BW: np.ndarray) -> None:
    """Keeps some of the rows, and of the positions those that a live hypothesis uses, with room for more steps.

    Args:
      rows: numbers of the rows to keep, of those there are, in order.
      live_BW: whether there is a hypothesis, in all rows there are.
    """
    all_rows, _, room = self._mask_BWU.shape
    mask_BWU = np.where(live_BW[:, :, np.newaxis], self._mask_BWU, 0)[rows]
    used_BU = mask_BWU.max(axis=1)
    most = int(used_BU.sum(axis=1).max(initial=0))
    positions_BU = np.argsort(-used_BU, axis=1, kind='stable')[:, :most]
    self._mask_BWU = np.take_along_axis(mask_BWU, positions_BU[:, np.newaxis], axis=2)
    self._memory = {name: array[rows] for name, array in self._memory.items()}
    if len(rows) == all_rows and most + self._block // 2 <= room <= most + 2 * self._block:
      for name in self._caches:
        buffer_BNUK = self._graph.input(name)
        _move(buffer_BNUK, buffer_BNUK, rows, positions_BU)
      self._set_room(most, room)
      return
    with _TURN:
      kept, free = {}, self._scratch
      for name in (*self._caches, *self._memories):
        buffer_BNUK = self._graph.input(name)
        _, heads, size, features = buffer_BNUK.shape
        at_BU = positions_BU if name in self._caches else np.broadcast_to(np.arange(size), [len(rows), size])
        shape = len(rows), heads, at_BU.shape[1], features
        kept[name], free = free[: math.prod(shape)].reshape(shape), free[math.prod(shape) :]
        _move(buffer_BNUK, kept[name], rows, at_BU)
        del buffer_BNUK  # a view, of which none may be held when sizes change
      self._resize(kept, most)

  def _resize(self, kept: dict[str, np.ndarray], used: int) -> None:
    """Gives the decoder's inputs room behind `used` positions, and writes keys and values."""
    room = min((-(-used // self._block) + 1) * self._block, used + self._steps * self._width)
    self._graph.resize(self._shapes(room))
    self._graph.release()
    for name in self._caches:
      self._graph.input(name)[:, :, used:] = 0.0  # what is masked must be finite
    for name, kept_BNUK in kept.items():
      self._graph.input(name)[:, :, : kept_BNUK.shape[2]] = kept_BNUK
    for name, array in self._memory.items():
      self._graph.write(name, array)
    self._set_room(used, room)

  def _shapes(self, room: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoder's inputs with so many positions."""
    source_length = self._memory['segments'].shape[1] if 'segments' in self._memory else 0
    sizes = {'memory': source_length, 'segments': source_length, 'cache': room, 'mask': room}
    shapes = {}
    for name, (_, *shape) in self._graph.shapes.items():
      if name != 'time':
        shapes[name] = (len(self._mask_BWU), *(sizes[name.partition('_')[0]] if size < 0 else size for size in shape))
    return shapes

  def _set_room(self, used: int, room: int) -> None:
    """Begins the room at the end of the `used` positions that the mask has."""
    self._start = used
    self._mask_BWU = np.pad(self._mask_BWU, [(0, 0), (0, 0), (0, room - used)])

  def run(self, ids_BW: np.ndarray, time: int, live_BW: np.ndarray) -> None:
    """Runs a step of the decoder for the last symbol of each hypothesis, and writes the new keys and values."""
    graph, new_positions = self._graph, slice(self._start, self._start + self._width)
    for name, value in {'ids': ids_BW, 'time': time, 'live': live_BW, 'mask': self._mask_BWU}.items():
      graph.write(name, value)
    graph.run()
    for name in self._caches:
      graph.input(name)[:, :, new_positions] = graph.output(name.replace('cache_', 'new_', 1))
    self._mask_BWU[:, :, new_positions] = np.eye(self._width)
    self._start += self._width
    self._steps -= 1

  def follow(self, parents_BW: np.ndarray) -> None:
    """Moves the masks: hypothesis w of the next step continues hypothesis parents_BW[:, w] of this one."""
    self._mask_BWU = self._mask_BWU[np.arange(len(parents_BW))[:, np.newaxis], parents_BW]


def _move(from_BNUK: np.ndarray, to_BNUK: np.ndarray, rows: np.ndarray, positions_BU: np.ndarray) -> None:
  """Copies these positions of some rows to the beginning of an array, which may be the same one."""
  for to, (row, at_U) in enumerate(zip(rows, positions_BU, strict=True)):
    first = int(np.sum(np.logical_and.accumulate(at_U == np.arange(len(at_U)))))  # positions that stay as they are
    if to_BNUK is not from_BNUK or row != to:
      to_BNUK[to, :, :first] = from_BNUK[row, :, :first]
    to_BNUK[to, :, first : len(at_U)] = from_BNUK[row].take(at_U[first:], axis=1)
