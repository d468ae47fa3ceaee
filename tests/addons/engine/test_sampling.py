"""Samples of a batch whose finished rows leave it: each row keeps its own values, keys and listener."""

import types

import numpy as np
import pytest

from lingvo_moe.addons.engine import numpy_sampling
from lingvo_moe.vocab.vocab import PAD

LOGITS_V = np.array([-9, -9, -9, 0, 0.1, 0.2, 0.1, 0], np.float32)  # greedily 5, drawn all but evenly from 3 to 7
SHORT, LONG = 2, 9  # limits of the first and of the second row


class Cache:
  """FlatCache whose finished rows leave it at every step."""

  def __init__(self, decoder, memory, width, steps, prompt):
    self.decoder = decoder

  def is_due(self, live_B):
    return True

  def follow(self, parents_BW, live_BW):
    pass

  def keep(self, rows):
    self.decoder.rows = len(rows)

  def run(self, last_BW, time, live_BW):
    assert len(last_BW) == len(live_BW) == self.decoder.rows


@pytest.fixture
def drawn(monkeypatch):
  """Function that draws two rows, the first of two symbols, with temperatures of each: ids by row."""
  monkeypatch.setattr(numpy_sampling, 'FlatCache', Cache)
  logits = lambda decoder, name, width: np.tile(LOGITS_V, [decoder.rows, width, 1])
  monkeypatch.setattr(numpy_sampling.search, 'results', logits)
  monkeypatch.setattr(
    numpy_sampling.search, 'log_z', lambda decoder, width: np.zeros([decoder.rows, width], np.float32)
  )

  def draw(temperatures, watch=None):
    decoder = types.SimpleNamespace(rows=2)
    sampler = numpy_sampling.NumpySampler(np.array(temperatures, np.float32), np.zeros(2, int), np.ones(2, np.float32))
    keys, limits = np.array([[3], [4]], np.uint32), np.array([[SHORT], [LONG]])
    ids_BWT, lengths_BW, _ = numpy_sampling.sample(decoder, {}, sampler, keys, limits, np.zeros(2, int), watch=watch)
    return [ids_T[: length[0]].tolist() for (ids_T,), length in zip(ids_BWT, lengths_BW)]

  return draw


def test_a_row_keeps_its_temperature_once_another_has_left(drawn):
  short, long = drawn([1.0, 0.0])
  assert len(short) == SHORT and long == [5] * LONG
  short, long = drawn([0.0, 1.0])
  assert short == [5] * SHORT and len(long) == LONG and len(set(long)) > 2


def test_a_row_goes_on_as_its_own_listener_says_once_another_has_left(drawn):
  assert list(map(len, drawn([0.0, 0.0], lambda ids_BW: np.array([False, True])))) == [1, LONG]
  heard = []

  def until_the_fourth(ids_BW):
    heard.append(ids_BW[:, 0].tolist())
    return np.array([True, len(heard) < 4])

  assert list(map(len, drawn([0.0, 0.0], until_the_fourth))) == [SHORT, 4]
  assert heard == [[5, 5]] * SHORT + [[PAD, 5]] * 2
