"""Lanes: batches computed side by side, in order, each by graphs that no other uses meanwhile."""

import threading
import time

import pytest

from lingvo_moe.addons.engine import stages
from lingvo_moe.addons.engine.lanes import Lanes

NAMES = 'decoder', 'encoder'


@pytest.fixture
def loaded(monkeypatch):
  """(name, threads) of the graphs that were loaded."""
  made = []
  monkeypatch.setattr(stages, 'load', lambda folder, name, threads, experts: made.append((name, threads)) or object())
  return made


def test_texts_of_two_lanes_are_divided_evenly_the_longest_first_and_few_are_one_batch():
  lengths = [3, 0, 9, *[5] * 13]
  of = lambda threads, lengths, tokens: Lanes('', threads).batches(lengths, tokens)
  assert of(2, lengths, 1000) == [[2, *range(3, 16), 0]]  # 15 with a length
  first, second = of(2, [*lengths, 4], 1000)
  assert first[0] == 2 and len(first) == len(second) == 8 and second[-2:] == [16, 0]
  assert of(1, [*lengths, 4], 1000) == [[*first, *second]]
  assert [len(batch) for batch in of(2, [10] * 20, 100)] == [5] * 4  # half of the tokens for each lane
  assert [len(batch) for batch in of(1, [10] * 120, 2048)] == [51, 51, 18]  # 512 tokens
  assert [len(batch) for batch in of(1, [64] * 40, 2048)] == [16, 16, 8]  # or 16 rows
  assert of(2, [500, 2], 100) == [[0], [1]] and of(2, [0, 0], 100) == []


def test_results_are_in_order_and_a_graph_has_one_batch_at_a_time(loaded):
  lanes, busy, together, met = Lanes('', 5), set(), set(), threading.Barrier(2)

  def run(batch, decoder, encoder):
    assert not busy & {decoder, encoder}
    busy.update({decoder, encoder})
    if batch[0] < 2:
      met.wait(timeout=60)  # both lanes compute
    together.add(frozenset(busy))
    busy.difference_update({decoder, encoder})
    return -batch[0]

  for _ in range(2):
    assert list(lanes.run(run, [[i] for i in range(9)], NAMES)) == [([i], -i) for i in range(9)]
  assert loaded == [('decoder', 2), ('encoder', 2)] * 2 and max(map(len, together)) == 4
  assert list(lanes.run(lambda batch, *graphs: len(graphs), [[0]], NAMES)) == [
    ([0], 2)
  ]  # a batch alone gets all threads
  assert loaded[4:] == [('decoder', 5), ('encoder', 5)]
  assert list(lanes.run(run, [], NAMES)) == []


def test_batches_that_nobody_waits_for_are_not_computed_and_an_error_frees_its_lane(loaded):
  lanes, begun = Lanes('', 2), []

  def run(batch, decoder):
    begun.append(batch)
    if batch[0] == 1:
      raise ValueError('bad batch')
    if batch[0] == 0:
      time.sleep(0.01)  # as long as the caller needs to see the error

  with pytest.raises(ValueError, match='bad batch'):
    list(lanes.run(run, [[1], *[[0]] * 999], NAMES[:1]))
  assert len(begun) < 900
  assert len(list(lanes.run(run, [[2]] * 8, NAMES[:1]))) == 8
  assert lanes._idle[2].qsize() == 2
