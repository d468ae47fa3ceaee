"""Encoder and decoder stacks: pre-norm residual blocks, a mixture of experts in place of every k-th feed-forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_moe import prng
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.attention import Cache
from lingvo_moe.layers.attention import causal_mask
from lingvo_moe.layers.attention import segment_mask
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gating import Routing
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import LayerNorm
from lingvo_moe.shapes import Size
from lingvo_moe.shapes import sizes
from lingvo_moe.weights import Specs
from lingvo_moe.weights import Theta

LayerCache = dict[str, Cache]  # of a decoder layer: 'self', and 'memory', which does not change
StackCache = dict[str, LayerCache]  # by layer name
Branch = Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor]  # (normalised x, random key) -> what is added to x


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer of a stack: self-attention, then attention to the encoder (decoders), then feed-forward or experts.

  Each is a residual branch over normalised input, x + dropout(f(norm(x))), as Lingvo builds them.
  """

  attention: Attention
  ffn: FeedForward | MoE
  cross_attention: bool = False
  residual_dropout: float = 0.0

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
    attend = lambda x, k: self.attention(theta['attention'], x, x, mask_BTT, k)
    x_BTM = self._residual(theta['attention'], x_BTM, attend, key, 'attention')
    if self.cross_attention:
      cross = theta['cross_attention']
      attend = lambda x, k: self.attention(cross, x, memory_BUM, memory_mask_BTU, k)
      x_BTM = self._residual(cross, x_BTM, attend, key, 'cross_attention')
    return self._feed_forward(theta, x_BTM, paddings_BT, key)

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_slots: Size) -> LayerCache:
    """Room for a decoder layer's own keys and values, and those of the encoder's output, computed once."""
    keys, values = self.attention.keys_values(theta['cross_attention'], memory_BUM)
    empty = self.attention.empty_cache(sizes(memory_BUM)[0], num_slots, keys.dtype)
    return {'self': empty, 'memory': {'keys': keys, 'values': values}}

  def extend(
    self,
    theta: Theta,
    x_BWM: tf.Tensor,
    time: tf.Tensor,
    mask_BWU: tf.Tensor,
    memory_mask_B1U: tf.Tensor,
    paddings_BW: tf.Tensor,
    cache: LayerCache,
  ) -> tuple[tf.Tensor, LayerCache]:
    """One decoding step of W hypotheses a row, at inference.

    Args:
      theta: the layer's weights.
      x_BWM: input.
      time: int32 scalar, the steps made before.
      mask_BWU: 1 at the flat positions that a hypothesis owns; see Attention.extend.
      memory_mask_B1U: where the encoder's output may be attended to.
      paddings_BW: 1.0 where there is no hypothesis.
      cache: from `init_cache` or the step before.

    Returns:
      ([B, W, M], the cache with the step's keys and values).
    """
    own = theta['attention']
    y_BWM, self_cache = self.attention.extend(own, self.norm(own['norm'], x_BWM), time, mask_BWU, cache['self'])
    x_BWM += y_BWM
    cross, memory = theta['cross_attention'], cache['memory']
    attend = lambda x, k: self.attention.attend(cross, x, memory['keys'], memory['values'], memory_mask_B1U)
    x_BWM = self._residual(cross, x_BWM, attend, None, 'cross_attention')
    x_BWM, _ = self._feed_forward(theta, x_BWM, paddings_BW, None)
    return x_BWM, {'self': self_cache, 'memory': memory}

  def _feed_forward(
    self, theta: Theta, x_BTM: tf.Tensor, paddings_BT: tf.Tensor, key: tf.Tensor | None
  ) -> tuple[tf.Tensor, Routing | None]:
    if not self.is_moe:
      return self._residual(theta['ffn'], x_BTM, lambda x, _: self.ffn(theta['ffn'], x), key, 'ffn'), None
    own = theta['moe']
    gate_key = None if key is None else prng.fold(key, 'gate')
    with tf.name_scope('moe'):
      y_BTM, routing = self.ffn(own, self.norm(own['norm'], x_BTM), paddings_BT, gate_key)
    return x_BTM + self._dropout(y_BTM, key, 'moe'), routing

  def _residual(self, theta: Theta, x_BTM: tf.Tensor, branch: Branch, key: tf.Tensor | None, name: str) -> tf.Tensor:
    inner = None if key is None else prng.fold(key, name)
    with tf.name_scope(name):
      return x_BTM + self._dropout(branch(self.norm(theta['norm'], x_BTM), inner), key, name)

  def _dropout(self, y_BTM: tf.Tensor, key: tf.Tensor | None, name: str) -> tf.Tensor:
    return y_BTM if key is None else prng.dropout(y_BTM, self.residual_dropout, prng.fold(key, f'{name}/residual'))


@dataclasses.dataclass(frozen=True)
class Stack:
  """An encoder (`cross_attention=False`) or decoder: its layers in order, then a last normalisation.

  Every `moe_every`-th layer carries experts (2: layers 1, 3, 5 counted from 0, as in the paper; 0: none).
  """

  num_layers: int
  attention: Attention
  ffn: FeedForward
  moe: MoE | None = None
  moe_every: int = 2
  cross_attention: bool = False
  residual_dropout: float = 0.0

  @property
  def layers(self) -> dict[str, Layer]:
    """The layers by name: layer_00, layer_01, ..."""
    is_moe = lambda i: self.moe is not None and self.moe_every and i % self.moe_every == self.moe_every - 1
    make = lambda ffn: Layer(self.attention, ffn, self.cross_attention, self.residual_dropout)
    return {f'layer_{i:02d}': make(self.moe if is_moe(i) else self.ffn) for i in range(self.num_layers)}

  @property
  def norm(self) -> LayerNorm:
    return LayerNorm(self.attention.model_dim)

  def weights(self) -> Specs:
    return {**{name: layer.weights() for name, layer in self.layers.items()}, 'norm': self.norm.weights()}

  def __call__(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    segments_BT: tf.Tensor,
    memory_BUM: tf.Tensor | None = None,
    memory_segments_BU: tf.Tensor | None = None,
    key: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, dict[str, Routing]]:
    """Runs the stack over whole rows; decoders attend causally, and to memory of the same segment.

    Args:
      theta: the stack's weights.
      x_BTM: embedded input.
      segments_BT: which sentence of the row a position belongs to; 0 is padding.
      memory_BUM: the encoder's output, for decoders.
      memory_segments_BU: its segments.
      key: random key in training; None at inference.

    Returns:
      ([B, T, M], {layer name: Routing} of the layers with experts).
    """
    mask_BTT = segment_mask(segments_BT, segments_BT)
    memory_mask_BTU = None
    if self.cross_attention:
      mask_BTT &= causal_mask(sizes(segments_BT)[1])
      memory_mask_BTU = segment_mask(segments_BT, memory_segments_BU)
    paddings_BT = tf.cast(segments_BT == 0, tf.float32)
    routing = {}
    for number, (name, layer) in enumerate(self.layers.items()):
      layer_key = None if key is None else prng.fold(key, number)
      with tf.name_scope(name):  # so that what XLA makes of it can be told by layer
        x_BTM, layer_routing = layer(theta[name], x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, layer_key)
      if layer_routing is not None:
        routing[name] = layer_routing
    return self.norm(theta['norm'], x_BTM), routing

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_slots: Size) -> StackCache:
    """Each decoder layer's cache by name."""
    return {name: layer.init_cache(theta[name], memory_BUM, num_slots) for name, layer in self.layers.items()}

  def extend(
    self,
    theta: Theta,
    x_BWM: tf.Tensor,
    time: tf.Tensor,
    mask_BWU: tf.Tensor,
    memory_segments_BU: tf.Tensor,
    cache: StackCache,
  ) -> tuple[tf.Tensor, StackCache]:
    """One decoding step of W hypotheses a row, at inference.

    Args:
      theta: the stack's weights.
      x_BWM: the embedded last symbol of each hypothesis.
      time: int32 scalar, the steps made before.
      mask_BWU: 1 at the flat positions that a hypothesis owns; see Attention.extend.
      memory_segments_BU: segments of the encoder's output: one sentence a row, 0 at padding.
      cache: from `init_cache` or the step before.

    Returns:
      ([B, W, M], the cache with the step's keys and values).
    """
    memory_mask_B1U = (memory_segments_BU > 0)[:, tf.newaxis, :]
    # Rows without a source (fillers) are padding to the experts.
    empty_B1 = tf.cast(tf.reduce_all(memory_segments_BU == 0, axis=1, keepdims=True), tf.float32)
    paddings_BW = tf.broadcast_to(empty_B1, sizes(x_BWM)[:2])
    cache = dict(cache)
    for name, layer in self.layers.items():
      x_BWM, cache[name] = layer.extend(theta[name], x_BWM, time, mask_BWU, memory_mask_B1U, paddings_BW, cache[name])
    return self.norm(theta['norm'], x_BWM), cache
