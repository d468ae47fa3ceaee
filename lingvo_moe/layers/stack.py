"""Stack: layers in order, every k-th with experts, unrolled; scanned_stack.py has the form in one loop."""

import dataclasses
import functools
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.attention import Attention, Now, causal_mask, segment_mask
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates import by_task
from lingvo_moe.layers.gates.routing import Routed
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.transformer import Branches, Layer, LayerCache, Rows
from lingvo_moe.ops.remat import rematerialised

StackCache = dict[str, LayerCache]  # by layer name; of a scanned stack by stacked name, with a leading axis L


class StackOutput(NamedTuple):
  """Output of a stack, with its routing, cache and attention weights; see LayerOutput."""

  x_BTM: tf.Tensor
  routed: dict[str, Routed]  # by layer name, of layers with experts
  cache: StackCache | None
  memory_weights_BnTU: tf.Tensor | None  # of one layer


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
  joined: FeedForward | None = None  # feed-forward in the places of MoE layers where there are none; None: ffn
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
    """Number of blocks L, on whose axis weights and caches of traced layers are stacked; None: they are not stacked."""
    return None

  def weights(self) -> Specs:
    layers = {name: layer.weights() for name, layer in self.traced.items()}
    last = {'norm': self.norm.weights()} if self.norm_first else {}
    if self.shared_relative:
      last['relative'], *_ = [layer_specs['attention'].pop('relative') for layer_specs in layers.values()]
    if self.num_blocks is not None:
      layers = {name: weights_lib.stack(layer_specs, self.num_blocks) for name, layer_specs in layers.items()}
    return {**layers, **last}

  def __call__(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    segments_BT: tf.Tensor,
    memory_BUM: tf.Tensor | None = None,
    memory_segments_BU: tf.Tensor | None = None,
    key: tf.Tensor | None = None,
    aligned_layer: int | None = None,
  ) -> StackOutput:
    """Runs the stack over whole rows.

    Decoders attend causally, and to the encoder output `memory_BUM` of the same segment. A segment is the sentence of
    the row that a position belongs to; 0 is padding. For a gate by task it also holds its task's number; see
    by_task.with_tasks. The random key is None at inference. The layer of number
    `aligned_layer` also returns the weights of its attention to the encoder output; see Attention.attend.
    """
    mask_BTT, memory_mask_BTU = segment_mask(segments_BT, segments_BT), None
    if self.cross_attention or self.causal:
      mask_BTT &= causal_mask(sizes(segments_BT)[1])
    if self.cross_attention:
      memory_mask_BTU = segment_mask(segments_BT, memory_segments_BU)
    tasks_BT = by_task.tasks_of(segments_BT) if self._reads_tasks else None
    rows = Rows(mask_BTT, tf.cast(segments_BT == 0, tf.float32), memory_mask_BTU, key, tasks_BT=tasks_BT)
    return self._run(theta, x_BTM, memory_BUM, rows, aligned_layer=aligned_layer)

  def extend(
    self, theta: Theta, x_BWM: tf.Tensor, now: Now, memory_segments_BU: tf.Tensor | None, cache: StackCache
  ) -> tuple[tf.Tensor, StackCache]:
    """Decoding step of W hypotheses a row, at inference.

    Without cross-attention it also takes the first W symbols of a row at once, all live, under a causal mask.

    Args:
      x_BWM: embedded last symbol of each hypothesis.
      now: positions to write, positions of each hypothesis, and which of them there are; see Attention.extend.
      memory_segments_BU: segments of the encoder output: one sentence a row, 0 at padding, as in `__call__`; None: no
        cross-attention.
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
    tasks_BW = None
    if self._reads_tasks:
      tasks_B1 = by_task.tasks_of(tf.reduce_max(memory_segments_BU, axis=1, keepdims=True))
      tasks_BW = tf.broadcast_to(tasks_B1, sizes(x_BWM)[:2])
    rows = Rows(now.mask_BWU, tf.cast(empty_BW, tf.float32), memory_mask_B1U, now=now, tasks_BT=tasks_BW)
    output = self._run(theta, x_BWM, None, rows, cache)
    return output.x_BTM, output.cache

  def _run(self, theta, x_BTM, memory_BUM, rows, cache=None, aligned_layer=None) -> StackOutput:
    """Runs the layers in order, then the last normalisation; with a cache, for a step of decoding."""
    x_BTM, routed, cache, weights_BnTU = self._run_layers(theta, x_BTM, memory_BUM, rows, cache, aligned_layer)
    x_BTM = self.norm(theta['norm'], x_BTM) if self.norm_first else x_BTM
    return StackOutput(x_BTM, routed, cache, weights_BnTU)

  def _run_layers(self, theta, x_BTM, memory_BUM, rows, cache, aligned_layer) -> StackOutput:
    routed, written, weights_BnTU = {}, {}, None
    for number, (name, layer) in enumerate(self.layers.items()):
      layer_theta, is_aligned = theta[name], number == aligned_layer
      layer_rows = rows._replace(key=prng.fold(rows.key, number))
      if self.shared_relative:
        layer_theta = {**layer_theta, 'attention': {**layer_theta['attention'], 'relative': theta['relative']}}
      with tf.name_scope(name):  # compiled operations carry the scope, so that tools can group them by layer
        if self.remat == 'block' and rows.key is not None:
          output = rematerialised(layer, layer_theta, x_BTM, memory_BUM, rows=layer_rows, with_weights=is_aligned)
        else:
          output = layer(layer_theta, x_BTM, memory_BUM, layer_rows, cache and cache[name], with_weights=is_aligned)
      x_BTM, written[name] = output.x_BTM, output.cache
      routed |= {name: output.routed} if layer.is_moe else {}
      weights_BnTU = output.memory_weights_BnTU if is_aligned else weights_BnTU
    return StackOutput(x_BTM, routed, cache and written, weights_BnTU)

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_positions: Size) -> StackCache:
    """Cache of decoder layers by name: room for their keys and values, and those of the encoder output."""
    cache = self.empty_cache(sizes(memory_BUM)[0], num_positions, memory_BUM.dtype)
    return {name: {**cache[name], 'memory': memory} for name, memory in self._memory(theta, memory_BUM).items()}

  def _memory(self, theta, memory_BUM):
    """Keys and values of the encoder output by the name of a traced layer."""
    return {name: layer.memory_cache(theta[name], memory_BUM) for name, layer in self.layers.items()}

  def empty_cache(self, rows: Size, num_positions: Size, dtype: tf.DType = tf.float32) -> StackCache:
    """Cache of the layers by name, for a stack without cross-attention."""
    empty = functools.partial(self.attention.empty_cache, rows, num_positions, dtype, self.num_blocks)
    return {name: {'self': empty()} for name in self.traced}

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
    keep = self.attention.keep_positions
    return {name: {**layer, 'self': keep(layer['self'], positions_BU)} for name, layer in cache.items()}

  @property
  def _reads_tasks(self) -> bool:
    return self.moe is not None and self.moe.gate.tasks > 0

  def _layer(self, number: int) -> Layer:
    in_place = self.moe_every and number % self.moe_every == self.moe_every - 1
    ffn = (self.moe or self.joined or self.ffn) if in_place else self.ffn
    shared = {field.name: getattr(self, field.name) for field in dataclasses.fields(Branches)}
    return Layer(self.attention, ffn, self.remat == 'attention', **shared)
