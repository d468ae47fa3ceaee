"""Losses of tokens and of gates, and counts of tokens and groups, which models of all tasks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.shapes import sizes
from lingvo_moe.layers.gates.routing import RoutingStats
from lingvo_moe.layers.stack import Routed

Denominator = Callable[[str, RoutingStats], tf.Tensor]  # (name of a layer, its statistics) -> a number to divide by


def of_tokens(
  logits: Callable[[tf.Tensor], tf.Tensor],
  x_BTM: tf.Tensor,
  label_BT: tf.Tensor,
  smoothing: float = 0.0,
  z_weight: float = 0.0,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Cross-entropy of each token, computed in sub-batches: as ops.softmax_cross_entropy of logits(x_BTM)."""

  def of_rows(x_BTM, label_BT):
    logits_BTV = logits(x_BTM)
    with tf.name_scope('softmax'):
      return ops.softmax_cross_entropy(logits_BTV, label_BT, smoothing, z_weight)

  return ops.map_sub_batches(of_rows, x_BTM, label_BT)


def by_subset(subset: str, xent_BT: tf.Tensor, real_BT: tf.Tensor, member_BP: tf.Tensor) -> dict[str, tf.Tensor]:
  """Sums [P] of cross-entropy and of tokens over the rows of each part of the text; see TaskConfig.subset.

  Args:
    subset: by what the text is divided, such as 'pair'.
    xent_BT: cross-entropy of each token.
    real_BT: 1.0 where a token counts.
    member_BP: 1 at the part of a row.
  """
  total_P = lambda x_BT: tf.einsum('B,BP->P', tf.reduce_sum(x_BT, axis=1), tf.cast(member_BP, tf.float32))
  return {f'xent_by_{subset}': total_P(xent_BT * real_BT), f'target_tokens_by_{subset}': total_P(real_BT)}


def choices_by_subset(
  subset: str, routing: Mapping[str, Routed], member_BP: tf.Tensor
) -> dict[str, dict[str, tf.Tensor]]:
  """Sums [P, E] of the choices of each expert over the rows of each part of the text, by MoE layer; {} without experts."""
  if not routing:
    return {}
  member_BP = tf.cast(member_BP, tf.float32)

  def count(stats, decisions):
    num_experts = stats.tokens_E.shape[0]
    rows = sizes(member_BP)[0]
    by_row = lambda x_GSR: tf.reshape(x_GSR, [rows, -1])  # a group is whole rows
    chosen_BC = tf.where(by_row(decisions.weight_GSR) > 0, by_row(decisions.expert_GSR), -1)
    chosen_BE = tf.reduce_sum(tf.one_hot(chosen_BC, num_experts), axis=1)
    return tf.einsum('BP,BE->PE', member_BP, chosen_BE)

  with tf.name_scope('choices'):
    return {f'choices_by_{subset}': {name: count(r.stats, r.decisions) for name, r in routing.items()}}


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
