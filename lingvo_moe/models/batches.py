"""Batches of an encoder-decoder model: names of their arrays, int32 [B, T] each, and rows of ids as such arrays.

inputs/mt_input.py and tasks/denoising/denoising_input.py say what they hold.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.vocab.sentencepiece_vocab import BOS

Batch = Mapping[str, Any]  # name -> array, of which a process has some rows
ArrayBatch = dict[str, np.ndarray]

SOURCE_KEYS = ('src_ids', 'src_segments', 'src_positions')
FIRST = 'tgt_first'  # [B, 1]: the first symbol of an answer, where search is given it
TARGET_KEYS = ('tgt_inputs', 'tgt_labels', 'tgt_segments', 'tgt_positions')
BATCH_KEYS = SOURCE_KEYS + TARGET_KEYS
LOSS_FACTORS = 'tgt_loss_factors'  # of the loss of each token in training, in thousandths; without it all count alike

ALIGNED = 'tgt_aligned'  # source position, from 1, that the attention of a target token is drawn to; 0: none


class Side(NamedTuple):
  """Source or target of a batch: ids with their ends, segments and positions, int32 [B, T] each."""

  ids_BT: np.ndarray
  segments_BT: np.ndarray
  positions_BT: np.ndarray

  def as_source(self) -> ArrayBatch:
    """Source arrays; see SOURCE_KEYS."""
    return dict(zip(SOURCE_KEYS, self, strict=True))

  def as_target(self, begin: int = BOS) -> ArrayBatch:
    """Target arrays, see TARGET_KEYS; the inputs of the decoder are `begin` and all but the last label of a segment."""
    before_BT = np.where(self.positions_BT > 0, np.roll(self.ids_BT, 1, axis=1), np.int32(begin))
    return dict(zip(TARGET_KEYS, (before_BT * (self.segments_BT > 0), *self), strict=True))


def padded(rows: Sequence[Sequence[int]], count: int, length: int) -> Side:
  """Rows of ids, one segment each, padded on the right and below to [count, length]."""
  ids_BT, segments_BT = (np.zeros([count, length], np.int32) for _ in range(2))
  for row, ids in enumerate(rows):
    ids_BT[row, : len(ids)] = ids
    segments_BT[row, : len(ids)] = 1
  return Side(ids_BT, segments_BT, np.arange(length, dtype=np.int32) * segments_BT)


def flat(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
  """Ids of rows, one after the other, and the number of ids of each."""
  return np.concatenate([np.zeros(0, np.int32), *rows]).astype(np.int32), np.array([len(ids) for ids in rows], np.int64)


def zeros(rows: int, length: int) -> np.ndarray:
  """Zeros, int32 [rows, length], that take no memory."""
  return np.broadcast_to(np.zeros([], np.int32), [rows, length])
