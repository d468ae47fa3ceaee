"""Optimisers as pure functions of (gradient, slots, weight): Adafactor as in GShard, and Adam. Slots are float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from lingvo_moe import mean_square
from lingvo_moe.weights import Constant
from lingvo_moe.weights import WeightSpec

Slots = Mapping[str, tf.Tensor]


class Optimizer(Protocol):
  """How one weight is updated."""

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    """What it keeps for a weight."""

  def update(
    self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor, rate: tf.Tensor
  ) -> tuple[tf.Tensor, Slots]:
    """(new weight, new slots); `step` counts the updates made before, `rate` is the schedule's."""


@dataclasses.dataclass(frozen=True)
class Adafactor:
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
  ) -> tuple[tf.Tensor, Slots]:
    t = tf.cast(step, tf.float32) + 1.0
    beta2 = tf.minimum(self.beta2_cap, 1.0 - t**-self.decay)
    grad = tf.cast(grad, tf.float32)
    mix = lambda old, new: beta2 * old + (1.0 - beta2) * new
    if spec.factored:
      first, second = (spec.dims.index(letter) for letter in spec.factored)
      mean = lambda axis: tf.squeeze(self.mean_square(grad, [axis]), axis) + self.epsilon1
      row, column = mix(slots['row'], mean(second)), mix(slots['column'], mean(first))
      # v = row * column / mean(row). Two rsqrts, never the product: it underflows for an expert without a token.
      row_kept, column_kept = tf.expand_dims(row, second), tf.expand_dims(column, first)
      relative = row_kept / tf.reduce_mean(row_kept, axis=first, keepdims=True)
      update = grad * tf.math.rsqrt(relative) * tf.math.rsqrt(column_kept)
      slots = {'row': row, 'column': column}
    else:
      moment = mix(slots['moment'], tf.square(grad) + self.epsilon1)
      update = grad * tf.math.rsqrt(moment)
      slots = {'moment': moment}
    logical = [axis for axis, letter in enumerate(spec.dims) if letter != 'L']
    rms = lambda x: tf.sqrt(self.mean_square(x, logical))
    scale = rate * tf.maximum(self.epsilon2, rms(tf.cast(weight, tf.float32)))
    scale /= tf.maximum(1.0, rms(update) / self.clip)
    return weight - tf.cast(scale * update, weight.dtype), slots


@dataclasses.dataclass(frozen=True)
class Adam:
  """Adam (Kingma and Ba, 2015), with bias correction."""

  beta1: float = 0.9
  beta2: float = 0.98
  epsilon: float = 1e-9

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    return {'mean': _zeros(spec, drop=''), 'moment': _zeros(spec, drop='')}

  def update(
    self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor, rate: tf.Tensor
  ) -> tuple[tf.Tensor, Slots]:
    del spec
    t = tf.cast(step, tf.float32) + 1.0
    grad = tf.cast(grad, tf.float32)
    mean = self.beta1 * slots['mean'] + (1.0 - self.beta1) * grad
    moment = self.beta2 * slots['moment'] + (1.0 - self.beta2) * tf.square(grad)
    rate *= tf.sqrt(1.0 - self.beta2**t) / (1.0 - self.beta1**t)
    # Kingma and Ba's epsilon is added to the corrected root; scaling it here is the same thing.
    update = rate * mean / (tf.sqrt(moment) + self.epsilon * tf.sqrt(1.0 - self.beta2**t))
    return weight - tf.cast(update, weight.dtype), {'mean': mean, 'moment': moment}


def clip_by_global_norm(grads: dict[str, tf.Tensor], limit: float) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
  """Scales all gradients down to a global norm of `limit` (0: no limit); returns them and the norm before."""
  norm = tf.linalg.global_norm(list(grads.values()))
  if not limit:
    return grads, norm
  scale = limit / tf.maximum(norm, limit)
  return {name: g * tf.cast(scale, g.dtype) for name, g in grads.items()}, norm


def _zeros(spec: WeightSpec, drop: str) -> WeightSpec:
  kept = [(size, letter) for size, letter in zip(spec.shape, spec.dims, strict=True) if letter not in drop]
  return WeightSpec(tuple(s for s, _ in kept), ''.join(d for _, d in kept), Constant(0.0))
