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
from lingvo_moe import xla_sharding
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
    initial = lambda specs: self._stored(weights_lib.initialize(specs, self.seed), specs)
    return {
      'step': tf.zeros([], tf.int64),
      'weights': initial(self.weight_specs),
      'slots': initial(self.slot_specs),
    }

  def train_step(self, state: State, batch: Mapping[str, tf.Tensor]) -> tuple[State, Metrics]:
    """One update. Returns (the next state, metrics: the task's, 'grad_norm', 'learning_rate')."""
    grads, metrics = self.gradients(state['step'], state['weights'], batch)
    state, applied = self.apply(state, grads)
    return state, {**metrics, **applied}

  def gradients(
    self, step: tf.Tensor, weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]
  ) -> tuple[dict[str, tf.Tensor], Metrics]:
    """(the gradient of the loss for each weight, the task's metrics)."""
    weights = self._stored(weights, self.weight_specs)
    with tf.GradientTape() as tape:
      tape.watch(list(weights.values()))
      loss, metrics = self.task.loss(self.theta(weights), batch, prng.key(self.seed, 'train', step))
    grads = dict(zip(weights, tape.gradient(loss, list(weights.values())), strict=True))
    grads = {name: tf.zeros_like(weights[name]) if g is None else tf.convert_to_tensor(g) for name, g in grads.items()}
    return self._stored(grads, self.weight_specs), metrics

  def apply(self, state: State, grads: Mapping[str, tf.Tensor]) -> tuple[State, Metrics]:
    """The state after an update by some gradients; and {'grad_norm', 'learning_rate'}."""
    step, weights = state['step'], self._stored(state['weights'], self.weight_specs)
    old_slots = self._stored(state['slots'], self.slot_specs)
    grads, norm = optimizer_lib.clip_by_global_norm(dict(grads), self.clip_norm)
    rate = self.schedule(step)
    new_weights, new_slots = {}, {}
    for name, spec in self.weight_specs.items():
      slots = {slot: old_slots[f'{name}/{slot}'] for slot in self.optimizer.slots(spec)}
      new_weights[name], slots = self.optimizer.update(grads[name], slots, weights[name], spec, step, rate)
      new_slots.update({f'{name}/{slot}': value for slot, value in slots.items()})
    new_weights = self._stored(new_weights, self.weight_specs)
    new_slots = self._stored(new_slots, self.slot_specs)
    return {'step': step + 1, 'weights': new_weights, 'slots': new_slots}, {'grad_norm': norm, 'learning_rate': rate}

  def eval_step(self, weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]) -> Metrics:
    """The task's metrics of a batch, at inference."""
    return self.task.loss(self.theta(weights), batch)[1]

  def theta(self, weights: Mapping[str, tf.Tensor]) -> Theta:
    """Flat weights as the task takes them: nested, and where devices store parts of one that all use, gathered."""
    specs = self.weight_specs
    with tf.name_scope('weights'):
      return weights_lib.unflatten({name: xla_sharding.gather(w, specs[name].dims) for name, w in weights.items()})

  def _stored(self, values: Mapping[str, tf.Tensor], specs: Mapping[str, WeightSpec]) -> dict[str, tf.Tensor]:
    with tf.name_scope('state'):
      return {name: xla_sharding.store(value, specs[name].dims) for name, value in values.items()}
