"""Gates by the name that a configuration gives them."""

from __future__ import annotations

from lingvo_moe.layers.gates import top_k
from lingvo_moe.layers.gates.expert_choice import ExpertChoice
from lingvo_moe.layers.gates.gate import Gate
from lingvo_moe.layers.gates.hierarchical import Hierarchical
from lingvo_moe.layers.gates.noisy_top_k import NoisyTopK
from lingvo_moe.layers.gates.soft_mixture import SoftMixture
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.layers.gates.top_k import TopK

GATES = ('top2', 'top_k', 'top_k_unnormalised', 'switch', 'noisy_top_k', 'hierarchical', 'expert_choice', 'soft')
TAKE_K = ('top_k', 'top_k_unnormalised', 'noisy_top_k', 'hierarchical')  # those for which k is a choice


def least_experts(name: str, k: int) -> int | None:
  """Number of experts with which a gate can still choose, where it can do without some of those it was trained with.

  None for a gate that cannot: its experts choose tokens, stand in groups, or are all used by every token.
  """
  return {'top2': 2, 'switch': 2, 'top_k': k, 'top_k_unnormalised': max(k, 2), 'noisy_top_k': k + 1}.get(name)


def make(
  name: str,
  *,
  k: int = 2,
  second_choice: str = 'random',
  scale: float = 1.0,
  capacity_factor: float | None = None,
  groups_of_experts: int = 0,
  dispatch: str = 'auto',
) -> Gate:
  """Gate by name; each takes of the options what it needs.

  Args:
    name: one of GATES.
    k: choices of a token; of each level of a hierarchical gate.
    second_choice: see Top2.
    scale: factor of initial weights that are not zero.
    capacity_factor: of expert choice.
    groups_of_experts: of a hierarchical gate.
    dispatch: dispatcher to the second gates of a hierarchical gate.

  Raises:
    ValueError: options that the gate refuses.
  """
  if name == 'top2':
    return Top2(second_choice, scale=scale)
  if name in ('top_k', 'top_k_unnormalised'):
    return TopK(k, normalised=name == 'top_k', scale=scale)
  if name == 'switch':
    return top_k.switch(scale)
  if name == 'noisy_top_k':
    return NoisyTopK(k)
  if name == 'hierarchical':
    return Hierarchical(groups_of_experts, k, dispatch)
  if name == 'expert_choice':
    if capacity_factor is None:
      raise ValueError(
        'expert choice takes capacity_factor * tokens / E tokens an expert; saw capacity_factor=None: give one'
      )
    return ExpertChoice(capacity_factor, scale=scale)
  return SoftMixture(scale=scale)
