"""A task as pure functions of a state: what every runtime runs.

A state is {'step': int64 scalar, 'weights': {name: tensor}, 'slots': {name/slot: tensor}}. Nothing here owns a
variable, opens a file or knows a device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Protocol

import tensorflow as tf

from lingvo_moe import optimizer as optimizer_lib
from lingvo_moe import prng
from lingvo_moe import weights as weights_lib
from lingvo_moe.schedule import Schedule
from lingvo_moe.weights import Specs
from lingvo_moe.weights import Theta
from lingvo_moe.weights import WeightSpec

State = dict[str, Any]
Metrics = dict[str, Any]  # scalars, and a task's own nests of tensors


class Task(Protocol):
  """What a program needs of a model: its weights, and a loss."""

  def weights(self) -> Specs:
    """Nested WeightSpecs."""

  def loss(
    self, theta: Theta, batch: Mapping[str, tf.Tensor], key: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, Metrics]:
    """(scalar to minimise, metrics); key None means inference."""


@dataclasses.dataclass(frozen=True)
class Program:
  """A task, how it learns, and the seed of all its random numbers."""

  task: Task
  optimizer: optimizer_lib.Optimizer
  schedule: Schedule
  clip_norm: float = 0.0
  seed: int = 0

  @functools.cached_property
  def weight_specs(self) -> dict[str, WeightSpec]:
    """Flat name -> WeightSpec."""
    return weights_lib.flatten(self.task.weights())

  @functools.cached_property
  def slot_specs(self) -> dict[str, WeightSpec]:
    """Flat name/slot -> WeightSpec of what the optimiser keeps."""
    return {
      f'{name}/{slot}': s for name, spec in self.weight_specs.items() for slot, s in self.optimizer.slots(spec).items()
    }

  def init(self) -> State:
    """The state before the first step."""
    return {
      'step': tf.zeros([], tf.int64),
      'weights': weights_lib.initialize(self.weight_specs, self.seed),
      'slots': weights_lib.initialize(self.slot_specs, self.seed),
    }

  def train_step(self, state: State, batch: Mapping[str, tf.Tensor]) -> tuple[State, Metrics]:
    """One update. Returns (the next state, metrics: the task's, 'grad_norm', 'learning_rate')."""
    step, weights = state['step'], state['weights']
    key = prng.key(self.seed, 'train', step)
    with tf.GradientTape() as tape:
      tape.watch(list(weights.values()))
      loss, metrics = self.task.loss(weights_lib.unflatten(weights), batch, key)
    grads = dict(zip(weights, tape.gradient(loss, list(weights.values())), strict=True))
    grads = {name: tf.zeros_like(weights[name]) if g is None else tf.convert_to_tensor(g) for name, g in grads.items()}
    grads, norm = optimizer_lib.clip_by_global_norm(grads, self.clip_norm)
    rate = self.schedule(step)
    new_weights, new_slots = {}, {}
    for name, spec in self.weight_specs.items():
      slots = {slot: state['slots'][f'{name}/{slot}'] for slot in self.optimizer.slots(spec)}
      new_weights[name], slots = self.optimizer.update(grads[name], slots, weights[name], spec, step, rate)
      new_slots.update({f'{name}/{slot}': value for slot, value in slots.items()})
    metrics = {**metrics, 'grad_norm': norm, 'learning_rate': rate}
    return {'step': step + 1, 'weights': new_weights, 'slots': new_slots}, metrics

  def eval_step(self, weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]) -> Metrics:
    """The task's metrics of a batch, at inference."""
    return self.task.loss(weights_lib.unflatten(weights), batch)[1]
