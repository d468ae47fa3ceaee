"""Scanned stack: one loop over equal blocks of layers, whose weights and caches are stacked on a leading axis L."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.layers.scan import scan, weights_at
from lingvo_moe.layers.stack import Stack
from lingvo_moe.layers.transformer import Layer
from lingvo_moe.ops.loops import counted
from lingvo_moe.xla_sharding import shard


@dataclasses.dataclass(frozen=True)
class ScannedStack(Stack):
  """Stack whose program has the size of one block of `moe_every` layers; see Stack and scan.py."""

  def __post_init__(self):
    super().__post_init__()
    if self.num_layers % self.period:
      raise ValueError(
        f'a scanned stack is made of blocks of moe_every={self.period} layers; saw {self.num_layers} layers: '
        'use a multiple, or scan_layers=False'
      )

  @property
  def period(self) -> int:
    return self.moe_every if self.moe is not None and self.moe_every else 1

  @property
  def num_blocks(self) -> int:
    return self.num_layers // self.period

  @property
  def traced(self) -> dict[str, Layer]:
    return {weights_lib.stack_name(i, self.period): self._layer(i) for i in range(self.period)}

  def _run(self, theta, x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, key):
    stacked = weights_lib.flatten({name: theta[name] for name in self.traced})
    specs = weights_lib.flatten({name: layer.weights() for name, layer in self.traced.items()})

    def run_block(number, x_BTM, memory, weights):
      routed = {}
      for place, (name, layer) in enumerate(self.traced.items()):
        own = {n: w for n, w in weights.items() if n.startswith(name + '/')}
        with tf.name_scope(name):
          with tf.name_scope('weights'):
            own = {n: xla_sharding.gather(w, specs[n].dims) for n, w in own.items()}
          own = weights_lib.unflatten(own)[name]
          own_key = prng.fold(key, number * self.period + place)
          of_memory = (*(memory or [None]), memory_mask_BTU)
          x_BTM, routing = layer(own, x_BTM, mask_BTT, paddings_BT, *of_memory, own_key)
        routed |= {name: routing.routed} if layer.is_moe else {}
      return x_BTM, routed

    x_BTM, by_block = scan(run_block, x_BTM, [memory_BUM] if self.cross_attention else [], stacked, specs)
    routed = {}
    for name, of_blocks in by_block.items():
      for block, layer_name in enumerate(weights_lib.names_by_layer(name, self.num_blocks)):
        routed[layer_name] = tf.nest.map_structure(lambda t, block=block: t[block], of_blocks)
    return x_BTM, routed

  def _memory(self, theta, memory_BUM):
    array = lambda: tf.TensorArray(memory_BUM.dtype, self.num_blocks)

    def fill(number, arrays):
      filled = {}
      for name, layer in self.traced.items():
        with tf.name_scope(name):
          own = {'cross_attention': layer.weights()['cross_attention']}
          cache = layer.memory_cache(weights_at(theta[name], own, number), memory_BUM)
        filled[name] = {kind: array.write(number, cache[kind]) for kind, array in arrays[name].items()}
      return [filled]

    (arrays,) = counted(self.num_blocks, fill, {name: {'keys': array(), 'values': array()} for name in self.traced})
    return {
      name: {kind: shard(array.stack(), 'LBNUK') for kind, array in by_kind.items()} for name, by_kind in arrays.items()
    }

  def _extend(self, theta, x_BWM, now, memory_mask_B1U, paddings_BW, cache):
    """Runs one loop over blocks, each of which writes its positions of the cache in place."""

    def extend_block(number, x_BWM, own_caches):
      written = {}
      for name, layer in self.traced.items():
        with tf.name_scope(name):
          own = weights_at(theta[name], layer.weights(), number)
          of_layers = {**cache[name], 'self': own_caches[name]}
          x_BWM, of_layers = layer.extend(own, x_BWM, now, memory_mask_B1U, paddings_BW, of_layers, number)
        written[name] = of_layers['self']
      return shard(x_BWM, 'BWM'), written

    own_caches = {name: of_layers['self'] for name, of_layers in cache.items()}
    x_BWM, own_caches = counted(self.num_blocks, extend_block, x_BWM, own_caches)
    return x_BWM, {name: {**cache[name], 'self': own} for name, own in own_caches.items()}
