"""Collectives on a torus, their times worked out by hand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from lingvo_moe.analysis import torus
from lingvo_moe.runtime.chips import CHIPS
from lingvo_moe.runtime.chips import HOP_SECONDS


class Device(NamedTuple):
  coords: tuple[int, ...]


def slice_of(shape, cores=2):
  return [Device((x, y, 0)) for y in range(shape[1]) for x in range(shape[0]) for _ in range(cores)]


def seconds(kind, size, shape, groups=None):
  devices = slice_of(shape)
  groups = np.arange(len(devices))[None] if groups is None else np.array(groups)
  return torus.seconds(kind, size, groups, devices, CHIPS['v3'])


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
