"""Batch plans: assigns the examples of a window, by their lengths, to batches, rows and positions.

There are two ways, buckets of similar length and packing. Both use only lengths, so a batch is planned without reading
tokens. Batches never mix windows, and the plan of a window does not depend on earlier windows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lingvo_moe.corpora.temperature_sampling import shuffled

if TYPE_CHECKING:
  from lingvo_moe.inputs.feed import Feed

# Row lengths in steps of a quarter of the next lower power of two, at least 4. With half as many, the share of padding
# in a batch was 6 to 8% higher.
_LADDER = (8, 12, *(power * quarters // 4 for power in (16, 32, 64, 128, 256, 512) for quarters in (4, 5, 6, 7)), 1024)


class BatchPlan(NamedTuple):
  """Plan of a batch of B rows of T positions; each array has one entry for each example in the batch."""

  rows: int  # B
  length: int  # T
  example: np.ndarray  # number of the example within the window
  row: np.ndarray
  segment: np.ndarray  # 1, 2, ... within the row
  source_start: np.ndarray  # position in the row where its source begins
  target_start: np.ndarray  # and its target

  def rows_of(self, feed: Feed) -> BatchPlan:
    """The part that a process feeds, of B / process_count rows; see feed.TrainInput."""
    rows = self.rows // feed.process_count
    is_of_process = self.row // rows == feed.process_index
    plan = BatchPlan(rows, self.length, *(column[is_of_process] for column in self[2:]))
    return plan._replace(row=plan.row % rows)


def default_boundaries(max_length: int) -> tuple[int, ...]:
  """Default row lengths: 8, 12, 16, 20, 24, 28, 32, 40, ... up to and including max_length."""
  return tuple(b for b in _LADDER if b < max_length) + (max_length,)


@dataclasses.dataclass(frozen=True)
class BatchPlanner:
  """Planner of batches with at most `batch_tokens` positions a side."""

  batch_tokens: int  # largest B * T of a batch (unless row_multiple rows are already more)
  boundaries: tuple[int, ...]  # possible row lengths T, ascending; the last is that of the longest sentence, with eos
  row_multiple: int = 1  # divisor of every B
  packing: bool = False  # True to put several examples in a row; then every row has the length of the last boundary

  def rows(self, length: int) -> int:
    """Number of rows (B) of a batch with rows of this length."""
    return max(1, self.batch_tokens // length // self.row_multiple) * self.row_multiple

  def plan(self, source_lengths: np.ndarray, target_lengths: np.ndarray) -> list[BatchPlan]:
    """Plans the batches of all examples, given their lengths with eos; examples of length 0 are left out.

    Examples stay in order within a bucket. Only the last batch may have empty rows.
    """
    kept = np.flatnonzero((source_lengths > 0) & (target_lengths > 0))
    if not len(kept):
      return []
    source_lengths, target_lengths = np.asarray(source_lengths)[kept], np.asarray(target_lengths)[kept]
    plans = (self._packed if self.packing else self._bucketed)(source_lengths, target_lengths)
    return [plan._replace(example=kept[plan.example]) for plan in plans]

  def _bucketed(self, source_lengths: np.ndarray, target_lengths: np.ndarray) -> list[BatchPlan]:
    """Plans with one example a row. Examples that do not fill a batch of their bucket go to the next longer bucket."""
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
    # The first rows have the longest pairs; this spreads them over the batches.
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
  """Packs pairs into rows of `length` positions a side: best fit, in the order of decreasing length.

  A pair goes to the row in which it leaves the least room. The room of a row is that of its fuller side. There is a
  list of rows for every room, and one integer has a bit for each list that is not empty, so a pair costs a microsecond.

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
