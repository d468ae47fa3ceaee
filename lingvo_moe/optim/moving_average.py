"""Exponential moving average of the weights, with any optimizer (Polyak and Juditsky, 1992)."""

import dataclasses

import tensorflow as tf

from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.optim.optimizer import Optimizer, Slots, Update, zeros

SLOT = 'average'


@dataclasses.dataclass(frozen=True)
class WithMovingAverage(Optimizer):
  """Optimizer that also keeps the moving average decay * average + (1 - decay) * w_t of each weight, in slot `average`.

  It begins at 0, so after t updates the average of w_1 to w_t is that optimizer slot divided by `bias(decay, t)`.
  Training does not read it. It is split over devices, saved and restored as all optimizer slots are.
  """

  inner: Optimizer  # makes the updates
  decay: float  # in [0, 1); the average looks back over some 1 / (1 - decay) steps

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    return {**self.inner.slots(spec), SLOT: zeros(spec)}

  def update(self, grad, slots, weight, spec, step, rate) -> Update:
    inner_slots = {name: slots[name] for name in self.inner.slots(spec)}
    return self._averaged(self.inner.update(grad, inner_slots, weight, spec, step, rate), slots)

  def update_alike(self, grads, slots, weights, spec, step, rate) -> list[Update]:
    inner_slots = [{name: of_one[name] for name in self.inner.slots(spec)} for of_one in slots]
    updates = self.inner.update_alike(grads, inner_slots, weights, spec, step, rate)
    return [self._averaged(updated, of_one) for updated, of_one in zip(updates, slots, strict=True)]

  def _averaged(self, updated: Update, slots: Slots) -> Update:
    # In this form, as decay and 1 - decay in float32 do not sum to 1, which scales the average of many steps.
    average = slots[SLOT] + (1.0 - self.decay) * (tf.cast(updated.weight, tf.float32) - slots[SLOT])
    return updated._replace(slots={**updated.slots, SLOT: average})


def bias(decay: float, updates: int) -> float:
  """Bias of the moving average after t updates: sum of the factors of w_1 to w_t in it."""
  return 1.0 - decay**updates
