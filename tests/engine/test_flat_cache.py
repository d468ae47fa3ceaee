"""Flat cache: what is kept stays with its positions, whether buffers are resized or not."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.engine.flat_cache import FlatCache

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


@pytest.mark.parametrize('parent', [0, 1])
def test_hypotheses_keep_their_past_while_positions_move_and_rows_leave(parent):
  graph, rows = NumberingGraph(), np.arange(3)
  segments = np.arange(3)[:, np.newaxis] + np.ones([1, 4], np.int32)
  memory = {'segments': segments, 'memory_keys_0': segments[:, np.newaxis, :, np.newaxis] * 1.0}
  cache, past = FlatCache(graph, memory, WIDTH, 60), []
  for time in range(60):
    live_BW = np.ones([len(rows), WIDTH], bool)
    if cache.is_full:
      kept = np.delete(np.arange(len(rows)), 0) if time > 40 and len(rows) > 1 else np.arange(len(rows))
      cache.keep(kept, live_BW)
      rows, live_BW = rows[kept], live_BW[kept]
    cache.run(np.zeros([len(rows), WIDTH], np.int32), time, live_BW)
    for row, number in enumerate(rows):
      assert [graph.owned(row, w) for w in range(WIDTH)] == [past, past]
      assert graph.input('memory_keys_0')[row].max() == number + 1
    past = [*past, 10 * time + parent]
    cache.follow(np.full([len(rows), WIDTH], parent))
  assert len(rows) == 1 and graph.resizes < 10
