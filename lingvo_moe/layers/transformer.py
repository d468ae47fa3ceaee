"""Transformer layer of an encoder or decoder: pre-norm residual branches of attention and feed-forward, or experts."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.attention import Attention, Cache, of_layer
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.incremental import Now
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import NORMS, LayerNorm, RMSNorm
from lingvo_moe.layers.remat import rematerialised

# Cache of a decoder layer, or of the equal layers of a scanned stack: 'self', and 'memory', which is constant.
LayerCache = dict[str, Cache]


@dataclasses.dataclass(frozen=True)
class Layer:
  """Layer of a stack: self-attention, then attention to the encoder (decoders), then feed-forward or experts.

  Each is a residual branch over normalised input, x + dropout(f(norm(x))), as in Lingvo. `remat_attention`
  rematerialises attention for its gradient. `norm_type` is a name of norm.NORMS. With `post_norm` the output of each
  branch is normalised too, before the dropout, as in Grok-1.
  """

  attention: Attention
  ffn: FeedForward | MoE
  cross_attention: bool = False
  residual_dropout: float = 0.0
  remat_attention: bool = False
  norm_type: str = 'layer'
  post_norm: bool = False

  @property
  def norm(self) -> LayerNorm | RMSNorm:
    return NORMS[self.norm_type](self.attention.model_dim)

  @property
  def is_moe(self) -> bool:
    return isinstance(self.ffn, MoE)

  def weights(self) -> Specs:
    norms = {name: self.norm.weights() for name in ('norm', 'post_norm')[: 1 + self.post_norm]}
    attention = {**norms, **self.attention.weights()}
    cross = {'cross_attention': {**norms, **self.attention.of_memory.weights()}} if self.cross_attention else {}
    ffn = {**norms, **self.ffn.weights()}
    return {'attention': attention, **cross, 'moe' if self.is_moe else 'ffn': ffn}

  def __call__(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    mask_BTT: tf.Tensor,
    paddings_BT: tf.Tensor,
    memory_BUM: tf.Tensor | None = None,
    memory_mask_BTU: tf.Tensor | None = None,
    key: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, Routing | None]:
    """Runs the layer over whole rows. All but experts compute each row by itself, on a CPU in sub-batches.

    Args:
      theta: the layer's weights, which are cast to the type of x unless their spec says float32.
      x_BTM: input.
      mask_BTT: where a position may attend to another of x.
      paddings_BT: 1.0 where x is padding.
      memory_BUM: encoder output, for layers with cross-attention.
      memory_mask_BTU: where a position may attend to memory.
      key: random key, or one for each row, in training; None at inference.

    Returns:
      ([B, T, M], Routing of the experts or None).
    """
    theta = weights_lib.cast(theta, self.weights(), x_BTM.dtype)

    def rows(x_BTM, mask_BTT, memory_BUM, memory_mask_BTU, key):
      own = theta['attention']
      with tf.name_scope('attention'):
        h_BTM = self.norm(own['norm'], x_BTM)
        y_BTM = self._attend(self.attention, own, h_BTM, h_BTM, mask_BTT, _fold(key, 'attention'))
        x_BTM = self._add(x_BTM, own, y_BTM, key, 'attention')
      if self.cross_attention:
        own = theta['cross_attention']
        with tf.name_scope('cross_attention'):
          h_BTM = self.norm(own['norm'], x_BTM)
          to_memory, own_key = self.attention.of_memory, _fold(key, 'cross_attention')
          y_BTM = self._attend(to_memory, own, h_BTM, memory_BUM, memory_mask_BTU, own_key)
          x_BTM = self._add(x_BTM, own, y_BTM, key, 'cross_attention')
      return x_BTM if self.is_moe else self._feed_forward(theta, x_BTM, key)

    x_BTM = ops.map_sub_batches(rows, x_BTM, mask_BTT, memory_BUM, memory_mask_BTU, key)
    if not self.is_moe:
      return x_BTM, None
    with tf.name_scope('moe'):
      own = theta['moe']
      h_BTM = ops.map_sub_batches(lambda x_BTM: self.norm(own['norm'], x_BTM), x_BTM)
      y_BTM, routing = self.ffn(own, h_BTM, paddings_BT, _fold(key, 'gate'))
      add = lambda x_BTM, y_BTM, key: self._add(x_BTM, own, y_BTM, key, 'moe')
      return ops.map_sub_batches(add, x_BTM, y_BTM, key), routing

  def empty_cache(
    self, rows: Size, num_positions: Size, dtype: tf.DType = tf.float32, layers: int | None = None
  ) -> LayerCache:
    """Cache of a layer without cross-attention, or of the equal `layers` of a scanned stack."""
    return {'self': self.attention.empty_cache(rows, num_positions, dtype, layers)}

  def memory_cache(self, theta: Theta, memory_BUM: tf.Tensor) -> Cache:
    """Keys and values of the encoder output."""
    own = weights_lib.cast(theta['cross_attention'], self.weights()['cross_attention'], memory_BUM.dtype)
    keys, values = self.attention.of_memory.keys_values(own, memory_BUM)
    return {'keys': keys, 'values': values}

  def keep_positions(self, cache: LayerCache, positions_BU: tf.Tensor) -> LayerCache:
    """Cache gathered at these flat positions, with its memory unchanged."""
    return {**cache, 'self': self.attention.keep_positions(cache['self'], positions_BU)}

  def extend(
    self,
    theta: Theta,
    x_BWM: tf.Tensor,
    now: Now,
    memory_mask_B1U: tf.Tensor | None,
    paddings_BW: tf.Tensor,
    cache: LayerCache,
    number: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, LayerCache]:
    """Decoding step of W hypotheses a row, at inference.

    Args:
      theta: the layer's weights, which are cast to the type of x unless their spec says float32.
      x_BWM: input.
      now: positions to write, and positions of each hypothesis; see Attention.extend.
      memory_mask_B1U: where the encoder output may be attended to; None without cross-attention.
      paddings_BW: 1.0 where there is no hypothesis.
      cache: of this layer, from its stack or the step before.
      number: number of this layer on axis L of a scanned stack's cache; None: the cache of this layer alone.

    Returns:
      ([B, W, M], the cache with the step's keys and values).
    """
    theta = weights_lib.cast(theta, self.weights(), x_BWM.dtype)
    own = theta['attention']
    with tf.name_scope('attention'):
      h_BWM = self.norm(own['norm'], x_BWM)
      y_BWM, self_cache = self.attention.extend(own, h_BWM, now, cache['self'], number)
      x_BWM = self._add(x_BWM, own, y_BWM, None, 'attention')
    if self.cross_attention:
      own, memory = theta['cross_attention'], of_layer(cache['memory'], number)
      with tf.name_scope('cross_attention'):
        h_BWM = self.norm(own['norm'], x_BWM)
        y_BWM = self.attention.of_memory.attend(own, h_BWM, memory['keys'], memory['values'], memory_mask_B1U)
        x_BWM = self._add(x_BWM, own, y_BWM, None, 'cross_attention')
    cache = {**cache, 'self': self_cache}
    if not self.is_moe:
      return self._feed_forward(theta, x_BWM, None), cache
    own = theta['moe']
    with tf.name_scope('moe'):
      y_BWM, _ = self.ffn(own, self.norm(own['norm'], x_BWM), paddings_BW)
      return self._add(x_BWM, own, y_BWM, None, 'moe'), cache

  def _attend(
    self,
    attention: Attention,
    theta: Theta,
    x_BTM: tf.Tensor,
    memory_BUM: tf.Tensor,
    mask_BTU: tf.Tensor,
    key: tf.Tensor | None,
  ) -> tf.Tensor:
    attend = lambda theta, x, memory: attention(theta, x, memory, mask_BTU, key)
    if self.remat_attention and key is not None:
      return rematerialised(attend, theta, x_BTM, memory_BUM)
    return attend(theta, x_BTM, memory_BUM)

  def _feed_forward(self, theta: Theta, x_BTM: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
    own = theta['ffn']
    with tf.name_scope('ffn'):
      y_BTM = self.ffn(own, self.norm(own['norm'], x_BTM), _fold(key, 'ffn'))
      return self._add(x_BTM, own, y_BTM, key, 'ffn')

  def _add(self, x_BTM: tf.Tensor, theta: Theta, y_BTM: tf.Tensor, key: tf.Tensor | None, branch: str) -> tf.Tensor:
    """Residual: x plus the output of a branch, which is normalised if there is a second norm, then dropped out."""
    y_BTM = self.norm(theta['post_norm'], y_BTM) if self.post_norm else y_BTM
    return x_BTM + prng.dropout(y_BTM, self.residual_dropout, _fold(key, f'{branch}/residual'))


def _fold(key: tf.Tensor | None, name: str) -> tf.Tensor | None:
  return None if key is None else prng.fold(key, name)
