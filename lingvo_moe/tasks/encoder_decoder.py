"""Encoder-decoder model: two stacks of a MoE Transformer, their loss, and one step of decoding."""

import dataclasses
from typing import Any

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.stack import Stack, StackCache
from lingvo_moe.tasks import losses
from lingvo_moe.tasks.batches import ALIGNED
from lingvo_moe.tasks.losses import Batch, Routings, Totals


@dataclasses.dataclass(frozen=True)
class EncoderDecoder(losses.TokenModel):
  """Encoder-decoder model: source ids in, a distribution over each next target symbol out.

  With `source_embedding` None the encoder shares the target embedding; without `output_embedding` the output softmax
  shares it too. `sinusoidal` adds sinusoidal positions to the embeddings, for stacks whose attention has none. The
  first `given` symbols of a target are not scored. The attention of `alignment_layer`, counted from 1 (0: the middle
  one), aligns tokens; `guided_weight` is of the loss that draws it to the alignments of a batch.
  """

  encoder: Stack
  decoder: Stack
  target_embedding: Embedding
  source_embedding: Embedding | None = None
  sinusoidal: bool = True
  output_embedding: Embedding | None = None
  given: int = 0
  alignment_layer: int = 0
  guided_weight: float = 0.0
  subset: str = dataclasses.field(default='pair', kw_only=True)

  def encode(self, theta: Theta, batch: Batch, key: tf.Tensor | None = None) -> tuple[tf.Tensor, Routings]:
    """Runs the encoder: ([B, U, M], Routed by layer). Reads src_ids, src_segments, src_positions."""
    name = 'source_embedding' if self.source_embedding else 'target_embedding'
    key = prng.fold(key, 'encoder')
    with tf.name_scope('encoder'):
      x_BTM = self._embed(theta, batch['src_ids'], key, self._positions(batch['src_positions']), name)
      return self.encoder(theta['encoder'], x_BTM, batch['src_segments'], key=key)

  def _run(self, theta: Theta, batch: Batch, key: tf.Tensor | None) -> tuple[tf.Tensor, Routings]:
    memory_BUM, encoder_routing = self.encode(theta, batch, key)
    key = prng.fold(key, 'decoder')
    with tf.name_scope('decoder'):
      x_BTM = self._embed(theta, batch['tgt_inputs'], key, self._positions(batch['tgt_positions']))
      x_BTM, decoder_routing = self.decoder(
        theta['decoder'], x_BTM, batch['tgt_segments'], memory_BUM, batch['src_segments'], key
      )
    of_decoder = {f'decoder/{name}': r for name, r in decoder_routing.items()}
    return x_BTM, {f'encoder/{name}': r for name, r in encoder_routing.items()} | of_decoder

  def totals(self, batch: Batch) -> dict[str, tf.Tensor]:
    """Denominators of the losses of a batch; they add up over parts of a batch."""
    source = losses.stack_totals('encoder', self.encoder.moe, batch['src_segments'])
    target = losses.stack_totals('decoder', self.decoder.moe, batch['tgt_segments'])
    return {**source, **target, 'target_tokens': target['decoder_tokens']}

  def _labels(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
    return batch['tgt_labels'], tf.cast(batch['tgt_segments'] > 0, tf.float32)

  def loss(
    self, theta: Theta, batch: Batch, key: tf.Tensor | None = None, totals: Totals | None = None
  ) -> tuple[tf.Tensor, dict[str, Any]]:
    """Training loss of a batch with arrays by BATCH_KEYS, as TokenModel.loss; metrics have 'source_tokens' too.

    With ALIGNED in the batch, the mean over target tokens of -log(attention to their source position) is added, times
    `guided_weight` (Chen et al., 2016, arXiv 1607.01628). That attention is computed once more, without dropout.
    """
    loss, metrics = super().loss(theta, batch, key, totals)
    if ALIGNED in batch:
      place_BT = batch[ALIGNED]
      attention_BT = tf.gather(self.attention_to_source(theta, batch), tf.maximum(place_BT - 1, 0), batch_dims=2)
      missed_BT = tf.where(place_BT > 0, -tf.math.log(tf.maximum(attention_BT, 1e-9)), 0.0)
      tokens = (totals or self.totals(batch))['target_tokens']
      loss += self.guided_weight * tf.reduce_sum(missed_BT) / tf.maximum(tokens, 1.0)
      metrics = {**metrics, 'loss': loss}
    return loss, {**metrics, 'source_tokens': losses.count_tokens(batch['src_segments'])}

  def decisions(self, theta: Theta, batch: Batch) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """Experts of every token and their weights by layer, no token dropped: ([B, T, R] int32, [B, T, R] float32)."""
    _, routing = self._run(theta, batch, None)
    found = {}
    for name, routed in routing.items():
      shape_BT = tf.shape(batch['src_ids' if name.startswith('encoder/') else 'tgt_inputs'])
      by_token = lambda x_GSR, shape_BT=shape_BT: tf.reshape(x_GSR, tf.concat([shape_BT, [x_GSR.shape[-1]]], axis=0))
      found[name] = by_token(routed.decisions.expert_GSR), by_token(routed.decisions.weight_GSR)
    return found

  def attention_to_source(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Weights by which `alignment_layer` attends to the source, a mean over its heads: float32 [B, T, U]."""
    layer = (self.alignment_layer or -(-self.decoder.num_layers // 2)) - 1
    memory_BUM, _ = self.encode(theta, batch)
    with tf.name_scope('decoder'):
      x_BTM = self._embed(theta, batch['tgt_inputs'], None, self._positions(batch['tgt_positions']))
      segments = batch['tgt_segments'], memory_BUM, batch['src_segments']
      weights_BnTU = self.decoder.memory_weights(theta['decoder'], x_BTM, *segments, layer)
    return tf.reduce_mean(weights_BnTU, axis=list(range(1, weights_BnTU.shape.rank - 2)))

  def score(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Scores: log p of each row's target given its source, float32 [B], summed over its symbols and the end."""
    scores_BT = self.token_scores(theta, batch)
    if self.given:
      scores_BT = tf.where(batch['tgt_positions'] < self.given, 0.0, scores_BT)
    return tf.reduce_sum(scores_BT, axis=1)

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_positions: Size) -> StackCache:
    """Cache of the decoder for `num_positions` flat positions (steps x hypotheses)."""
    return self.decoder.init_cache(theta['decoder'], memory_BUM, num_positions)

  def decode_step(
    self, theta: Theta, ids_BW: tf.Tensor, now: Now, src_segments_BU: tf.Tensor, cache: StackCache
  ) -> tuple[tf.Tensor, StackCache]:
    """Decoding step of W hypotheses a row over a flat cache: (float32 logits [B, W, V], cache); see beam_search."""
    with tf.name_scope('decoder'):
      positions_11 = self._positions(tf.reshape(now.time, [1, 1]))
      x_BWM = self._embed(theta, ids_BW, None, positions_11)
      x_BWM, cache = self.decoder.extend(theta['decoder'], x_BWM, now, src_segments_BU, cache)
    return self._output(theta)(x_BWM), cache

  def _positions(self, positions_BT: tf.Tensor) -> tf.Tensor | None:
    return positions_BT if self.sinusoidal else None
