"""Topologies by name."""

import re

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime.chips import CHIPS, GPUS, Topology


@pytest.mark.parametrize(
  'text, devices',
  [('v3:32x32', 2048), ('v3:8x8', 128), ('v4:4x4x4', 128), ('v5p:4x4x4', 64), ('v6e:16x16', 256), ('h100:8', 8)],
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


def test_a_gpu_alone_needs_no_number():
  assert Topology.parse('a100') == Topology.parse('a100:1')


def test_the_compiler_reads_the_figures_of_the_roofline():
  for gpu in GPUS.values():
    fields = dict(re.findall(r'(\w+): (\S+)', gpu.target))
    assert int(fields['device_memory_size']) == gpu.memory and float(fields['memory_bandwidth']) == gpu.hbm_bandwidth
    # A quarter of a core makes 256 bfloat16 products in a clock (A100), or 512; an H100's then runs at 1.83 GHz.
    per_core = gpu.flops / (2 * int(fields['core_count']) * 4)
    assert 0.9 * gpu.ghz <= per_core / {'8': 256e9, '9': 512e9}[fields['major']] <= gpu.ghz * 1.001


@pytest.mark.parametrize(
  'text, message',
  [
    ('v5:4x4', r"there is no TPU or GPU 'v5'; closest: v"),
    ('v3', r"chips along each axis, such as 'v3:4x4'; saw 'v3'"),
    ('v3:4x4x4', r"such as 'v3:4x4'; saw 'v3:4x4x4'"),
    ('v4:4xx4', r"such as 'v4:4x4x4'; saw 'v4:4xx4'"),
    ('v4:0x4', r"saw 'v4:0x4'"),
    ('h101', r"there is no TPU or GPU 'h101'; closest: h100, h200"),
    ('h100:', r"GPUs are 1 to 8 of one host, such as 'h100:8'; saw 'h100:'"),
    ('h100:9', r"saw 'h100:9'"),
    ('a100:2x2', r"such as 'a100:8'; saw 'a100:2x2'"),
  ],
)
def test_mistakes_are_told(text, message):
  with pytest.raises(UserError, match=message):
    Topology.parse(text)
