"""Layer normalisation (Ba et al., 2016)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe.weights import Constant
from lingvo_moe.weights import Specs
from lingvo_moe.weights import Theta
from lingvo_moe.weights import WeightSpec


@dataclasses.dataclass(frozen=True)
class LayerNorm:
  """Mean 0 and variance 1 over the features, then a learnt scale and bias; computed in float32."""

  model_dim: int
  epsilon: float = 1e-6

  def weights(self) -> Specs:
    return {
      'scale': WeightSpec((self.model_dim,), 'M', Constant(1.0)),
      'bias': WeightSpec((self.model_dim,), 'M', Constant(0.0)),
    }

  def __call__(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    x = tf.cast(x_BTM, tf.float32)
    x -= tf.reduce_mean(x, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
    y = x * tf.math.rsqrt(variance + self.epsilon) * theta['scale'] + theta['bias']
    return tf.cast(y, x_BTM.dtype)
