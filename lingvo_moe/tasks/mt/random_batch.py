"""Random batches, for tools that time, compare or compile a model and need no text."""

from __future__ import annotations

import numpy as np

from lingvo_moe.tasks.batch_keys import BATCH_KEYS
from lingvo_moe.tasks.mt.assembly import Batch
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.vocab import BOS, EOS

_FIRST_ID = 10  # none of the special symbols


def random_batch(config: MtConfig, seed: int = 0, full: bool = True) -> Batch:
  """Batch of random ids: rows of max_length tokens with one sentence each, as many as batch_tokens allows.

  Args:
    config: configuration with the sizes.
    seed: seed of the ids and lengths.
    full: True for full rows; False for sentences of 1 to max_length tokens, followed by padding.
  """
  rng = np.random.default_rng(seed)
  length = config.max_length
  rows = config.batcher().rows(length)
  shape = rows, length

  def side(vocab_size):
    lengths_B1 = np.full([rows, 1], length) if full else rng.integers(1, length + 1, [rows, 1])
    position_BT = np.tile(np.arange(length, dtype=np.int32), [rows, 1])
    real_BT = position_BT < lengths_B1
    ids_BT = rng.integers(_FIRST_ID, vocab_size, shape)
    ids_BT = np.where(position_BT == lengths_B1 - 1, EOS, ids_BT)
    mask = lambda x: np.where(real_BT, x, 0).astype(np.int32)
    return mask(ids_BT), mask(np.ones(shape)), mask(position_BT)

  src_ids, src_segments, src_positions = side(config.source_vocab_size)
  labels, tgt_segments, tgt_positions = side(
    config.source_vocab_size if config.shared_vocab else config.target_vocab_size
  )
  inputs = np.where(tgt_segments > 0, np.concatenate([np.full([rows, 1], BOS), labels[:, :-1]], axis=1), 0)
  source = src_ids, src_segments, src_positions
  target = inputs.astype(np.int32), labels, tgt_segments, tgt_positions
  return dict(zip(BATCH_KEYS, source + target, strict=True))


def batch_shapes(config: MtConfig, training: bool = True) -> Batch:
  """Batch with the shapes of `random_batch(config)`: zeros that take no memory, however many tokens a batch has.

  With `training` False it is a batch of evaluation, of eval_batch_tokens.
  """
  length = config.max_length
  zeros_BT = np.broadcast_to(np.zeros([], np.int32), [config.batcher(training=training).rows(length), length])
  return dict.fromkeys(BATCH_KEYS, zeros_BT)
