"""A model for every gate, on the default corpus; a token costs as many FLOPs in each as in mt.cldr.MoE8E.

tools/compare_gates.py trains them all and compares them; docs/gates.md has what came out.
"""

from __future__ import annotations

from lingvo_moe.core import registry
from lingvo_moe.params.mt.cldr import MoE8E


@registry.register
class Soft(MoE8E):
  """Soft mixture of 8 narrow experts, all of which answer (Jacobs et al., 1991): 1.52M weights, all used by a token."""

  gate: str = 'soft'
  expert_dim: int = 64
  aux_loss_weight: float = 0.0


@registry.register
class NoisyTop2(MoE8E):
  """Noisy top-2 gate (Shazeer et al., 2017)."""

  gate: str = 'noisy_top_k'
  aux_loss_weight: float = 0.1


@registry.register
class Hierarchical(MoE8E):
  """Hierarchical noisy gate (Shazeer et al., 2017): 2 of 4 groups, 2 of 4 experts in each."""

  gate: str = 'hierarchical'
  num_experts: int = 16
  groups_of_experts: int = 4
  expert_dim: int = 128
  aux_loss_weight: float = 0.1


@registry.register
class Switch(MoE8E):
  """Switch gate (Fedus et al., 2021): one expert, twice as wide, capacity factor 1.25."""

  gate: str = 'switch'
  gate_init_scale: float = 0.1
  expert_dim: int = 512
  capacity_factor: float = 1.25


@registry.register
class Top4(MoE8E):
  """Top-4 gate, normalised, over 16 experts of half the width."""

  gate: str = 'top_k'
  choices: int = 4
  num_experts: int = 16
  expert_dim: int = 128
  capacity_factor: float = 4.0


@registry.register
class SharedTop3(MoE8E):
  """Top-3 gate over 16 experts of half the width, beside a shared expert (DeepSeekMoE, 2024)."""

  gate: str = 'top_k'
  choices: int = 3
  num_experts: int = 16
  expert_dim: int = 128
  shared_experts: int = 1
  capacity_factor: float = 3.0


@registry.register
class DroplessTop2(MoE8E):
  """Top-2 gate of which every choice is served (MegaBlocks, 2022)."""

  gate: str = 'top_k'
  capacity_factor: float | None = None


@registry.register
class ExpertChoice(MoE8E):
  """Expert choice (Zhou et al., 2022) in the encoder; the decoder is dense, and costs two thirds of MoE8E's."""

  gate: str = 'expert_choice'
  experts_in: str = 'encoder'
