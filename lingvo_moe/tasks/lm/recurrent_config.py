"""Configuration of a recurrent language model: LSTM, experts, LSTM."""

from __future__ import annotations

import dataclasses

from lingvo_moe.core.fields import field
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.lstm import Lstm
from lingvo_moe.layers.recurrent_stack import RecurrentStack
from lingvo_moe.tasks.lm.config import LanguageConfig
from lingvo_moe.tasks.lm.model import LanguageModel


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(LanguageConfig):
  """Recurrent language model: LSTM, experts or a dense feed-forward, LSTM, and an output softmax of its own."""

  window: int = field(
    64, 'T, tokens of a row. The state is zero before a row; in text that is generated it has no end.', at_least=2
  )
  lstm_dim: int = field(0, 'Units of both LSTMs, projected to model_dim features; 0: model_dim.', at_least=0)

  def model(self) -> LanguageModel:
    """The model that these values describe."""
    embedding = Embedding(self.vocab_size or 8000, self.model_dim)
    return LanguageModel(
      decoder=RecurrentStack(
        lstm=Lstm(self.model_dim, self.lstm_dim),
        ffn=FeedForward(self.model_dim, self.ff_dim, bias=False),
        moe=self.moe(),
        residual_dropout=self.residual_dropout,
      ),
      target_embedding=embedding,
      output_embedding=embedding,
      window=self.window,
      **self.token_model_values(),
    )
