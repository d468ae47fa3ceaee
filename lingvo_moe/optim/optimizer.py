"""Optimisers as pure functions of (gradient, slots, weight): Adafactor as in GShard, and Adam. Slots are float32."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.core.weights import Constant
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.optim.cpu import mean_square

Slots = Mapping[str, tf.Tensor]


class Update(NamedTuple):
  """A weight and its slots after an update."""

  weight: tf.Tensor
  slots: Slots
  square: tf.Tensor  # float32 scalar: the sum of the squares of the gradient, of which every optimiser makes use anyway


class Updates(NamedTuple):
  """Those of some weights, by name."""

  weights: dict[str, tf.Tensor]
  slots: dict[str, Slots]
  square: tf.Tensor  # float32 scalar, of all gradients


class Optimizer(abc.ABC):
  """How weights are updated."""

  @abc.abstractmethod
  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    """What it keeps for a weight."""

  @abc.abstractmethod
  def update(
    self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor, rate: tf.Tensor
  ) -> Update:
    """The update by one gradient; `step` counts the updates made before, `rate` is the schedule's."""

  def clipped(self, grads: Mapping[str, tf.Tensor], limit: float) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """(all gradients scaled down to a global norm of `limit`, the norm before)."""
    norm = tf.linalg.global_norm([self.of_same_norm(grad) for grad in grads.values()])
    scale = limit / tf.maximum(norm, limit)
    return {name: self.scaled(grad, scale) for name, grad in grads.items()}, norm

  def of_same_norm(self, grad: tf.Tensor) -> tf.Tensor:
    """A tensor with the norm of a gradient."""
    return grad

  def scaled(self, grad: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """grad * scale, in a form that `update` takes."""
    return grad * tf.cast(scale, grad.dtype)

  def update_all(
    self,
    grads: Mapping[str, tf.Tensor],
    slots: Mapping[str, Slots],
    weights: Mapping[str, tf.Tensor],
    specs: Mapping[str, WeightSpec],
    step: tf.Tensor,
    rate: tf.Tensor,
  ) -> Updates:
    """The updates of all weights, by name, each by its gradient."""
    updates = {n: self.update(grads[n], slots[n], weights[n], spec, step, rate) for n, spec in specs.items()}
    return Updates(
      {name: update.weight for name, update in updates.items()},
      {name: update.slots for name, update in updates.items()},
      tf.add_n([update.square for update in updates.values()]),
    )


class Measured(NamedTuple):
  """What Adafactor asks of a weight and its gradient before it takes a step."""

  slots: Slots  # the new ones
  grad: tf.Tensor  # means of squares over each logical weight, whose axes are kept: of the gradient,
  update: tf.Tensor  # of the gradient over the root of the second moment,
  weight: tf.Tensor  # and of the weight


@dataclasses.dataclass(frozen=True)
class Adafactor(Optimizer):
  """Adafactor (Shazeer and Stern, 2018) without momentum, as GShard trains with.

  The second moment of a weight with `factored` axes is kept as its means over either axis (`row` over the second,
  `column` over the first); other axes, such as the experts', are kept whole. beta2 at update t (from 1) is
  min(beta2_cap, 1 - t^-0.8). The update is clipped to an RMS of `clip` and scaled by
  rate * max(epsilon2, RMS(weight)). RMS is taken per logical weight: of stacked layers, of each by itself.
  `mean_square` is how means of squares are taken.
  """

  beta2_cap: float = 0.99
  decay: float = 0.8
  clip: float = 1.0
  epsilon1: float = 1e-30
  epsilon2: float = 1e-3
  mean_square: Callable[[tf.Tensor, Sequence[int]], tf.Tensor] = mean_square.plain

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    if not spec.factored:
      return {'moment': _zeros(spec, drop='')}
    first, second = spec.factored
    return {'row': _zeros(spec, drop=second), 'column': _zeros(spec, drop=first)}

  def update(
    self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor, rate: tf.Tensor
  ) -> Update:
    return self.step(grad, weight, self.measure(grad, slots, weight, spec, step), spec, rate)

  def measure(self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor) -> Measured:
    """The first half of an update. Of a part of a weight, such as one expert, it is that part's."""
    t = tf.cast(step, tf.float32) + 1.0
    beta2 = tf.minimum(self.beta2_cap, 1.0 - t**-self.decay)
    grad = tf.cast(grad, tf.float32)
    logical = [axis for axis, letter in enumerate(spec.dims) if letter != 'L']
    mix = lambda old, new: beta2 * old + (1.0 - beta2) * (new + self.epsilon1)
    if spec.factored:
      first, second = (spec.dims.index(letter) for letter in spec.factored)
      row, column = (self.mean_square(grad, [axis]) for axis in (second, first))
      mean = tf.reduce_mean(row, axis=logical, keepdims=True)
      slots = {
        'row': mix(slots['row'], tf.squeeze(row, second)),
        'column': mix(slots['column'], tf.squeeze(column, first)),
      }
    else:
      square = tf.square(grad)
      mean = tf.reduce_mean(square, axis=logical, keepdims=True)
      slots = {'moment': mix(slots['moment'], square)}
    return Measured(
      slots=slots,
      grad=mean,
      update=self.mean_square(_over_root(grad, slots, spec), logical),
      weight=self.mean_square(tf.cast(weight, tf.float32), logical),
    )

  def step(self, grad: tf.Tensor, weight: tf.Tensor, measured: Measured, spec: WeightSpec, rate: tf.Tensor) -> Update:
    """The second half."""
    scale = rate * tf.maximum(self.epsilon2, tf.sqrt(measured.weight))
    scale /= tf.maximum(1.0, tf.sqrt(measured.update) / self.clip)
    update = scale * _over_root(tf.cast(grad, tf.float32), measured.slots, spec)
    square = float(spec.size) * tf.reduce_mean(measured.grad)
    return Update(weight - tf.cast(update, weight.dtype), measured.slots, square)


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
  """Adam (Kingma and Ba, 2015), with bias correction."""

  beta1: float = 0.9
  beta2: float = 0.98
  epsilon: float = 1e-9

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    return {'mean': _zeros(spec, drop=''), 'moment': _zeros(spec, drop='')}

  def update(
    self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor, rate: tf.Tensor
  ) -> Update:
    del spec
    t = tf.cast(step, tf.float32) + 1.0
    grad = tf.cast(grad, tf.float32)
    square = tf.square(grad)
    mean = self.beta1 * slots['mean'] + (1.0 - self.beta1) * grad
    moment = self.beta2 * slots['moment'] + (1.0 - self.beta2) * square
    rate *= tf.sqrt(1.0 - self.beta2**t) / (1.0 - self.beta1**t)
    # Kingma and Ba's epsilon is added to the corrected root; scaling it here is the same thing.
    update = rate * mean / (tf.sqrt(moment) + self.epsilon * tf.sqrt(1.0 - self.beta2**t))
    return Update(weight - tf.cast(update, weight.dtype), {'mean': mean, 'moment': moment}, tf.reduce_sum(square))


def _zeros(spec: WeightSpec, drop: str) -> WeightSpec:
  kept = [(size, letter) for size, letter in zip(spec.shape, spec.dims, strict=True) if letter not in drop]
  return WeightSpec(tuple(s for s, _ in kept), ''.join(d for _, d in kept), Constant(0.0))


def _over_root(grad: tf.Tensor, slots: Slots, spec: WeightSpec) -> tf.Tensor:
  """grad / sqrt(v), of Adafactor's slots."""
  if not spec.factored:
    return grad * tf.math.rsqrt(slots['moment'])
  first, second = (spec.dims.index(letter) for letter in spec.factored)
  # v = row * column / mean(row). Two rsqrts, never the product: it underflows for an expert without a token.
  row, column = tf.expand_dims(slots['row'], second), tf.expand_dims(slots['column'], first)
  relative = row / tf.reduce_mean(row, axis=first, keepdims=True)
  return grad * tf.math.rsqrt(relative) * tf.math.rsqrt(column)
