"""Updates on a CPU: of large weights in place, each compiled by XLA, which does in the cache what can be done there.

TensorFlow's own kernels write every intermediate value to memory, and memory is what an update of many experts waits
for. Compiled, an update reads gradients and weights twice and writes weights once; a gradient that is the product of few
rows is not even written. Of small weights, which are most, the many operations are what takes time, and more of it while
they are traced: those that are alike are updated as one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping

import tensorflow as tf

from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.optim.cpu.matrix_updates import MatrixByMatrix
from lingvo_moe.optim.cpu.thin_products import ThinProduct
from lingvo_moe.optim.optimizer import Adafactor
from lingvo_moe.optim.optimizer import Optimizer
from lingvo_moe.optim.optimizer import Slots
from lingvo_moe.optim.optimizer import Update
from lingvo_moe.optim.optimizer import Updates

_SMALL = 1 << 17  # elements; to copy larger ones together takes longer than what it saves
_LARGE = 1 << 22  # elements, which no cache holds; smaller weights are not worth compiling for


@dataclasses.dataclass(frozen=True)
class FusedUpdates(Optimizer):
  """An optimiser that makes the same updates as another, to rounding, of slots and weights that are variables.

  Large ones are assigned to and returned as they are; what has been read of them before stays what it was. Adafactor's
  gradients of experts that are products of few rows are not multiplied out, if they come here as they were made: in
  float32, not summed over micro-batches and not of a scanned stack. Clipped here they stay so.
  """

  optimizer: Optimizer

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    return self.optimizer.slots(spec)

  def update(
    self, grad: tf.Tensor, slots: Slots, weight: tf.Tensor, spec: WeightSpec, step: tf.Tensor, rate: tf.Tensor
  ) -> Update:
    if spec.size >= _LARGE:
      return Update(weight, slots, self._in_place(grad, slots, weight, spec, step, rate))
    return self.optimizer.update(grad, *_read((slots, weight)), spec, step, rate)

  def of_same_norm(self, grad: tf.Tensor) -> tf.Tensor:
    thin = ThinProduct.behind(grad)
    return super().of_same_norm(grad) if thin is None else thin.norm()

  def scaled(self, grad: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    thin = ThinProduct.behind(grad)
    return super().scaled(grad, scale) if thin is None else thin.scaled(scale)

  def update_all(
    self,
    grads: Mapping[str, tf.Tensor],
    slots: Mapping[str, Slots],
    weights: Mapping[str, tf.Tensor],
    specs: Mapping[str, WeightSpec],
    step: tf.Tensor,
    rate: tf.Tensor,
  ) -> Updates:
    """As one by one; but small weights that are alike are stacked, as an update has eighty operations whatever its size."""
    found = []
    for names in _alike(specs):
      if len(names) == 1:
        found.append(super().update_all(grads, slots, weights, {names[0]: specs[names[0]]}, step, rate))
      else:
        found.append(self._stacked(names, (grads, slots, weights), specs[names[0]], step, rate))
    return Updates(
      {name: weight for updates in found for name, weight in updates.weights.items()},
      {name: of for updates in found for name, of in updates.slots.items()},
      tf.add_n([updates.square for updates in found]),
    )

  def _stacked(self, names, values, spec, step, rate):
    """The updates of weights that share a specification, as of one with an axis of layers; values are by name."""
    stack = dataclasses.replace(spec, shape=(len(names), *spec.shape), dims='L' + spec.dims)
    together = (tf.nest.map_structure(lambda *x: tf.stack(x), *(of[name] for name in names)) for of in values)
    update = self.optimizer.update(*together, stack, step, rate)
    unstacked = tf.nest.map_structure(tf.unstack, (update.weight, update.slots))
    return Updates(
      dict(zip(names, unstacked[0], strict=True)),
      {name: {slot: x[i] for slot, x in unstacked[1].items()} for i, name in enumerate(names)},
      update.square,
    )

  def _in_place(self, grad, slots, weight, spec, step, rate):
    """Updates variables; returns the sum of the squares of the gradient."""
    values = slots, weight, step, rate
    takes_products = isinstance(self._for_xla, MatrixByMatrix) and self._for_xla.takes_products(spec)
    thin = ThinProduct.behind(grad) if takes_products else None
    if thin is None:
      return self._compiled(spec)(grad, *values)
    by = lambda made: lambda: self._compiled(spec)(made(), *values)
    return tf.cond(thin.worth_it, by(thin.padded), by(thin.multiplied))

  @functools.cached_property
  def _for_xla(self) -> Optimizer:
    return MatrixByMatrix.of(self.optimizer) if isinstance(self.optimizer, Adafactor) else self.optimizer

  @functools.cached_property
  def _compiled(self) -> Callable[[WeightSpec], Callable[..., tf.Tensor]]:
    """Of a specification, one function for all weights that have it, so that XLA compiles it once.

    It takes a gradient, or a ThinProduct that is one, of which it is compiled for each number of rows as that first comes.
    """

    @functools.cache
    def of(spec):
      @functools.partial(tf.function, autograph=False, jit_compile=True)
      def update(grad, slots, weight, step, rate):
        by = self._for_xla.update_by_product if isinstance(grad, ThinProduct) else self._for_xla.update
        updated = by(grad, *_read((slots, weight)), spec, step, rate)
        weight.assign(updated.weight)
        for name, slot in slots.items():
          slot.assign(updated.slots[name])
        return updated.square

      return update

    return of


def _alike(specs: Mapping[str, WeightSpec]) -> list[list[str]]:
  """The names of weights that may be stacked together, and of each other one by itself."""
  alike = collections.defaultdict(list)
  for name, spec in specs.items():
    stackable = spec.size <= _SMALL and 'L' not in spec.dims
    alike[(spec.shape, spec.dims, spec.factored, spec.dtype) if stackable else name].append(name)
  return list(alike.values())


def _read(variables):
  return tf.nest.map_structure(lambda v: v.read_value(), variables)
