"""Batches of random ids, for tools that time, compare or compile a model and need no text."""

from __future__ import annotations

import numpy as np

from lingvo_moe.tasks.mt.assembly import Batch
from lingvo_moe.tasks.mt.batch_keys import BATCH_KEYS
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.mt.vocab import BOS
from lingvo_moe.tasks.mt.vocab import EOS

_FIRST_ID = 10  # none of the special symbols


def random_batch(config: MtConfig, seed: int = 0, full: bool = True) -> Batch:
  """A batch as in training: one sentence a row of max_length tokens, as many rows as batch_tokens holds.

  Args:
    config: its sizes are used.
    seed: of the ids, and of the lengths.
    full: every row is full; otherwise sentences have 1 to max_length tokens, and padding follows.
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
  return {
    'src_ids': src_ids,
    'src_segments': src_segments,
    'src_positions': src_positions,
    'tgt_inputs': inputs.astype(np.int32),
    'tgt_labels': labels,
    'tgt_segments': tgt_segments,
    'tgt_positions': tgt_positions,
  }


def batch_shapes(config: MtConfig) -> Batch:
  """The shapes of `random_batch(config)`: zeros that take no memory, however many tokens a batch has."""
  length = config.max_length
  zeros_BT = np.broadcast_to(np.zeros([], np.int32), [config.batcher().rows(length), length])
  return dict.fromkeys(BATCH_KEYS, zeros_BT)
