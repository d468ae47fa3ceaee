"""From the lengths of a window of examples to batches: which example goes where in which batch.

Both ways see lengths only, so a batch can be planned without reading a token. A plan covers one window and forgets
it: batches never mix windows, and the plan of window w depends on nothing before it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from lingvo_moe.tasks.mt.sampling import shuffled

# Steps of a quarter of the power of two below, at least 4. Half as many steps made 6 to 8% more of a batch padding.
_LADDER = (
  8,
  12,
  16,
  20,
  24,
  28,
  32,
  40,
  48,
  56,
  64,
  80,
  96,
  112,
  128,
  160,
  192,
  224,
  256,
  320,
  384,
  448,
  512,
  640,
  768,
  896,
  1024,
)


class BatchPlan(NamedTuple):
  """A batch of B rows of T positions; each array has one entry for each example in it."""

  rows: int  # B
  length: int  # T
  example: np.ndarray  # its number within the window
  row: np.ndarray
  segment: np.ndarray  # 1, 2, ... within the row
  source_start: np.ndarray  # where in the row its source and its target begin
  target_start: np.ndarray


def default_boundaries(max_length: int) -> tuple[int, ...]:
  """8, 12, 16, 20, 24, 28, 32, 40, ... and max_length at the end."""
  return tuple(b for b in _LADDER if b < max_length) + (max_length,)


@dataclasses.dataclass(frozen=True)
class Batcher:
  """Cuts windows into batches of at most `batch_tokens` positions a side.

  Attributes:
    batch_tokens: B * T of a batch, at most (unless row_multiple rows are already more).
    boundaries: the row lengths T there are, ascending; the last is the longest sentence (with eos) taken.
    row_multiple: what divides every B.
    packing: whether a row holds several examples; then every row has the last boundary's length.
  """

  batch_tokens: int
  boundaries: tuple[int, ...]
  row_multiple: int = 1
  packing: bool = False

  def rows(self, length: int) -> int:
    """B for rows of this length."""
    return max(1, self.batch_tokens // length // self.row_multiple) * self.row_multiple

  def plan(self, source_lengths: np.ndarray, target_lengths: np.ndarray) -> list[BatchPlan]:
    """Batches of all examples, given their lengths with eos; those of length 0 are left out.

    The examples' order is kept within a bucket. Only the last batch may have empty rows.
    """
    kept = np.flatnonzero((source_lengths > 0) & (target_lengths > 0))
    if not len(kept):
      return []
    source_lengths, target_lengths = np.asarray(source_lengths)[kept], np.asarray(target_lengths)[kept]
    plans = (self._packed if self.packing else self._bucketed)(source_lengths, target_lengths)
    return [plan._replace(example=kept[plan.example]) for plan in plans]

  def _bucketed(self, source_lengths: np.ndarray, target_lengths: np.ndarray) -> list[BatchPlan]:
    """One example a row. What does not fill a batch of its bucket is carried into the next larger one."""
    bucket = np.searchsorted(self.boundaries, np.maximum(source_lengths, target_lengths))
    order = np.argsort(bucket, kind='stable')
    ends = np.searchsorted(bucket[order], np.arange(len(self.boundaries)), side='right')
    plans, start = [], 0
    for length, end in zip(self.boundaries, ends, strict=True):
      rows = self.rows(length)
      while end - start >= rows:
        plans.append(_one_a_row(rows, length, order[start : start + rows]))
        start += rows
      if end == len(order):  # no example is longer
        if start < end:
          plans.append(_one_a_row(rows, length, order[start:]))
        return plans
    raise AssertionError('an example is longer than the last boundary')

  def _packed(self, source_lengths: np.ndarray, target_lengths: np.ndarray) -> list[BatchPlan]:
    length = self.boundaries[-1]
    row, segment, source_start, target_start = pack(source_lengths, target_lengths, length)
    rows = self.rows(length)
    # The longest pairs went to the first rows: spread them over the batches.
    row = shuffled(int(row.max()) + 1, 'rows')[row]
    order = np.lexsort((segment, row))
    cuts = np.searchsorted(row[order], np.arange(0, row.max() + rows + 1, rows))
    plans = []
    for number, (start, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
      if start < end:
        e = order[start:end]
        plans.append(BatchPlan(rows, length, e, row[e] - number * rows, segment[e], source_start[e], target_start[e]))
    return plans


def _one_a_row(rows: int, length: int, example: np.ndarray) -> BatchPlan:
  zeros = np.zeros(len(example), np.int64)
  return BatchPlan(rows, length, example, np.arange(len(example)), zeros + 1, zeros, zeros)


def pack(
  source_lengths: np.ndarray, target_lengths: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Puts pairs into rows of `length` positions a side: best fit, in the order of decreasing length.

  A pair goes to the row that it leaves the least room in. The room of a row is that of its fuller side; rows are kept
  by room in `length` piles, and the bits of one integer say which are not empty, so a pair costs a microsecond.

  Returns:
    (row, segment, source_start, target_start), each with an entry for each pair. No pair is split.
  """
  n = len(source_lengths)
  row, segment, source_start, target_start = ([0] * n for _ in range(4))
  sources, targets = source_lengths.tolist(), target_lengths.tolist()
  piles = [[] for _ in range(length + 1)]
  occupied = 0  # bit r: some row has room r
  source_used, target_used, filled = [], [], []
  for e in np.argsort(-np.maximum(source_lengths, target_lengths), kind='stable').tolist():
    needs = max(sources[e], targets[e])
    if enough := occupied >> needs:
      room = needs + (enough & -enough).bit_length() - 1
      r = piles[room].pop()
      if not piles[room]:
        occupied ^= 1 << room
    else:
      r = len(filled)
      for column in (source_used, target_used, filled):
        column.append(0)
    filled[r] += 1
    row[e], segment[e], source_start[e], target_start[e] = r, filled[r], source_used[r], target_used[r]
    source_used[r] += sources[e]
    target_used[r] += targets[e]
    room = length - max(source_used[r], target_used[r])
    piles[room].append(r)
    occupied |= 1 << room
  return tuple(np.array(column, np.int64) for column in (row, segment, source_start, target_start))
