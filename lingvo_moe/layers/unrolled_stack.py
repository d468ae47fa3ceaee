"""Unrolled stack: layers one after the other, each with weights and a cache of its own."""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.layers.remat import rematerialised
from lingvo_moe.layers.stack import Stack


@dataclasses.dataclass(frozen=True)
class UnrolledStack(Stack):
  """Stack whose program grows with its depth; see Stack."""

  def _run(self, theta, x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, key):
    all_routed = {}
    for number, (name, layer) in enumerate(self.layers.items()):
      own_key = None if key is None else prng.fold(key, number)

      def run(theta, x_BTM, memory_BUM=None, name=name, layer=layer, key=own_key):
        x_BTM, routing = layer(theta, x_BTM, mask_BTT, paddings_BT, memory_BUM, memory_mask_BTU, key)
        return x_BTM, {name: routing.routed} if layer.is_moe else {}

      if self.remat == 'block' and key is not None:
        run = functools.partial(rematerialised, run)
      with tf.name_scope(name):  # compiled operations carry the scope, so that tools can group them by layer
        x_BTM, routed = run(theta[name], x_BTM, *([memory_BUM] if self.cross_attention else []))
      all_routed |= routed
    return x_BTM, all_routed

  def _memory(self, theta, memory_BUM):
    return {name: layer.memory_cache(theta[name], memory_BUM) for name, layer in self.layers.items()}

  def _extend(self, theta, x_BWM, now, memory_mask_B1U, paddings_BW, cache):
    cache = dict(cache)
    for name, layer in self.layers.items():
      with tf.name_scope(name):
        x_BWM, cache[name] = layer.extend(theta[name], x_BWM, now, memory_mask_B1U, paddings_BW, cache[name])
    return x_BWM, cache
