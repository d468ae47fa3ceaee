"""One layer of an encoder or decoder: pre-norm residual branches of attention and feed-forward, or experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.attention import Cache
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gating import Routing
from lingvo_moe.layers.incremental import Now
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import LayerNorm
from lingvo_moe.layers.remat import rematerialised
from lingvo_moe.layers.rows import in_parts

LayerCache = dict[str, Cache]  # of a decoder layer: 'self', and 'memory', which does not change
Branch = Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor]  # (normalised x, random key) -> what is added to x


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer of a stack: self-attention, then attention to the encoder (decoders), then feed-forward or experts.

  Each is a residual branch over normalised input, x + dropout(f(norm(x))), as Lingvo builds them. `remat_attention`
  keeps nothing of what attention makes inside for its gradient.
  """

  attention: Attention
  ffn: FeedForward | MoE
  cross_attention: bool = False
  residual_dropout: float = 0.0
  remat_attention: bool = False

  @property
  def norm(self) -> LayerNorm:
    return LayerNorm(self.attention.model_dim)

  @property
  def is_moe(self) -> bool:
    return isinstance(self.ffn, MoE)

  def weights(self) -> Specs:
    attention = {'norm': self.norm.weights(), **self.attention.weights()}
    cross = {'cross_attention': attention} if self.cross_attention else {}
    ffn = {'norm': self.norm.weights(), **self.ffn.weights()}
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
    """Runs the layer over whole rows.

    Args:
      theta: the layer's weights.
      x_BTM: input.
      mask_BTT: where a position may attend to another of x.
      paddings_BT: 1.0 where x is padding.
      memory_BUM: the encoder's output, for layers with cross-attention.
      memory_mask_BTU: where a position may attend to memory.
      key: random key in training; None at inference.

    Returns:
      ([B, T, M], the Routing of its experts, or None).
    """

    def before_experts(x_BTM, mask_BTT, memory_BUM, memory_mask_BTU, key):
      own = theta['attention']
      x_BTM = self._residual(own, x_BTM, lambda x, k: self._attend(own, x, x, mask_BTT, k), key, 'attention')
      if self.cross_attention:
        cross = theta['cross_attention']
        attend = lambda x, k: self._attend(cross, x, memory_BUM, memory_mask_BTU, k)
        x_BTM = self._residual(cross, x_BTM, attend, key, 'cross_attention')
      return x_BTM if self.is_moe else self._feed_forward(theta, x_BTM, key)

    x_BTM = in_parts(before_experts, x_BTM, mask_BTT, memory_BUM, memory_mask_BTU, key)
    return self._experts(theta, x_BTM, paddings_BT, key) if self.is_moe else (x_BTM, None)

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_slots: Size) -> LayerCache:
    """Room for a decoder layer's own keys and values, and those of the encoder's output, computed once."""
    keys, values = self.attention.keys_values(theta['cross_attention'], memory_BUM)
    empty = self.attention.empty_cache(sizes(memory_BUM)[0], num_slots, keys.dtype)
    return {'self': empty, 'memory': {'keys': keys, 'values': values}}

  def keep_positions(self, cache: LayerCache, positions_BU: tf.Tensor) -> LayerCache:
    """A cache of what `cache` has at these flat positions, and the same memory."""
    return {**cache, 'self': self.attention.keep_positions(cache['self'], positions_BU)}

  def extend(
    self,
    theta: Theta,
    x_BWM: tf.Tensor,
    now: Now,
    memory_mask_B1U: tf.Tensor,
    paddings_BW: tf.Tensor,
    cache: LayerCache,
  ) -> tuple[tf.Tensor, LayerCache]:
    """One decoding step of W hypotheses a row, at inference.

    Args:
      theta: the layer's weights.
      x_BWM: input.
      now: where the step writes and what each hypothesis owns; see Attention.extend.
      memory_mask_B1U: where the encoder's output may be attended to.
      paddings_BW: 1.0 where there is no hypothesis.
      cache: from `init_cache` or the step before.

    Returns:
      ([B, W, M], the cache with the step's keys and values).
    """
    own = theta['attention']
    with tf.name_scope('attention'):
      y_BWM, self_cache = self.attention.extend(own, self.norm(own['norm'], x_BWM), now, cache['self'])
      x_BWM += y_BWM
    cross, memory = theta['cross_attention'], cache['memory']
    attend = lambda x, k: self.attention.attend(cross, x, memory['keys'], memory['values'], memory_mask_B1U)
    x_BWM = self._residual(cross, x_BWM, attend, None, 'cross_attention')
    x_BWM = self._experts(theta, x_BWM, paddings_BW, None)[0] if self.is_moe else self._feed_forward(theta, x_BWM, None)
    return x_BWM, {'self': self_cache, 'memory': memory}

  def _attend(
    self, theta: Theta, x_BTM: tf.Tensor, memory_BUM: tf.Tensor, mask_BTU: tf.Tensor, key: tf.Tensor | None
  ) -> tf.Tensor:
    attend = lambda theta, x, memory: self.attention(theta, x, memory, mask_BTU, key)
    if self.remat_attention and key is not None:
      return rematerialised(attend, theta, x_BTM, memory_BUM)
    return attend(theta, x_BTM, memory_BUM)

  def _feed_forward(self, theta: Theta, x_BTM: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
    return self._residual(theta['ffn'], x_BTM, lambda x, _: self.ffn(theta['ffn'], x), key, 'ffn')

  def _experts(
    self, theta: Theta, x_BTM: tf.Tensor, paddings_BT: tf.Tensor, key: tf.Tensor | None
  ) -> tuple[tf.Tensor, Routing]:
    own = theta['moe']
    gate_key = None if key is None else prng.fold(key, 'gate')
    with tf.name_scope('moe'):
      normalised_BTM = in_parts(lambda x: self.norm(own['norm'], x), x_BTM)
      y_BTM, routing = self.ffn(own, normalised_BTM, paddings_BT, gate_key)
    add = lambda x, y, key: x + self._dropout(y, key, 'moe')
    return in_parts(add, x_BTM, y_BTM, key), routing

  def _residual(self, theta: Theta, x_BTM: tf.Tensor, branch: Branch, key: tf.Tensor | None, name: str) -> tf.Tensor:
    inner = None if key is None else prng.fold(key, name)
    with tf.name_scope(name):
      return x_BTM + self._dropout(branch(self.norm(theta['norm'], x_BTM), inner), key, name)

  def _dropout(self, y_BTM: tf.Tensor, key: tf.Tensor | None, name: str) -> tf.Tensor:
    return y_BTM if key is None else prng.dropout(y_BTM, self.residual_dropout, prng.fold(key, f'{name}/residual'))
