"""Vocabulary of plain text: the fields that tasks of one text share."""

import dataclasses

from lingvo_moe.config.fields import changeable, field
from lingvo_moe.inputs.batch_config import BatchConfig


@dataclasses.dataclass(frozen=True)
class PlainTextConfig(BatchConfig):
  """Plain text: vocabulary."""

  vocab: str = changeable(
    'char',
    "Symbols: 'char', the characters of the training text; 'byte'; 'pieces', SentencePiece pieces trained on it; or "
    'the path of a SentencePiece .model.',
  )
  vocab_size: int = field(
    0, 'Symbols of the vocabulary, 4 special ones included; 0: as many as the text gives, or 8000 pieces.', at_least=0
  )

  @property
  def row_length(self) -> int:
    """Tokens of a row of a batch; of an encoder-decoder, those of its input."""
    raise NotImplementedError

  def rows_of_batch(self, training: bool = True) -> int:
    """B, a multiple of num_groups."""
    tokens = self.batch_tokens if training else self.eval_batch_tokens or self.batch_tokens
    return max(1, tokens // self.row_length // self.num_groups) * self.num_groups
