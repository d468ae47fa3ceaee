"""Numbers reported by GShard (arXiv 2006.16668), and the settings with which each of its models is compiled here.

Only numbers that the paper prints are here. Of figures that it draws (the bars of Figures 7 and 8, the curves of
Figure 9), only the statements in its text are.
"""

import dataclasses
from typing import Any

from lingvo_moe.runtime.chips import Topology

USABLE_GIB = 15.48  # memory that the compiler allows a program, of the 16 GiB of a core of TPU v3
_YEAR = 365.25 * 86400
_TOKENS_A_CORE = 2048  # source positions: 4M on 2048 cores


@dataclasses.dataclass(frozen=True)
class Case:
  """Train step, or other program, to compile.

  Attributes:
    model: registered name.
    topology: the TPU slice.
    mesh: devices by axis.
    values: fields of the configuration that differ from the model's own.
    split_dense: True to split dense weights over the devices too.
    program: as in lingvo-moe cost.
  """

  model: str
  topology: str
  mesh: str
  values: tuple[tuple[str, Any], ...] = ()
  split_dense: bool = False
  program: str = 'train'

  @property
  def devices(self) -> int:
    return Topology.parse(self.topology).num_devices


@dataclasses.dataclass(frozen=True)
class Row:
  """Model of Tables 1 and 3; None where the paper gives no number.

  Attributes:
    name: as printed.
    case: the train step to compile for it.
    weights: number of weights, from Table 1 or section 4.2.
    layers: number of layers of encoder and decoder together.
    batch_tokens: from Table 3.
    steps_per_second: from Table 3, measured.
    core_years: number of cores times the time of training in years, from Table 3.
    steps: training steps, from the footnote on T(96L).
    billions: of tokens until the cross-entropy is LOSSES, from Table 2.
    bleu: mean over 100 languages into English, from Figure 6.
  """

  name: str
  case: Case
  weights: float
  layers: int
  batch_tokens: int | None = None
  steps_per_second: float | None = None
  core_years: float | None = None
  steps: int | None = None
  billions: tuple[int | None, ...] = (None,) * 3
  bleu: float | None = None

  def core_years_at(self, steps_per_second: float | None) -> float | None:
    """TPU core-years of the paper's steps at another speed; None if the paper gives neither steps nor years."""
    if not steps_per_second or not self.core_years:
      return None
    if self.steps_per_second:
      return self.core_years * self.steps_per_second / steps_per_second
    return self.steps / steps_per_second * self.case.devices / _YEAR


def _moe(name, topology, **settings) -> Case:
  return Case(f'mt.m4.{name}', topology, f'expert:{Topology.parse(topology).num_devices}', **settings)


_M = 2**20
_NONE, _ATTENTION = (('remat', 'none'),), (('remat', 'attention'),)  # the fastest that fits; else blocks

# All settings that differ from a model's own are in this file.
_36L, _12L = _moe('MoE2048E36L', 'v3:32x32', values=_ATTENTION), _moe('MoE2048E12L', 'v3:32x32', values=_NONE)
_512E_36L, _512E_12L = (_moe(f'MoE512E{n}L', 'v3:16x16', values=v) for n, v in ((36, _ATTENTION), (12, _NONE)))
_128E_36L, _128E_12L = _moe('MoE128E36L', 'v3:8x8'), _moe('MoE128E12L', 'v3:8x8', values=_ATTENTION)
TABLE_1 = (
  Row('MoE(2048E, 36L)', _36L, 600e9, 36, 4 * _M, 0.72, 22.4, None, (82, 175, 542), 44.3),
  Row('MoE(2048E, 12L)', _12L, 200e9, 12, 4 * _M, 2.15, 7.5, None, (176, 484, 1780), 41.3),
  Row('MoE(512E, 36L)', _512E_36L, 150e9, 36, _M, 1.05, 15.5, None, (66, 170, 567), 43.7),
  Row('MoE(512E, 12L)', _512E_12L, 50e9, 12, _M, 3.28, 4.9, None, (141, 486, None), 40.0),
  Row('MoE(128E, 36L)', _128E_36L, 37e9, 36, _M, 0.67, 6.1, None, (321, 1074, None), 39.0),
  Row('MoE(128E, 12L)', _128E_12L, 12.5e9, 12, _M, 2.16, 1.9, None, (995, None, None), 36.7),
  Row('MoE(2048E, 60L)', _moe('MoE2048E60L', 'v3:32x32', split_dense=True), 1e12, 60),
  Row(
    'T(96L)',
    Case('mt.m4.T96L', 'v3:32x32', 'data:2048', split_dense=True),
    2.3e9,
    96,
    4 * _M,
    None,
    235.5,
    300_000,
    bleu=36.9,
  ),
)
LOSSES = (0.7, 0.6, 0.5)  # of Table 2, nats per token
BILINGUAL_BLEU, BILINGUAL_CORE_YEARS = 30.8, 29  # of 100 bilingual baselines: mean (Figure 6), all together
# A model that section 5.1 discusses and Table 1 does not list.
MOE_2048E_24L = Row('MoE(2048E, 24L)', _moe('MoE2048E24L', 'v3:32x32', values=_NONE), None, 24)

# The model of 600B weights on newer machines, with 4M source tokens a batch. Micro-batches need an extra buffer for the
# sum of their gradients, for which v6e has no memory.
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
  """Model of 12 layers with an expert and a group per core, and 2048 source tokens per core (section 5.2).

  Blocks are rematerialised, as in the registered models.
  """
  devices = Topology.parse(topology).num_devices
  values = (('num_experts', devices), ('num_groups', devices), ('batch_tokens', _TOKENS_A_CORE * devices))
  return _moe('MoE2048E12L', topology, values=() if devices == 2048 else values)


def tiny(case: Case) -> Case:
  """Tiny sibling of a giant model, on 8 cores and with its own batch size."""
  axis = case.mesh.partition(':')[0]
  values = tuple(
    item for item in case.values if item[0] not in ('batch_tokens', 'eval_batch_tokens', 'micro_batches', 'num_groups')
  )
  return dataclasses.replace(case, model=f'{case.model}Tiny', topology='v3:2x2', mesh=f'{axis}:8', values=values)


def tiny_growing(topology: str) -> Case:
  """Tiny sibling of `growing`, with 256 source tokens a core."""
  devices = Topology.parse(topology).num_devices
  values = (('num_experts', devices), ('num_groups', devices), ('batch_tokens', 256 * devices))
  return _moe('MoE2048E12LTiny', topology, values=values)


# Statements about the figures in the text.
FIGURE_8 = {
  # share of AllToAll in the forward time of a MoE layer and the Transformer layer next to it (section 5.2)
  'AllToAll': {128: 0.16, 2048: 0.36},
  'step': 1.7,  # time with 2048 experts / time with 128
  'AllToAll grows': 3.75,  # time of AllToAll with 2048 experts / with 128
  'cumsum': 0.1,  # the gate without its einsums takes less of the time of the layers, with 2048 experts
}
# Share of all cycles that is spent on rematerialisation, by layers (section 5.1).
REMATERIALISED = {12: 0.0, 24: 0.0, 36: 0.28, 60: 0.34}
# Bytes of a partition; time of AllToAll with 2048 partitions / with 16.
FIGURE_9 = {'sizes': (8 * _M, 32 * _M), 'AllToAll grows': 9.0}
