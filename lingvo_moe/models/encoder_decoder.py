"""Encoder-decoder model: two stacks of a MoE Transformer, their loss, and one step of decoding."""

import dataclasses
from typing import Any

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.layers.embedding import Embedding, InputSettings, embed
from lingvo_moe.layers.gates import by_task
from lingvo_moe.layers.stack import Stack, StackCache
from lingvo_moe.models import losses
from lingvo_moe.models.batches import ALIGNED
from lingvo_moe.models.losses import Batch, LossSettings, Routings, Totals
from lingvo_moe.models.output import HasOutput
from lingvo_moe.models.task_tags import TaskTags


@dataclasses.dataclass(frozen=True)
class EncoderDecoder(HasOutput, InputSettings, LossSettings):
  """Encoder-decoder model: source ids in, a distribution over each next target symbol out.

  With `source_embedding` None the encoder shares the target embedding; without `output_embedding` the output softmax
  shares it too. `sinusoidal` adds sinusoidal positions to the embeddings, for stacks whose attention has none. The
  first `given` symbols of a target are not scored. The attention of `alignment_layer`, counted from 1 (0: the middle
  one), aligns tokens; `guided_weight` is of the loss that draws it to the alignments of a batch. `task_tags` are for a
  gate by task.
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
  task_tags: TaskTags | None = None
  subset: str = dataclasses.field(default='pair', kw_only=True)

  def weights(self) -> Specs:
    """Specs of the weights of every part that the model has."""
    source = {'source_embedding': self.source_embedding.weights()} if self.source_embedding else {}
    target = {'target_embedding': self.target_embedding.weights()}
    output = {'output_embedding': self.output_embedding.weights()} if self.output_embedding else {}
    return {**source, **target, 'encoder': self.encoder.weights(), 'decoder': self.decoder.weights(), **output}

  def totals(self, batch: Batch) -> dict[str, tf.Tensor]:
    """Denominators of the losses of a batch; they add up over parts of a batch."""
    source = losses.stack_totals('encoder', self.encoder.moe, batch['src_segments'])
    target = losses.stack_totals('decoder', self.decoder.moe, batch['tgt_segments'])
    return {**source, **target, 'target_tokens': target['decoder_tokens']}

  def choices(self, theta: Theta, batch: Batch, key: tf.Tensor) -> dict[str, tf.Tensor]:
    """Totals of a batch that a run of the model alone tells; see losses.choices."""
    return losses.choices(self._run(theta, batch, key)[1])

  def loss(
    self, theta: Theta, batch: Batch, key: tf.Tensor | None = None, totals: Totals | None = None
  ) -> tuple[tf.Tensor, dict[str, Any]]:
    """Objective of a batch with arrays by BATCH_KEYS; see losses.token_loss. Metrics have 'source_tokens' too.

    With ALIGNED in the batch, the mean over target tokens of -log(attention to their source position) is added, times
    `guided_weight` (Chen et al., 2016, arXiv 1607.01628). That attention is taken before its dropout.

    Args:
      theta: nested weights.
      batch: arrays by name.
      key: random key, or one for each row, in training; None: no dropout, no smoothing of labels, and no token dropped
        by experts.
      totals: totals of the whole batch, if this is a part of it.
    """
    x_BTM, routing, attention_BTU = self._run(theta, batch, key, aligned=ALIGNED in batch)
    scored = *self.output(theta), x_BTM, batch['tgt_labels'], _real(batch)
    objective, metrics = losses.token_loss(self, *scored, routing, batch, totals, training=key is not None)
    if ALIGNED in batch:
      tokens = tf.maximum((totals or self.totals(batch))['target_tokens'], 1.0)
      guided = self.guided_weight * losses.alignment_loss(attention_BTU, batch[ALIGNED]) / tokens
      objective += guided
      metrics = {**metrics, 'objective_parts': {**metrics['objective_parts'], 'alignment': guided}}
    return objective, {**metrics, 'source_tokens': losses.count_tokens(batch['src_segments'])}

  def logits(self, theta: Theta, batch: Batch, key: tf.Tensor | None = None) -> tuple[tf.Tensor, Routings]:
    """Logits of every next symbol given those before it: (float32 [B, T, V], Routed by layer)."""
    x_BTM, routing, _ = self._run(theta, batch, key)
    return self.scores(theta, x_BTM), routing

  def token_scores(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Scores: log p of each target token given those before it and the source, float32 [B, T]; 0 where none counts."""
    return losses.token_scores(self.logits(theta, batch)[0], batch['tgt_labels'], _real(batch))

  def score(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Scores: log p of each row's target given its source, float32 [B], summed over its symbols and the end."""
    scores_BT = self.token_scores(theta, batch)
    if self.given:
      scores_BT = tf.where(batch['tgt_positions'] < self.given, 0.0, scores_BT)
    return tf.reduce_sum(scores_BT, axis=1)

  def decisions(self, theta: Theta, batch: Batch) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """Experts of every token and their weights by layer, no token dropped: ([B, T, R] int32, [B, T, R] float32)."""
    _, routing, _ = self._run(theta, batch, None)
    decisions = {}
    for name, (_, choices) in routing.items():
      shape_BT = tf.shape(batch['src_ids' if name.startswith('encoder/') else 'tgt_inputs'])
      shape_BTR = tf.concat([shape_BT, [choices.expert_GSR.shape[-1]]], axis=0)
      decisions[name] = tf.reshape(choices.expert_GSR, shape_BTR), tf.reshape(choices.weight_GSR, shape_BTR)
    return decisions

  def attention_to_source(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Weights by which `alignment_layer` attends to the source, a mean over its heads: float32 [B, T, U]."""
    return self._run(theta, batch, None, aligned=True)[2]

  def encode(self, theta: Theta, batch: Batch, key: tf.Tensor | None = None) -> tuple[tf.Tensor, Routings]:
    """Runs the encoder: ([B, U, M], Routed by layer). Reads src_ids, src_segments, src_positions."""
    name = 'source_embedding' if self.source_embedding else 'target_embedding'
    key = prng.fold(key, 'encoder')
    with tf.name_scope('encoder'):
      positions_BT = batch['src_positions'] if self.sinusoidal else None
      x_BTM = embed(self, getattr(self, name), theta[name], batch['src_ids'], positions_BT, key)
      x_BTM, routed, *_ = self.encoder(theta['encoder'], x_BTM, self.segments(batch, 'src'), key=key)
    return x_BTM, routed

  def segments(self, batch: Batch, side: str) -> tf.Tensor:
    """Segments of a side, 'src' or 'tgt', int32 [B, T], as stacks take them: with numbers of tasks, if it has any."""
    segments_BT = batch[f'{side}_segments']
    if not self.task_tags:
      return segments_BT
    return by_task.with_tasks(segments_BT, self.task_tags.numbers(batch, segments_BT))

  def init_cache(self, theta: Theta, memory_BUM: tf.Tensor, num_positions: Size) -> StackCache:
    """Cache of the decoder for `num_positions` flat positions (steps x hypotheses)."""
    return self.decoder.init_cache(theta['decoder'], memory_BUM, num_positions)

  def decode_step(
    self, theta: Theta, ids_BW: tf.Tensor, now: Now, src_segments_BU: tf.Tensor, cache: StackCache
  ) -> tuple[tf.Tensor, StackCache]:
    """Decoding step of W hypotheses a row over a flat cache: (float32 logits [B, W, V], cache); see beam_search.

    src_segments_BU are from `segments`.
    """
    with tf.name_scope('decoder'):
      positions_11 = tf.reshape(now.time, [1, 1]) if self.sinusoidal else None
      x_BWM = embed(self, self.target_embedding, theta['target_embedding'], ids_BW, positions_11)
      x_BWM, cache = self.decoder.extend(theta['decoder'], x_BWM, now, src_segments_BU, cache)
    return self.scores(theta, x_BWM), cache

  def _run(
    self, theta: Theta, batch: Batch, key: tf.Tensor | None, aligned: bool = False
  ) -> tuple[tf.Tensor, Routings, tf.Tensor | None]:
    """Runs encoder and decoder: (input of the output softmax, Routed by layer, attention [B, T, U] to the source).

    With `aligned`, attention is that of `alignment_layer`, a mean over its heads.
    """
    memory_BUM, encoder_routed = self.encode(theta, batch, key)
    key = prng.fold(key, 'decoder')
    with tf.name_scope('decoder'):
      positions_BT = batch['tgt_positions'] if self.sinusoidal else None
      x_BTM = embed(self, self.target_embedding, theta['target_embedding'], batch['tgt_inputs'], positions_BT, key)
      layer = (self.alignment_layer or -(-self.decoder.num_layers // 2)) - 1 if aligned else None
      segments = self.segments(batch, 'tgt'), memory_BUM, self.segments(batch, 'src')
      x_BTM, decoder_routed, _, weights_BnTU = self.decoder(theta['decoder'], x_BTM, *segments, key, layer)
      attention_BTU = None
      if aligned:
        attention_BTU = tf.reduce_mean(weights_BnTU, axis=list(range(1, weights_BnTU.shape.rank - 2)))
    routing = {f'encoder/{name}': routed for name, routed in encoder_routed.items()}
    routing |= {f'decoder/{name}': routed for name, routed in decoder_routed.items()}
    return x_BTM, routing, attention_BTU


def _real(batch: Batch) -> tf.Tensor:
  """1.0 where a target token counts."""
  return tf.cast(batch['tgt_segments'] > 0, tf.float32)
