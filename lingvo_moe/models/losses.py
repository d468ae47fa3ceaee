"""Loss over target tokens and of gates, and counts of tokens and groups, from outputs, labels and routing."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.embedding import CompetingOutputs, Embedding
from lingvo_moe.layers.gates.routing import Routed, RoutingStats
from lingvo_moe.layers.moe import MoE
from lingvo_moe.models.batches import LOSS_FACTORS

Batch = Mapping[str, tf.Tensor]  # int32 [B, T] by names
Routings = dict[str, Routed]  # by layer name: 'encoder/layer_01'
# 'target_tokens'; of each stack '<stack>_tokens', '<stack>_groups'; of layers, if need be, '<layer>_chosen'
Totals = Mapping[str, tf.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
  """Settings of a model's loss.

  `report_decisions` adds to the metrics of a loss the decision of every gate on every token: 'decisions', {layer:
  (expert_GSR, weight_GSR, margin_GS)}. `subset` is the division of the text by which losses are reported too; see
  Task.subset.
  """

  label_smoothing: float = 0.0
  aux_loss_weight: float = 0.01
  router_z_loss_weight: float = 0.0
  z_loss_weight: float = 0.0
  report_decisions: bool = False
  subset: str = 'file'


def token_loss(
  settings: LossSettings,
  output: Embedding | CompetingOutputs,
  theta: Theta,
  x_BTM: tf.Tensor,
  label_BT: tf.Tensor,
  real_BT: tf.Tensor,
  routing: Routings,
  batch: Batch,
  totals: Totals | None = None,
  training: bool = False,
) -> tuple[tf.Tensor, dict[str, Any]]:
  """Loss over the target tokens of a batch or of a part of it; loss and metrics add up over parts.

  Args:
    settings: weights of the parts of the loss.
    output: the output softmax.
    theta: its weights.
    x_BTM: its inputs.
    label_BT: target tokens.
    real_BT: 1.0 where a target token counts.
    routing: statistics and decisions of gates by layer name.
    batch: arrays by name; with '<subset>s' [B, P], 1 at the part of the text of a row, losses are also given by part.
    totals: totals of the whole batch, if this is a part of it.
    training: whether labels are smoothed.

  Returns:
    (the objective, {'loss', 'objective_parts', 'xent', 'target_tokens', 'aux_loss', 'routing'}): `xent` is the sum over
    target tokens of -log p (not smoothed), and `loss` their mean. The objective is the sum of its parts: the mean over
    target tokens of the smoothed cross-entropy and z-loss, times the LOSS_FACTORS of a batch that has some;
    aux_loss_weight times `aux_loss`; and the router z-loss; see gate_losses. By part of the text also
    'xent_by_<subset>' and 'target_tokens_by_<subset>', [P], and, if there are experts, 'choices_by_<subset>',
    {layer: [P, E]}.
  """
  factor_BT = real_BT
  if LOSS_FACTORS in batch:
    factor_BT *= tf.cast(batch[LOSS_FACTORS], tf.float32) / 1000
  smoothing = settings.label_smoothing if training else 0.0
  weights = {'smoothing': smoothing, 'z_weight': settings.z_loss_weight}
  xent_BT, loss_sum = output.loss(theta, x_BTM, label_BT, factor_BT, **weights)
  xent, target_tokens = tf.reduce_sum(xent_BT * real_BT), tf.reduce_sum(real_BT)
  routing = {name: r._replace(stats=_with_balance_loss(name, r.stats, totals)) for name, r in routing.items()}
  aux_loss, z_loss = gate_losses(routing, totals)
  all_tokens = tf.maximum(totals['target_tokens'] if totals else target_tokens, 1.0)
  parts = {'smoothed_cross_entropy': loss_sum / all_tokens}
  if routing:
    parts['balance'] = settings.aux_loss_weight * aux_loss
  if settings.router_z_loss_weight:
    parts['router_z'] = settings.router_z_loss_weight * z_loss
  metrics = {
    'loss': xent / all_tokens,
    'objective_parts': parts,
    'xent': xent,
    'target_tokens': target_tokens,
    'aux_loss': aux_loss,
    'routing': {name: r.stats for name, r in routing.items()},
  }
  if (member_BP := batch.get(f'{settings.subset}s')) is not None:
    metrics |= by_subset(settings.subset, xent_BT, real_BT, member_BP)
    metrics |= choices_by_subset(settings.subset, routing, member_BP)
  if settings.report_decisions:
    metrics['decisions'] = {name: r.decisions for name, r in routing.items()}
  return functools.reduce(tf.add, parts.values()), metrics


def token_scores(logits_BTV: tf.Tensor, label_BT: tf.Tensor, real_BT: tf.Tensor) -> tf.Tensor:
  """Scores: log p of each token given those before it, float32 [B, T]; 0 where no token counts."""
  with tf.name_scope('softmax'):
    xent_BT, _ = ops.softmax_cross_entropy(logits_BTV, label_BT)
  return -xent_BT * real_BT


def gate_losses(routing: Routings, totals: Totals | None = None) -> tuple[tf.Tensor, tf.Tensor]:
  """Sums over layers of auxiliary losses, each a mean over groups, and of router z-losses, each a mean over tokens."""
  if not routing:
    return tf.zeros([]), tf.zeros([])
  aux_losses, z_losses = [], []
  for name, (stats, _) in routing.items():
    groups, tokens = _groups_and_tokens(name, stats, totals)
    aux_losses.append(stats.aux_loss / groups)
    z_losses.append(stats.z_loss / tokens)
  return tf.add_n(aux_losses), tf.add_n(z_losses)


def _groups_and_tokens(name: str, stats: RoutingStats, totals: Totals | None) -> list[tf.Tensor]:
  """Numbers of groups and of tokens of a whole batch at a layer, 1 at least."""
  stack, counts = name.partition('/')[0], [stats.groups, stats.tokens]
  if totals:
    counts = [totals[f'{stack}_groups'], totals[f'{stack}_tokens']]
  return [tf.maximum(count, 1.0) for count in counts]


def _with_balance_loss(name: str, stats: RoutingStats, totals: Totals | None) -> RoutingStats:
  """Statistics of a layer whose balance loss, if it is of a whole batch, is made from its sums over the batch.

  E sum_e c_e m_e is linear in m, so it adds up over parts of a batch whose c, the shares of choices, are those of all.
  """
  if not stats.aux_loss.shape.rank:
    return stats
  gates_E, chosen_E = tf.split(stats.aux_loss, 2)
  chosen_E = totals[f'{name}_chosen'] if totals else chosen_E
  groups, tokens = _groups_and_tokens(name, stats, totals)
  share_E = chosen_E / tf.maximum(tf.reduce_sum(chosen_E), 1.0)
  num_experts = tf.cast(tf.size(share_E), tf.float32)
  return stats._replace(aux_loss=groups * num_experts * tf.reduce_sum(gates_E * share_E) / tokens)


def choices(routing: Routings) -> dict[str, tf.Tensor]:
  """Totals that a run of a model alone tells: choices of every expert, for balance losses of a whole batch."""
  losses = {name: stats.aux_loss for name, (stats, _) in routing.items()}
  return {f'{name}_chosen': tf.split(loss, 2)[1] for name, loss in losses.items() if loss.shape.rank}


def alignment_loss(attention_BTU: tf.Tensor, place_BT: tf.Tensor) -> tf.Tensor:
  """Alignment loss: sum over target tokens of -log(attention to the source place), counted from 1; 0: no place."""
  attention_BT = tf.gather(attention_BTU, tf.maximum(place_BT - 1, 0), batch_dims=2)
  return tf.reduce_sum(tf.where(place_BT > 0, -tf.math.log(tf.maximum(attention_BT, 1e-9)), 0.0))


def by_subset(subset: str, xent_BT: tf.Tensor, real_BT: tf.Tensor, member_BP: tf.Tensor) -> dict[str, tf.Tensor]:
  """Sums [P] of cross-entropy and of tokens over the rows of each part of the text; see Task.subset.

  Args:
    subset: by what the text is divided, such as 'pair'.
    xent_BT: cross-entropy of each token.
    real_BT: 1.0 where a token counts.
    member_BP: 1 at the part of a row.
  """
  member_BP, metrics = tf.cast(member_BP, tf.float32), {}
  for name, x_BT in (('xent', xent_BT * real_BT), ('target_tokens', real_BT)):
    metrics[f'{name}_by_{subset}'] = tf.einsum('B,BP->P', tf.reduce_sum(x_BT, axis=1), member_BP)
  return metrics


def choices_by_subset(
  subset: str, routing: Mapping[str, Routed], member_BP: tf.Tensor
) -> dict[str, dict[str, tf.Tensor]]:
  """Sums [P, E] of each expert's choices over the rows of each part of the text, by MoE layer; {} without experts."""
  if not routing:
    return {}
  member_BP, choices = tf.cast(member_BP, tf.float32), {}
  rows = sizes(member_BP)[0]
  with tf.name_scope('choices'):
    for name, (stats, decisions) in routing.items():
      chosen_GSR = tf.where(decisions.weight_GSR > 0, decisions.expert_GSR, -1)
      chosen_BC = tf.reshape(chosen_GSR, [rows, -1])  # a group is whole rows
      chosen_BE = tf.reduce_sum(tf.one_hot(chosen_BC, stats.tokens_E.shape[0]), axis=1)
      choices[name] = tf.einsum('BP,BE->PE', member_BP, chosen_BE)
  return {f'choices_by_{subset}': choices}


def stack_totals(name: str, moe: MoE | None, segments_BT: tf.Tensor) -> dict[str, tf.Tensor]:
  """Totals of a stack: numbers of tokens and of groups that hold a token, as floats by the names of Totals."""
  rows, length = sizes(segments_BT)
  num_groups = moe.num_groups if moe else 1
  real_GS = tf.reshape(segments_BT > 0, [num_groups, rows // num_groups * length])
  groups = tf.reduce_sum(tf.cast(tf.reduce_any(real_GS, axis=1), tf.float32))
  return {f'{name}_tokens': count_tokens(segments_BT), f'{name}_groups': groups}


def count_tokens(segments_BT: tf.Tensor) -> tf.Tensor:
  """Number of tokens, as a float."""
  return tf.reduce_sum(tf.cast(segments_BT > 0, tf.float32))
