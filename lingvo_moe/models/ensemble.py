"""Ensemble: models of one vocabulary that translate as one, by the mean of their log-probabilities."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.models.batches import Batch
from lingvo_moe.models.encoder_decoder import EncoderDecoder
from lingvo_moe.vocab.sentencepiece_vocab import PAD


@dataclasses.dataclass(frozen=True)
class Ensemble:
  """Model at inference: log p of a symbol is the mean of those of the members. See EncoderDecoder for its methods.

  Weights have the number of their member before their names. Alignments are those of the first.
  """

  members: tuple[EncoderDecoder, ...]

  @property
  def target_embedding(self) -> Embedding:
    return self.members[0].target_embedding

  @property
  def decoder(self) -> Self:
    """The stacks of all, as far as their caches are kept."""
    return self

  def weights(self) -> Specs:
    return {str(i): member.weights() for i, member in enumerate(self.members)}

  def encode(self, theta: Theta, batch: Batch) -> tuple[list[tf.Tensor], None]:
    return self._of_each(lambda member, theta: member.encode(theta, batch)[0], theta), None

  def segments(self, batch: Batch, side: str) -> tf.Tensor:
    return next((m for m in self.members if m.task_tags), self.members[0]).segments(batch, side)

  def init_cache(self, theta: Theta, memories: Sequence[tf.Tensor], num_positions: Size) -> list[Any]:
    return self._of_each(lambda member, theta, memory: member.init_cache(theta, memory, num_positions), theta, memories)

  def keep_positions(self, caches: Sequence[Any], positions_BU: tf.Tensor) -> list[Any]:
    return [
      member.decoder.keep_positions(member_cache, positions_BU)
      for member, member_cache in zip(self.members, caches, strict=True)
    ]

  def decode_step(
    self, theta: Theta, ids_BW: tf.Tensor, now: Now, src_segments_BU: tf.Tensor, caches: Sequence[Any]
  ) -> tuple[tf.Tensor, list[Any]]:
    step = lambda member, theta, cache: member.decode_step(theta, ids_BW, now, src_segments_BU, cache)
    logits, caches = zip(*self._of_each(step, theta, caches))
    log_probs_BWV = tf.add_n([tf.nn.log_softmax(own_BWV) for own_BWV in logits]) / len(logits)
    # Pad, which never comes, gets what is left of 1: means are then probabilities without being divided by their sum.
    is_pad_V = tf.range(log_probs_BWV.shape[-1]) == PAD
    sum_BW1 = tf.reduce_sum(tf.where(is_pad_V, 0.0, tf.exp(log_probs_BWV)), axis=-1, keepdims=True)
    return tf.where(is_pad_V, tf.math.log(tf.maximum(1 - sum_BW1, 1e-30)), log_probs_BWV), list(caches)

  def score(self, theta: Theta, batch: Batch) -> tf.Tensor:
    return tf.add_n(self._of_each(lambda member, theta: member.score(theta, batch), theta)) / len(self.members)

  def attention_to_source(self, theta: Theta, batch: Batch) -> tf.Tensor:
    return self.members[0].attention_to_source(theta['0'], batch)

  def decisions(self, theta: Theta, batch: Batch) -> Any:
    raise UserError('an ensemble has no routing of its own: load one of its runs')

  def _of_each(self, function: Callable[..., Any], theta: Theta, *values: Sequence[Any]) -> list[Any]:
    """Results of function(member, its weights, its values)."""
    return [
      function(member, theta[str(i)], *member_values)
      for i, (member, *member_values) in enumerate(zip(self.members, *values))
    ]
