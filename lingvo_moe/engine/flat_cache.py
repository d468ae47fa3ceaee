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
    self._start, rows = 0, len(memory['segments'])
    self._mask_BWU = np.zeros([rows, width, 0], np.float32)
    sizes = {name: (rows, heads, 0, dim) for name in self._caches for _, heads, _, dim in [graph.shapes[name]]}
    self._hold({**{name: np.zeros(shape, np.float32) for name, shape in sizes.items()}, **memory})

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
    self._start = most
    index_B1U1 = positions_BU[:, np.newaxis, :, np.newaxis]
    caches = {name: np.take_along_axis(self._graph.input(name)[rows], index_B1U1, axis=2) for name in self._caches}
    self._hold({**caches, **{name: self._graph.input(name)[rows] for name in self._memory}})

  def _hold(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Resizes the decoder's inputs to these rows and positions, with room behind them, and writes them."""
    rows, width, used = self._mask_BWU.shape
    block = ROOM * width
    size = (-(-used // block) + 1) * block
    self._mask_BWU = np.pad(self._mask_BWU, [(0, 0), (0, 0), (0, size - used)])
    caches = {name: (*arrays[name].shape[:2], size, arrays[name].shape[3]) for name in self._caches}
    given = {name: array.shape for name, array in arrays.items()}
    self._graph.resize({**given, **caches, 'mask': self._mask_BWU.shape, 'ids': (rows, width), 'live': (rows, width)})
    for name, array in arrays.items():
      buffer = self._graph.input(name)
      if name in caches:
        buffer[:, :, :used], buffer[:, :, used:] = array, 0.0  # a masked position counts 0 only if it is finite
      else:
        buffer[...] = array

  def run(self, ids_BW: np.ndarray, time: int, live_BW: np.ndarray) -> None:
    """Runs a step of the decoder for the last symbol of each hypothesis, and writes the new keys and values."""
    graph, own = self._graph, slice(self._start, self._start + self._width)
    for name, value in {'ids': ids_BW, 'time': time, 'live': live_BW, 'mask': self._mask_BWU}.items():
      graph.input(name)[...] = value
    graph.run()
    for name in self._caches:
      graph.input(name)[:, :, own] = graph.output(name.replace('cache_', 'new_', 1))
    self._mask_BWU[:, :, own] = np.eye(self._width)
    self._start += self._width

  def follow(self, parents_BW: np.ndarray) -> None:
    """Moves the masks: hypothesis w of the next step continues hypothesis parents_BW[:, w] of this one."""
    self._mask_BWU = np.take_along_axis(self._mask_BWU, parents_BW[:, :, np.newaxis], axis=1)
