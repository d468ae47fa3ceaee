"""Program: a model, its optimizer and its seed as pure functions of a state, which every runtime runs.

A state is {'step': int64 scalar, 'weights': {name: tensor}, 'slots': {name/slot: tensor}}. Nothing here owns a
variable, opens a file or names a device.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import tensorflow as tf

from lingvo_moe import ops, xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import dealt, results_of, row_parts, sizes
from lingvo_moe.core.weights import Specs, Theta, WeightSpec
from lingvo_moe.layers import moe
from lingvo_moe.layers.lora import Lora, part
from lingvo_moe.ops import backend
from lingvo_moe.ops.loops import counted
from lingvo_moe.optim import updates
from lingvo_moe.optim.optimizer import Optimizer
from lingvo_moe.optim.schedule import Schedule
from lingvo_moe.optim.updates import stored

State = dict[str, Any]
Metrics = dict[str, Any]  # scalars, and nests of tensors specific to a model


class Model(Protocol):
  """Interface of a model to a program: its weights and a loss."""

  def weights(self) -> Specs:
    """Nested WeightSpecs."""

  def loss(
    self,
    theta: Theta,
    batch: Mapping[str, tf.Tensor],
    key: tf.Tensor | None = None,
    totals: Mapping[str, tf.Tensor] | None = None,
  ) -> tuple[tf.Tensor, Metrics]:
    """Objective, a scalar to minimise, and metrics, which a program extends by 'objective'.

    With the totals of a batch both add up over its parts. Without a key it is inference.
    """

  def totals(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Denominators of losses; they add up over parts of a batch.

    A model whose gates have balance_over='batch' also has `choices(theta, batch, key)`: more of them, from a run of it.
    """


@dataclasses.dataclass(frozen=True)
class Program:
  """Model with its optimizer, schedule and seed.

  Micro-batches are parts of a batch that are computed one after the other, with their gradients added up: equal results
  to rounding, in less memory. Balance losses over all groups together of noisy top-k and hierarchical gates are then
  those of each micro-batch. Where the losses of others are (balance_over='batch'), the choices of all micro-batches
  are counted first, in a forward pass more.
  """

  model: Model
  optimizer: Optimizer
  schedule: Schedule  # of the learning rate
  clip_norm: float = 0.0  # largest global norm of the gradients; 0: no limit
  seed: int = 0  # of initial weights and of random numbers in training
  num_groups: int = 1  # groups of rows of a batch; the rows of a group stay together
  micro_batches: int = 1  # divides num_groups
  frozen: tuple[str, ...] = ()  # parts of the weights that are never updated, such as 'encoder/layer_00'; weights.below
  init_scale: float = (
    0.0  # s of matrices that begin as truncated normals of deviation sqrt(s / fan_in); 0: as specified
  )
  lora: Lora | None = None  # adapters, which are trained in place of the weights

  @functools.cached_property
  def model_specs(self) -> dict[str, WeightSpec]:
    """Flat name -> WeightSpec of the weights that the model is given."""
    specs = weights_lib.flatten(self.model.weights())
    return weights_lib.scaled_by_fan_in(specs, self.init_scale) if self.init_scale else specs

  @functools.cached_property
  def adapter_specs(self) -> dict[str, WeightSpec]:
    """Flat name -> WeightSpec of adapters."""
    return self.lora.specs(self.model_specs) if self.lora else {}

  @functools.cached_property
  def weight_specs(self) -> dict[str, WeightSpec]:
    """Flat name -> WeightSpec of all weights: those of the model, and adapters."""
    return self.model_specs | self.adapter_specs

  @property
  def constant(self) -> tuple[str, ...]:
    """Names of weights that training does not change; checkpoints after the first do not repeat them."""
    return tuple(self.model_specs) if self.lora else ()

  @functools.cached_property
  def trained_specs(self) -> dict[str, WeightSpec]:
    """Flat name -> WeightSpec of the weights that are updated: all that are not frozen, or adapters alone."""
    frozen = {*weights_lib.below(self.weight_specs, self.frozen), *self.constant}
    return {name: spec for name, spec in self.weight_specs.items() if name not in frozen}

  @functools.cached_property
  def used_dtypes(self) -> dict[str, tf.DType]:
    """Flat name -> type in which the model uses the weight; it casts a weight that is given in another type."""
    activations = tf.as_dtype(getattr(self.model, 'activation_dtype', tf.float32))
    whole = lambda name, spec: spec.float32 or part(name, 'a') in self.adapter_specs  # the sum with its adapter is cast
    return {name: s.dtype if whole(name, s) else activations for name, s in self.weight_specs.items()}

  @functools.cached_property
  def slot_specs(self) -> dict[str, WeightSpec]:
    """Flat name/slot -> WeightSpec of the optimizer slots; a frozen weight has none, nor a bias of loads."""
    optimized = {name: spec for name, spec in self.trained_specs.items() if not spec.balance_rate}
    return {f'{name}/{slot}': s for name, spec in optimized.items() for slot, s in self.optimizer.slots(spec).items()}

  def init(self) -> State:
    """Initial state, before the first step."""
    initial = lambda specs: stored(weights_lib.initialize(specs, self.seed), specs)
    return {'step': tf.zeros([], tf.int64), 'weights': initial(self.weight_specs), 'slots': initial(self.slot_specs)}

  def train_step(self, state: State, batch: Mapping[str, tf.Tensor]) -> tuple[State, Metrics]:
    """Train step: one update. Returns (the next state, metrics of the model with 'grad_norm' and 'learning_rate').

    Under a backend that updates in place, the state holds variables, which are returned; see optim/updates.py.
    """
    used = {**state['weights'], **state.get('copies', {})}
    grads, metrics = self.gradients(tf.convert_to_tensor(state['step']), used, batch)
    with tf.name_scope('update'):
      state, applied = self.apply(state, grads)
    return state, {**metrics, **applied}

  def gradients(
    self, step: tf.Tensor, weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]
  ) -> tuple[dict[str, Any], Metrics]:
    """Gradients of the loss by weight that is trained, and metrics of the model.

    Weights may be given in their `used_dtypes`, which their gradients then have. Under a backend that updates in place,
    a gradient may also be tf.IndexedSlices, of an embedding's rows or a FactoredGradient of the CPU backend;
    tf.convert_to_tensor makes it a tensor.
    """
    weights = stored(weights, self.weight_specs)
    batch = _Numbered.of(batch)
    key = prng.key(self.seed, 'train', step)
    if self.micro_batches > 1 and xla_sharding.stages() == 1:  # a pipeline takes the whole batch
      return self._sum_over_micro_batches(weights, key, batch)
    grads, metrics = self._gradients_in_parts(weights, key, batch)
    if not backend.current().updates_in_place:
      grads = stored(grads, self.weight_specs, update=True)
    return grads, metrics

  def _gradients(self, model, weights, key, batch, **totals):
    """Gradients and metrics of a batch, or of a part of one."""
    arrays, key_B = batch.with_keys(key)
    trained = {name: weights[name] for name in self.trained_specs}
    with tf.GradientTape() as tape:
      tape.watch(list(trained.values()))
      objective, metrics = model.loss(self.theta(weights), arrays, key_B, **totals)
    grads = dict(zip(trained, tape.gradient(objective, list(trained.values())), strict=True))
    grads = {n: tf.zeros_like(weights[n]) if g is None else g for n, g in grads.items()}
    return grads, {**metrics, 'objective': objective}

  def _gradients_in_parts(self, weights, key, batch, totals=None):
    """Sums of the gradients and metrics of parts of whole groups, which the backend computes side by side."""
    parts = _parts(self.model, batch, training=True)
    if len(parts.batches) == 1:
      return self._gradients(self.model, weights, key, batch, **({} if totals is None else {'totals': totals}))
    totals = parts.totals if totals is None else totals
    with backend.use(dataclasses.replace(backend.current(), sub_batches=1)):
      results = [self._gradients(parts.model, weights, key, part, totals=totals) for part in parts.batches]
      grads = {name: ops.add_gradients(*(grads[name] for grads, _ in results)) for name in results[0][0]}
    return grads, joined([metrics for _, metrics in results])

  def _sum_over_micro_batches(self, weights, key, batch):
    """Sum of the gradients and metrics of the micro-batches, computed one after the other."""
    divided = batch.map(lambda x: dealt(x, self.num_groups, self.micro_batches))

    def micro_batch(i):
      return divided.map(lambda x: xla_sharding.shard(x[i], 'B' + '1' * (x.shape.rank - 2)))

    totals = [self.model.totals(micro_batch(i).arrays) for i in range(self.micro_batches)]
    totals = tf.nest.map_structure(lambda *values: tf.add_n(values), *totals)
    if moe.balances_batch(self.model):
      theta = self.theta(weights)
      choices = lambda i: self.model.choices(theta, *micro_batch(i).with_keys(key))
      none = tf.nest.map_structure(lambda x: tf.zeros(x.shape, x.dtype), results_of(lambda: choices(0)))
      add = lambda i, sums: [tf.nest.map_structure(tf.add, sums, choices(i))]
      totals |= counted(self.micro_batches, add, none, scope='')[0]

    def dense_gradients(i):
      grads, metrics = self._gradients_in_parts(weights, key, micro_batch(i), totals)
      grads = stored(grads, self.weight_specs, update=True)
      return {name: tf.cast(g, self.weight_specs[name].dtype) for name, g in grads.items()}, metrics

    def body(i, grads, metrics):
      more_grads, more_metrics = dense_gradients(i)
      grads = stored({name: g + more_grads[name] for name, g in grads.items()}, self.weight_specs, update=True)
      return grads, tf.nest.map_structure(tf.add, metrics, more_metrics)

    results = results_of(lambda: dense_gradients(0))
    zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), results)
    begin = stored(zeros[0], self.weight_specs, update=True), zeros[1]
    return counted(self.micro_batches, body, *begin, scope='')

  def apply(self, state: State, grads: Mapping[str, tf.Tensor]) -> tuple[State, Metrics]:
    """State after an update by the gradients, and {'grad_norm', 'learning_rate'}."""
    rate = self.schedule(tf.convert_to_tensor(state['step']))
    specs = self.weight_specs, self.trained_specs, self.slot_specs
    state, norm = updates.update(self.optimizer, state, grads, specs, rate, self.clip_norm)
    return state, {'grad_norm': norm, 'learning_rate': rate}

  def eval_step(self, weights: Mapping[str, tf.Tensor], batch: Mapping[str, tf.Tensor]) -> Metrics:
    """Metrics of the model for a batch, at inference."""
    theta, parts = self.theta(weights), _parts(self.model, _Numbered.of(batch), training=False)
    if len(parts.batches) == 1:
      return self.model.loss(theta, batch)[1]
    with backend.use(dataclasses.replace(backend.current(), sub_batches=1)):
      return joined([parts.model.loss(theta, part.arrays, totals=parts.totals)[1] for part in parts.batches])

  def theta(self, weights: Mapping[str, tf.Tensor]) -> Theta:
    """Nested weights for the model, adapters merged; weights that devices store in parts but use whole are gathered.

    Weights of a scanned stack are gathered layer by layer, within its loop.
    """

    def used(name, weight):
      dims = self.weight_specs[name].dims
      return weight if dims.startswith('L') else xla_sharding.gather(weight, dims)

    with tf.name_scope('weights'):
      weights = {name: used(name, weight) for name, weight in weights.items()}
      return weights_lib.unflatten(self.lora.merged(weights) if self.lora else weights)


class _Numbered(NamedTuple):
  """Arrays of a batch, or of a part of it, and the numbers that its rows have in the batch."""

  arrays: Mapping[str, tf.Tensor]
  number_B: tf.Tensor

  @classmethod
  def of(cls, batch: Mapping[str, tf.Tensor]) -> Self:
    return cls(batch, tf.range(sizes(next(iter(batch.values())))[0]))

  def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> Self:
    """A function of each array and of the numbers."""
    return _Numbered({name: function(x) for name, x in self.arrays.items()}, function(self.number_B))

  def with_keys(self, key: tf.Tensor) -> tuple[Mapping[str, tf.Tensor], tf.Tensor]:
    """The arrays, and a random key for each row, which does not depend on the part."""
    return self.arrays, xla_sharding.shard(prng.fold(key, self.number_B), 'B')


class _Parts(NamedTuple):
  """Parts of a batch, the model of one, and the totals of all; or the batch alone, as its one part."""

  batches: Sequence[_Numbered]
  model: Model
  totals: Mapping[str, tf.Tensor]


def _parts(model: Model, batch: _Numbered, training: bool) -> _Parts:
  """Parts of a batch, as many as the backend computes side by side, if the losses of the model add up over parts.

  In training they are whole groups. At inference groups make no difference to a token. No part is empty where the
  number of rows is known; a runtime sees to it where it is not.
  """
  layers, rows = moe.layers_of(model), sizes(batch.number_B)[0]
  count = backend.current().sub_batches if hasattr(model, 'totals') else 1
  if isinstance(rows, int):
    count = max(1, min(count, rows))
  if (training and any(layer.gate.joint_loss for layer in layers)) or moe.balances_batch(model):
    count = 1
  if training:
    count = next(n for n in range(count, 0, -1) if all(layer.num_groups % n == 0 for layer in layers))
  if count == 1:
    return _Parts([batch], model, {})
  divided = batch.map(lambda x: row_parts(x, count))
  batches = [divided.map(lambda x, i=i: x[i]) for i in range(count)]
  model = moe.of_part(model, count if training else None)
  totals = tf.nest.map_structure(lambda *x: tf.add_n(x), *(model.totals(part.arrays) for part in batches))
  return _Parts(batches, model, totals)


def joined(metrics: Sequence[Any]) -> Any:
  """Metrics of a batch, joined from those of its parts: sums, unless their type has a method `joined`."""
  first = metrics[0]
  if isinstance(first, Mapping):
    return {name: joined([of_part[name] for of_part in metrics]) for name in first}
  if hasattr(first, 'joined'):
    return first.joined(metrics)
  return tf.nest.map_structure(lambda *x: tf.add_n(x), *metrics)
