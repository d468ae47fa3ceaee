"""Pruning of experts: a model without the experts that some languages use least in each MoE layer."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.layers.gates.gate import is_gate_weight


class KeptExperts(NamedTuple):
  """Experts that are kept of a MoE layer."""

  experts: list[int]  # their numbers, ascending
  share: float  # of all choices of experts on the text that was routed


def choose_pairs(pairs: Sequence[tuple[str, str]], languages: Sequence[str]) -> list[tuple[str, str]]:
  """Pairs between the languages; if there are none, pairs that have one of them. Without languages, all pairs."""
  if not languages:
    return list(pairs)
  known = sorted({language for pair in pairs for language in pair})
  for language in languages:
    if language not in known:
      raise UserError(f'this run has no language {language!r}; {closest(language, known)}')
  between = [pair for pair in pairs if set(pair) <= set(languages)]
  return between or [pair for pair in pairs if set(pair) & set(languages)]


def choose_experts(choices: Mapping[str, np.ndarray], count: int) -> dict[str, KeptExperts]:
  """The most used experts of each layer, every part of the text counted alike; of equals the first.

  Args:
    choices: by layer, how often each part of the text chose each expert, [P, E].
    count: number of experts to keep.
  """
  kept = {}
  for layer, choices_PE in choices.items():
    share_E = np.mean(choices_PE / np.maximum(choices_PE.sum(axis=1, keepdims=True), 1.0), axis=0)
    experts = sorted(np.argsort(-share_E, kind='stable')[:count].tolist())
    kept[layer] = KeptExperts(experts, float(share_E[experts].sum()))
  return kept


def without_others(
  weights: Mapping[str, np.ndarray], specs: Mapping[str, WeightSpec], kept: Mapping[str, KeptExperts]
) -> dict[str, np.ndarray]:
  """Weights of the model with the kept experts alone.

  Args:
    weights: arrays by flat name, of unrolled layers.
    specs: of the weights.
    kept: by layer, such as 'encoder/layer_01'.
  """

  def pruned(name, weight):
    layer, is_moe, weight_name = name.partition('/moe/')
    axis = 'J' if is_gate_weight(weight_name) else 'E'  # that of the experts
    if not is_moe or axis not in specs[name].dims:
      return weight
    return np.take(weight, kept[layer].experts, axis=specs[name].dims.index(axis))

  return {name: pruned(name, weight) for name, weight in weights.items()}
