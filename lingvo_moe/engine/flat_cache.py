"""Flat key/value cache of a beam in the decoder's input buffers: hypotheses write interleaved positions (GShard, A.1).

The symbols of all W hypotheses of a row interleave in one sequence, which is never reordered. Each step writes W
positions, and a 0/1 mask says which positions belong to each hypothesis; see search/flat_sequence.py, which does the
same in TensorFlow. The graph reads the mask of earlier positions, and attends to the new ones by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lingvo_moe.engine.graph import Graph

# Least number of steps for which there is room after positions were dropped. Sizes are multiples of it, because every
# new size costs a resize, and a larger one costs attention to unused positions.
ROOM = 8


class FlatCache:
  """Cache of some rows while the decoder runs on them; rows leave it when they are finished.

  Args:
    graph: the decoder, whose inputs this object writes, except `ids`, `time` and `live`.
    memory: what the decoder reads of the sources, by the names of its inputs; rows are the first axis.
    width: W.
  """

  def __init__(self, graph: Graph, memory: Mapping[str, np.ndarray], width: int) -> None:
    self._graph, self._width = graph, width
    self._memory = list(memory)
    self._caches = [name for name in graph.inputs if name.startswith('cache_')]
    self._mask_BWU = np.zeros([len(memory['segments']), width, 0], np.float32)
    self._source_length = memory['segments'].shape[1]
    self._make_room(len(memory['segments']), 0)
    for name in self._caches:
      graph.input(name)[...] = 0.0
    for name, array in memory.items():
      graph.write(name, array)

  @property
  def is_full(self) -> bool:
    """Whether there is no room for another step: `keep` must be called."""
    return self._start + self._width > self._mask_BWU.shape[2]

  def keep(self, rows: np.ndarray, live_BW: np.ndarray) -> None:
    """Keeps some of the rows, and of the positions those that a live hypothesis uses, with room for more steps.

    Args:
      rows: numbers of the rows to keep, of those there are.
      live_BW: whether there is a hypothesis, in all rows there are.
    """
    mask_BWU = np.where(live_BW[:, :, np.newaxis], self._mask_BWU, 0)[rows]
    used_BU = mask_BWU.max(axis=1)
    most = int(used_BU.sum(axis=1).max(initial=0))
    positions_BU = np.argsort(-used_BU, axis=1, kind='stable')[:, :most]
    self._mask_BWU = np.take_along_axis(mask_BWU, positions_BU[:, np.newaxis], axis=2)
    kept = {name: self._taken(name, rows, positions_BU) for name in self._caches}
    memory = {name: self._graph.input(name)[rows] for name in self._memory if self._is_resized(len(rows), most)}
    self._make_room(len(rows), most)
    for name, cache_BNUK in kept.items():
      buffer_BNUK = self._graph.input(name)
      buffer_BNUK[:, :, :most], buffer_BNUK[:, :, most:] = cache_BNUK, 0.0  # what is masked must be finite
    for name, array in memory.items():
      self._graph.write(name, array)

  def _taken(self, name: str, rows: np.ndarray, positions_BU: np.ndarray) -> np.ndarray:
    """Keys or values of some rows at these positions; row by row, in which they lie K at a time."""
    buffer_BNUK = self._graph.input(name)
    return np.stack([buffer_BNUK[row].take(at, axis=1) for row, at in zip(rows, positions_BU, strict=True)])

  def _shapes(self, rows: int, used: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoder's inputs for so many rows, and positions that are used, with room behind them."""
    block = ROOM * self._width
    sizes = {'memory': self._source_length, 'segments': self._source_length}
    sizes |= dict.fromkeys(('cache', 'mask'), (-(-used // block) + 1) * block)
    shapes = {}
    for name, (_, *shape) in self._graph.shapes.items():
      if name != 'time':
        shapes[name] = (rows, *(sizes[name.partition('_')[0]] if size < 0 else size for size in shape))
    return shapes

  def _is_resized(self, rows: int, used: int) -> bool:
    return self._graph.sizes != self._shapes(rows, used)

  def _make_room(self, rows: int, used: int) -> None:
    """Resizes the decoder's inputs, which loses their contents if a size changes; `used` positions are in the mask."""
    shapes = self._shapes(rows, used)
    self._graph.resize(shapes)
    self._start = used
    self._mask_BWU = np.pad(self._mask_BWU, [(0, 0), (0, 0), (0, shapes['mask'][2] - used)])

  def run(self, ids_BW: np.ndarray, time: int, live_BW: np.ndarray) -> None:
    """Runs a step of the decoder for the last symbol of each hypothesis, and writes the new keys and values."""
    graph, own = self._graph, slice(self._start, self._start + self._width)
    for name, value in {'ids': ids_BW, 'time': time, 'live': live_BW, 'mask': self._mask_BWU}.items():
      graph.write(name, value)
    graph.run()
    for name in self._caches:
      graph.input(name)[:, :, own] = graph.output(name.replace('cache_', 'new_', 1))
    self._mask_BWU[:, :, own] = np.eye(self._width)
    self._start += self._width

  def follow(self, parents_BW: np.ndarray) -> None:
    """Moves the masks: hypothesis w of the next step continues hypothesis parents_BW[:, w] of this one."""
    self._mask_BWU = np.take_along_axis(self._mask_BWU, parents_BW[:, :, np.newaxis], axis=1)
