"""What GShard (arXiv 2006.16668) reports, and how each of its models is compiled here to stand beside it.

Numbers are those that the paper prints; what it only draws (the bars of Figures 7 and 8, the curves of Figure 9) is not
here, but for what its text says of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_moe.runtime.chips import Topology

USABLE_GIB = 15.48  # of the 16 of a core of TPU v3, what the compiler allows a program
_TOKENS_A_CORE = 2048  # source positions: 4M on 2048 cores


@dataclasses.dataclass(frozen=True)
class Case:
  """A train step to be compiled.

  Attributes:
    model: registered name.
    topology: the slice.
    mesh: devices by axis.
    values: of the configuration, where they are not the model's own.
    split_dense: whether dense weights are split over the devices too.
  """

  model: str
  topology: str
  mesh: str
  values: tuple[tuple[str, Any], ...] = ()
  split_dense: bool = False

  @property
  def devices(self) -> int:
    return Topology.parse(self.topology).num_devices


@dataclasses.dataclass(frozen=True)
class Row:
  """A model of Tables 1 and 3; None where the paper gives no number.

  Attributes:
    name: as printed.
    case: here.
    weights: Table 1, or section 4.2.
    layers: of encoder and decoder together.
    batch_tokens: Table 3.
    steps_per_second: Table 3, measured.
  """

  name: str
  case: Case
  weights: float
  layers: int
  batch_tokens: int | None = None
  steps_per_second: float | None = None


def _moe(name, topology, **settings) -> Case:
  return Case(f'mt.m4.{name}', topology, f'expert:{Topology.parse(topology).num_devices}', **settings)


_M = 2**20

# Every setting that is not a model's own stands here.
TABLE_1 = (
  Row('MoE(2048E, 36L)', _moe('MoE2048E36L', 'v3:32x32'), 600e9, 36, 4 * _M, 0.72),
  Row('MoE(2048E, 12L)', _moe('MoE2048E12L', 'v3:32x32'), 200e9, 12, 4 * _M, 2.15),
  Row('MoE(512E, 36L)', _moe('MoE512E36L', 'v3:16x16'), 150e9, 36, _M, 1.05),
  Row('MoE(512E, 12L)', _moe('MoE512E12L', 'v3:16x16'), 50e9, 12, _M, 3.28),
  Row('MoE(128E, 36L)', _moe('MoE128E36L', 'v3:8x8'), 37e9, 36, _M, 0.67),
  Row('MoE(128E, 12L)', _moe('MoE128E12L', 'v3:8x8'), 12.5e9, 12, _M, 2.16),
  Row('MoE(2048E, 60L)', _moe('MoE2048E60L', 'v3:32x32', split_dense=True), 1e12, 60),
  Row('T(96L)', Case('mt.m4.T96L', 'v3:32x32', 'data:2048', split_dense=True), 2.3e9, 96, 4 * _M),
)
# Beside Table 1, of the models that section 5.1 speaks of.
MOE_2048E_24L = Row('MoE(2048E, 24L)', _moe('MoE2048E24L', 'v3:32x32'), None, 24)

# The model of 600B weights on newer machines: 4M source tokens a batch. Gradients are added up over micro-batches in a
# place of their own, which v6e has no room for.
NEWER = (
  *(
    _moe('MoE2048E36L', topology, values=(('micro_batches', micro_batches),))
    for topology, micro_batches in (('v5p:4x4x4', 32), ('v5p:4x4x8', 16), ('v5p:4x8x8', 8), ('v6e:16x16', 8))
  ),
  _moe('MoE2048E36L', 'v6e:16x16', split_dense=True),
)

SQUARES = ('v3:2x2', 'v3:4x4', 'v3:8x8', 'v3:16x16', 'v3:32x32')  # 8 to 2048 cores
SLICES = ('v3:2x4', 'v3:4x4', 'v3:4x8', 'v3:8x8', 'v3:8x16', 'v3:16x16', 'v3:16x32', 'v3:32x32')  # 16 to 2048: Figure 9


def growing(topology: str) -> Case:
  """12 layers with as many experts and groups as the slice has cores, and 2048 source tokens a core (section 5.2)."""
  devices = Topology.parse(topology).num_devices
  own = devices == 2048  # so that it is the model of Table 1, and compiled once
  values = (('num_experts', devices), ('num_groups', devices), ('batch_tokens', _TOKENS_A_CORE * devices))
  return _moe('MoE2048E12L', topology, values=() if own else values)


def tiny(case: Case) -> Case:
  """The sibling of a giant on 8 cores, whose batch has its own size."""
  axis = case.mesh.partition(':')[0]
  values = tuple(item for item in case.values if item[0] not in ('batch_tokens', 'micro_batches', 'num_groups'))
  return Case(f'{case.model}Tiny', 'v3:2x2', f'{axis}:8', values, case.split_dense)


def tiny_growing(topology: str) -> Case:
  """As `growing`, of tiny layers and 256 source tokens a core."""
  devices = Topology.parse(topology).num_devices
  values = (('num_experts', devices), ('num_groups', devices), ('batch_tokens', 256 * devices))
  return _moe('MoE2048E12LTiny', topology, values=values)


# What the text says of the figures.
FIGURE_8 = {
  # share of an MoE layer and the Transformer layer beside it, forward, that AllToAll takes (section 5.2)
  'AllToAll': {128: 0.16, 2048: 0.36},
  'step': 1.7,  # times as long with 2048 experts as with 128
  'AllToAll grows': 3.75,  # likewise
}
FIGURE_9 = {'sizes': (8 * _M, 32 * _M), 'AllToAll grows': 9.0}  # bytes of a partition; from 16 partitions to 2048
