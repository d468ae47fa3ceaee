"""Random batches, for tools that time, compare or compile a model and need no text."""

import numpy as np

from lingvo_moe.models.batches import ArrayBatch, padded
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.vocab.sentencepiece_vocab import EOS

_FIRST_ID = 10  # none of the special symbols


def random_batch(config: MtConfig, seed: int = 0, full: bool = True) -> ArrayBatch:
  """Batch of random ids: rows of max_length tokens with one sentence each, as many as batch_tokens allows.

  Rows are full, or without `full` sentences of 1 to max_length tokens, followed by padding.
  """
  rng = np.random.default_rng(seed)
  length = config.max_length
  rows = config.batcher().rows(length)

  def side(vocab_size):
    lengths_B = np.full(rows, length) if full else rng.integers(1, length + 1, rows)
    ids_BT = rng.integers(_FIRST_ID, vocab_size, [rows, length])
    return padded(
      [np.append(ids[: row_length - 1], EOS) for ids, row_length in zip(ids_BT, lengths_B, strict=True)], rows, length
    )

  source = side(config.source_vocab_size)
  target = side(config.source_vocab_size if config.shared_vocab else config.target_vocab_size)
  return source.as_source() | target.as_target(config.begin_id)
