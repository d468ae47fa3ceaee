"""Pruning of experts: a model without those that some languages use least, or do not use, in each MoE layer.

With a gate by task, what a language uses follows from the weights. One task's experts are a dense layer: the sum over
the chosen of w_r f(x wi_r) wo_r is f(x [wi_1 .. wi_k]) [w_1 wo_1; ..; w_k wo_k].
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.corpora import parallel
from lingvo_moe.layers.gates.gate import Gate, is_gate_weight


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


def choose_tasks(names: Sequence[str], are_pairs: bool, languages: Sequence[str]) -> list[int]:
  """Numbers of the tasks of these languages: of target languages, or of the pairs that choose_pairs gives."""
  pairs = parallel.languages_of(names) if are_pairs else [(name, name) for name in names]
  chosen = choose_pairs(pairs, languages)
  return [i for i, name in enumerate(names) if name in {'-'.join(pair) if are_pairs else pair[0] for pair in chosen}]


class OfTasks(NamedTuple):
  """Choices of a gate by task in a MoE layer."""

  experts_PR: np.ndarray  # experts of each task
  weights_PR: np.ndarray  # weights of their outputs


def choices_of_tasks(weights: Mapping[str, np.ndarray], gate: Gate, tasks: Sequence[int]) -> dict[str, OfTasks]:
  """Choices of some tasks, by layer, such as 'encoder/layer_01'."""
  layers = [name.removesuffix('/moe/gate') for name in weights if name.endswith('/moe/gate')]
  names = [name for name in gate.weights(0, 1) if is_gate_weight(name)]
  chosen = {}
  for layer in layers:
    theta = {name: tf.constant(weights[f'{layer}/moe/{name}']) for name in names}
    routing = gate(theta, tf.one_hot([tasks], gate.tasks), tf.zeros([1, len(tasks)]))
    chosen[layer] = OfTasks(routing.expert_GSR[0].numpy(), routing.weight_GSR[0].numpy())
  return chosen


def experts_of_tasks(choices: Mapping[str, OfTasks], num_experts: int) -> dict[str, KeptExperts]:
  """Experts that the tasks use in each layer, with the first of the others where another layer uses more."""
  used = {layer: sorted({*of_layer.experts_PR.flat}) for layer, of_layer in choices.items()}
  most = max(map(len, used.values()))
  others = lambda experts: [e for e in range(num_experts) if e not in experts][: most - len(experts)]
  return {layer: KeptExperts(sorted([*experts, *others(experts)]), 1.0) for layer, experts in used.items()}


def joined(
  weights: Mapping[str, np.ndarray], choices: Mapping[str, OfTasks], scale: float = 1.0
) -> dict[str, np.ndarray]:
  """Weights of the model whose MoE layers are dense, of the experts of one task and the shared ones.

  `scale` is the factor of the chosen experts' outputs.
  """
  result = {name: weight for name, weight in weights.items() if '/moe/' not in name or 'norm/' in name}
  result = {name.replace('/moe/', '/ffn/'): weight for name, weight in result.items()}
  for layer, ((experts_R,), (weights_R,)) in choices.items():
    part = lambda name, layer=layer: weights.get(f'{layer}/moe/{name}')
    factors = scale * weights_R
    for name in ('wi', 'wg', 'bi', 'wo', 'bo'):
      if part(name) is None:
        continue
      chosen, shared = [*part(name)[experts_R]], part(f'shared/{name}')
      if name in ('wo', 'bo'):
        chosen = [factor * weight for factor, weight in zip(factors, chosen, strict=True)]
      if name == 'bi' and part('shared/wi') is not None:
        shared = np.zeros(part('shared/wi').shape[1], np.float32)
      chosen += [] if shared is None else [shared]
      result[f'{layer}/ffn/{name}'] = sum(chosen) if name == 'bo' else np.concatenate(chosen, 0 if name == 'wo' else -1)
  return result


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
