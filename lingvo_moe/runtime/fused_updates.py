"""Updates of large weights on a CPU: each compiled by XLA, which passes over the gradient and the weight half as often.

TensorFlow's own kernels write every intermediate value to memory, and memory is what an update of many experts waits
for. The shape of a weight never changes, so each is compiled once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from lingvo_moe import mean_square
from lingvo_moe.optimizer import Adafactor
from lingvo_moe.optimizer import Optimizer
from lingvo_moe.optimizer import Slots
from lingvo_moe.weights import WeightSpec

_LARGE = 1 << 23  # elements, which no cache holds; smaller weights are not worth compiling for


@dataclasses.dataclass(frozen=True)
class FusedUpdates:
  """An optimiser that makes the same updates as another, to rounding."""

  optimizer: Optimizer

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    return self.optimizer.slots(spec)

  def update(
    self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor, rate: tf.Tensor
  ) -> tuple[tf.Tensor, Slots]:
    if spec.size < _LARGE:
      return self.optimizer.update(grad, slots, weight, spec, step, rate)
    return self._compiled(spec)(grad, slots, weight, step, rate)

  @functools.cached_property
  def _compiled(self) -> Callable[[WeightSpec], Callable]:
    """Of a specification, one function for all weights that have it, so that XLA compiles it once."""
    optimizer = self.optimizer
    if isinstance(optimizer, Adafactor):
      optimizer = dataclasses.replace(optimizer, mean_square=mean_square.for_xla_on_cpus)

    @functools.cache
    def of(spec):
      update = lambda grad, slots, weight, step, rate: optimizer.update(grad, slots, weight, spec, step, rate)
      return tf.function(update, autograph=False, jit_compile=True)

    return of
