"""Gates by the name that a configuration gives them: a gate is a file here and a line in this table."""

import dataclasses
from typing import Any

from lingvo_moe.core.live_names import LiveNames
from lingvo_moe.layers.gates.by_task import ByPair, ByTarget
from lingvo_moe.layers.gates.expert_choice import ExpertChoice
from lingvo_moe.layers.gates.gate import Gate
from lingvo_moe.layers.gates.hierarchical import Hierarchical
from lingvo_moe.layers.gates.noisy_top_k import NoisyTopK
from lingvo_moe.layers.gates.soft_mixture import SoftMixture
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.layers.gates.top_k import Switch, TopK, TopKUnnormalised

GATES: dict[str, type[Gate]] = {
  'top2': Top2,
  'top_k': TopK,
  'top_k_unnormalised': TopKUnnormalised,
  'switch': Switch,
  'noisy_top_k': NoisyTopK,
  'hierarchical': Hierarchical,
  'expert_choice': ExpertChoice,
  'soft': SoftMixture,
  'by_target': ByTarget,
  'by_pair': ByPair,
}


@dataclasses.dataclass(frozen=True)
class ThatHave(LiveNames):
  """Names of the gates, also of one's own, that have a field of some name, or an attribute of it that is True."""

  name: str
  table = GATES

  def holds(self, gate: type[Gate]) -> bool:
    return self.name in _options(gate) or getattr(gate, self.name, None) is True


def make(name: str, config: Any) -> Gate:
  """Gate by name, with its fields set from the fields of equal names of `config`."""
  options = [option for option in _options(GATES[name]) if hasattr(config, option)]
  return GATES[name](**{option: getattr(config, option) for option in options})


def _options(gate: type[Gate]) -> list[str]:
  return [field.name for field in dataclasses.fields(gate) if field.init]
