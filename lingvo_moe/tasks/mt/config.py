"""Configuration of a translation model, its training and decoding: one frozen dataclass of values."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe.core.fields import field
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.tasks.encoder_decoder import EncoderDecoder
from lingvo_moe.tasks.mt.data_config import DataConfig
from lingvo_moe.tasks.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class MtConfig(TransformerConfig, DataConfig):
  """Translation: stacks, evaluation and decoding."""

  task_class = 'lingvo_moe.tasks.mt.task.TranslationTask'

  encoder_layers: int = field(4, 'Layers of the encoder.', at_least=1, at_most=10_000)
  decoder_layers: int = field(4, 'Layers of the decoder.', at_least=1, at_most=10_000)
  experts_in: str = field('both', 'Stacks that have MoE layers.', choices=('both', 'encoder', 'decoder'))
  eval_sentences: int = field(0, 'Dev sentences of a pair that are evaluated; 0: all.', at_least=0, may_change=True)
  decode_ratio: float = field(
    2.0,
    'A translation has at most decode_ratio * source tokens + decode_extra symbols.',
    at_least=0,
    at_most=1000,
    may_change=True,
  )
  decode_extra: int = field(10, 'See decode_ratio.', at_least=0, may_change=True)

  @property
  def causal_experts(self) -> bool:
    """Whether the decoder has experts."""
    return bool(self.num_experts) and self.experts_in != 'encoder'

  def _check_combinations(self) -> None:
    super()._check_combinations()
    for name in ('encoder_layers', 'decoder_layers'):
      self._check_blocks(name)
    stacks = {'encoder': self.encoder_layers, 'decoder': self.decoder_layers}
    self._check_experts(*(layers for name, layers in stacks.items() if self.experts_in in ('both', name)))

  @property
  def longest_answer(self) -> int:
    """Most symbols of a translation with its end."""
    return self.max_length

  def answer_lengths(self, src_segments_BT: tf.Tensor) -> tf.Tensor:
    """Length limits of translations in symbols, with the end, int32 [B]; 0 in empty rows.

    They depend on the source alone, whose tokens are counted with its end and tag.
    """
    length_B = tf.reduce_sum(tf.cast(src_segments_BT > 0, tf.float32), axis=1)
    limit_B = tf.cast(tf.floor(self.decode_ratio * length_B), tf.int32) + self.decode_extra
    limit_B = tf.clip_by_value(limit_B, 1, self.max_length)
    return tf.where(length_B > 0, limit_B, 0)

  def model(self) -> EncoderDecoder:
    """The model that these values describe."""
    attention = Attention(self.model_dim, self.num_heads, self.head_dim, self.attention_dropout)
    moe = self.moe()
    stack = lambda layers, is_decoder: self.stack(
      num_layers=layers,
      attention=attention,
      ffn=FeedForward(self.model_dim, self.ff_dim, self.ffn_dropout),
      moe=moe if self.experts_in in ('both', 'decoder' if is_decoder else 'encoder') else None,
      cross_attention=is_decoder,
    )
    source = Embedding(self.source_vocab_size, self.model_dim)
    target = source if self.shared_vocab else Embedding(self.target_vocab_size, self.model_dim)
    return EncoderDecoder(
      encoder=stack(self.encoder_layers, False),
      decoder=stack(self.decoder_layers, True),
      target_embedding=target,
      source_embedding=None if self.shared_vocab else source,
      **self.token_model_values(),
    )
