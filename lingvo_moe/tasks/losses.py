"""Losses of gates, and counts of tokens and groups, for models whose layers have experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.layers.gates.routing import RoutingStats
from lingvo_moe.layers.stack import Routed

Denominator = Callable[[str, RoutingStats], tf.Tensor]  # (name of a layer, its statistics) -> a number to divide by


def of_gates(routing: Mapping[str, Routed], groups: Denominator, tokens: Denominator) -> tuple[tf.Tensor, tf.Tensor]:
  """Losses of gates, each summed over layers: (auxiliary losses, means over groups; router z-losses, over tokens)."""
  if not routing:
    return tf.zeros([]), tf.zeros([])
  aux_loss = tf.add_n([r.stats.aux_loss / groups(name, r.stats) for name, r in routing.items()])
  z_loss = tf.add_n([r.stats.z_loss / tokens(name, r.stats) for name, r in routing.items()])
  return aux_loss, z_loss


def count_tokens(segments_BT: tf.Tensor) -> tf.Tensor:
  """Number of tokens, as a float."""
  return tf.reduce_sum(tf.cast(segments_BT > 0, tf.float32))


def groups_with_tokens(segments_BT: tf.Tensor, num_groups: int) -> tf.Tensor:
  """Number of groups that hold a token, as a float."""
  rows, length = sizes(segments_BT)
  real_GS = tf.reshape(segments_BT > 0, [num_groups, rows // num_groups * length])
  return tf.reduce_sum(tf.cast(tf.reduce_any(real_GS, axis=1), tf.float32))
