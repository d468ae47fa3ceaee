"""Loss over target tokens and of gates, with counts of tokens and groups: the base of the models of all tasks."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.embedding import Sinusoids
from lingvo_moe.layers.gates.routing import Routed
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend
from lingvo_moe.tasks.batches import LOSS_FACTORS

_FROM_ZERO = Sinusoids()
Batch = Mapping[str, tf.Tensor]  # int32 [B, T] by names
Logits = Callable[[tf.Tensor], tf.Tensor]  # x_BTM -> float32 logits [B, T, V]
Routings = dict[str, Routed]  # by layer name: 'encoder/layer_01'
Totals = Mapping[str, tf.Tensor]  # 'target_tokens'; of each stack '<stack>_tokens', '<stack>_groups'
_PARTS = ('source_embedding', 'target_embedding', 'encoder', 'decoder', 'output_embedding')  # of a model


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenModel:
  """Base of models with a `target_embedding`, maybe an `output_embedding`, and a loss over target tokens.

  Weights and scores are float32 whatever `activation_dtype` is. `report_decisions` adds to the metrics of a loss the
  decision of every gate on every token: 'decisions', {layer: (expert_GSR, weight_GSR, margin_GS)}. `subset` is by what
  losses are given too; see Task.subset.
  """

  input_dropout: float = 0.0
  label_smoothing: float = 0.0
  aux_loss_weight: float = 0.01
  router_z_loss_weight: float = 0.0
  z_loss_weight: float = 0.0
  activation_dtype: str = 'float32'
  report_decisions: bool = False
  sinusoids: Sinusoids = _FROM_ZERO
  subset: str = 'file'

  def weights(self) -> Specs:
    """Specs of the weights of every part that the model has."""
    return {name: part.weights() for name in _PARTS if (part := getattr(self, name, None))}

  def logits(self, theta: Theta, batch: Batch, key: tf.Tensor | None = None) -> tuple[tf.Tensor, Routings]:
    """Logits of every next symbol given those before it: (float32 [B, T, V], Routed by layer)."""
    x_BTM, routing = self._run(theta, batch, key)
    return self._output(theta)(x_BTM), routing

  def token_scores(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Scores: log p of each token given those before it, float32 [B, T]; 0 where none counts."""
    x_BTM, _ = self._run(theta, batch, None)
    label_BT, real_BT = self._labels(batch)
    xent_BT, _ = cross_entropy(self._output(theta), x_BTM, label_BT)
    return -xent_BT * real_BT

  def loss(
    self, theta: Theta, batch: Batch, key: tf.Tensor | None = None, totals: Totals | None = None
  ) -> tuple[tf.Tensor, dict[str, Any]]:
    """Training loss of a batch, or of a part of one; it and all metrics add up over parts.

    Args:
      theta: nested weights.
      batch: arrays by name; with '<subset>s' [B, P], 1 at the part of the text of a row, losses are also given by part.
      key: random key, or one for each row, in training; None: no dropout, no smoothing of labels, and no token dropped
        by experts.
      totals: totals of the whole batch, if this is a part of it.

    Returns:
      (the scalar to minimise, {'loss', 'xent', 'target_tokens', 'aux_loss', 'routing'}): `xent` is the sum over target
      tokens of -log p (not smoothed); `loss` is the mean over target tokens of the smoothed cross-entropy and z-loss,
      times the LOSS_FACTORS of a batch that has some, plus aux_loss_weight times `aux_loss`, the sum over layers of
      auxiliary losses, each a mean over groups, and the router z-loss. By part also 'xent_by_<subset>' and
      'target_tokens_by_<subset>', [P], and, if there are experts, 'choices_by_<subset>', {layer: [P, E]}.
    """
    x_BTM, routing = self._run(theta, batch, key)
    label_BT, real_BT = self._labels(batch)
    target_tokens = tf.reduce_sum(real_BT)
    factor_BT = real_BT
    if LOSS_FACTORS in batch:
      factor_BT *= tf.cast(batch[LOSS_FACTORS], tf.float32) / 1000
    count = lambda name, of_this: tf.maximum(totals[name] if totals else of_this, 1.0)
    smoothing = 0.0 if key is None else self.label_smoothing
    xent_BT, loss_BT = cross_entropy(self._output(theta), x_BTM, label_BT, smoothing, self.z_loss_weight)
    aux_loss = z_loss = tf.zeros([])
    if routing:
      stack = lambda name: name.partition('/')[0]
      by_layer = [(stack(name), r.stats) for name, r in routing.items()]
      aux_loss = tf.add_n([stats.aux_loss / count(f'{name}_groups', stats.groups) for name, stats in by_layer])
      z_loss = tf.add_n([stats.z_loss / count(f'{name}_tokens', stats.tokens) for name, stats in by_layer])
    loss = tf.reduce_sum(loss_BT * factor_BT) / count('target_tokens', target_tokens) + self.aux_loss_weight * aux_loss
    if self.router_z_loss_weight:
      loss += self.router_z_loss_weight * z_loss
    metrics = {
      'loss': loss,
      'xent': tf.reduce_sum(xent_BT * real_BT),
      'target_tokens': target_tokens,
      'aux_loss': aux_loss,
      'routing': {name: r.stats for name, r in routing.items()},
    }
    if (member_BP := batch.get(f'{self.subset}s')) is not None:
      metrics |= by_subset(self.subset, xent_BT, real_BT, member_BP)
      metrics |= choices_by_subset(self.subset, routing, member_BP)
    if self.report_decisions:
      metrics['decisions'] = {name: r.decisions for name, r in routing.items()}
    return loss, metrics

  def _run(self, theta: Theta, batch: Batch, key: tf.Tensor | None) -> tuple[tf.Tensor, Routings]:
    """Input of the output softmax: ([B, T, M], Routed by layer)."""
    raise NotImplementedError

  def _labels(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
    """Target tokens [B, T], and 1.0 where one counts."""
    raise NotImplementedError

  def _output(self, theta: Theta) -> Logits:
    """The output softmax, which shares the embedding of the target unless the model has another."""
    name = 'output_embedding' if getattr(self, 'output_embedding', None) else 'target_embedding'
    return functools.partial(getattr(self, name).logits, theta[name])

  def _embed(
    self,
    theta: Theta,
    ids_BT: tf.Tensor,
    key: tf.Tensor | None = None,
    positions_BT: tf.Tensor | None = None,
    name: str = 'target_embedding',
  ) -> tf.Tensor:
    """Ids [B, T, M] by the embedding of a name, with sinusoidal positions where they are given."""
    embedding = getattr(self, name)

    def embed(ids_BT, positions_BT, key):
      x_BTM = embedding.lookup(theta[name], ids_BT)
      if positions_BT is not None:
        x_BTM += self.sinusoids(positions_BT, embedding.model_dim)
      x_BTM = tf.cast(x_BTM, self.activation_dtype if backend.current().bfloat16 else tf.float32)
      return prng.dropout(x_BTM, self.input_dropout, prng.fold(key, 'input'))

    return ops.map_sub_batches(embed, ids_BT, positions_BT, key)


def cross_entropy(
  logits: Logits, x_BTM: tf.Tensor, label_BT: tf.Tensor, smoothing: float = 0.0, z_weight: float = 0.0
) -> tuple[tf.Tensor, tf.Tensor]:
  """Cross-entropy of each token, computed in sub-batches: as ops.softmax_cross_entropy of logits(x_BTM)."""

  def of_rows(x_BTM, label_BT):
    logits_BTV = logits(x_BTM)
    with tf.name_scope('softmax'):
      return ops.softmax_cross_entropy(logits_BTV, label_BT, smoothing, z_weight)

  return ops.map_sub_batches(of_rows, x_BTM, label_BT)


def by_subset(subset: str, xent_BT: tf.Tensor, real_BT: tf.Tensor, member_BP: tf.Tensor) -> dict[str, tf.Tensor]:
  """Sums [P] of cross-entropy and of tokens over the rows of each part of the text; see Task.subset.

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
  """Sums [P, E] of each expert's choices over the rows of each part of the text, by MoE layer; {} without experts."""
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


def stack_totals(name: str, moe: MoE | None, segments_BT: tf.Tensor) -> dict[str, tf.Tensor]:
  """Tokens of a stack, and the groups of its experts that hold one, as floats by the names of Totals."""
  rows, length = sizes(segments_BT)
  num_groups = moe.num_groups if moe else 1
  real_GS = tf.reshape(segments_BT > 0, [num_groups, rows // num_groups * length])
  groups = tf.reduce_sum(tf.cast(tf.reduce_any(real_GS, axis=1), tf.float32))
  return {f'{name}_tokens': count_tokens(segments_BT), f'{name}_groups': groups}


def count_tokens(segments_BT: tf.Tensor) -> tf.Tensor:
  """Number of tokens, as a float."""
  return tf.reduce_sum(tf.cast(segments_BT > 0, tf.float32))
