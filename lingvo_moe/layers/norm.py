"""Layer normalisation (Ba et al., 2016)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.weights import Constant
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec


@dataclasses.dataclass(frozen=True)
class LayerNorm:
  """Layer normalisation: mean 0 and variance 1 over the features, then a learnt scale and bias; computed in float32."""

  model_dim: int
  epsilon: float = 1e-6

  def weights(self) -> Specs:
    return {
      'scale': WeightSpec((self.model_dim,), 'M', Constant(1.0)),
      'bias': WeightSpec((self.model_dim,), 'M', Constant(0.0)),
    }

  def __call__(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    y_BTM = ops.layer_norm(tf.cast(x_BTM, tf.float32), theta['scale'], theta['bias'], self.epsilon)
    return tf.cast(y_BTM, x_BTM.dtype)
