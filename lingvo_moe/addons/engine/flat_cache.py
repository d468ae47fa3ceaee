"""Flat key/value cache of a beam in the decoder's input buffers: hypotheses share one sequence of cells (GShard, A.1).

The keys and values of all W hypotheses of a row lie in the cells of one sequence, which is never reordered, and a 0/1
mask says which cells belong to each hypothesis; see search/flat_sequence.py, which does the same in TensorFlow. There
each step writes the next W cells. Here it writes W cells that no live hypothesis uses any more, so that there are few
more cells than are used: a step takes time for each. Where it matters in which order the symbols of cells came, the
graph is told their offsets.
"""

import math
import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lingvo_moe.addons.engine.stages import StagedGraph
from lingvo_moe.search.constraints import NEG_INF

# Cells by which rows grow, at least, and a quarter of those there are: a new size costs copies, and a larger one costs
# attention to unused cells.
ROOM = 16
# Cells of all rows that are there from the beginning: fewer sentences then seldom grow.
_FIRST = 40
_ENDED = 0.3  # share of ended rows that leave: those that stay take time, and leaving costs copies of the others
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
  """Cache of some rows while the decoder runs on them; rows leave it when they have ended.

  Args:
    graph: the decoder, of W or more hypotheses, whose inputs this object writes.
    memory: what the decoder reads of the sources, by the names of its inputs; rows are the first axis. Keys and values
      are taken out of it: the decoder's buffers have them.
    width: W.
    steps: the most steps that will be run.
    prompt: what comes before the first step; None: nothing.
  """

  def __init__(
    self, graph: StagedGraph, memory: dict[str, np.ndarray], width: int, steps: int, prompt: Prompt | None = None
  ) -> None:
    self._graph, self._width, self._others = graph, width, graph.shapes['ids'][1] - width
    rows = len(next(iter(memory.values())))
    mask_BP, caches = (prompt.mask_BP, prompt.caches) if prompt else (np.zeros([rows, 0]), {})
    used = mask_BP.shape[1]
    self._mask_BWU = np.repeat(mask_BP[:, np.newaxis], self._width, axis=1).astype(np.float32)
    self._position_BU = np.broadcast_to(np.arange(used, dtype=np.int32), mask_BP.shape)
    self._before_B1 = (prompt.lengths_B if prompt else np.zeros(rows, np.int32))[:, np.newaxis]
    kept = dict(caches) | {name: memory.pop(name) for name in [*memory] if name.startswith('memory_')}
    self._memory, self._most = dict(memory), used + steps * self._width
    self._caches, self._memories = ([n for n in graph.shapes if n.startswith(part)] for part in ('cache_', 'memory_'))
    # As much as could be needed: what is not written takes no memory.
    largest = self._shapes(self._most)
    size, self._scratch = sum(math.prod(largest[n]) for n in (*self._caches, *self._memories)), _SCRATCH.get('')
    if self._scratch is None or self._scratch.size < size:
      _SCRATCH[''] = self._scratch = np.empty(size, np.float32)
    self._resize(kept, used, max(used + self._width, _FIRST // max(rows, 1)))

  def is_due(self, live_B: np.ndarray) -> bool:
    """Whether `keep` must be called before the next step: a row has too few free cells, or too many have ended."""
    if self._next + self._width > self._free_BC.shape[1]:
      self._find_free()
    is_full = self._width > self._free_BC.shape[1]
    return is_full or np.count_nonzero(live_B) <= (1 - _ENDED) * len(live_B)

  def keep(self, rows: np.ndarray) -> None:
    """Keeps some of the rows, with room for more steps. `rows`: numbers of those there are, in order."""
    _, _, room = self._mask_BWU.shape
    self._mask_BWU, self._position_BU, self._before_B1 = (
      x[rows] for x in (self._mask_BWU, self._position_BU, self._before_B1)
    )
    self._memory = {name: array[rows] for name, array in self._memory.items()}
    used = self._most_used(self._mask_BWU.any(axis=1))
    with _TURN:
      shapes = {n: (len(rows), *self._graph.input(n).shape[1:]) for n in (*self._caches, *self._memories)}
      kept, free = {}, self._scratch
      for name, shape in shapes.items():
        kept[name], free = free[: math.prod(shape)].reshape(shape), free[math.prod(shape) :]
        np.take(self._graph.input(name), rows, axis=0, out=kept[name])
      self._resize(kept, room, used + self._width)

  def _resize(self, kept: dict[str, np.ndarray], cells: int, least: int) -> None:
    """Gives the decoder's inputs `least` cells or more behind the `cells` there are, and writes keys and values."""
    if least > cells:  # rows that leave keep the others' cells
      least = max(least, cells * 5 // 4)
    room = max(cells, min(-(-least // ROOM) * ROOM, self._most))
    present = self._graph.sizes.get('mask', (0, 0, 0))[2]
    if room <= present <= min(2 * room, self._most) and self._shapes(present) == self._graph.sizes:
      room = present  # another size would cost more than these cells
    elif self._graph.resize(self._shapes(room)):
      self._graph.release()
    for name in self._caches:
      self._graph.input(name)[:, :, cells:] = 0.0  # what is masked must be finite, also after a search that was not
    for name, kept_BNUK in kept.items():
      self._graph.input(name)[:, :, : kept_BNUK.shape[2]] = kept_BNUK
    for name, array in self._memory.items():
      self._graph.write(name, array)
    self._mask_BWU, self._position_BU = (
      np.concatenate([x, np.zeros([*x.shape[:-1], room - cells], x.dtype)], axis=-1)
      for x in (self._mask_BWU, self._position_BU)
    )
    self._find_free()

  def _shapes(self, room: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoder's inputs with `room` cells a row."""
    source_length = self._memory['segments'].shape[1] if 'segments' in self._memory else 0
    sizes = {'memory': source_length, 'segments': source_length, 'cache': room, 'mask': room, 'offsets': room}
    shapes = {}
    for name, (_, *shape) in self._graph.shapes.items():
      if name != 'time':
        shapes[name] = (len(self._mask_BWU), *(sizes[name.partition('_')[0]] if size < 0 else size for size in shape))
    return shapes

  def _find_free(self) -> None:
    """Finds the cells that no hypothesis uses, as many in each row; others that become free are found when they end."""
    used_BU = self._mask_BWU.any(axis=1)
    count = used_BU.shape[1] - self._most_used(used_BU)
    self._free_BC, self._next = np.argsort(used_BU, axis=1, kind='stable')[:, :count], 0

  @staticmethod
  def _most_used(used_BU: np.ndarray) -> int:
    """Cells of the row that uses most."""
    return int(np.count_nonzero(used_BU, axis=1).max())

  def run(self, ids_BW: np.ndarray, time: int, live_BW: np.ndarray, log_probs_BW: np.ndarray | None = None) -> None:
    """Runs a step of the decoder for the last symbol of each hypothesis, and writes the new keys and values.

    log_probs_BW: of the hypotheses, for its `next_` results; None: these are not read.
    """
    graph, rows_B1 = self._graph, np.arange(len(ids_BW))[:, np.newaxis]
    for name, value in {'ids': ids_BW, 'live': live_BW, 'mask': self._mask_BWU}.items():
      if self._others:
        value = np.pad(value, [(0, 0), (0, self._others), (0, 0)][: value.ndim])
      graph.write(name, value)
    if 'log_probs' in graph.shapes:
      scores_BW = graph.input('log_probs')
      scores_BW[:] = NEG_INF
      if log_probs_BW is not None:
        scores_BW[:, : self._width] = log_probs_BW
      del scores_BW  # a view, of which none may be held by the run
    graph.write('time', time)
    cells_BW = self._free_BC[:, self._next : self._next + self._width]
    if 'offsets' in graph.shapes:
      position_B1 = self._before_B1 + time
      graph.write('offsets', self._position_BU - position_B1)
      self._position_BU[rows_B1, cells_BW] = position_B1
    graph.run()
    self._next += self._width
    places = {}  # of the new keys and values in a cache [B * N * U, K], by N
    for name in self._caches:
      cache_BNUK, new_BNWK = graph.input(name), graph.output(name.replace('cache_', 'new_', 1))
      rows, heads, room, features = cache_BNUK.shape
      if heads not in places:
        heads_BN1 = np.arange(rows * heads).reshape(rows, heads, 1)
        places[heads] = (heads_BN1 * room + cells_BW[:, np.newaxis]).ravel()
      cache_BNUK.reshape(-1, features)[places[heads]] = new_BNWK[:, :, : self._width].reshape(-1, features)
      del cache_BNUK, new_BNWK  # views, of which none may be held by the next step
    self._mask_BWU[rows_B1, np.arange(self._width), cells_BW] = 1.0

  def follow(self, parents_BW: np.ndarray, live_BW: np.ndarray) -> None:
    """Moves the masks: hypothesis w of the next step, if it is live, continues parents_BW[:, w] of this one."""
    self._mask_BWU = self._mask_BWU[np.arange(len(parents_BW))[:, np.newaxis], parents_BW]
    self._mask_BWU *= live_BW[:, :, np.newaxis]
