"""Multi-head and grouped-query attention: padded, causal, packed, and incremental over a flat cache."""

import dataclasses
from typing import NamedTuple, Self

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.core.weights import Constant, Specs, Theta, Uniform, WeightSpec, glorot_uniform
from lingvo_moe.layers.positions import PositionBias, offsets_of_owned, offsets_of_rows, rotate
from lingvo_moe.ops.remat import keep
from lingvo_moe.xla_sharding import shard

# Keys and values of flat positions, 'keys' and 'values': [B, N, U, K], or [L, B, N, U, K] those of the layers of a
# scanned stack.
Cache = dict[str, tf.Tensor]


class Now(NamedTuple):
  """Position of a decoding step in the flat key/value cache; see search/flat_sequence.py."""

  time: tf.Tensor  # int32 scalar; number of steps made before
  start: tf.Tensor  # int32 scalar; hypothesis w writes flat position start + w
  mask_BWU: tf.Tensor  # float32 0/1; positions of each hypothesis, including the one written now
  live_BW: tf.Tensor | None = None  # whether there is a hypothesis: others are sent to no expert; None: all there are
  position_BW: tf.Tensor | None = None  # int32; of the symbol in its sequence, for rotary positions; None: time
  # int32; symbols of all positions less the one written now, for relative positions; None: they are in order
  offsets_BWU: tf.Tensor | None = None


def segment_mask(query_segments_BT: tf.Tensor, key_segments_BU: tf.Tensor) -> tf.Tensor:
  """Mask of segments, booleans [B, T, U]: T may attend to U of the same segment; segment 0 is padding."""
  keys_B1U = tf.expand_dims(key_segments_BU, 1)
  return (tf.expand_dims(query_segments_BT, 2) == keys_B1U) & (keys_B1U > 0)


def causal_mask(length: Size) -> tf.Tensor:
  """Causal mask, booleans [1, T, T]: position T may attend to no later position."""
  position_T = tf.range(length)
  return (position_T[:, tf.newaxis] >= position_T[tf.newaxis, :])[tf.newaxis]


@dataclasses.dataclass(frozen=True)
class Attention:
  """Scaled dot-product attention (Vaswani et al., 2017, section 3.2) with biases on query, value and output.

  Keys carry no bias: softmax would cancel it. With fewer key/value heads than query heads it is grouped-query attention
  (Ainslie et al., arXiv 2305.13245): axis N has the key/value heads, and an axis Q after it the query heads that share
  each. One key/value head is multi-query attention (Shazeer, arXiv 1911.02150). A mesh splits the longer of both axes,
  whose letter is N: where more query heads share a head than there are such heads, the axes are J and N.
  """

  model_dim: int  # M
  num_heads: int  # query heads, N * Q
  head_dim: int  # K
  dropout: float = 0.0  # dropout of the attention weights
  num_kv_heads: int = 0  # key/value heads, N, a divisor of num_heads; 0: as many
  # base of rotary positions of queries and keys, for self-attention; 0: none. See positions.py.
  rotary_base: float = 0.0
  bias: bool = True  # whether there are biases
  # largest magnitude of a score, which becomes cap * tanh(score / cap), as in Grok-1; 0: no limit
  logit_cap: float = 0.0
  relative: PositionBias | None = None  # by the offsets of keys, for self-attention; None: none
  attention_scale: float = 0.0  # factor of the scores; 0: K^-0.5, by which they have unit variance. T5 has 1.

  def __post_init__(self):
    if self.num_heads % self.kv_heads:
      raise UserError(
        f'each key/value head serves as many query heads; saw num_kv_heads={self.num_kv_heads} for '
        f'num_heads={self.num_heads}: use a divisor of num_heads, or 0 for as many'
      )
    if self.rotary_base and self.head_dim % 2:
      raise UserError(f'rotary positions turn pairs of features; saw head_dim={self.head_dim}: use an even one')

  @property
  def kv_heads(self) -> int:
    """N, the number of key/value heads."""
    return self.num_kv_heads or self.num_heads

  @property
  def _heads(self) -> tuple[tuple[int, ...], str]:
    """Sizes and letters of the axes of query heads: (N, Q) if key/value heads are shared, else (N,)."""
    shared = self.num_heads // self.kv_heads
    heads = (self.kv_heads, shared) if shared > 1 else (self.num_heads,)
    return heads, ops.head_letters(heads)

  @property
  def cache_dims(self) -> str:
    """Axis letters of keys and values, which devices hold whole where a mesh splits the query heads of each."""
    return f'B{self._heads[1][0]}UK'

  @property
  def of_memory(self) -> Self:
    """Cross-attention of equal sizes: this self-attention without relative positions."""
    return dataclasses.replace(self, relative=None)

  def weights(self) -> Specs:
    m, n, k = self.model_dim, self.kv_heads, self.head_dim
    heads, letters = self._heads
    width = self.num_heads * k
    into = WeightSpec((m, n, k), f'M{letters[0]}K', glorot_uniform(m, n * k), factored='MK')
    specs = {
      'wq': WeightSpec((m, *heads, k), f'M{letters}K', glorot_uniform(m, width), factored='MK'),
      'bq': WeightSpec((*heads, k), f'{letters}K', Constant(0.0)),
      'wk': into,
      'wv': into,
      'bv': WeightSpec((n, k), f'{letters[0]}K', Constant(0.0)),
      'wo': WeightSpec((*heads, k, m), f'{letters}KM', glorot_uniform(width, m), factored='KM'),
      'bo': WeightSpec((m,), 'M', Constant(0.0)),
    }
    specs = {name: spec for name, spec in specs.items() if self.bias or not name.startswith('b')}
    if self.relative and (rows := self.relative.table_rows):
      initial = Uniform(glorot_uniform(rows, self.num_heads).limit)
      specs['relative'] = WeightSpec((rows, *heads), f'J{letters}', initial)
    return specs

  def keys_values(self, theta: Theta, x_BUM: tf.Tensor, positions_BU: tf.Tensor | None = None) -> Cache:
    """Keys and values [B, N, U, K]; positions, for rotary ones, are 0, 1, ... by default."""
    with tf.name_scope('projection'):
      keys_BNUK = ops.heads_first(ops.linear(x_BUM, theta['wk']))
      values_BNUK = ops.heads_first(ops.linear(x_BUM, theta['wv'], theta.get('bv')))
      keys_BNUK = keep(self._rotated(keys_BNUK, positions_BU), self.cache_dims)
      return {'keys': keys_BNUK, 'values': keep(values_BNUK, self.cache_dims)}

  def attend(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    memory: tf.Tensor | Cache,
    mask_BTU: tf.Tensor,
    key: tf.Tensor | None = None,
    positions_BT: tf.Tensor | None = None,
    offsets_BTU: tf.Tensor | None = None,
    with_weights: bool = False,
  ) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Attends from x to memory where mask (boolean, or 0/1) allows: ([B, T, M], attention weights or None).

    Args:
      x_BTM: positions that attend, from which queries are computed.
      memory: what is attended to, [B, U, M] (x itself for self-attention), or its keys and values.
      mask_BTU: true (1) where T may attend to U; axes of length one broadcast.
      key: random key of the dropout; None for none.
      positions_BT: positions of x, for rotary ones; 0, 1, ... by default.
      offsets_BTU: positions of keys less those of x, for relative ones; by default those of 0, 1, ... on both sides.
      with_weights: whether attention weights are returned, before their dropout: float32 [B, N, T, U], which sum to 1
        over U. Q follows N if keys are shared.
    """
    keys_values = memory if isinstance(memory, dict) else self.keys_values(theta, memory)
    y_BTnK, weights_BnTU = ops.attention(
      self._queries(theta, x_BTM, positions_BT),
      keys_values['keys'],
      keys_values['values'],
      mask_BTU,
      self._relative_bias(theta, x_BTM, offsets_BTU),
      key,
      dropout=self.dropout,
      logit_cap=self.logit_cap,
      with_weights=with_weights,
    )
    with tf.name_scope('projection'):
      y_BTM = shard(ops.linear(y_BTnK, theta['wo'], theta.get('bo'), inputs=y_BTnK.shape.rank - 2), 'BTM')
    return y_BTM, weights_BnTU

  def _queries(self, theta: Theta, x_BTM: tf.Tensor, positions_BT: tf.Tensor | None) -> tf.Tensor:
    """Scaled queries [B, N, T, K]; Q follows N if keys are shared."""
    scale = self.attention_scale or self.head_dim**-0.5  # applied to the weights of queries, the smallest tensors
    with tf.name_scope('projection'):
      bias = theta['bq'] * scale if self.bias else None
      q_BnTK = ops.heads_first(ops.linear(x_BTM, theta['wq'] * scale, bias))
      return keep(self._rotated(q_BnTK, positions_BT), f'B{self._heads[1]}TK')

  def _relative_bias(self, theta: Theta, x_BTM: tf.Tensor, offsets_BTU: tf.Tensor | None) -> tf.Tensor | None:
    """Relative position bias [B, N, T, U], B of length one without offsets; None if there is none."""
    if not self.relative:
      return None
    b = '1' if offsets_BTU is None else 'B'
    offsets_BTU = offsets_of_rows(sizes(x_BTM)[1]) if offsets_BTU is None else offsets_BTU
    heads, letters = self._heads
    return shard(self.relative.bias(theta.get('relative'), offsets_BTU, heads), f'{b}{letters}TU')

  def _rotated(self, x_BnTK: tf.Tensor, positions_BT: tf.Tensor | None) -> tf.Tensor:
    """Queries or keys with rotary positions, if there are any."""
    if not self.rotary_base:
      return x_BnTK
    positions_BT = tf.range(sizes(x_BnTK)[-2])[tf.newaxis] if positions_BT is None else positions_BT
    return rotate(x_BnTK, positions_BT, self.rotary_base)

  def __call__(
    self, theta: Theta, x_BTM: tf.Tensor, memory_BUM: tf.Tensor, mask_BTU: tf.Tensor, key: tf.Tensor | None = None
  ) -> tf.Tensor:
    """Attends from x to memory (x itself for self-attention): [B, T, M]; see `attend`."""
    return self.attend(theta, x_BTM, memory_BUM, mask_BTU, key)[0]

  def empty_cache(
    self, batch_size: Size, num_positions: Size, dtype: tf.DType = tf.float32, layers: int | None = None
  ) -> Cache:
    """Cache of zeros for the keys and values of `num_positions` flat positions; `layers`: of a scanned stack."""
    shape = [batch_size, self.kv_heads, num_positions, self.head_dim]
    stacked, letter = ([], '') if layers is None else ([layers], 'L')
    zeros = shard(tf.zeros([*stacked, *shape], dtype), letter + self.cache_dims)
    return {'keys': zeros, 'values': zeros}

  def keep_positions(self, cache: Cache, positions_BU: tf.Tensor) -> Cache:
    """Cache gathered at these flat positions."""
    if cache['keys'].shape.rank == 4:
      return {name: tf.gather(buffer, positions_BU, axis=2, batch_dims=1) for name, buffer in cache.items()}
    positions_LBU = tf.tile(positions_BU[tf.newaxis], [cache['keys'].shape[0], 1, 1])
    return {name: tf.gather(buffer, positions_LBU, axis=3, batch_dims=2) for name, buffer in cache.items()}

  def extend(
    self, theta: Theta, x_BWM: tf.Tensor, now: Now, cache: Cache, layer: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, Cache]:
    """One step of W hypotheses a row: writes their keys and values at flat positions now.start .., then attends.

    See search/flat_sequence.py.

    Args:
      x_BWM: embedded last symbol of each hypothesis.
      now: positions to write, and positions of each hypothesis. Under XLA, U and start must be multiples of W. A
        hypothesis' rotary position is now.position_BW, and does not depend on where it is written.
      cache: from `empty_cache`, `keep_positions` or the step before.
      layer: number of this layer on axis L of a scanned stack's cache; None: the cache of this layer alone.

    Returns:
      ([B, W, M], the cache with the step's positions written).
    """
    positions_BW = tf.reshape(now.time, [1, 1]) if now.position_BW is None else now.position_BW
    new = self.keys_values(theta, x_BWM, positions_BW)
    at = () if layer is None else (layer,)
    cache = {name: ops.write_cache(cache[name], x_BNWK, now.start, *at) for name, x_BNWK in new.items()}
    if layer is not None:
      cache = {name: shard(buffer_LBNUK, f'L{self.cache_dims}') for name, buffer_LBNUK in cache.items()}
    offsets_BWU = now.offsets_BWU
    if self.relative and offsets_BWU is None:
      offsets_BWU = offsets_of_owned(now.mask_BWU)
    y_BWM, _ = self.attend(theta, x_BWM, self.of_layer(cache, layer), now.mask_BWU, None, positions_BW, offsets_BWU)
    return y_BWM, cache

  def of_layer(self, cache: Cache, layer: tf.Tensor | None) -> Cache:
    """Keys and values [B, N, U, K] of one layer of a scanned stack's cache; None: the cache is of one layer."""
    return cache if layer is None else {name: shard(x_LBNUK[layer], self.cache_dims) for name, x_LBNUK in cache.items()}
