"""Adam (Kingma and Ba, 2015), and AdamW, which decays weights apart from their gradients."""

import dataclasses
import math

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
    # In this form, as beta2 and 1 - beta2 in float32 do not sum to 1.
    moment = slots['moment'] + (1.0 - self.beta2) * (square - slots['moment'])
    bias1, bias2 = (-tf.math.expm1(t * math.log(beta)) for beta in (self.beta1, self.beta2))  # 1 - beta**t
    # Kingma and Ba add epsilon to the corrected root; scaling it here is equivalent.
    update = rate * tf.sqrt(bias2) / bias1 * mean / (tf.sqrt(moment) + self.epsilon * tf.sqrt(bias2))
    update += self.decay(weight, spec, rate)
    return Update(weight - tf.cast(update, weight.dtype), {'mean': mean, 'moment': moment}, tf.reduce_sum(square))

  def decay(self, weight: tf.Tensor, spec: WeightSpec, rate: tf.Tensor) -> tf.Tensor | float:
    """What the update takes from a weight besides that of its gradient."""
    return 0.0


@dataclasses.dataclass(frozen=True)
class AdamW(Adam):
  """AdamW (Loshchilov and Hutter, 2019, arXiv 1711.05101): each update shrinks matrices by rate * weight_decay.

  Norms and biases do not decay. Defaults are those of PyTorch and, but for weight_decay, of optax.
  """

  beta2: float = 0.999
  epsilon: float = 1e-8
  weight_decay: float = 0.01

  def decay(self, weight, spec, rate):
    return rate * self.weight_decay * tf.cast(weight, tf.float32) if spec.is_matrix else 0.0
