"""Encoder-decoder model: two stacks of a MoE Transformer, their loss, and one step of decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.embedding import sinusoidal_positions
from lingvo_moe.layers.incremental import Now
from lingvo_moe.layers.stack import Routed
from lingvo_moe.layers.stack import Stack
from lingvo_moe.layers.stack import StackCache
from lingvo_moe.tasks import losses

Batch = Mapping[str, tf.Tensor]  # int32 [B, T] by the names of batch_keys.py
Totals = dict[str, tf.Tensor]
Routings = dict[str, Routed]  # by layer name


@dataclasses.dataclass(frozen=True)
class EncoderDecoder:
  """Encoder-decoder model: source ids in, a distribution over each next target symbol out.

  With `source_embedding` None the encoder shares the target embedding; the output softmax always shares it. Weights,
  and so their gradients and updates, are float32 whatever `activation_dtype` is, and so are scores. `report_decisions`
  adds to the metrics of a loss the decision of every gate on every token: 'decisions', {layer: (expert_GSR,
  weight_GSR, margin_GS)}. `sinusoidal` adds sinusoidal positions to the embeddings, for stacks whose attention has none.
  `subset` is by what losses are given too; see TaskConfig.subset.
  """

  encoder: Stack
  decoder: Stack
  target_embedding: Embedding
  source_embedding: Embedding | None = None
  input_dropout: float = 0.0
  label_smoothing: float = 0.0
  aux_loss_weight: float = 0.01
  router_z_loss_weight: float = 0.0
  z_loss_weight: float = 0.0
  activation_dtype: str = 'float32'
  report_decisions: bool = False
  sinusoidal: bool = True
  subset: str = 'pair'

  def weights(self) -> Specs:
    own_source = {'source_embedding': self.source_embedding.weights()} if self.source_embedding else {}
    return {
      **own_source,
      'target_embedding': self.target_embedding.weights(),
      'encoder': self.encoder.weights(),
      'decoder': self.decoder.weights(),
    }

  def encode(self, theta: Theta, batch: Batch, key: tf.Tensor | None = None) -> tuple[tf.Tensor, Routings]:
    """Runs the encoder: ([B, U, M], Routed by layer). Reads src_ids, src_segments, src_positions."""
    embedding, own = self.target_embedding, theta['target_embedding']
    if self.source_embedding:
      embedding, own = self.source_embedding, theta['source_embedding']
    key = None if key is None else prng.fold(key, 'encoder')
    with tf.name_scope('encoder'):
      x_BTM = self._embed(embedding, own, batch['src_ids'], batch['src_positions'], key)
      return self.encoder(theta['encoder'], x_BTM, batch['src_segments'], key=key)

  def logits(self, theta: Theta, batch: Batch, key: tf.Tensor | None = None) -> tuple[tf.Tensor, Routings]:
    """Logits of every next symbol given the target so far: (float32 [B, T, V], Routed by layer)."""
    x_BTM, routing = self._decode(theta, batch, key)
    return self.target_embedding.logits(theta['target_embedding'], x_BTM), routing

  def _decode(self, theta: Theta, batch: Batch, key: tf.Tensor | None) -> tuple[tf.Tensor, Routings]:
    """Runs encoder and decoder, without the output softmax: ([B, T, M], Routed by layer)."""
    memory_BUM, encoder_routing = self.encode(theta, batch, key)
    key = None if key is None else prng.fold(key, 'decoder')
    own = theta['target_embedding']
    with tf.name_scope('decoder'):
      x_BTM = self._embed(self.target_embedding, own, batch['tgt_inputs'], batch['tgt_positions'], key)
      x_BTM, decoder_routing = self.decoder(
        theta['decoder'], x_BTM, batch['tgt_segments'], memory_BUM, batch['src_segments'], key
      )
    routing = {
      f'{stack}/{name}': r
      for stack, named in (('encoder', encoder_routing), ('decoder', decoder_routing))
      for name, r in named.items()
    }
    return x_BTM, routing

  def totals(self, batch: Batch) -> Totals:
    """Denominators of the losses of a batch; they add up over parts of a batch."""
    groups = lambda stack, segments_BT: losses.groups_with_tokens(segments_BT, stack.moe.num_groups if stack.moe else 1)
    return {
      'source_tokens': losses.count_tokens(batch['src_segments']),
      'target_tokens': losses.count_tokens(batch['tgt_segments']),
      'encoder': groups(self.encoder, batch['src_segments']),
      'decoder': groups(self.decoder, batch['tgt_segments']),
    }

  def loss(
    self, theta: Theta, batch: Batch, key: tf.Tensor | None = None, totals: Totals | None = None
  ) -> tuple[tf.Tensor, dict[str, Any]]:
    """Training loss of a batch, or of a part of one; it and all metrics add up over parts.

    Args:
      theta: nested weights.
      batch: arrays by BATCH_KEYS; with 'pairs' [B, P], 1 at the pair of a row, losses are also given by pair, if
        that is the subset.
      key: random key, or one for each row, in training; None at inference: no dropout, no token dropped by experts.
      totals: totals of the whole batch, if this is a part of it.

    Returns:
      (the scalar to minimise, {'loss', 'xent', 'target_tokens', 'source_tokens', 'aux_loss', 'routing'}):
      `xent` is the sum over target tokens of -log p (not smoothed); `loss` is the mean over target tokens of the
      smoothed cross-entropy and z-loss, plus aux_loss_weight times `aux_loss`, the sum over layers of auxiliary losses,
      each a mean over groups, and the router z-loss. With 'pairs' also 'xent_by_pair' and 'target_tokens_by_pair', [P],
      and, if there are experts, 'choices_by_pair', {layer: [P, E]}.
    """
    x_BTM, routing = self._decode(theta, batch, key)
    real_BT = tf.cast(batch['tgt_segments'] > 0, tf.float32)
    target_tokens = losses.count_tokens(batch['tgt_segments'])
    count = lambda name, of_this: tf.maximum(totals[name] if totals else of_this, 1.0)
    smoothing = self.label_smoothing if key is not None else 0.0

    xent_BT, loss_BT = losses.of_tokens(self._output(theta), x_BTM, batch['tgt_labels'], smoothing, self.z_loss_weight)
    stack_of = lambda name: name.split('/')[0]
    tokens = {'encoder': 'source_tokens', 'decoder': 'target_tokens'}
    aux_loss, z_loss = losses.of_gates(
      routing,
      groups=lambda name, stats: count(stack_of(name), stats.groups),
      tokens=lambda name, stats: count(tokens[stack_of(name)], stats.tokens),
    )
    loss = tf.reduce_sum(loss_BT * real_BT) / count('target_tokens', target_tokens) + self.aux_loss_weight * aux_loss
    if self.router_z_loss_weight:
      loss += self.router_z_loss_weight * z_loss
    metrics = {
      'loss': loss,
      'xent': tf.reduce_sum(xent_BT * real_BT),
      'target_tokens': target_tokens,
      'source_tokens': losses.count_tokens(batch['src_segments']),
      'aux_loss': aux_loss,
      'routing': {name: r.stats for name, r in routing.items()},
    }
    if (members := f'{self.subset}s') in batch:
      metrics |= losses.by_subset(self.subset, xent_BT, real_BT, batch[members])
      metrics |= losses.choices_by_subset(self.subset, routing, batch[members])
    if self.report_decisions:
      metrics['decisions'] = {name: r.decisions for name, r in routing.items()}
    return loss, metrics

  def decisions(self, theta: Theta, batch: Batch) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """Experts of every token and their weights by layer, at inference: ([B, T, R] int32, [B, T, R] float32)."""
    _, routing = self._decode(theta, batch, None)
    found = {}
    for name, routed in routing.items():
      shape_BT = tf.shape(batch['src_ids' if name.startswith('encoder/') else 'tgt_inputs'])
      by_token = lambda x_GSR, shape_BT=shape_BT: tf.reshape(x_GSR, tf.concat([shape_BT, [x_GSR.shape[-1]]], axis=0))
      found[name] = by_token(routed.decisions.expert_GSR), by_token(routed.decisions.weight_GSR)
    return found

  def score(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Scores: log p of each row's target given its source, float32 [B], summed over its symbols and the end."""
    x_BTM, _ = self._decode(theta, batch, None)
    xent_BT, _ = losses.of_tokens(self._output(theta), x_BTM, batch['tgt_labels'])
    return -tf.reduce_sum(xent_BT * tf.cast(batch['tgt_segments'] > 0, tf.float32), axis=1)

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_positions: Size) -> StackCache:
    """Cache of the decoder for `num_positions` flat positions (steps x hypotheses)."""
    return self.decoder.init_cache(theta['decoder'], memory_BUM, num_positions)

  def keep_positions(self, cache: StackCache, positions_BU: tf.Tensor) -> StackCache:
    """Cache gathered at these flat positions; see flat_sequence.loop."""
    return self.decoder.keep_positions(cache, positions_BU)

  def decode_step(
    self,
    theta: Theta,
    ids_BW: tf.Tensor,
    now: Now,
    src_segments_BU: tf.Tensor,
    cache: StackCache,
  ) -> tuple[tf.Tensor, StackCache]:
    """Decoding step of W hypotheses a row over a flat cache: (float32 logits [B, W, V], cache); see beam_search."""
    own = theta['target_embedding']
    with tf.name_scope('decoder'):
      x_BWM = self._embed(self.target_embedding, own, ids_BW, tf.reshape(now.time, [1, 1]), None)
      x_BWM, cache = self.decoder.extend(theta['decoder'], x_BWM, now, src_segments_BU, cache)
    return self.target_embedding.logits(own, x_BWM), cache

  def _output(self, theta: Theta) -> Callable[[tf.Tensor], tf.Tensor]:
    """Output softmax: function of x_BTM that returns float32 logits [B, T, V]."""
    return functools.partial(self.target_embedding.logits, theta['target_embedding'])

  def _embed(
    self, embedding: Embedding, theta: Theta, ids_BT: tf.Tensor, positions_BT: tf.Tensor, key: tf.Tensor | None
  ) -> tf.Tensor:
    def embed(ids_BT, positions_BT, key):
      x_BTM = embedding.lookup(theta, ids_BT)
      if self.sinusoidal:
        x_BTM += sinusoidal_positions(positions_BT, embedding.model_dim)
      x_BTM = tf.cast(x_BTM, self.activation_dtype)
      return prng.dropout(x_BTM, self.input_dropout, None if key is None else prng.fold(key, 'input'))

    return ops.map_sub_batches(embed, ids_BT, positions_BT, key)
