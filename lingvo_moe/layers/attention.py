"""Multi-head attention (Vaswani et al., 2017): padded, causal, packed, and incremental over a flat cache."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.weights import Constant
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.core.weights import glorot_uniform
from lingvo_moe.layers.incremental import Now
from lingvo_moe.xla_sharding import shard

# Keys and values of flat positions, 'keys' and 'values': [B, N, U, K], or [L, B, N, U, K] those of the layers of a
# scanned stack.
Cache = dict[str, tf.Tensor]

# Added to a masked score. Finite, so that a row with nothing to attend to stays finite; its exp is 0 beside any score
# that is not masked, so masked positions do not change the result.
_MASKED = -1e9


def segment_mask(query_segments_BT: tf.Tensor, key_segments_BU: tf.Tensor) -> tf.Tensor:
  """Mask of segments, booleans [B, T, U]: position T may attend to position U of the same segment; segment 0 is padding."""
  keys_B1U = key_segments_BU[:, tf.newaxis, :]
  return (query_segments_BT[:, :, tf.newaxis] == keys_B1U) & (keys_B1U > 0)


def causal_mask(length: Size) -> tf.Tensor:
  """Causal mask, booleans [1, T, T]: position T may attend to no later position."""
  position_T = tf.range(length)
  return (position_T[:, tf.newaxis] >= position_T[tf.newaxis, :])[tf.newaxis]


@dataclasses.dataclass(frozen=True)
class Attention:
  """Scaled dot-product attention with biases on query, value and output.

  Keys carry no bias: softmax would cancel it. `dropout` is applied to the attention weights.
  """

  model_dim: int
  num_heads: int
  head_dim: int
  dropout: float = 0.0

  def weights(self) -> Specs:
    m, n, k = self.model_dim, self.num_heads, self.head_dim
    into = lambda: WeightSpec((m, n, k), 'MNK', glorot_uniform(m, n * k), factored='MK')
    bias = lambda: WeightSpec((n, k), 'NK', Constant(0.0))
    return {
      'wq': into(),
      'bq': bias(),
      'wk': into(),
      'wv': into(),
      'bv': bias(),
      'wo': WeightSpec((n, k, m), 'NKM', glorot_uniform(n * k, m), factored='KM'),
      'bo': WeightSpec((m,), 'M', Constant(0.0)),
    }

  def keys_values(self, theta: Theta, x_BUM: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Keys and values [B, N, U, K] of the positions attended to."""
    with tf.name_scope('projection'):
      return (
        shard(_heads_first(ops.linear(x_BUM, theta['wk'])), 'BNUK'),
        shard(_heads_first(ops.linear(x_BUM, theta['wv'], theta['bv'])), 'BNUK'),
      )

  def attend(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    keys_BNUK: tf.Tensor,
    values_BNUK: tf.Tensor,
    mask_BTU: tf.Tensor,
    key: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Attends from x to keys where mask (boolean, or 0/1) allows.

    Args:
      theta: this layer's weights.
      x_BTM: positions that attend, from which queries are computed.
      keys_BNUK, values_BNUK: from `keys_values`.
      mask_BTU: true (1) where T may attend to U; axes of length one broadcast.
      key: random key of the dropout; None for none.

    Returns:
      [B, T, M].
    """
    scale = (
      self.head_dim**-0.5
    )  # of the queries, for scores of unit variance; applied to the weights, the smallest tensors
    with tf.name_scope('projection'):
      q_BNTK = shard(_heads_first(ops.linear(x_BTM, theta['wq'] * scale, theta['bq'] * scale)), 'BNTK')
    scores_BNTU = shard(tf.einsum('BNTK,BNUK->BNTU', q_BNTK, keys_BNUK), 'BNTU')
    bias_B1TU = (1.0 - tf.cast(mask_BTU, tf.float32))[:, tf.newaxis] * _MASKED
    probs_BNTU = tf.nn.softmax(tf.cast(scores_BNTU, tf.float32) + bias_B1TU)
    probs_BNTU = prng.dropout(tf.cast(probs_BNTU, x_BTM.dtype), self.dropout, key)
    y_BNTK = shard(tf.einsum('BNTU,BNUK->BNTK', probs_BNTU, values_BNUK), 'BNTK')
    y_BTNK = tf.einsum('BNTK->BTNK', y_BNTK)
    with tf.name_scope('projection'):
      return shard(ops.linear(y_BTNK, theta['wo'], theta['bo'], inputs=2), 'BTM')

  def __call__(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    memory_BUM: tf.Tensor,
    mask_BTU: tf.Tensor,
    key: tf.Tensor | None = None,
  ) -> tf.Tensor:
    """Attends from x to memory (x itself for self-attention); see `attend`."""
    return self.attend(theta, x_BTM, *self.keys_values(theta, memory_BUM), mask_BTU, key)

  def empty_cache(
    self, batch_size: Size, num_positions: Size, dtype: tf.DType = tf.float32, layers: int | None = None
  ) -> Cache:
    """Cache of zeros with room for the keys and values of `num_positions` flat positions; `layers`: of a scanned stack."""
    shape = [batch_size, self.num_heads, num_positions, self.head_dim]
    if layers is None:
      zeros = shard(tf.zeros(shape, dtype), 'BNUK')
    else:
      zeros = shard(tf.zeros([layers, *shape], dtype), 'LBNUK')
    return {'keys': zeros, 'values': zeros}

  def keep_positions(self, cache: Cache, positions_BU: tf.Tensor) -> Cache:
    """Cache gathered at these flat positions."""

    def keep(buffer):
      if buffer.shape.rank == 4:
        return tf.gather(buffer, positions_BU, axis=2, batch_dims=1)
      positions_LBU = tf.tile(positions_BU[tf.newaxis], [buffer.shape[0], 1, 1])
      return tf.gather(buffer, positions_LBU, axis=3, batch_dims=2)

    return {name: keep(buffer) for name, buffer in cache.items()}

  def extend(
    self, theta: Theta, x_BWM: tf.Tensor, now: Now, cache: Cache, layer: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, Cache]:
    """One step of W hypotheses a row: writes their keys and values at flat positions now.start .., then attends.

    See search/flat_sequence.py.

    Args:
      theta: this layer's weights.
      x_BWM: embedded last symbol of each hypothesis.
      now: positions to write, and positions of each hypothesis. Under XLA, U and start must be multiples of W.
      cache: from `empty_cache`, `keep_positions` or the step before.
      layer: number of this layer on axis L of a scanned stack's cache; None: the cache of this layer alone.

    Returns:
      ([B, W, M], the cache with the step's positions written).
    """
    new = dict(zip(('keys', 'values'), self.keys_values(theta, x_BWM), strict=True))
    if layer is None:
      cache = {name: ops.write_cache(cache[name], x_BNWK, now.start) for name, x_BNWK in new.items()}
    else:
      written = {name: ops.write_stacked_cache(cache[name], x_BNWK, layer, now.start) for name, x_BNWK in new.items()}
      cache = {name: shard(buffer_LBNUK, 'LBNUK') for name, buffer_LBNUK in written.items()}
    own = of_layer(cache, layer)
    return self.attend(theta, x_BWM, own['keys'], own['values'], now.mask_BWU), cache


def of_layer(cache: Cache, layer: tf.Tensor | None) -> Cache:
  """Keys and values [B, N, U, K] of one layer of a scanned stack's cache; with None, the cache is of one layer already."""
  return cache if layer is None else {name: shard(buffer[layer], 'BNUK') for name, buffer in cache.items()}


def _heads_first(x_BTNK: tf.Tensor) -> tf.Tensor:
  """Transpose to [B, N, T, K]. A product with this result would instead transpose larger operands of its gradients."""
  return tf.einsum('BTNK->BNTK', x_BTNK)
