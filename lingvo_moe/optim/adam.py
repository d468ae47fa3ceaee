"""Adam (Kingma and Ba, 2015)."""

import dataclasses

import tensorflow as tf

from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.optim.optimizer import Optimizer, Update, zeros


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
  """Adam (Kingma and Ba, 2015), with bias correction."""

  beta1: float = 0.9
  beta2: float = 0.98
  epsilon: float = 1e-9

  def slots(self, spec: WeightSpec) -> dict[str, WeightSpec]:
    return {'mean': zeros(spec), 'moment': zeros(spec)}

  def update(self, grad, slots, weight, spec, step, rate) -> Update:
    t = tf.cast(step, tf.float32) + 1.0
    grad = tf.cast(grad, tf.float32)
    square = tf.square(grad)
    mean = self.beta1 * slots['mean'] + (1.0 - self.beta1) * grad
    moment = self.beta2 * slots['moment'] + (1.0 - self.beta2) * square
    rate *= tf.sqrt(1.0 - self.beta2**t) / (1.0 - self.beta1**t)
    # Kingma and Ba add epsilon to the corrected root; scaling it here is equivalent.
    update = rate * mean / (tf.sqrt(moment) + self.epsilon * tf.sqrt(1.0 - self.beta2**t))
    return Update(weight - tf.cast(update, weight.dtype), {'mean': mean, 'moment': moment}, tf.reduce_sum(square))
