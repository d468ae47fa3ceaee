"""Collectives on a torus, their times worked out by hand."""

import numpy as np
import pytest

from lingvo_moe.addons.analysis import torus
from lingvo_moe.runtime.chips import CHIPS, HOP_SECONDS, Topology


def slice_of(shape, cores=2):
  return np.array([(x, y, 0) for y in range(shape[1]) for x in range(shape[0]) for _ in range(cores)])


def seconds(kind, size, shape, groups=None):
  devices = slice_of(shape)
  groups = np.arange(len(devices))[None] if groups is None else np.array(groups)
  return torus.seconds(kind, size, groups, devices, CHIPS['v3'])


def seconds_v5p(kind, size, shape, groups):
  topology = Topology(CHIPS['v5p'], shape)
  return torus.seconds(kind, size, np.array(groups), torus.coordinates(topology), topology.chip)


def test_an_all_to_all_grows_with_the_root_of_the_devices_and_an_all_reduce_does_not():
  size = 10**9  # hops do not count
  assert seconds('all-to-all', size, (8, 8)) / seconds('all-to-all', size, (4, 4)) == pytest.approx(2, rel=1e-3)
  assert seconds('all-reduce', size, (8, 8)) / seconds('all-reduce', size, (4, 4)) == pytest.approx(1, rel=0.06)
  # A whole pod: half of 2048 x 10^9 bytes crosses the middle, half of that each way, over 2 x 32 links of 82 GB/s.
  assert seconds('all-to-all', size, (32, 32)) == pytest.approx(2048 * 1e9 / 4 / (64 * 82e9), rel=1e-3)


def test_rings_by_hand():
  # 4 x 4 chips of an open grid: one link onwards along each axis; 15 of 16 parts pass, there and back, over 3 + 3 hops.
  expected = 2 * (1e9 * 15 / 16 / (2 * 82e9) + 6 * HOP_SECONDS)
  assert seconds('all-reduce', 10**9, (4, 4)) == pytest.approx(expected)
  assert seconds('all-gather', 10**9, (4, 4)) == pytest.approx(expected / 2)


def test_cores_of_a_chip_need_no_link():
  assert seconds('all-reduce', 450, (4, 4), groups=[[0, 1], [2, 3]]) == pytest.approx(1e-9)


def test_groups_of_one_core_a_chip_share_links_with_those_of_the_other_core():
  together = np.arange(32)[None]
  of_a_core = [range(0, 32, 2), range(1, 32, 2)]
  assert seconds('all-gather', 10**9, (4, 4), of_a_core) == pytest.approx(
    2 * seconds('all-gather', 10**9, (4, 4), together), rel=1e-3
  )


def test_the_ends_of_part_of_an_axis_are_not_linked():
  # Four chips: the whole of an axis of 4, or half of one of 8, with one link from each to the next in place of two.
  ring = seconds_v5p('all-gather', 10**9, (4, 1, 1), [range(4)])
  line = seconds_v5p('all-gather', 10**9, (8, 1, 1), [range(4), range(4, 8)])
  assert ring == pytest.approx(1e9 * 3 / 4 / (2 * 100e9) + 2 * HOP_SECONDS)
  assert line == pytest.approx(1e9 * 3 / 4 / 100e9 + 3 * HOP_SECONDS)


def test_an_all_to_all_is_limited_by_the_axis_whose_ends_are_not_linked():
  # A box of 4 x 4 chips in one of 4 x 8: rings along the first axis, lines along the second, with 4 links across a cut.
  box = [8 * a + b for a in range(4) for b in range(4)]
  found = seconds_v5p('all-to-all', 10**9, (4, 8, 1), [box])
  assert found == pytest.approx(16 * 1e9 / 4 / (4 * 100e9) + (2 + 3) * HOP_SECONDS)


def test_of_the_pairs_of_a_permute_the_farthest_counts():
  pairs = [[0, 1], [1, 7], [2, 3]]  # cores of one chip; one end of a line of four chips to the other; cores of one
  for order in (pairs, pairs[::-1], [pairs[1], pairs[0]]):
    assert seconds('collective-permute', 10**9, (4, 1), order) == pytest.approx(1e9 / 82e9 + 3 * HOP_SECONDS)
