"""Models for gates other than top-2, on the default corpus; a token costs the FLOPs of mt.cldr.MoE8E.

ExpertChoice has a dense decoder, which costs less.

tools/compare_gates.py compares runs of them; docs/gates.md has what came out.
"""

from lingvo_moe.config import registry
from lingvo_moe.params.mt.cldr import MoE8E


@registry.register
class Soft(MoE8E):
  """Soft mixture of 8 narrow experts, all of which answer (Jacobs et al., 1991): 1.72M weights, 948k used by a token.

  Run:     lingvo-moe train --model=mt.cldr_gates.Soft --logdir=...
  Result:  docs/gates.md
  """

  gate: str = 'soft'
  expert_dim: int = 64


@registry.register
class NoisyTop2(MoE8E):
  """Noisy top-2 gate (Shazeer et al., 2017): 2.5M weights, 950k used by a token.

  Run:     lingvo-moe train --model=mt.cldr_gates.NoisyTop2 --logdir=...
  Result:  docs/gates.md
  """

  gate: str = 'noisy_top_k'
  aux_loss_weight: float = 0.1


@registry.register
class Hierarchical(MoE8E):
  """Hierarchical noisy gate (2017), 2 of 4 groups of 4 experts, 2 in each: 2.51M weights, 957k used by a token.

  Run:     lingvo-moe train --model=mt.cldr_gates.Hierarchical --logdir=...
  Result:  docs/gates.md
  """

  gate: str = 'hierarchical'
  num_experts: int = 16
  groups_of_experts: int = 4
  expert_dim: int = 128
  capacity_factor: float = 4.0
  aux_loss_weight: float = 0.1


@registry.register
class Switch(MoE8E):
  """Switch gate (Fedus et al., 2021), one expert, twice as wide: 3.55M weights, 948k used by a token.

  Run:     lingvo-moe train --model=mt.cldr_gates.Switch --logdir=...
  Result:  docs/gates.md
  """

  gate: str = 'switch'
  gate_init_scale: float = 0.1
  expert_dim: int = 512
  capacity_factor: float = 1.25


@registry.register
class Top4(MoE8E):
  """Top-4 gate, normalised, over 16 experts of half the width: 2.5M weights, 950k used by a token.

  Run:     lingvo-moe train --model=mt.cldr_gates.Top4 --logdir=...
  Result:  docs/gates.md
  """

  gate: str = 'top_k'
  choices: int = 4
  num_experts: int = 16
  expert_dim: int = 128
  capacity_factor: float = 4.0


@registry.register
class SharedTop3(MoE8E):
  """Top-3 gate over 16 narrow experts, and a shared one (DeepSeekMoE, 2024): 2.57M weights, 950k used by a token.

  Run:     lingvo-moe train --model=mt.cldr_gates.SharedTop3 --logdir=...
  Result:  docs/gates.md
  """

  gate: str = 'top_k'
  choices: int = 3
  num_experts: int = 16
  expert_dim: int = 128
  shared_experts: int = 1
  capacity_factor: float = 3.0


@registry.register
class DroplessTop2(MoE8E):
  """Top-2 gate of which every choice is served (MegaBlocks, 2022): 2.5M weights, 948k used by a token.

  Run:     lingvo-moe train --model=mt.cldr_gates.DroplessTop2 --logdir=...
  Result:  docs/gates.md
  """

  gate: str = 'top_k'
  capacity_factor: float | None = None


@registry.register
class ExpertChoice(MoE8E):
  """Expert choice (Zhou et al., 2022) in the encoder; a dense decoder: 2.04M weights, 882k used by a token.

  Run:     lingvo-moe train --model=mt.cldr_gates.ExpertChoice --logdir=...
  Result:  docs/gates.md
  """

  gate: str = 'expert_choice'
  experts_in: str = 'encoder'


@registry.register
class Tiny(Hierarchical):
  """Hierarchical at the size of a test: 211k weights, 66.1k used by a token."""

  source_vocab_size: int = 3000
  target_vocab_size: int = 400
  batch_tokens: int = 512
  max_length: int = 64
  num_groups: int = 4
  model_dim: int = 32
  ff_dim: int = 64
  expert_dim: int = 32
  head_dim: int = 8
  max_steps: int = 20
  eval_every: int = 10
