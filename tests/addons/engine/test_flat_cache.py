"""Flat cache: what is kept stays with its positions, whether buffers are resized or not."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lingvo_moe.addons.engine import flat_cache
from lingvo_moe.addons.engine.flat_cache import ROOM, FlatCache

WIDTH = 2


KEYS = (-1, 1, -1, 1)
SHAPES = {
  'ids': (-1, WIDTH),
  'time': (1,),
  'live': (-1, WIDTH),
  'mask': (-1, WIDTH, -1),
  'segments': (-1, -1),
  'memory_keys_0': KEYS,
  'cache_keys_0': KEYS,
}


class NumberingGraph:
  """Decoder whose new keys of hypothesis w at a time are 10 * time + w, and that counts its resizes."""

  def __init__(self):
    self.inputs, self.shapes = list(SHAPES), SHAPES
    self.sizes, self.resizes, self._arrays = {}, 0, {'time': np.zeros([1], np.int32)}

  def resize(self, sizes):
    if sizes != self.sizes:
      self.sizes, self.resizes = sizes, self.resizes + 1
      self._arrays |= {name: np.full(shape, np.nan) for name, shape in sizes.items()}

  def input(self, name):
    return self._arrays[name]

  def write(self, name, value):
    self._arrays[name][...] = value

  def output(self, name):
    assert name == 'new_keys_0'
    rows = len(self._arrays['ids'])
    return np.broadcast_to((10 * self._arrays['time'][0] + np.arange(WIDTH))[:, np.newaxis], [rows, 1, WIDTH, 1])

  def run(self):
    assert np.isfinite(self._arrays['cache_keys_0']).all()

  def release(self):
    pass

  def owned(self, row, hypothesis):
    """Keys that a hypothesis attends to."""
    keys_U, mask_WU = self._arrays['cache_keys_0'][row, 0, :, 0], self._arrays['mask'][row]
    return keys_U[mask_WU[hypothesis] > 0].tolist()


def searched(graph, parent, first):
  """Runs 60 steps, in which all hypotheses continue one, and compares what they attend to.

  The sources of 3 rows have the numbers `first` and those after it.
  """
  rows = np.arange(3)
  segments = np.arange(first, first + 3)[:, np.newaxis] + np.zeros([1, 4], np.int32)
  memory = {'segments': segments, 'memory_keys_0': segments[:, np.newaxis, :, np.newaxis] * 1.0}
  cache, past = FlatCache(graph, memory, WIDTH, 60), []
  assert memory.keys() == {'segments'}  # the rest is in the buffers alone
  for step in range(60):
    live_BW = np.ones([len(rows), WIDTH], bool)
    if cache.is_full:
      kept = np.delete(np.arange(len(rows)), 0) if step > 40 and len(rows) > 1 else np.arange(len(rows))
      cache.keep(kept, live_BW)
      rows, live_BW = rows[kept], live_BW[kept]
    cache.run(np.zeros([len(rows), WIDTH], np.int32), step, live_BW)
    for row, number in enumerate(rows):
      assert [graph.owned(row, w) for w in range(WIDTH)] == [past, past]
      assert (graph.input('memory_keys_0')[row] == first + number).all()
    past = [*past, 10 * step + parent]
    cache.follow(np.full([len(rows), WIDTH], parent))
  assert len(rows) == 1


@pytest.mark.parametrize('parent', [0, 1])
def test_hypotheses_keep_their_past_while_positions_move_and_rows_leave(parent):
  searched(graph := NumberingGraph(), parent, 1)
  assert graph.resizes < 10


def test_the_last_room_is_that_of_the_steps_that_are_left():
  graph, live_BW = NumberingGraph(), np.ones([1, WIDTH], bool)
  memory = {'segments': np.ones([1, 4], np.int32), 'memory_keys_0': np.ones([1, 1, 4, 1])}
  cache = FlatCache(graph, memory, WIDTH, ROOM + 3)
  assert graph.sizes['cache_keys_0'] == (1, 1, ROOM * WIDTH, 1)
  for step in range(ROOM):
    cache.run(np.zeros([1, WIDTH], np.int32), step, live_BW)
  cache.keep(np.arange(1), live_BW)
  assert graph.sizes['cache_keys_0'] == (1, 1, (ROOM + 3) * WIDTH, 1)


def test_one_search_at_a_time_has_its_caches_in_memory_twice(monkeypatch):
  moving, move = set(), flat_cache._move

  def noted(from_BNUK, to_BNUK, *where):
    if to_BNUK is not from_BNUK:
      moving.add(threading.get_ident())
      time.sleep(0.001)
      assert len(moving) == 1
    move(from_BNUK, to_BNUK, *where)

  class NotedGraph(NumberingGraph):
    def resize(self, sizes):
      moving.discard(threading.get_ident())
      super().resize(sizes)

  monkeypatch.setattr(flat_cache, '_move', noted)
  with ThreadPoolExecutor(4) as pool:
    assert len(list(pool.map(lambda first: searched(NotedGraph(), 0, first), range(1, 80, 10)))) == 8
