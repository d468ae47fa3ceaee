"""Parity of a model on a mesh with one device: objective, gradients, weights, slots, routing and translations."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import tensorflow as tf

from lingvo_moe.addons.analysis import hlo
from lingvo_moe.program import Program
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks.model_config import ModelConfig
from lingvo_moe.tasks.task import task_of

# Difference of gate probabilities below which rounding may send a token to another expert.
FLIP_MARGIN = 1e-6
# Tolerance for the scores of whole translations. Rounding alone made differences of 1.6e-5, on an Intel CPU.
_SCORES = 3e-5
_SHARPER = 2.0  # factor by which matrices are scaled before translating, see _sharper
_SCALE_FLOOR = 1e-4  # smallest scale of a gradient, as a part of the model's largest gradient


@dataclasses.dataclass(frozen=True)
class Observed(Program):
  """Program whose train step also returns gradients, the new weights and slots, and every gate's decisions."""

  shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, kw_only=True)  # of all batches

  @classmethod
  def of(cls, program: Program, batch: Mapping[str, np.ndarray]) -> Self:
    values = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    values |= {'model': dataclasses.replace(program.model, report_decisions=True)}
    return cls(**values, shapes={name: x.shape for name, x in batch.items()})

  def gradients(self, step, weights, batch):
    # Decisions of micro-batches are summed, for which their shape is known beforehand also where programs take any.
    batch = {name: tf.ensure_shape(x, self.shapes[name]) for name, x in batch.items()}
    grads, metrics = super().gradients(step, weights, batch)
    return grads, {**metrics, 'grads': {name: tf.convert_to_tensor(grad) for name, grad in grads.items()}}

  def train_step(self, state, batch):
    state, metrics = super().train_step(state, batch)
    values = {kind: {n: tf.convert_to_tensor(x) for n, x in state[kind].items()} for kind in ('weights', 'slots')}
    return state, {**metrics, **values}


class Observation(NamedTuple):
  """Results of a runtime, as numpy arrays."""

  initial: Mapping[str, np.ndarray]  # weights before the first step
  steps: list[dict]  # for each train step: 'objective', 'grads', 'weights', 'slots', 'decisions'
  ids: np.ndarray  # of the translations
  scores: np.ndarray  # of the translations
  collectives: dict[str, int]  # in the partitioned train step, by kind


class Row(NamedTuple):
  """Differences of an observation from the reference, the largest over all steps."""

  objective: float
  gradients: float
  weights: float
  slots: float
  flips: int  # tokens that a gate routed differently, in the first step with any
  flip_margin: float  # largest over groups with flips of the smallest margin of a flipped decision; 0 without flips
  same_ids: bool
  scores: float
  collectives: dict[str, int]
  worst: str  # where the largest difference is

  def agrees(self, tolerance: float) -> bool:
    close = all(number <= tolerance for number in (self.objective, self.gradients, self.weights, self.slots))
    return close and self.flip_margin <= FLIP_MARGIN and self.same_ids and self.scores <= _SCORES


def observe(
  config: ModelConfig, runtime_of: Callable[[Program], Runtime], steps: int = 3, reference: Observation | None = None
) -> Observation:
  """Observes a runtime: decodes, then trains for some steps on random batches with padding.

  Args:
    config: configuration of the model.
    runtime_of: makes a runtime for a program; batches and seeds are the same for every one.
    steps: number of train steps.
    reference: observation in whose state each step begins; by default in that which the runtime's last step left. The
      rounding of an update may open a ReLU or turn a choice of a gate in the next step, and then gradients differ.
  """
  program = Observed.of(config.program(), task_of(config).random_batch(full=False))
  runtime = runtime_of(program)
  runtime.init()
  # Decoding comes first, while the weights are equal to the last bit: after training, their small differences could
  # change the decision of a gate with two nearly equal probabilities.
  probe = task_of(config).probe_search()
  search = runtime.function(
    lambda weights, batch: (probe.function(program.model, program.theta(_sharper(weights)), batch), dict(weights))
  )
  hypotheses, initial = search(probe.batch)
  observed = []
  for step in range(steps):
    if reference and step:
      runtime.load({'step': np.array(step), **{kind: reference.steps[step - 1][kind] for kind in ('weights', 'slots')}})
    batch = task_of(config).random_batch(seed=step, full=False)
    rows = len(next(iter(batch.values()))) // runtime.feed_count  # that this process feeds
    metrics = runtime.train_step({name: x[runtime.feed_index * rows :][:rows] for name, x in batch.items()})
    observed.append({name: metrics[name] for name in ('objective', 'grads', 'weights', 'slots', 'decisions')})
  kinds = []
  if hasattr(runtime, 'train_program'):
    instructions = hlo.parse(runtime.train_program(task_of(config).random_batch(full=False)).as_text()).instructions()
    kinds = [instruction.collective for instruction in instructions if instruction.collective]
  return Observation(initial, observed, hypotheses.ids_BWT, hypotheses.scores_BW, dict(collections.Counter(kinds)))


def compare(reference: Observation, other: Observation) -> Row:
  """Compares two observations; a difference is max|a - b| / max(max|a|, 1e-4 times the largest entry of any gradient).

  Of several steps the largest difference counts. Updated weights are compared as `_Updates` says.
  """
  largest = dict.fromkeys(('grads', 'weights', 'slots'), (0.0, ''))
  objective, flips, margin = 0.0, 0, 0.0
  updates = {name: _Updates(initial) for name, initial in reference.initial.items()}
  for a, b in zip(reference.steps, other.steps, strict=True):
    floor = _SCALE_FLOOR * max(float(np.max(np.abs(g))) for g in a['grads'].values())
    objective = max(objective, _difference(a['objective'], b['objective'], floor))
    for kind in ('grads', 'slots'):
      largest[kind] = max(largest[kind], *((_difference(x, b[kind][name], floor), name) for name, x in a[kind].items()))
    for name, weight in a['weights'].items():
      updates[name].add(a['grads'][name], weight, floor)
      largest['weights'] = max(largest['weights'], (updates[name].difference(b['weights'][name], floor), name))
    if not flips:  # after a flip the weights differ, and later flips are not due to rounding
      flips, margin = _flips(a['decisions'], b['decisions'])
  finite, theirs = np.isfinite(reference.scores), np.isfinite(other.scores)
  both = finite & theirs
  length = max(reference.ids.shape[-1], other.ids.shape[-1])  # with dynamic shapes only as long as the batch needs
  padded = lambda ids_BWT: np.pad(ids_BWT, [(0, 0), (0, 0), (0, length - ids_BWT.shape[-1])])
  return Row(
    objective=objective,
    gradients=largest['grads'][0],
    weights=largest['weights'][0],
    slots=largest['slots'][0],
    flips=flips,
    flip_margin=margin,
    same_ids=np.array_equal(padded(reference.ids), padded(other.ids)) and np.array_equal(finite, theirs),
    scores=_difference(reference.scores[both], other.scores[both], 1.0),
    collectives=other.collectives,
    worst=max(largest.values())[1],
  )


def _sharper(weights: Mapping[str, Any]) -> dict[str, Any]:
  """Weights with larger matrices: to an untrained model all symbols are alike, and translations would be equal."""
  return {name: _SHARPER * w if w.shape.rank > 1 else w for name, w in weights.items()}


class _Updates:
  """Updates of a weight so far in the reference, and differences from them that rounding explains.

  Adam and Adafactor divide a gradient by its own size: where it is rounding noise, so is the update. An entry's
  difference counts as the smaller of two: relative to the largest entry of the weight; and relative to the sum of
  updates, times the entry of the gradient relative to the scale by which gradients are compared, as that difference of
  gradients makes it. An entry without a gradient, and one that differs by more than updates can, has the first only.
  """

  def __init__(self, initial: np.ndarray):
    self._last = np.asarray(initial, np.float64)
    self._sum = 0.0  # of the largest entry of each update
    self._gradient = np.zeros(self._last.shape)  # largest |gradient| of each entry, relative to the gradient's scale

  def add(self, gradient: np.ndarray, weight: np.ndarray, floor: float) -> None:
    """Adds the update of a step: its gradient, the weight after it, and the smallest scale of a gradient."""
    gradient, weight = np.abs(np.asarray(gradient, np.float64)), np.asarray(weight, np.float64)
    self._sum += float(np.max(np.abs(weight - self._last)))
    self._gradient = np.maximum(self._gradient, gradient / max(np.max(gradient), floor))
    self._last = weight

  def difference(self, other: np.ndarray, floor: float) -> float:
    """Largest difference of an entry of `other` from the weight after the last step."""
    difference = np.abs(self._last - np.asarray(other, np.float64))
    of_weight = difference / max(np.max(np.abs(self._last)), floor)
    explained = (self._gradient > 0) & (difference <= 2 * self._sum)
    of_gradient = np.where(explained, difference * self._gradient / max(self._sum, np.finfo(float).tiny), np.inf)
    return _or_inf(np.max(np.minimum(of_weight, of_gradient)))


def _difference(a, b, floor: float) -> float:
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return _or_inf(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), floor)) if a.size else 0.0


def _or_inf(difference: np.floating) -> float:
  """The difference; infinite where it is NaN, which is no agreement and which max() would pass over."""
  return float('inf') if np.isnan(difference) else float(difference)


def _flips(reference: Mapping, other: Mapping) -> tuple[int, float]:
  """Number of flips (tokens routed or dropped differently), and the margin of the decisions that caused them.

  A flipped token may push others of its group out of their slots, and changes the input of later layers for its rows,
  which form the same group there. So for each group the cause is the flipped decision of smallest margin in the first
  layer with a flip in that group; the result is the largest of these margins.
  """
  count, margin, seen_groups = 0, 0.0, set()
  for name in sorted(reference, key=lambda name: (not name.startswith('encoder/'), name)):
    (expert_GSR, weight_GSR, margin_GS), (other_expert_GSR, other_weight_GSR, _) = reference[name], other[name]
    routed_GSR, other_routed_GSR = weight_GSR > 0, other_weight_GSR > 0
    changed_GSR = (routed_GSR != other_routed_GSR) | (routed_GSR & (expert_GSR != other_expert_GSR))
    changed_GS = np.any(changed_GSR, axis=-1)
    count += int(changed_GS.sum())
    for g in set(np.flatnonzero(changed_GS.any(axis=-1)).tolist()) - seen_groups:
      margin = max(margin, float(margin_GS[g][changed_GS[g]].min()))
      seen_groups.add(g)
  return count, margin
