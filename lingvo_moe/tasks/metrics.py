"""Scalars for the log of a training step, from the metrics that tasks with a token loss share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Loss, gradient norm and learning rate by name; of every MoE layer its balance, drops and entropy.

  Args:
    metrics: a training step's, with 'xent' and 'target_tokens' summed over the batch, and 'routing', {layer: Stats}.
  """
  tokens = max(float(metrics['target_tokens']), 1.0)
  flat = {
    'loss': metrics['loss'],
    'xent': metrics['xent'] / tokens,
    'aux_loss': metrics['aux_loss'],
    'grad_norm': metrics['grad_norm'],
    'learning_rate': metrics['learning_rate'],
    'target_tokens': metrics['target_tokens'],
  }
  for layer, stats in metrics['routing'].items():
    flat |= {f'moe/{layer}/{name}': value for name, value in _routing_scalars(stats).items()}
  return {name: float(value) for name, value in flat.items()}


RANKS = ('first', 'second', 'third', 'fourth', 'fifth', 'sixth', 'seventh', 'eighth')  # choices of a token


def _routing_scalars(stats) -> dict[str, float]:
  routed = max(float(stats.tokens), 1.0)
  return {
    'aux_loss': stats.aux_loss / max(float(stats.groups), 1.0),
    **{f'{rank}_dropped': dropped / routed for rank, dropped in zip(RANKS, stats.dropped_R)},
    'second_skipped': stats.skipped / routed,
    'entropy': stats.entropy / routed,
    'z_loss': stats.z_loss / routed,
    'rounds': stats.rounds,
    'largest_load': stats.tokens_E.max() / max(stats.tokens_E.mean(), 1e-9),
  }
