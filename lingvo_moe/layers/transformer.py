"""Transformer layer of an encoder or decoder: pre-norm residual branches of attention and feed-forward, or experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.attention import Cache
from lingvo_moe.layers.attention import of_layer
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.incremental import Now
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import NORMS
from lingvo_moe.layers.norm import LayerNorm
from lingvo_moe.layers.norm import RMSNorm
from lingvo_moe.layers.remat import rematerialised

# Cache of a decoder layer, or of the equal layers of a scanned stack: 'self', and 'memory', which is constant.
LayerCache = dict[str, Cache]
Branch = Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor]  # (normalised x, random key) -> term added to x


class Rows(NamedTuple):
  """Rows of a batch, or of a sub-batch, as inputs of a layer."""

  x_BTM: tf.Tensor
  mask_BTT: tf.Tensor  # where a position may attend to another of x
  memory_BUM: tf.Tensor | None = None  # encoder output, for layers with cross-attention
  memory_mask_BTU: tf.Tensor | None = None  # where a position may attend to memory
  key: tf.Tensor | None = None  # random key, or one for each row, in training; None at inference


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
    self, theta: Theta, parts: Sequence[Rows], paddings_BT: tf.Tensor
  ) -> tuple[list[tf.Tensor], Routing | None]:
    """Runs the layer over whole rows in sub-batches, which are joined for experts only.

    Args:
      theta: the layer's weights.
      parts: sub-batches of all rows; see ops.split_rows.
      paddings_BT: 1.0 where x is padding, for all rows.

    Returns:
      (x_BTM of each sub-batch, Routing of the experts or None).
    """
    xs = [self._attention(theta, rows) for rows in parts]
    keys = [rows.key for rows in parts]
    if not self.is_moe:
      return [self._feed_forward(theta, x_BTM, key) for x_BTM, key in zip(xs, keys, strict=True)], None
    with tf.name_scope('moe'):
      own, key = theta['moe'], None if keys[0] is None else ops.join_rows(keys)
      normalised_BTM = ops.join_rows([self.norm(own['norm'], x_BTM) for x_BTM in xs])
      y_BTM, routing = self.ffn(own, normalised_BTM, paddings_BT, _fold(key, 'gate'))
      answers = [y for y, _ in ops.split_rows((y_BTM, key))]
      dropped = lambda y, key: self._dropout(self._post(own, y), key, 'moe')
      return [x + dropped(y, key) for x, y, key in zip(xs, answers, keys, strict=True)], routing

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_positions: Size) -> LayerCache:
    """Cache of a decoder layer: room for its own keys and values, and those of the encoder output, computed once."""
    empty = self.attention.empty_cache(sizes(memory_BUM)[0], num_positions, memory_BUM.dtype)
    return {'self': empty, 'memory': self.memory_cache(theta, memory_BUM)}

  def empty_cache(
    self, rows: Size, num_positions: Size, dtype: tf.DType = tf.float32, layers: int | None = None
  ) -> LayerCache:
    """Cache of a layer without cross-attention, or of the equal `layers` of a scanned stack."""
    return {'self': self.attention.empty_cache(rows, num_positions, dtype, layers)}

  def memory_cache(self, theta: Theta, memory_BUM: tf.Tensor) -> Cache:
    """Keys and values of the encoder output."""
    keys, values = self.attention.of_memory.keys_values(theta['cross_attention'], memory_BUM)
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
      theta: the layer's weights.
      x_BWM: input.
      now: positions to write, and positions of each hypothesis; see Attention.extend.
      memory_mask_B1U: where the encoder output may be attended to; None without cross-attention.
      paddings_BW: 1.0 where there is no hypothesis.
      cache: from `init_cache` or the step before.
      number: number of this layer on axis L of a scanned stack's cache; None: the cache of this layer alone.

    Returns:
      ([B, W, M], the cache with the step's keys and values).
    """
    own = theta['attention']
    with tf.name_scope('attention'):
      y_BWM, self_cache = self.attention.extend(own, self.norm(own['norm'], x_BWM), now, cache['self'], number)
      x_BWM += self._post(own, y_BWM)
    if self.cross_attention:
      cross, memory = theta['cross_attention'], of_layer(cache['memory'], number)
      attend = lambda x, k: self.attention.of_memory.attend(cross, x, memory['keys'], memory['values'], memory_mask_B1U)
      x_BWM = self._residual(cross, x_BWM, attend, None, 'cross_attention')
    if self.is_moe:
      own = theta['moe']
      with tf.name_scope('moe'):
        x_BWM += self._post(own, self.ffn(own, self.norm(own['norm'], x_BWM), paddings_BW)[0])
    else:
      x_BWM = self._feed_forward(theta, x_BWM, None)
    return x_BWM, {**cache, 'self': self_cache}

  def _attention(self, theta: Theta, rows: Rows) -> tf.Tensor:
    """Branches of attention: self-attention, then attention to memory."""
    own = theta['attention']
    attend = lambda x, key: self._attend(self.attention, own, x, x, rows.mask_BTT, key)
    x_BTM = self._residual(own, rows.x_BTM, attend, rows.key, 'attention')
    if self.cross_attention:
      cross = theta['cross_attention']
      to_memory = self.attention.of_memory
      attend = lambda x, key: self._attend(to_memory, cross, x, rows.memory_BUM, rows.memory_mask_BTU, key)
      x_BTM = self._residual(cross, x_BTM, attend, rows.key, 'cross_attention')
    return x_BTM

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
    return self._residual(theta['ffn'], x_BTM, lambda x, key: self.ffn(theta['ffn'], x, key), key, 'ffn')

  def _residual(self, theta: Theta, x_BTM: tf.Tensor, branch: Branch, key: tf.Tensor | None, name: str) -> tf.Tensor:
    with tf.name_scope(name):
      y_BTM = self._post(theta, branch(self.norm(theta['norm'], x_BTM), _fold(key, name)))
      return x_BTM + self._dropout(y_BTM, key, name)

  def _post(self, theta: Theta, y_BTM: tf.Tensor) -> tf.Tensor:
    """Output of a branch, normalised if there is a second norm."""
    return self.norm(theta['post_norm'], y_BTM) if self.post_norm else y_BTM

  def _dropout(self, y_BTM: tf.Tensor, key: tf.Tensor | None, name: str) -> tf.Tensor:
    return prng.dropout(y_BTM, self.residual_dropout, _fold(key, f'{name}/residual'))


def _fold(key: tf.Tensor | None, name: str) -> tf.Tensor | None:
  return None if key is None else prng.fold(key, name)
