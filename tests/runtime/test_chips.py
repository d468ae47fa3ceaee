"""Topologies by name."""

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime.chips import CHIPS, Topology


@pytest.mark.parametrize(
  'text, devices', [('v3:32x32', 2048), ('v3:8x8', 128), ('v4:4x4x4', 128), ('v5p:4x4x4', 64), ('v6e:16x16', 256)]
)
def test_devices_are_cores_or_chips(text, devices):
  topology = Topology.parse(text)
  assert topology.num_devices == devices and str(topology) == text


def test_peak_is_the_clock_times_the_multipliers():
  for chip in CHIPS.values():
    if chip.clock:
      units = chip.flops / chip.clock / (2 * 128 * 128)
      assert units == pytest.approx(round(units), rel=0.02)
    assert 0.9 * chip.hbm < chip.usable <= chip.hbm


@pytest.mark.parametrize(
  'text, message',
  [
    ('v5:4x4', r"there is no TPU or GPU 'v5'; closest: v"),
    ('v3', r"chips along each axis, such as 'v3:4x4'; saw 'v3'"),
    ('v3:4x4x4', r"such as 'v3:4x4'; saw 'v3:4x4x4'"),
    ('v4:4xx4', r"such as 'v4:4x4x4'; saw 'v4:4xx4'"),
    ('v4:0x4', r"saw 'v4:0x4'"),
  ],
)
def test_mistakes_are_told(text, message):
  with pytest.raises(UserError, match=message):
    Topology.parse(text)
