"""Adafactor (Shazeer and Stern, 2018), the optimizer of GShard."""

import dataclasses
import math
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops, xla_sharding
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.ops import backend
from lingvo_moe.optim.optimizer import Optimizer, Slots, Update, zeros


class Measured(NamedTuple):
  """Statistics of a weight and its gradient before the step."""

  slots: Slots  # the new ones
  grad: tf.Tensor  # mean squares over each logical weight, with axes kept: of the gradient,
  update: tf.Tensor  # of gradient / root of the second moment,
  weight: tf.Tensor  # and of the weight


@dataclasses.dataclass(frozen=True)
class Adafactor(Optimizer):
  """Adafactor (Shazeer and Stern, 2018) without momentum, as in GShard.

  The second moment of a weight with `factored` axes is kept as its means over one axis each (`row` over the second,
  `column` over the first); other axes, such as E of experts, are kept whole. beta2 at update t (from 1) is
  min(beta2_cap, 1 - t^-0.8), our reading of the paper's 'beta2 = 0.99 with 1 - t^-0.8 schedule'; beta2_cap = 1 is no
  cap, as in Lingvo, whose XLAShardingAdafactor ignores beta2 where it has the exponent. The update is clipped to an RMS
  of `clip` and scaled by rate * max(epsilon2, RMS(weight)). RMS is taken per logical weight: of each layer by itself if
  layers are stacked.
  """

  beta2_cap: float = 0.99
  decay: float = 0.8
  clip: float = 1.0
  epsilon1: float = 1e-30
  epsilon2: float = 1e-3

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    if not spec.factored:
      return {'moment': zeros(spec)}
    first, second = spec.factored
    return {'row': zeros(spec, drop=second), 'column': zeros(spec, drop=first)}

  def update(self, grad, slots, weight, spec, step, rate) -> Update:
    return self.step(grad, weight, self.measure(grad, slots, weight, spec, step), spec, rate)

  def update_alike(self, grads, slots, weights, spec, step, rate) -> list[Update]:
    """Updates from statistics of all weights together, whose stacks XLA reads from the weights, and never writes.

    XLA makes one kernel of what is done to each weight where all of it reads one small tensor, here [L] and behind a
    barrier. New slots are behind one too: they are written before they are stacked, or XLA would copy the old ones.
    """
    if len(grads) == 1:
      return super().update_alike(grads, slots, weights, spec, step, rate)
    stack = dataclasses.replace(spec, shape=(len(grads), *spec.shape), dims='L' + spec.dims)
    grads = [tf.cast(grad, tf.float32) for grad in grads]
    grad = tf.stack(grads)
    squares, mean = _mean_squares(grad, stack)
    squares = {slot: tf.unstack(square) for slot, square in squares.items()}
    if not spec.factored:
      squares = {'moment': [tf.square(grad) for grad in grads]}
    (beta2_L,) = xla_sharding.barrier([tf.fill([backend.current().updates_at_once], self._beta2(step))])
    mixed = [
      self._mixed(of_one, {slot: of_each[i] for slot, of_each in squares.items()}, beta2_L[i])
      for i, of_one in enumerate(slots)
    ]
    mixed = tf.nest.pack_sequence_as(mixed, xla_sharding.barrier(tf.nest.flatten(mixed)))
    new_slots = {slot: tf.stack([of_one[slot] for of_one in mixed]) for slot in squares}
    measured = _measured(grad, new_slots, tf.stack(weights), stack, mean)
    scales, means, *roots = map(tf.unstack, (self._scale(measured, rate), mean, *_roots(new_slots, stack)))
    each = zip(grads, weights, mixed, zip(*roots), scales, means, strict=True)
    return [self._stepped(*of_one, spec) for of_one in each]

  def measure(self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor) -> Measured:
    """Statistics of gradient and weight before the step; also of a part of a weight, such as one expert."""
    grad = tf.cast(grad, tf.float32)
    squares, mean = _mean_squares(grad, spec)
    return _measured(grad, self._mixed(slots, squares, self._beta2(step)), weight, spec, mean)

  def step(self, grad: tf.Tensor, weight: tf.Tensor, measured: Measured, spec: WeightSpec, rate: tf.Tensor) -> Update:
    """Update from the statistics."""
    roots, grad = _roots(measured.slots, spec), tf.cast(grad, tf.float32)
    return self._stepped(grad, weight, measured.slots, roots, self._scale(measured, rate), measured.grad, spec)

  def _beta2(self, step: tf.Tensor) -> tf.Tensor:
    t = tf.cast(step, tf.float32) + 1.0
    return tf.minimum(self.beta2_cap, 1.0 - t**-self.decay)

  def _mixed(self, slots: Slots, squares: Slots, beta2: tf.Tensor) -> Slots:
    """New slots, from the old ones and the mean squares of a gradient."""
    return {slot: beta2 * slots[slot] + (1.0 - beta2) * (new + self.epsilon1) for slot, new in squares.items()}

  def _scale(self, measured: Measured, rate: tf.Tensor) -> tf.Tensor:
    """Factor of gradient / root of the second moment in the update."""
    scale = rate * tf.maximum(self.epsilon2, tf.sqrt(measured.weight))
    return scale / tf.maximum(1.0, tf.sqrt(measured.update) / self.clip)

  def _stepped(self, grad, weight, slots, roots, scale, mean, spec) -> Update:
    update = scale * math.prod(roots, start=grad)
    return Update(weight - tf.cast(update, weight.dtype), slots, float(spec.size) * tf.reduce_mean(mean))


def _mean_squares(grad: tf.Tensor, spec: WeightSpec) -> tuple[Slots, tf.Tensor]:
  """Mean squares of a float32 gradient: those that are mixed into each slot, and over each logical weight."""
  if not spec.factored:
    square = tf.square(grad)
    return {'moment': square}, tf.reduce_mean(square, axis=_logical(spec), keepdims=True)
  first, second = (spec.dims.index(letter) for letter in spec.factored)
  row, column = (ops.mean_square(grad, [axis]) for axis in (second, first))
  mean = tf.reduce_mean(row, axis=_logical(spec), keepdims=True)
  return {'row': tf.squeeze(row, second), 'column': tf.squeeze(column, first)}, mean


def _measured(grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, mean: tf.Tensor) -> Measured:
  """Statistics, given the new slots and the gradient's mean square."""
  update = ops.mean_square(math.prod(_roots(slots, spec), start=grad), _logical(spec))
  return Measured(slots, mean, update, ops.mean_square(tf.cast(weight, tf.float32), _logical(spec)))


def _logical(spec: WeightSpec) -> list[int]:
  """Axes of a logical weight."""
  return [axis for axis, letter in enumerate(spec.dims) if letter != 'L']


def _roots(slots: Slots, spec: WeightSpec) -> list[tf.Tensor]:
  """Factors of 1 / sqrt(v), with the second moment v from the optimizer slots."""
  if not spec.factored:
    return [tf.math.rsqrt(slots['moment'])]
  first, second = (spec.dims.index(letter) for letter in spec.factored)
  # v = row * column / mean(row). Two rsqrts, as the product row * column underflows for an expert without a token.
  row, column = tf.expand_dims(slots['row'], second), tf.expand_dims(slots['column'], first)
  return [tf.math.rsqrt(row / tf.reduce_mean(row, axis=first, keepdims=True)), tf.math.rsqrt(column)]
