"""Encoder and decoder stacks: layers in order, every k-th with experts, unrolled or scanned."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.attention import causal_mask
from lingvo_moe.layers.attention import segment_mask
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.routing import Decisions
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.gates.routing import RoutingStats
from lingvo_moe.layers.incremental import Now
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import NORMS
from lingvo_moe.layers.norm import LayerNorm
from lingvo_moe.layers.norm import RMSNorm
from lingvo_moe.layers.remat import rematerialised
from lingvo_moe.layers.scan import loop_blocks
from lingvo_moe.layers.scan import scan
from lingvo_moe.layers.scan import weights_at
from lingvo_moe.layers.transformer import Layer
from lingvo_moe.layers.transformer import LayerCache
from lingvo_moe.layers.transformer import Rows
from lingvo_moe.xla_sharding import shard

StackCache = dict[str, LayerCache]  # by layer name; of a scanned stack by stacked name, with a leading axis L


class Routed(NamedTuple):
  """Statistics and decisions of the gate of one layer."""

  stats: RoutingStats
  decisions: Decisions


@dataclasses.dataclass(frozen=True)
class Stack:
  """Encoder (`cross_attention=False`) or decoder: layers in order, then a last normalisation.

  Every `moe_every`-th layer has experts (2: layers 1, 3, 5 counted from 0, as in the paper; 0: none).

  Attributes:
    num_layers: number of layers of both kinds.
    attention: attention of every layer.
    ffn: feed-forward of the layers without experts.
    moe: feed-forward of the layers with experts; None: no layer has any.
    moe_every: see above.
    cross_attention: whether it is a decoder that attends to an encoder.
    residual_dropout: dropout of every branch.
    scan: whether whole rows and steps of decoding run in one loop over blocks of `moe_every` layers, whose weights and
      caches are stacked on a leading axis L (see scan.py). Results are equal to rounding, and so are checkpoints.
    remat: policy of remat.POLICIES for an unrolled layer. A scanned block is always rematerialised.
    causal: whether no position attends to a later one; with cross-attention none does in any case.
    norm_type: a name of norm.NORMS.
    post_norm: whether the output of each branch is normalised too.
  """

  num_layers: int
  attention: Attention
  ffn: FeedForward
  moe: MoE | None = None
  moe_every: int = 2
  cross_attention: bool = False
  residual_dropout: float = 0.0
  scan: bool = False
  remat: str = 'none'
  causal: bool = False
  norm_type: str = 'layer'
  post_norm: bool = False

  def __post_init__(self):
    if self.cross_attention and self.attention.rotary_base:
      raise ValueError(
        'rotary positions relate positions of one sequence, and cross-attention those of two: choose one'
      )
    if self.scan and self.num_layers % self.period:
      raise ValueError(
        f'a scanned stack is made of blocks of moe_every={self.period} layers; saw {self.num_layers} layers: '
        'use a multiple, or scan_layers=False'
      )

  @property
  def period(self) -> int:
    """Number of layers of a block, which repeats."""
    return self.moe_every if self.moe is not None and self.moe_every else 1

  @property
  def layers(self) -> dict[str, Layer]:
    """Layers by name: layer_00, layer_01, ..."""
    return {weights_lib.layer_name(i): self._layer(i) for i in range(self.num_layers)}

  @property
  def norm(self) -> LayerNorm | RMSNorm:
    return NORMS[self.norm_type](self.attention.model_dim)

  def weights(self) -> Specs:
    layers = {name: layer.weights() for name, layer in self.layers.items()}
    if self.scan:
      layers = {name: weights_lib.stack(layer.weights(), self.num_blocks) for name, layer in self._block.items()}
    return {**layers, 'norm': self.norm.weights()}

  @property
  def num_blocks(self) -> int:
    return self.num_layers // self.period

  def __call__(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    segments_BT: tf.Tensor,
    memory_BUM: tf.Tensor | None = None,
    memory_segments_BU: tf.Tensor | None = None,
    key: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, dict[str, Routed]]:
    """Runs the stack over whole rows; decoders attend causally, and to memory of the same segment.

    Args:
      theta: the stack's weights.
      x_BTM: embedded input.
      segments_BT: sentence of the row that a position belongs to; 0 is padding.
      memory_BUM: encoder output, for decoders.
      memory_segments_BU: segments of memory_BUM.
      key: random key in training; None at inference.

    Returns:
      ([B, T, M], {layer name: Routed} for layers with experts).
    """
    mask_BTT = segment_mask(segments_BT, segments_BT)
    memory_mask_BTU = None
    if self.cross_attention or self.causal:
      mask_BTT &= causal_mask(sizes(segments_BT)[1])
    if self.cross_attention:
      memory_mask_BTU = segment_mask(segments_BT, memory_segments_BU)
    rows = Rows(x_BTM, mask_BTT, memory_BUM, memory_mask_BTU, key)
    paddings_BT = tf.cast(segments_BT == 0, tf.float32)
    return (self._scanned if self.scan else self._unrolled)(theta, rows, paddings_BT)

  def _unrolled(self, theta: Theta, rows: Rows, paddings_BT: tf.Tensor) -> tuple[tf.Tensor, dict[str, Routed]]:
    parts, routed = ops.split_rows(rows), {}
    for number, (name, layer) in enumerate(self.layers.items()):

      def run(xs, memories, theta, number=number, name=name, layer=layer, parts=parts):
        parts = [part._replace(x_BTM=x, memory_BUM=m) for part, x, m in zip(parts, xs, memories or [None] * len(xs))]
        xs, routing = self._run(number, layer, theta, parts, paddings_BT)
        return xs, _routed(name, routing)

      if self.remat == 'block' and rows.key is not None:
        run = functools.partial(rematerialised, run)
      memories = [part.memory_BUM for part in parts] if self.cross_attention else []
      with tf.name_scope(name):  # compiled operations carry the scope, so that tools can group them by layer
        xs, routing = run([part.x_BTM for part in parts], memories, theta[name])
      parts = [part._replace(x_BTM=x) for part, x in zip(parts, xs, strict=True)]
      routed |= routing
    return ops.join_rows([self.norm(theta['norm'], part.x_BTM) for part in parts]), routed

  def _scanned(self, theta: Theta, rows: Rows, paddings_BT: tf.Tensor) -> tuple[tf.Tensor, dict[str, Routed]]:
    stacked = weights_lib.flatten({name: theta[name] for name in self._block})
    specs = weights_lib.flatten({name: layer.weights() for name, layer in self._block.items()})

    def run_block(number, x_BTM, shared, weights):
      parts, routed = ops.split_rows(rows._replace(x_BTM=x_BTM, memory_BUM=shared[0] if shared else None)), {}
      for place, (name, layer) in enumerate(self._block.items()):
        own = {n: w for n, w in weights.items() if n.startswith(name + '/')}
        with tf.name_scope(name):
          with tf.name_scope('weights'):
            own = {n: xla_sharding.gather(w, specs[n].dims) for n, w in own.items()}
          own = weights_lib.unflatten(own)[name]
          xs, routing = self._run(number * self.period + place, layer, own, parts, paddings_BT)
        parts = [part._replace(x_BTM=x) for part, x in zip(parts, xs, strict=True)]
        routed |= _routed(name, routing)
      return ops.join_rows([part.x_BTM for part in parts]), routed

    shared = [rows.memory_BUM] if self.cross_attention else []
    x_BTM, by_block = scan(run_block, rows.x_BTM, shared, stacked, specs)
    routed = {}
    for name, of_blocks in by_block.items():
      for block, layer_name in enumerate(weights_lib.names_by_layer(name, self.num_blocks)):
        routed[layer_name] = tf.nest.map_structure(lambda t, block=block: t[block], of_blocks)
    return ops.map_sub_batches(lambda x_BTM: self.norm(theta['norm'], x_BTM), x_BTM), routed

  def _run(
    self, number: int | tf.Tensor, layer: Layer, theta: Theta, parts: Sequence[Rows], paddings_BT: tf.Tensor
  ) -> tuple[list[tf.Tensor], Routing | None]:
    """Runs one layer with random keys of its own, and weights cast to the type of its input."""
    parts = [part._replace(key=None if part.key is None else prng.fold(part.key, number)) for part in parts]
    return layer(weights_lib.cast(theta, layer.weights(), parts[0].x_BTM.dtype), parts, paddings_BT)

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_positions: Size) -> StackCache:
    """Cache of the decoder layers by name."""
    if self.scan:
      return self._init_scanned_cache(theta, memory_BUM, num_positions)
    return {
      name: layer.init_cache(
        weights_lib.cast(theta[name], layer.weights(), memory_BUM.dtype), memory_BUM, num_positions
      )
      for name, layer in self.layers.items()
    }

  def empty_cache(self, rows: Size, num_positions: Size, dtype: tf.DType = tf.float32) -> StackCache:
    """Cache of the layers by name, for a stack without cross-attention."""
    layers, stacked = (self._block, self.num_blocks) if self.scan else (self.layers, None)
    return {name: layer.empty_cache(rows, num_positions, dtype, stacked) for name, layer in layers.items()}

  def read(self, theta: Theta, x_BTM: tf.Tensor, real_BT: tf.Tensor, window: int) -> StackCache:
    """Cache of T flat positions after reading the first symbols of each row, without cross-attention.

    Args:
      theta: the stack's weights.
      x_BTM: embedded symbols.
      real_BT: False at padding, which is last in its row.
      window: number of positions that a symbol may attend to, itself included.
    """
    rows, length = sizes(x_BTM)[:2]
    ago_TU = tf.range(length)[:, tf.newaxis] - tf.range(length)[tf.newaxis]
    mask_BTU = ((ago_TU >= 0) & (ago_TU < window))[tf.newaxis] & real_BT[:, tf.newaxis]
    now = Now(tf.constant(0), tf.constant(0), tf.cast(mask_BTU, tf.float32), real_BT, tf.range(length)[tf.newaxis])
    return self.extend(theta, x_BTM, now, None, self.empty_cache(rows, length, x_BTM.dtype))[1]

  def _init_scanned_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_positions: Size) -> StackCache:
    arrays = {
      name: {kind: tf.TensorArray(memory_BUM.dtype, self.num_blocks) for kind in ('keys', 'values')}
      for name in self._block
    }

    def fill(number, arrays):
      filled = {}
      for name, layer in self._block.items():
        with tf.name_scope(name):
          own = self._block_theta(theta, name, number, memory_BUM.dtype, only='cross_attention')
          cache = layer.memory_cache(own, memory_BUM)
        filled[name] = {kind: array.write(number, cache[kind]) for kind, array in arrays[name].items()}
      return [filled]

    (arrays,) = loop_blocks(self.num_blocks, fill, arrays)
    rows, attention = sizes(memory_BUM)[0], self.attention
    return {
      name: {
        'self': attention.empty_cache(rows, num_positions, memory_BUM.dtype, self.num_blocks),
        'memory': {kind: shard(array.stack(), 'LBNUK') for kind, array in arrays[name].items()},
      }
      for name in self._block
    }

  def keep_positions(self, cache: StackCache, positions_BU: tf.Tensor) -> StackCache:
    """Cache gathered at these flat positions; see flat_sequence.loop."""
    layers = self._block if self.scan else self.layers
    return {name: layer.keep_positions(cache[name], positions_BU) for name, layer in layers.items()}

  def extend(
    self,
    theta: Theta,
    x_BWM: tf.Tensor,
    now: Now,
    memory_segments_BU: tf.Tensor | None,
    cache: StackCache,
  ) -> tuple[tf.Tensor, StackCache]:
    """Decoding step of W hypotheses a row, at inference.

    Without cross-attention it also takes the first W symbols of a row at once, all live, under a causal mask.

    Args:
      theta: the stack's weights.
      x_BWM: embedded last symbol of each hypothesis.
      now: positions to write, positions of each hypothesis, and which of them there are; see Attention.extend.
      memory_segments_BU: segments of the encoder output: one sentence a row, 0 at padding; None: no cross-attention.
      cache: from `init_cache`, `empty_cache` or the step before.

    Returns:
      ([B, W, M], the cache with the step's keys and values).
    """
    # Rows without a source, which pad a batch, are padding for the experts. So are rows without a hypothesis: of equal
    # symbols, such as those of sentences that have stopped, all would queue for the same experts.
    memory_mask_B1U, empty_B1 = None, tf.constant([[False]])
    if self.cross_attention:
      memory_mask_B1U = (memory_segments_BU > 0)[:, tf.newaxis, :]
      empty_B1 = tf.reduce_all(memory_segments_BU == 0, axis=1, keepdims=True)
    empty_BW = tf.broadcast_to(empty_B1, sizes(x_BWM)[:2]) if now.live_BW is None else empty_B1 | ~now.live_BW
    paddings_BW = tf.cast(empty_BW, tf.float32)
    if self.scan:
      x_BWM, cache = self._extend_scanned(theta, x_BWM, now, memory_mask_B1U, paddings_BW, cache)
      return self.norm(theta['norm'], x_BWM), cache
    cache = dict(cache)
    for name, layer in self.layers.items():
      own = weights_lib.cast(theta[name], layer.weights(), x_BWM.dtype)
      with tf.name_scope(name):
        x_BWM, cache[name] = layer.extend(own, x_BWM, now, memory_mask_B1U, paddings_BW, cache[name])
    return self.norm(theta['norm'], x_BWM), cache

  def _extend_scanned(
    self,
    theta: Theta,
    x_BWM: tf.Tensor,
    now: Now,
    memory_mask_B1U: tf.Tensor | None,
    paddings_BW: tf.Tensor,
    cache: StackCache,
  ) -> tuple[tf.Tensor, StackCache]:
    """One loop over blocks, each of which writes its positions of the cache in place."""

    def extend_block(number, x_BWM, own_caches):
      written = {}
      for name, layer in self._block.items():
        with tf.name_scope(name):
          own = self._block_theta(theta, name, number, x_BWM.dtype)
          of_layers = {**cache[name], 'self': own_caches[name]}
          x_BWM, of_layers = layer.extend(own, x_BWM, now, memory_mask_B1U, paddings_BW, of_layers, number)
        written[name] = of_layers['self']
      return shard(x_BWM, 'BWM'), written

    own_caches = {name: of_layers['self'] for name, of_layers in cache.items()}
    x_BWM, own_caches = loop_blocks(self.num_blocks, extend_block, x_BWM, own_caches)
    return x_BWM, {name: {**cache[name], 'self': own} for name, own in own_caches.items()}

  def _layer(self, number: int) -> Layer:
    has_experts = self.moe is not None and self.moe_every and number % self.moe_every == self.moe_every - 1
    ffn = self.moe if has_experts else self.ffn
    remat_attention = self.remat == 'attention'
    return Layer(
      self.attention,
      ffn,
      self.cross_attention,
      self.residual_dropout,
      remat_attention,
      norm_type=self.norm_type,
      post_norm=self.post_norm,
    )

  @property
  def _block(self) -> dict[str, Layer]:
    """Layers of a block by the names of their stacked weights."""
    return {weights_lib.stack_name(i, self.period): self._layer(i) for i in range(self.period)}

  def _block_theta(self, theta: Theta, name: str, number: tf.Tensor, dtype: tf.DType, only: str = '') -> Theta:
    """Weights of layer `name` of block `number` of a scanned stack, gathered and cast for use; `only`: of this branch."""
    specs = weights_lib.flatten(self._block[name].weights())
    specs = {n: spec for n, spec in specs.items() if n.startswith(only)}
    theta = weights_lib.unflatten(weights_at(weights_lib.flatten(theta[name]), specs, number))
    return weights_lib.cast(theta, specs, dtype)


def _routed(name: str, routing: Routing | None) -> Mapping[str, Routed]:
  return {} if routing is None else {name: Routed(routing.stats, routing.decisions)}
