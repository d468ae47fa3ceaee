"""Weight updates in place on a CPU: large weights compiled by XLA, small ones of one specification stacked.

TensorFlow's own kernels write every intermediate value to memory, and the update of many experts is bound by memory.
Compiled, an update reads gradients and weights twice and writes weights once; a factored gradient is not written at
all. The update of small weights, which are most, is bound by the number of operations, as is its tracing: weights of
one specification are stacked and updated as one.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.ops import backend, cpu
from lingvo_moe.ops.cpu.factored import FactoredGradient
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.cpu.matrix_updates import MatrixByMatrix
from lingvo_moe.optim.optimizer import Optimizer, clip_scale

_SMALL = 1 << 17  # elements; stacking larger weights takes longer than it saves
_LARGE = 1 << 22  # elements, more than a cache holds; updates of smaller weights are not worth compiling

Gradient = tf.Tensor | FactoredGradient
# {'weights': {name: variable}, 'slots': {name/slot: variable}, 'copies': {name: variable}}; copies are of some weights,
# in the type in which a model uses them.
Variables = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class InPlaceUpdates:
  """In-place updates: an optimizer's, equal to rounding, assigned to variables of weights, copies and optimizer slots.

  Tensors read from a variable before keep their values. Factored gradients stay factored, also when clipped.
  """

  optimizer: Optimizer

  def apply(
    self,
    grads: Mapping[str, Gradient],
    variables: Variables,
    specs: Mapping[str, WeightSpec],
    step: tf.Tensor,
    rate: tf.Tensor,
    clip_norm: float = 0.0,
  ) -> tf.Tensor:
    """Updates weights, copies and optimizer slots by gradients, and returns the global norm of these before clipping.

    Gradients and specifications are by name of the weight; step and rate are as in Optimizer.update, and clip_norm is
    the largest global norm, 0 for no limit.
    """
    grads = {name: g if isinstance(g, FactoredGradient) else tf.convert_to_tensor(g) for name, g in grads.items()}
    norm = None
    if clip_norm:
      factored = lambda grad: isinstance(grad, FactoredGradient)
      grads = {name: grad if factored(grad) else tf.cast(grad, tf.float32) for name, grad in grads.items()}
      scale, norm = clip_scale([grad.norm() if factored(grad) else grad for grad in grads.values()], clip_norm)
      scaled = lambda grad: grad.scaled(scale) if factored(grad) else grad * scale
      grads = {name: scaled(grad) for name, grad in grads.items()}
    slots = {
      name: {slot: variables['slots'][f'{name}/{slot}'] for slot in self.optimizer.slots(spec)}
      for name, spec in specs.items()
    }
    kinds = [variables[kind] for kind in ('weights', 'copies') if kind in variables]
    weights = {name: [of_kind[name] for of_kind in kinds if name in of_kind] for name in specs}
    squares = []
    for names in _alike(specs):
      spec, values = specs[names[0]], (grads, slots, weights)
      if len(names) > 1:
        squares.append(self._stacked(names, values, spec, step, rate))
      else:
        update = self._large if spec.size >= _LARGE else self._small
        squares.append(update(*(named[names[0]] for named in values), spec, step, rate))
    return tf.sqrt(tf.add_n(squares)) if norm is None else norm

  def _small(self, grad, slots, weight, spec, step, rate):
    """Updates one weight by TensorFlow's own kernels; returns the sum of squares of the gradient."""
    updated = self.optimizer.update(tf.convert_to_tensor(grad), *_read((slots, weight[0])), spec, step, rate)
    _assign(weight, slots, updated.weight, updated.slots)
    return updated.square

  def _stacked(self, names: Sequence[str], values, spec, step, rate):
    """Updates weights of one specification, stacked as one weight with an axis of layers; values are by name."""
    stack = dataclasses.replace(spec, shape=(len(names), *spec.shape), dims='L' + spec.dims)
    grads, slots, weights = ([named[name] for name in names] for named in values)
    nests = grads, _read(slots), _read([master for master, *_ in weights])
    grad, read_slots, weight = (tf.nest.map_structure(lambda *x: tf.stack(x), *nest) for nest in nests)
    updated = self.optimizer.update(grad, read_slots, weight, stack, step, rate)
    new_weights, new_slots = tf.nest.map_structure(tf.unstack, (updated.weight, updated.slots))
    for i, (variable, slot_variables) in enumerate(zip(weights, slots, strict=True)):
      _assign(variable, slot_variables, new_weights[i], {slot: x[i] for slot, x in new_slots.items()})
    return updated.square

  def _large(self, grad, slots, weight, spec, step, rate):
    """Updates one weight by a program that XLA compiles."""
    update = lambda *grad: self._compiled(spec)(grad, slots, weight, step, rate)
    takes_factors = isinstance(self._for_xla, MatrixByMatrix) and self._for_xla.takes_factors(spec)
    if not isinstance(grad, FactoredGradient) or not takes_factors:
      return update(tf.convert_to_tensor(grad))

    def by_factors():
      padded = grad.padded()
      return update(padded.x_ECM, padded.dy_ECH)

    return tf.cond(grad.has_few_rows, by_factors, lambda: update(grad.multiplied()))

  @functools.cached_property
  def _for_xla(self) -> Optimizer:
    return MatrixByMatrix(**vars(self.optimizer)) if isinstance(self.optimizer, Adafactor) else self.optimizer

  @functools.cached_property
  def _compiled(self) -> Callable[[WeightSpec], Callable[..., tf.Tensor]]:
    """Compiled update by specification: one function for all its weights, compiled once, or once per number of rows.

    Its gradient argument is (tensor,), or the two factors.
    """

    @functools.cache
    def compiled(spec):
      @functools.partial(tf.function, autograph=False, jit_compile=True)
      def update(grad, slots, weight, step, rate):
        with backend.use(cpu.COMPILED):
          values = *_read((slots, weight[0])), spec, step, rate
          if len(grad) == 1:
            updated = self._for_xla.update(*grad, *values)
          else:
            updated = self._for_xla.update_factored(FactoredGradient(*grad), *values)
        _assign(weight, slots, updated.weight, updated.slots)
        return updated.square

      return update

    return compiled


def _alike(specs: Mapping[str, WeightSpec]) -> list[list[str]]:
  """Groups of names: small weights of one specification together, every other weight alone."""
  alike = collections.defaultdict(list)
  for name, spec in specs.items():
    stackable = spec.size <= _SMALL and 'L' not in spec.dims
    alike[(spec.shape, spec.dims, spec.factored, spec.dtype, spec.float32) if stackable else name].append(name)
  return list(alike.values())


def _assign(weight, slots, new_weight, new_slots):
  for variable in weight:
    variable.assign(tf.cast(new_weight, variable.dtype))
  for name, slot in slots.items():
    slot.assign(new_slots[name])


def _read(variables):
  return tf.nest.map_structure(lambda v: v.value(), variables)
