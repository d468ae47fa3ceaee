"""Adafactor (Shazeer and Stern, 2018), the optimizer of GShard."""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.weights import WeightSpec
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

  def measure(self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor) -> Measured:
    """Statistics of gradient and weight before the step; also of a part of a weight, such as one expert."""
    t = tf.cast(step, tf.float32) + 1.0
    beta2 = tf.minimum(self.beta2_cap, 1.0 - t**-self.decay)
    grad = tf.cast(grad, tf.float32)
    logical = [axis for axis, letter in enumerate(spec.dims) if letter != 'L']
    mix = lambda old, new: beta2 * old + (1.0 - beta2) * (new + self.epsilon1)
    if spec.factored:
      first, second = (spec.dims.index(letter) for letter in spec.factored)
      row, column = (ops.mean_square(grad, [axis]) for axis in (second, first))
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
      update=ops.mean_square(_over_root(grad, slots, spec), logical),
      weight=ops.mean_square(tf.cast(weight, tf.float32), logical),
    )

  def step(self, grad: tf.Tensor, weight: tf.Tensor, measured: Measured, spec: WeightSpec, rate: tf.Tensor) -> Update:
    """Update from the statistics."""
    scale = rate * tf.maximum(self.epsilon2, tf.sqrt(measured.weight))
    scale /= tf.maximum(1.0, tf.sqrt(measured.update) / self.clip)
    update = scale * _over_root(tf.cast(grad, tf.float32), measured.slots, spec)
    square = float(spec.size) * tf.reduce_mean(measured.grad)
    return Update(weight - tf.cast(update, weight.dtype), measured.slots, square)


def _over_root(grad: tf.Tensor, slots: Slots, spec: WeightSpec) -> tf.Tensor:
  """grad / sqrt(v), with the second moment v from the optimizer slots."""
  if not spec.factored:
    return grad * tf.math.rsqrt(slots['moment'])
  first, second = (spec.dims.index(letter) for letter in spec.factored)
  # v = row * column / mean(row). Two rsqrts, as the product row * column underflows for an expert without a token.
  row, column = tf.expand_dims(slots['row'], second), tf.expand_dims(slots['column'], first)
  relative = row / tf.reduce_mean(row, axis=first, keepdims=True)
  return grad * tf.math.rsqrt(relative) * tf.math.rsqrt(column)
