"""Configuration of a denoising model, its training and decoding: one frozen dataclass of values."""

import dataclasses

import tensorflow as tf

from lingvo_moe.config import fields
from lingvo_moe.config.fields import changeable, field
from lingvo_moe.inputs.plain_text_config import PlainTextConfig
from lingvo_moe.models.encoder_decoder import EncoderDecoder
from lingvo_moe.tasks.denoising import spans
from lingvo_moe.tasks.encoder_decoder_config import EncoderDecoderConfig
from lingvo_moe.vocab.sentencepiece_vocab import BOS


@dataclasses.dataclass(frozen=True)
class DenoisingConfig(EncoderDecoderConfig, PlainTextConfig):
  """Span corruption: noise, stacks and decoding of an encoder-decoder.

  The model is T5's (v1.1): RMSNorm before each branch, no biases, relative position biases in self-attention, one
  embedding for inputs, targets and the output softmax. Departures: scores are divided by the root of head_dim, every
  layer has position biases of its own (as umT5, arXiv 2304.09151; in T5 all layers of a stack share the first's), and
  the output softmax of v1.1 has weights of its own.
  """

  task_class = 'lingvo_moe.tasks.denoising.denoising_task.DenoisingTask'
  begin_id = BOS

  sentinels: int = field(100, 'Sentinels, the last ids; they add to vocab_size.', at_least=1)
  inputs_length: int = field(
    512, 'Most tokens of an input row, with its end; windows of the text are as long as fill it.', at_least=4
  )
  noise_density: float = field(0.15, 'Share of the tokens that is noise.', above=0, below=1)
  mean_span: float = field(3.0, 'Mean length of the spans of noise.', at_least=1)
  positions: str = 'relative'
  norm: str = 'rms'
  bias: bool = False
  num_samples: int = changeable(3, 'Windows of each file that the decoder fills in.', at_least=0)

  def _check_combinations(self) -> None:
    super()._check_combinations()
    needed = spans.counts(self.lengths.window, self.noise_density, self.mean_span).spans
    if self.sentinels < needed:
      rule = f'at least {needed}, the spans of a window of {self.lengths.window} tokens'
      fields.refuse(self, 'sentinels', rule, 'or a smaller inputs_length or noise_density')
    self._check_rows_fit(self.inputs_length, 'inputs_length')

  @property
  def lengths(self) -> spans.Lengths:
    """Tokens of a window, of its inputs and of its targets."""
    return spans.lengths_for(self.inputs_length, self.noise_density, self.mean_span)

  @property
  def row_length(self) -> int:
    return self.inputs_length

  @property
  def longest_answer(self) -> int:
    """Most symbols of an answer: as many as the targets of training have."""
    return self.lengths.targets

  def answer_lengths(self, src_segments_BT: tf.Tensor) -> tf.Tensor:
    """Length limits of answers, int32 [B]; 0 in empty rows."""
    return tf.where(tf.reduce_any(src_segments_BT > 0, axis=1), self.longest_answer, 0)

  def model(self) -> EncoderDecoder:
    embedding = self.embedding((self.vocab_size or 8000) + self.sentinels)
    return self.encoder_decoder(None, embedding, subset='file')
