"""Dense position-wise feed-forward layer."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.weights import Constant
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.core.weights import glorot_uniform
from lingvo_moe.xla_sharding import shard


@dataclasses.dataclass(frozen=True)
class FeedForward:
  """Feed-forward ReLU(x wi + bi) wo + bo (Vaswani et al., 2017, equation 2), with dropout after the ReLU."""

  model_dim: int
  hidden_dim: int
  dropout: float = 0.0

  def weights(self) -> Specs:
    m, h = self.model_dim, self.hidden_dim
    return {
      'wi': WeightSpec((m, h), 'MH', glorot_uniform(m, h), factored='MH'),
      'bi': WeightSpec((h,), 'H', Constant(0.0)),
      'wo': WeightSpec((h, m), 'HM', glorot_uniform(h, m), factored='HM'),
      'bo': WeightSpec((m,), 'M', Constant(0.0)),
    }

  def __call__(self, theta: Theta, x_BTM: tf.Tensor, key: tf.Tensor | None = None) -> tf.Tensor:
    """Outputs [B, T, M]; key None means inference, without dropout."""
    h_BTH = shard(ops.linear(x_BTM, theta['wi'], theta['bi'], tf.nn.relu), 'BTH')
    h_BTH = prng.dropout(h_BTH, self.dropout, key)
    return shard(ops.linear(h_BTH, theta['wo'], theta['bo']), 'BTM')
