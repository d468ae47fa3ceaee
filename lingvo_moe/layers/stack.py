"""Stack: layers in order, every k-th with experts, unrolled; scanned_stack.py has the form in one loop."""

import dataclasses
import functools

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.attention import Attention, Now, causal_mask, segment_mask
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.routing import Routed
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.remat import rematerialised
from lingvo_moe.layers.transformer import Branches, Layer, LayerCache

StackCache = dict[str, LayerCache]  # by layer name; of a scanned stack by stacked name, with a leading axis L


@dataclasses.dataclass(frozen=True)
class Stack(Branches):
  """Encoder (`cross_attention=False`) or decoder: layers in order, then with `norm_first` a last normalisation.

  Every `moe_every`-th layer has experts (2: layers 1, 3, 5 counted from 0, as in the paper; 0: none). This stack is
  unrolled: its program grows with its depth. ScannedStack has equal results, to rounding, and equal checkpoints.
  """

  num_layers: int  # number of layers of both kinds
  attention: Attention  # attention of every layer
  ffn: FeedForward  # feed-forward of the layers without experts
  moe: MoE | None = None  # feed-forward of the layers with experts; None: no layer has any
  moe_every: int = 2  # see above
  remat: str = 'none'  # policy of remat.POLICIES
  causal: bool = False  # whether no position attends to a later one; with cross-attention none does in any case
  shared_relative: bool = False  # whether all layers have one table of relative position biases, as in T5

  def __post_init__(self):
    if self.cross_attention and self.attention.rotary_base:
      raise ValueError(
        'rotary positions relate positions of one sequence, and cross-attention those of two: choose one'
      )

  @property
  def layers(self) -> dict[str, Layer]:
    """Layers by name: layer_00, layer_01, ..."""
    return {weights_lib.layer_name(i): self._layer(i) for i in range(self.num_layers)}

  @property
  def traced(self) -> dict[str, Layer]:
    """Layers that are traced, by the names of their weights and caches: all, or those of the block that repeats."""
    return self.layers

  @property
  def period(self) -> int:
    """Number of layers of a block, which a loop repeats."""
    return 1

  @property
  def num_blocks(self) -> int | None:
    """L, the axis on which weights and caches of traced layers are stacked; None: they are not."""
    return None

  def weights(self) -> Specs:
    stacked = lambda specs: specs if self.num_blocks is None else weights_lib.stack(specs, self.num_blocks)
    layers = {name: layer.weights() for name, layer in self.traced.items()}
    last = {'norm': self.norm.weights()} if self.norm_first else {}
    if self.shared_relative:
      last['relative'], *_ = [own['attention'].pop('relative') for own in layers.values()]
    return {**{name: stacked(own) for name, own in layers.items()}, **last}

  def _own(self, theta: Theta, name: str) -> Theta:
    """Weights of a layer, with those that all layers share."""
    if not self.shared_relative:
      return theta[name]
    return {**theta[name], 'attention': {**theta[name]['attention'], 'relative': theta['relative']}}

  def _last(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    return self.norm(theta['norm'], x_BTM) if self.norm_first else x_BTM

  def __call__(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    segments_BT: tf.Tensor,
    memory_BUM: tf.Tensor | None = None,
    memory_segments_BU: tf.Tensor | None = None,
    key: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, dict[str, Routed]]:
    """Runs the stack over whole rows: ([B, T, M], {layer name: Routed} for layers with experts).

    Decoders attend causally, and to the encoder output `memory_BUM` of the same segment. A segment is the sentence of
    the row that a position belongs to; 0 is padding. The random key is None at inference.
    """
    mask_BTT, paddings_BT, memory_mask_BTU = self._masks(segments_BT, memory_segments_BU)
    x_BTM, routed = self._run(theta, x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, key)
    return ops.map_sub_batches(lambda x_BTM: self._last(theta, x_BTM), x_BTM), routed

  def memory_weights(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    segments_BT: tf.Tensor,
    memory_BUM: tf.Tensor,
    memory_segments_BU: tf.Tensor,
    number: int,
  ) -> tf.Tensor:
    """Weights by which a layer of a decoder attends to the encoder output; see Attention.weights_of.

    Arguments are those of `__call__`, at inference, and the number of the layer.
    """
    stack, theta = self.unrolled(theta)
    mask_BTT, paddings_BT, memory_mask_BTU = self._masks(segments_BT, memory_segments_BU)
    below = dataclasses.replace(stack, num_layers=number)
    x_BTM, _ = below._run(theta, x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, None)
    own = stack._own(theta, weights_lib.layer_name(number))
    return stack._layer(number).memory_weights(own, x_BTM, mask_BTT, memory_BUM, memory_mask_BTU)

  def unrolled(self, theta: Theta) -> tuple['Stack', Theta]:
    """The unrolled stack that is equal to this one, with its weights."""
    return self, theta

  def _masks(self, segments_BT, memory_segments_BU):
    """Masks of attention to itself and, last, to the encoder output; between them the paddings."""
    mask_BTT = segment_mask(segments_BT, segments_BT)
    memory_mask_BTU = None
    if self.cross_attention or self.causal:
      mask_BTT &= causal_mask(sizes(segments_BT)[1])
    if self.cross_attention:
      memory_mask_BTU = segment_mask(segments_BT, memory_segments_BU)
    return mask_BTT, tf.cast(segments_BT == 0, tf.float32), memory_mask_BTU

  def _run(self, theta, x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, key):
    """Runs the layers in order over whole rows; arguments are those of Layer, results those of `__call__`."""
    all_routed = {}
    for number, (name, layer) in enumerate(self.layers.items()):
      own_key = prng.fold(key, number)

      def run(theta, x_BTM, memory_BUM=None, name=name, layer=layer, key=own_key):
        x_BTM, routing = layer(theta, x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, key)
        return x_BTM, {name: routing.routed} if layer.is_moe else {}

      if self.remat == 'block' and key is not None:
        run = functools.partial(rematerialised, run)
      with tf.name_scope(name):  # compiled operations carry the scope, so that tools can group them by layer
        x_BTM, routed = run(self._own(theta, name), x_BTM, *([memory_BUM] if self.cross_attention else []))
      all_routed |= routed
    return x_BTM, all_routed

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_positions: Size) -> StackCache:
    """Cache of decoder layers by name: room for their keys and values, and those of the encoder output."""
    own = self.empty_cache(sizes(memory_BUM)[0], num_positions, memory_BUM.dtype)
    return {name: {**own[name], 'memory': memory} for name, memory in self._memory(theta, memory_BUM).items()}

  def _memory(self, theta, memory_BUM):
    """Keys and values of the encoder output by the name of a traced layer."""
    return {name: layer.memory_cache(theta[name], memory_BUM) for name, layer in self.layers.items()}

  def empty_cache(self, rows: Size, num_positions: Size, dtype: tf.DType = tf.float32) -> StackCache:
    """Cache of the layers by name, for a stack without cross-attention."""
    own = lambda: self.attention.empty_cache(rows, num_positions, dtype, self.num_blocks)
    return {name: {'self': own()} for name in self.traced}

  def read(self, theta: Theta, x_BTM: tf.Tensor, real_BT: tf.Tensor, window: int) -> StackCache:
    """Cache of T flat positions after reading the first embedded symbols of each row, without cross-attention.

    real_BT is False at padding, which is last in its row. A symbol may attend to `window` positions, itself included.
    """
    rows, length = sizes(x_BTM)[:2]
    ago_TU = tf.range(length)[:, tf.newaxis] - tf.range(length)[tf.newaxis]
    mask_BTU = ((ago_TU >= 0) & (ago_TU < window))[tf.newaxis] & real_BT[:, tf.newaxis]
    now = Now(tf.constant(0), tf.constant(0), tf.cast(mask_BTU, tf.float32), real_BT, tf.range(length)[tf.newaxis])
    return self.extend(theta, x_BTM, now, None, self.empty_cache(rows, length, x_BTM.dtype))[1]

  def keep_positions(self, cache: StackCache, positions_BU: tf.Tensor) -> StackCache:
    """Cache gathered at these flat positions, with the encoder output's unchanged; see flat_sequence.loop."""
    kept = lambda own: self.attention.keep_positions(own, positions_BU)
    return {name: {**of_layer, 'self': kept(of_layer['self'])} for name, of_layer in cache.items()}

  def extend(
    self, theta: Theta, x_BWM: tf.Tensor, now: Now, memory_segments_BU: tf.Tensor | None, cache: StackCache
  ) -> tuple[tf.Tensor, StackCache]:
    """Decoding step of W hypotheses a row, at inference.

    Without cross-attention it also takes the first W symbols of a row at once, all live, under a causal mask.

    Args:
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
      memory_mask_B1U = tf.expand_dims(memory_segments_BU > 0, 1)
      empty_B1 = tf.reduce_all(memory_segments_BU == 0, axis=1, keepdims=True)
    empty_BW = tf.broadcast_to(empty_B1, sizes(x_BWM)[:2]) if now.live_BW is None else empty_B1 | ~now.live_BW
    paddings_BW = tf.cast(empty_BW, tf.float32)
    x_BWM, cache = self._extend(theta, x_BWM, now, memory_mask_B1U, paddings_BW, cache)
    return self._last(theta, x_BWM), cache

  def _extend(self, theta, x_BWM, now, memory_mask_B1U, paddings_BW, cache):
    """Runs the layers in order for a step of decoding; arguments are those of Layer.extend, results of `extend`."""
    cache = dict(cache)
    for name, layer in self.layers.items():
      with tf.name_scope(name):
        x_BWM, cache[name] = layer.extend(self._own(theta, name), x_BWM, now, memory_mask_B1U, paddings_BW, cache[name])
    return x_BWM, cache

  def _layer(self, number: int) -> Layer:
    has_experts = self.moe is not None and self.moe_every and number % self.moe_every == self.moe_every - 1
    shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(Branches)}
    return Layer(self.attention, self.moe if has_experts else self.ffn, self.remat == 'attention', **shared)
