"""Normalisation: LayerNorm (Ba et al., 2016) and RMSNorm (Zhang and Sennrich, 2019)."""

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.weights import Constant, Specs, Theta, WeightSpec


@dataclasses.dataclass(frozen=True)
class LayerNorm:
  """Layer normalisation: mean 0 and variance 1 over the features, then a learnt scale and bias; computed in float32."""

  model_dim: int
  epsilon: float = 1e-6

  def weights(self) -> Specs:
    return {
      'scale': WeightSpec((self.model_dim,), 'M', Constant(1.0), float32=True),
      'bias': WeightSpec((self.model_dim,), 'M', Constant(0.0), float32=True),
    }

  def __call__(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    return ops.layer_norm(x_BTM, theta['scale'], theta['bias'], self.epsilon)


@dataclasses.dataclass(frozen=True)
class RMSNorm:
  """Root mean square normalisation (Zhang and Sennrich, arXiv 1910.07467): x / sqrt(mean(x^2)), then a learnt scale.

  No mean is subtracted and no bias added; computed in float32.
  """

  model_dim: int
  epsilon: float = 1e-6

  def weights(self) -> Specs:
    return {'scale': WeightSpec((self.model_dim,), 'M', Constant(1.0), float32=True)}

  def __call__(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    x32_BTM = tf.cast(x_BTM, tf.float32)
    square_BT1 = tf.reduce_mean(tf.square(x32_BTM), axis=-1, keepdims=True)
    return tf.cast(x32_BTM * tf.math.rsqrt(square_BT1 + self.epsilon) * theta['scale'], x_BTM.dtype)


NORMS = {'layer': LayerNorm, 'rms': RMSNorm}
