"""Flat cache: a hypothesis attends to its own past, in whatever cells that is, while rows grow and leave."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lingvo_moe.addons.engine import flat_cache
from lingvo_moe.addons.engine.flat_cache import FlatCache, Prompt

WIDTH = 3
KEYS = (-1, 1, -1, 1)
SHAPES = {
  'ids': (-1, WIDTH),
  'time': (1,),
  'live': (-1, WIDTH),
  'mask': (-1, WIDTH, -1),
  'offsets': (-1, -1),
  'segments': (-1, -1),
  'memory_keys_0': KEYS,
  'cache_keys_0': KEYS,
}


class NumberingGraph:
  """Decoder whose new keys of hypothesis w at a time are 10 * time + w, and that notes its sizes."""

  def __init__(self):
    self.inputs, self.shapes = list(SHAPES), SHAPES
    self.sizes, self.all_sizes, self._arrays = {}, [], {'time': np.zeros([1], np.int32)}

  def resize(self, sizes):
    if sizes == self.sizes:
      return False
    self.sizes = sizes
    self.all_sizes.append(sizes)
    self._arrays |= {name: np.full(shape, np.nan) for name, shape in sizes.items()}
    return True

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
    """(offset, key) of each cell that a hypothesis attends to, in order."""
    keys_U, mask_WU = self._arrays['cache_keys_0'][row, 0, :, 0], self._arrays['mask'][row]
    at_U = np.flatnonzero(mask_WU[hypothesis])
    return sorted(zip(self._arrays['offsets'][row][at_U].tolist(), keys_U[at_U].tolist()))


def searched(graph, seed, rows=5, width=WIDTH, steps=40, prompt=None):
  """Runs steps in which hypotheses have random parents and some end; compares what each attends to with its past."""
  rng, numbers = np.random.default_rng(seed), np.arange(rows)
  segments = 100.0 * seed + numbers[:, np.newaxis] + np.zeros([1, 4])
  memory = {'segments': segments, 'memory_keys_0': segments[:, np.newaxis, :, np.newaxis]}
  cache = FlatCache(graph, memory, width, steps, prompt)
  assert memory.keys() == {'segments'}  # the rest is in the buffers alone
  pasts = [[[-1.0] * (prompt.lengths_B[row] if prompt else 0) for _ in range(width)] for row in range(rows)]
  live_BW = np.ones([rows, width], bool)
  for step in range(steps):
    live_B = live_BW.any(axis=1)
    if cache.is_due(live_B):
      kept = np.flatnonzero(live_B)
      cache.keep(kept)
      numbers, live_BW, pasts = numbers[kept], live_BW[kept], [pasts[row] for row in kept]
    cache.run(np.zeros([len(numbers), width], np.int32), step, live_BW)
    for row, number in enumerate(numbers):
      assert (graph.input('memory_keys_0')[row] == 100 * seed + number).all()
      for w in np.flatnonzero(live_BW[row]):
        past = pasts[row][w]
        assert graph.owned(row, w) == list(zip(range(-len(past), 0), past))
    parents_BW = rng.integers(0, width, live_BW.shape)
    pasts = [[[*past[parent], 10.0 * step + parent] for parent in of_row] for past, of_row in zip(pasts, parents_BW)]
    # A row ends now and then; a hypothesis has a live parent.
    goes_on_B1 = rng.random([len(numbers), 1]) > 0.02
    live_BW = np.take_along_axis(live_BW, parents_BW, axis=1) & (rng.random(live_BW.shape) > 0.05) & goes_on_B1
    if not live_BW.any():
      return step
    cache.follow(parents_BW, live_BW)
  return steps


@pytest.mark.parametrize('width', range(1, WIDTH + 1))
def test_a_hypothesis_attends_to_its_past_while_cells_are_used_again_and_rows_leave(width):
  assert max(searched(NumberingGraph(), seed, width=width) for seed in range(8)) > 20


def test_what_an_earlier_search_left_in_cells_does_not_matter():
  graph = NumberingGraph()
  searched(graph, 1, steps=1)
  graph.input('cache_keys_0')[:] = np.nan
  searched(graph, 2, steps=1)
  assert len(graph.all_sizes) == 1


def test_a_prompt_comes_before():
  lengths_B = np.array([3, 0, 2, 3, 1])
  mask_BP = np.arange(3) < lengths_B[:, np.newaxis]
  caches = {'cache_keys_0': np.where(mask_BP, -1.0, 7.0)[:, np.newaxis, :, np.newaxis]}
  searched(NumberingGraph(), 1, prompt=Prompt(np.zeros(5), lengths_B, mask_BP, caches, np.zeros([5, 3])))


def test_cells_are_few_and_sizes_change_seldom():
  graph, live_BW = NumberingGraph(), np.ones([20, WIDTH], bool)
  memory = {'segments': np.ones([20, 4]), 'memory_keys_0': np.ones([20, 1, 4, 1])}
  cache = FlatCache(graph, memory, WIDTH, 50)
  for step in range(50):
    if cache.is_due(live_BW.any(axis=1)):
      cache.keep(np.arange(20))
    cache.run(np.zeros([20, WIDTH], np.int32), step, live_BW)
    cache.follow(np.zeros([20, WIDTH], int), live_BW)  # all continue one: a cell more is used at each step
  cells = [sizes['cache_keys_0'][2] for sizes in graph.all_sizes]
  assert len(cells) <= 4 and max(cells) <= 50 + WIDTH + flat_cache.ROOM


def test_cells_stay_as_many_where_rows_leave_and_grow_by_a_quarter_where_they_are_full():
  graph, rows, sizes = NumberingGraph(), 8, []
  memory = {'segments': np.zeros([rows, 4]), 'memory_keys_0': np.zeros([rows, 1, 4, 1])}
  cache = FlatCache(graph, memory, WIDTH, 120)
  for step in range(100):  # each hypothesis goes on by itself, so that no cell becomes free
    live_BW = np.ones([rows, WIDTH], bool)
    sizes.append(graph.sizes['mask'][2])
    if cache.is_due(live_BW.any(axis=1)):
      cache.keep(np.arange(rows))
      assert graph.sizes['mask'][2] >= sizes[-1] * 5 // 4
    cache.run(np.zeros([rows, WIDTH], np.int32), step, live_BW)
    cache.follow(np.broadcast_to(np.arange(WIDTH), live_BW.shape), live_BW)
    if step in (0, 50):
      rows, before = rows - 2, graph.sizes['mask'][2]
      cache.keep(np.arange(rows))
      assert graph.sizes['mask'][2] == before
  assert len({*sizes}) <= 10 and sizes[-1] <= 1.5 * 100 * WIDTH


def test_one_search_at_a_time_has_its_caches_in_memory_twice(monkeypatch):
  moving, take = set(), np.take

  def noted(buffer, rows, axis, out):
    moving.add(threading.get_ident())
    time.sleep(0.001)
    assert len(moving) == 1
    return take(buffer, rows, axis=axis, out=out)

  class NotedGraph(NumberingGraph):
    def resize(self, sizes):
      moving.discard(threading.get_ident())
      return super().resize(sizes)

  monkeypatch.setattr(flat_cache.np, 'take', noted)
  with ThreadPoolExecutor(4) as pool:
    assert len(list(pool.map(lambda seed: searched(NotedGraph(), seed), range(8)))) == 8
