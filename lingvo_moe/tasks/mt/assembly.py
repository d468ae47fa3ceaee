"""Batch assembly: fills the arrays of a batch from token ids, for all examples at once."""

from __future__ import annotations

import numpy as np

from lingvo_moe.tasks.batch_keys import SOURCE_KEYS, TARGET_KEYS
from lingvo_moe.tasks.mt.batching import BatchPlan
from lingvo_moe.tasks.vocab import BOS, EOS

Batch = dict[str, np.ndarray]  # int32 [B, T] each


def source_arrays(plan: BatchPlan, ids: np.ndarray, lengths: np.ndarray, prefix: np.ndarray | None = None) -> Batch:
  """Source arrays of a batch (SOURCE_KEYS), whose segments end with eos.

  Args:
    plan: row and position of each example.
    ids: token ids of the plan's examples, one after the other, without eos.
    lengths: number of ids of each example.
    prefix: id of the tag to put before each example; None for no tags.
  """
  ids, lengths, begins = _with_ends(ids, lengths, prefix is not None)
  if prefix is not None:
    ids[begins] = prefix
  place = _places(plan, plan.source_start, lengths, begins)
  return dict(zip(SOURCE_KEYS, _spread(plan, place, lengths, begins, ids), strict=True))


def target_arrays(plan: BatchPlan, ids: np.ndarray, lengths: np.ndarray) -> Batch:
  """Target arrays of a batch (TARGET_KEYS): labels end with eos; inputs are bos and the labels one position later."""
  labels, lengths, begins = _with_ends(ids, lengths, False)
  inputs = np.concatenate([[BOS], labels[:-1]])[: len(labels)]
  inputs[begins] = BOS
  place = _places(plan, plan.target_start, lengths, begins)
  labels_BT, segments_BT, positions_BT = _spread(plan, place, lengths, begins, labels)
  inputs_BT = np.zeros_like(labels_BT)
  inputs_BT.flat[place] = inputs
  return dict(zip(TARGET_KEYS, (inputs_BT, labels_BT, segments_BT, positions_BT), strict=True))


def _with_ends(ids, lengths, room_in_front: bool):
  """Adds eos to each example and, for `room_in_front`, a position before it; returns new ids, lengths and begins."""
  before = np.cumsum(lengths) - lengths
  new_lengths = lengths + 1 + room_in_front
  begins = np.cumsum(new_lengths) - new_lengths
  result = np.full(int(new_lengths.sum()), EOS, np.int32)
  result[np.arange(len(ids)) + np.repeat(begins - before + room_in_front, lengths)] = ids
  return result, new_lengths, begins


def _places(plan, start, lengths, begins) -> np.ndarray:
  """Flat position in [B, T] of every token."""
  return np.arange(int(lengths.sum())) + np.repeat(plan.row * plan.length + start - begins, lengths)


def _spread(plan, place, lengths, begins, ids):
  ids_BT, segments_BT, positions_BT = (np.zeros((plan.rows, plan.length), np.int32) for _ in range(3))
  ids_BT.flat[place] = ids
  segments_BT.flat[place] = np.repeat(plan.segment, lengths)
  positions_BT.flat[place] = np.arange(len(ids)) - np.repeat(begins, lengths)
  return ids_BT, segments_BT, positions_BT
