"""Optimizers as pure functions of (gradient, optimizer slots, weight). Optimizer slots are float32."""

import abc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.core.weights import Constant, WeightSpec

Slots = Mapping[str, tf.Tensor]


class Update(NamedTuple):
  """Weight and optimizer slots after an update."""

  weight: tf.Tensor
  slots: Slots
  square: tf.Tensor  # float32 scalar: sum of squares of the gradient, which every optimizer computes anyway


class Optimizer(abc.ABC):
  """Optimizer: rule for updating a weight by its gradient."""

  @abc.abstractmethod
  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    """Specifications of the optimizer slots of a weight."""

  @abc.abstractmethod
  def update(
    self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor, rate: tf.Tensor
  ) -> Update:
    """Update by one gradient; `step` is the number of updates made before, `rate` the learning rate."""

  def update_alike(
    self,
    grads: Sequence[tf.Tensor],
    slots: Sequence[Slots],
    weights: Sequence[tf.Tensor],
    spec: WeightSpec,
    step: tf.Tensor,
    rate: tf.Tensor,
  ) -> list[Update]:
    """Updates of weights of one specification, each as by `update`; an optimizer may make them at once, for XLA."""
    return [self.update(*of_one, spec, step, rate) for of_one in zip(grads, slots, weights, strict=True)]


def clip_scale(grads: Sequence[tf.Tensor], limit: float) -> tuple[tf.Tensor, tf.Tensor]:
  """(factor that scales gradients down to a global norm of `limit`, the norm before)."""
  norm = tf.linalg.global_norm(grads)
  return limit / tf.maximum(norm, limit), norm


def clip_by_global_norm(grads: Mapping[str, tf.Tensor], limit: float) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
  """Clips dense gradients to a global norm of `limit`; returns them and the norm before."""
  scale, norm = clip_scale(list(grads.values()), limit)
  return {name: grad * tf.cast(scale, grad.dtype) for name, grad in grads.items()}, norm


def zeros(spec: WeightSpec, drop: str = '') -> WeightSpec:
  """Optimizer slot of zeros with the axes of a weight, except those in `drop`."""
  kept = [(size, letter) for size, letter in zip(spec.shape, spec.dims, strict=True) if letter not in drop]
  return WeightSpec(tuple(s for s, _ in kept), ''.join(d for _, d in kept), Constant(0.0), slot=True)
