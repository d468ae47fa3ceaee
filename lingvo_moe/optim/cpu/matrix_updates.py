"""Adafactor matrix by matrix, for XLA to compile for a CPU: the statistics of an expert are computed within the cache.

Given a factored gradient, experts are updated one by one as well.
"""

import dataclasses
import math

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.ops.cpu.factored import FactoredGradient
from lingvo_moe.optim.adafactor import Adafactor, Measured
from lingvo_moe.optim.optimizer import Update


class MatrixByMatrix(Adafactor):
  """Adafactor with updates equal to rounding; matrices are the last two axes of a weight, if those are factored."""

  def measure(self, grad, slots, weight, spec, step) -> Measured:
    batch_axes = len(spec.dims) - 2
    if not batch_axes or spec.dims[batch_axes:] != spec.factored:
      return super().measure(grad, slots, weight, spec, step)
    flat = lambda x: tf.reshape(x, [-1, *x.shape[batch_axes:]])
    flat_grad, flat_slots, flat_weight = tf.nest.map_structure(flat, (grad, slots, weight))
    measured = self._measure_each(lambda i: _one(flat_grad, i), flat_slots, flat_weight, spec, step)
    measured = tf.nest.map_structure(lambda x: tf.reshape(x, [*spec.shape[:batch_axes], *x.shape[1:]]), measured)
    return _of_all(measured, [axis for axis in range(batch_axes) if spec.dims[axis] != 'L'])

  def takes_factors(self, spec: WeightSpec) -> bool:
    """Whether a weight belongs to experts, [E, M, H], with its last two axes factored."""
    return spec.dims[:-2] == 'E' and spec.dims[-2:] == spec.factored

  def update_factored(self, grad: FactoredGradient, slots, weight, spec, step, rate) -> Update:
    """Update of experts' weights [E, M, H] by a product computed twice within the cache and never written to memory."""
    factor = lambda x, i: tf.cast(_one(x, i), tf.float32)
    product = lambda i: FactoredGradient(factor(grad.x_ECM, i), factor(grad.dy_ECH, i)).multiplied()
    measured = self._measure_each(product, slots, weight, spec, step)
    of_all = _of_all(measured, [0])
    one_spec = _matrix(spec)

    def step_one(i, weight):
      of_one = of_all._replace(slots=tf.nest.map_structure(lambda x: _one(x, i), dict(measured.slots)))
      new = self.step(product(i), _one(weight, i), of_one, one_spec, rate).weight
      return i + 1, tf.tensor_scatter_nd_update(weight, [[i]], new)

    weight = tf.while_loop(lambda i, _: i < spec.shape[0], step_one, (0, weight))[1]
    return Update(weight, of_all.slots, float(spec.size) * tf.reduce_mean(of_all.grad))

  def _measure_each(self, grad, slots, weight, spec, step) -> Measured:
    """Statistics of each matrix, stacked on a first axis; grad(i) is [1, M, H]."""
    one_spec, measure = _matrix(spec), super().measure

    def measure_one(i):
      slots_of_one = {name: _one(slot, i) for name, slot in slots.items()}
      measured = measure(grad(i), slots_of_one, _one(weight, i), one_spec, step)
      return tf.nest.map_structure(lambda x: x[0], measured)

    matrices = math.prod(weight.shape[:-2])
    number = tf.TensorSpec([1, 1], tf.float32)
    shapes = {name: tf.TensorSpec(slot.shape[1:], tf.float32) for name, slot in slots.items()}
    return tf.map_fn(measure_one, tf.range(matrices), fn_output_signature=Measured(shapes, number, number, number))


def _matrix(spec: WeightSpec) -> WeightSpec:
  """Specification of one matrix of a weight, with a leading axis of size 1."""
  return dataclasses.replace(spec, shape=(1, *spec.shape[-2:]), dims='E' + spec.dims[-2:])


def _one(x: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
  """x[i : i + 1] as tf.slice, without the test for negative i: XLA then updates in place at full speed."""
  return tf.slice(x, tf.stack([i, *[0] * (x.shape.rank - 1)]), [1, *sizes(x)[1:]])


def _of_all(measured: Measured, logical: list[int]) -> Measured:
  mean = lambda x: tf.reduce_mean(x, axis=logical, keepdims=True)
  return Measured(measured.slots, mean(measured.grad), mean(measured.update), mean(measured.weight))
