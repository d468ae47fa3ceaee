"""Layer normalisation (Ba et al., 2016), and its gradient."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe.core.weights import Constant
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.layers.gradient import custom_gradient
from lingvo_moe.layers.linear import sum_to_features


@dataclasses.dataclass(frozen=True)
class LayerNorm:
  """Mean 0 and variance 1 over the features, then a learnt scale and bias; computed in float32.

  The gradient is written out: derived by TensorFlow it would take twice as many passes over [B, T, M].
  """

  model_dim: int
  epsilon: float = 1e-6

  def weights(self) -> Specs:
    return {
      'scale': WeightSpec((self.model_dim,), 'M', Constant(1.0)),
      'bias': WeightSpec((self.model_dim,), 'M', Constant(0.0)),
    }

  def __call__(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    y_BTM = self._normalised(tf.cast(x_BTM, tf.float32), theta['scale'], theta['bias'])
    return tf.cast(y_BTM, x_BTM.dtype)

  def _normalised(self, x_BTM, scale_M, bias_M):
    mean = lambda x_BTM: tf.reduce_mean(x_BTM, axis=-1, keepdims=True)

    @custom_gradient
    def run(x_BTM, scale_M, bias_M):
      centred_BTM = x_BTM - mean(x_BTM)
      rate_BT1 = tf.math.rsqrt(mean(tf.square(centred_BTM)) + self.epsilon)
      unit_BTM = centred_BTM * rate_BT1

      def grad(dy_BTM):
        dunit_BTM = dy_BTM * scale_M
        # What shifts all features alike, or along what they are, is undone by the mean and the variance.
        dx_BTM = (dunit_BTM - mean(dunit_BTM) - unit_BTM * mean(dunit_BTM * unit_BTM)) * rate_BT1
        return dx_BTM, sum_to_features(dy_BTM * unit_BTM), sum_to_features(dy_BTM)

      return tf.nn.bias_add(unit_BTM * scale_M, bias_M), grad

    return run(x_BTM, scale_M, bias_M)
