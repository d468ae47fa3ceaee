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

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import results_of
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.optim import optimizer as optimizer_lib
from lingvo_moe.optim.schedule import Schedule

State = dict[str, Any]
Metrics = dict[str, Any]  # scalars, and a task's own nests of tensors


class Task(Protocol):
  """What a program needs of a model: its weights, and a loss."""

  def weights(self) -> Specs:
    """Nested WeightSpecs."""

  def loss(
    self,
    theta: Theta,
    batch: Mapping[str, tf.Tensor],
    key: tf.Tensor | None = None,
    totals: Mapping[str, tf.Tensor] | None = None,
  ) -> tuple[tf.Tensor, Metrics]:
    """(scalar to minimise, metrics); key None means inference. With the totals of a batch both add up over its parts."""

  def totals(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """What losses are divided by; they add up over parts of a batch."""


@dataclasses.dataclass(frozen=True)
class Program:
  """A task, how it learns, and the seed of all its random numbers.

  Attributes:
    task: what is computed.
    optimizer: see optimizer.py.
    schedule: of the learning rate.
    clip_norm: largest global norm of the gradients; 0: any.
    seed: of initial weights and of training's random numbers.
    num_groups: a batch is made of so many groups of rows, which stay together.
    micro_batches: so many parts of a batch are computed one after the other and their gradients added up: the same
      numbers to rounding, in less memory. It divides num_groups.
  """

  task: Task
  optimizer: optimizer_lib.Optimizer
  schedule: Schedule
  clip_norm: float = 0.0
  seed: int = 0
  num_groups: int = 1
  micro_batches: int = 1

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
    """One update. Returns (the next state, metrics: the task's, 'grad_norm', 'learning_rate').

    A state may also be of variables. They are read for the gradients; the optimizer reads them too, or updates them in
    place and returns them.
    """
    grads, metrics = self.gradients(state['step'], state['weights'], batch)
    with tf.name_scope('update'):
      state, applied = self.apply(state, grads)
    return state, {**metrics, **applied}

  def gradients(
    self, step: tf.Tensor, weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]
  ) -> tuple[dict[str, tf.Tensor], Metrics]:
    """(the gradient of the loss for each weight, the task's metrics)."""
    weights = self._stored({n: tf.convert_to_tensor(w) for n, w in weights.items()}, self.weight_specs)
    key = prng.key(self.seed, 'train', step)
    rows_B = tf.range(sizes(next(iter(batch.values())))[0])

    def of_part(rows_B, batch, **totals):
      # Each row of the batch has a key of its own: its random numbers do not depend on the part that it comes in.
      key_B = xla_sharding.shard(prng.fold(key, rows_B), 'B')
      with tf.GradientTape() as tape:
        tape.watch(list(weights.values()))
        loss, metrics = self.task.loss(self.theta(weights), batch, key_B, **totals)
      grads = dict(zip(weights, tape.gradient(loss, list(weights.values())), strict=True))
      grads = {n: tf.zeros_like(weights[n]) if g is None else tf.convert_to_tensor(g) for n, g in grads.items()}
      return self._stored(grads, self.weight_specs), metrics

    if self.micro_batches == 1:
      return of_part(rows_B, batch)
    return self._sum_over_parts(of_part, rows_B, batch)

  def _sum_over_parts(self, of_part, rows_B, batch):
    """The sum of of_part's gradients and metrics, of one part after the other."""
    # The parts take turns at the groups, so that each device has as much of every part.
    per_part = self.num_groups // self.micro_batches

    def divided(x_B):
      rows, *rest = sizes(x_B)
      x = tf.reshape(x_B, [per_part, self.micro_batches, rows // self.num_groups, *rest])
      return tf.reshape(tf.einsum('gp...->pg...', x), [self.micro_batches, rows // self.micro_batches, *rest])

    divided_rows, divided_batch = divided(rows_B), {name: divided(x) for name, x in batch.items()}
    part = lambda i: (
      divided_rows[i],
      {name: xla_sharding.shard(x[i], 'B' + '1' * (x.shape.rank - 2)) for name, x in divided_batch.items()},
    )
    totals = [self.task.totals(part(i)[1]) for i in range(self.micro_batches)]
    of_whole = {'totals': {name: tf.add_n([t[name] for t in totals]) for name in totals[0]}}

    def body(i, grads, metrics):
      more_grads, more_metrics = of_part(*part(i), **of_whole)
      grads = self._stored({name: g + more_grads[name] for name, g in grads.items()}, self.weight_specs)
      return i + 1, grads, tf.nest.map_structure(tf.add, metrics, more_metrics)

    results = results_of(lambda: of_part(*part(0), **of_whole))
    zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), results)
    begin = (tf.constant(0), self._stored(zeros[0], self.weight_specs), zeros[1])
    return tf.while_loop(lambda i, *_: i < self.micro_batches, body, begin, parallel_iterations=1)[1:]

  def apply(self, state: State, grads: Mapping[str, tf.Tensor]) -> tuple[State, Metrics]:
    """The state after an update by some gradients; and {'grad_norm', 'learning_rate'}."""
    step, weights = state['step'], self._stored(state['weights'], self.weight_specs)
    old_slots = self._stored(state['slots'], self.slot_specs)
    norm = None
    if self.clip_norm:
      grads, norm = self.optimizer.clipped(grads, self.clip_norm)
    rate = self.schedule(step)
    slots = {
      name: {slot: old_slots[f'{name}/{slot}'] for slot in self.optimizer.slots(spec)}
      for name, spec in self.weight_specs.items()
    }
    updates = self.optimizer.update_all(grads, slots, weights, self.weight_specs, step, rate)
    if norm is None:
      norm = tf.sqrt(updates.square)
    new_weights = self._stored(updates.weights, self.weight_specs)
    new_slots = {f'{name}/{slot}': value for name, of in updates.slots.items() for slot, value in of.items()}
    new_slots = self._stored(new_slots, self.slot_specs)
    return {'step': step + 1, 'weights': new_weights, 'slots': new_slots}, {'grad_norm': norm, 'learning_rate': rate}

  def eval_step(self, weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]) -> Metrics:
    """The task's metrics of a batch, at inference."""
    return self.task.loss(self.theta(weights), batch)[1]

  def theta(self, weights: Mapping[str, tf.Tensor]) -> Theta:
    """Flat weights as the task takes them: nested, and where devices store parts of one that all use, gathered.

    Those of a scanned stack are gathered layer by layer, within its loop.
    """

    def used(name, weight):
      dims = self.weight_specs[name].dims
      return weight if dims.startswith('L') else xla_sharding.gather(weight, dims)

    with tf.name_scope('weights'):
      return weights_lib.unflatten({name: used(name, weight) for name, weight in weights.items()})

  def _stored(self, values: Mapping[str, tf.Tensor], specs: Mapping[str, WeightSpec]) -> dict[str, tf.Tensor]:
    with tf.name_scope('state'):
      return {name: xla_sharding.store(value, specs[name].dims) for name, value in values.items()}
