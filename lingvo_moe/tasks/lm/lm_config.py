"""Configurations of language models, Transformers and LSTMs, their training and sampling: frozen dataclasses."""

import dataclasses

from lingvo_moe.config import fields
from lingvo_moe.config.fields import changeable, field
from lingvo_moe.corpora.documents import DOCUMENTS
from lingvo_moe.inputs.plain_text_config import PlainTextConfig
from lingvo_moe.layers.embedding import CompetingOutputs, Embedding
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.recurrent_stack import Lstm, RecurrentStack
from lingvo_moe.models.lm_model import LanguageModel
from lingvo_moe.tasks.model_config import ModelConfig, SamplingConfig
from lingvo_moe.tasks.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class LanguageConfig(ModelConfig, PlainTextConfig, SamplingConfig):
  """Language models: text and sampling.

  A subclass has the layers and `model()`.
  """

  task_class = 'lingvo_moe.tasks.lm.lm_task.LanguageTask'

  documents: str = field(
    'file', 'Unit of text that gets an end symbol: each file, paragraph or line.', choices=DOCUMENTS
  )
  window: int = field(64, 'T, tokens of a row, and how far back a token may attend in longer text.', at_least=2)
  packing: bool = field(
    False, 'Documents are shuffled, and attend to themselves alone; otherwise a row is one segment of the running text.'
  )
  eval_stride: int = field(
    0, 'Tokens between the beginnings of windows in evaluation; fewer than window: more context; 0: window.', at_least=0
  )
  search: str = changeable(
    'sample', 'Search for continuations: sampling, greedy or beam search.', choices=('sample', 'greedy', 'beam')
  )
  num_samples: int = changeable(3, 'Continuations of the prompt by the decoder.', at_least=0)
  prompt: str = changeable('', 'Text that the samples of the decoder continue.')
  max_new_tokens: int = changeable(256, 'Most symbols of a continuation.', at_least=1)

  def _check_combinations(self) -> None:
    super()._check_combinations()
    if self.eval_stride > self.window:
      fields.refuse(self, 'eval_stride', f'at most window={self.window}', 'or some tokens would not count')
    self._check_rows_fit(self.window, 'a window')

  @property
  def row_length(self) -> int:
    return self.window


@dataclasses.dataclass(frozen=True)
class LmConfig(TransformerConfig, LanguageConfig):
  """Language model of Transformer layers."""

  tied_output: bool = field(
    True, 'Whether the output softmax shares the embedding of the input.', when={'output_experts': (0,)}
  )
  num_layers: int = field(4, 'Layers of the decoder.', at_least=1, at_most=10_000)
  rotary_base: float = field(10_000.0, 'Base of the rotary positions.', above=1)
  logit_cap: float = field(0.0, "Largest magnitude of attention's scores, by a tanh; 0: no limit.", at_least=0)
  output_experts: int = field(
    0,
    'Experts of the output softmax, each with one of its own, trained by the competitive loss of 1991; 0: one softmax.',
    at_least=0,
  )
  norm: str = 'rms'
  bias: bool = False

  def _check_combinations(self) -> None:
    super()._check_combinations()
    self._check_stacks(num_layers=True)

  def model(self) -> LanguageModel:
    embedding = self.embedding(self.vocab_size or 8000)
    output_embedding = None if self.tied_output else embedding
    return self.make(
      LanguageModel,
      decoder=self.stack(self.num_layers, self.attention(), self.moe(), causal=True),
      target_embedding=embedding,
      output_embedding=CompetingOutputs(embedding, self.output_experts) if self.output_experts else output_embedding,
    )


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(LanguageConfig):
  """Recurrent language model: LSTM, experts or a dense feed-forward, LSTM, and an output softmax of its own."""

  window: int = field(
    64, 'T, tokens of a row. The state is zero before a row; in text that is generated it has no end.', at_least=2
  )
  lstm_dim: int = field(0, 'Units of both LSTMs, projected to model_dim features; 0: model_dim.', at_least=0)

  def model(self) -> LanguageModel:
    embedding = Embedding(self.vocab_size or 8000, self.model_dim)
    lstm = Lstm(self.model_dim, self.lstm_dim)
    ffn = FeedForward(self.model_dim, self.ff_dim, bias=False)
    decoder = self.make(RecurrentStack, lstm=lstm, ffn=ffn, moe=self.moe())
    return self.make(LanguageModel, decoder=decoder, target_embedding=embedding, output_embedding=embedding)
