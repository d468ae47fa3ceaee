"""Embedding of symbols, output softmax, and sinusoidal positions."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.weights import Normal, Specs, Theta, WeightSpec
from lingvo_moe.xla_sharding import shard


@dataclasses.dataclass(frozen=True)
class Embedding:
  """Embedding table with a vector per symbol, shared with the output softmax (Press and Wolf, 2017)."""

  vocab_size: int
  model_dim: int

  def weights(self) -> Specs:
    shape = (self.vocab_size, self.model_dim)
    return {'table': WeightSpec(shape, 'VM', Normal(self.model_dim**-0.5), factored='VM', float32=True)}

  def lookup(self, theta: Theta, ids_BT: tf.Tensor) -> tf.Tensor:
    """Embedding vectors [B, T, M], scaled by sqrt(M) to unit variance (Vaswani et al., 2017, section 3.4)."""
    return shard(tf.gather(theta['table'], ids_BT), 'BTM') * math.sqrt(self.model_dim)

  def logits(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    """Scores [B, T, V] of every symbol as the next one, computed in float32 whatever type x has."""
    with tf.name_scope('softmax'):
      return shard(ops.product('BTM,VM->BTV', x_BTM, theta['table']), 'BTV')


def sinusoidal_positions(positions_BT: tf.Tensor, model_dim: int) -> tf.Tensor:
  """Sinusoidal positions, float32 [B, T, M]: sines at geometric wavelengths 2 pi .. 20000 pi, then cosines.

  Vaswani et al. (2017), section 3.5, with sines and cosines in two halves instead of interleaved.
  """
  num_timescales = (model_dim + 1) // 2
  log_step = math.log(10_000.0) / max(1, num_timescales - 1)
  rates = tf.exp(tf.range(num_timescales, dtype=tf.float32) * -log_step)
  angles = tf.expand_dims(tf.cast(positions_BT, tf.float32), -1) * rates
  return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)[..., :model_dim]
