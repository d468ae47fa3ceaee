"""Batches of an encoder-decoder model: names of their arrays, int32 [B, T] each, and rows of ids as such arrays.

mt/input.py and denoising/input.py say what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingvo_moe.tasks.vocab import BOS

Batch = dict[str, np.ndarray]

SOURCE_KEYS = ('src_ids', 'src_segments', 'src_positions')
TARGET_KEYS = ('tgt_inputs', 'tgt_labels', 'tgt_segments', 'tgt_positions')
BATCH_KEYS = SOURCE_KEYS + TARGET_KEYS


def source_arrays(rows: Sequence[Sequence[int]], count: int, length: int) -> Batch:
  """Source arrays [count, length] of rows of ids with their ends, padded on the right and below; see SOURCE_KEYS."""
  return dict(zip(SOURCE_KEYS, _padded(rows, count, length), strict=True))


def target_arrays(rows: Sequence[Sequence[int]], count: int, length: int) -> Batch:
  """Target arrays [count, length], padded likewise; the inputs of the decoder are bos and all but the last."""
  labels_BT, segments_BT, positions_BT = _padded(rows, count, length)
  inputs_BT = np.pad(labels_BT, [[0, 0], [1, 0]], constant_values=BOS)[:, :-1] * segments_BT
  return dict(zip(TARGET_KEYS, (inputs_BT, labels_BT, segments_BT, positions_BT), strict=True))


def _padded(rows: Sequence[Sequence[int]], count: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Ids, segments and positions."""
  ids_BT, segments_BT = (np.zeros([count, length], np.int32) for _ in range(2))
  for row, ids in enumerate(rows):
    ids_BT[row, : len(ids)] = ids
    segments_BT[row, : len(ids)] = 1
  return ids_BT, segments_BT, np.arange(length, dtype=np.int32) * segments_BT


def shapes(rows: int, length: int) -> np.ndarray:
  """Zeros, int32 [rows, length], that take no memory."""
  return np.broadcast_to(np.zeros([], np.int32), [rows, length])
