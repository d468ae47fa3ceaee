"""Layers that have experts: as a public configuration says by stack, and as the fields here say of both stacks."""

from collections.abc import Mapping, Sequence
from typing import Any

STACKS = ('encoder', 'decoder')


def fields(sparse: Mapping[str, Sequence[int]], layers: Mapping[str, int]) -> dict[str, Any]:
  """Values of the fields that say which layers have experts.

  Args:
    sparse: numbers of these layers, by stack.
    layers: number of all layers, by stack.

  Raises:
    ValueError: they are not every n-th layer, with the same n in both stacks, as here.
  """
  stacks = [stack for stack in STACKS if sparse[stack]]
  every = min((sparse[stack][0] for stack in stacks), default=0) + 1
  if any([*sparse[stack]] != [*range(every - 1, layers[stack], every)] for stack in stacks):
    seen = ', '.join(f'{[*sparse[stack]]} of the {stack}' for stack in stacks)
    raise ValueError(f'experts in layers {seen}, and here they are in every n-th layer of one stack or both')
  layer_fields = {'moe_every': every, 'experts_in': 'both' if len(stacks) != 1 else stacks[0]}
  return layer_fields if stacks else {'num_experts': 0}


def steps(ours: Any) -> dict[str, int]:
  """Values of config.json that say which layers have experts, by a configuration here."""
  return {f'{stack}_sparse_step': ours.moe_every * (ours.experts_in in ('both', stack)) for stack in STACKS}
