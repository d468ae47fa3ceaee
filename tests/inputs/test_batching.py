"""Batch plans: buckets, packing, and the rules for all plans."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from lingvo_moe.inputs.batching import BatchPlanner, default_boundaries, pack

RNG = np.random.default_rng(0)


def test_default_boundaries_end_with_the_longest_sentence():
  assert default_boundaries(50) == (8, 12, 16, 20, 24, 28, 32, 40, 48, 50)
  assert default_boundaries(8) == (8,)
  assert default_boundaries(5) == (5,)


def test_rows_fill_batch_tokens_in_multiples():
  batcher = BatchPlanner(batch_tokens=100, boundaries=(8, 16), row_multiple=4)
  assert batcher.rows(8) == 12 and batcher.rows(16) == 4
  assert BatchPlanner(100, (64,), row_multiple=4).rows(64) == 4


def test_a_bucket_holds_what_fits_and_leftovers_move_up():
  batcher = BatchPlanner(batch_tokens=16, boundaries=(4, 8))  # 4 rows of 4, or 2 rows of 8
  source = np.array([3, 8, 1, 4, 2, 4])
  target = np.array([4, 2, 4, 1, 2, 4])
  plans = batcher.plan(source, target)
  assert [(p.rows, p.length, p.example.tolist()) for p in plans] == [(4, 4, [0, 2, 3, 4]), (2, 8, [5, 1])]


def test_a_bucket_that_is_exactly_full_is_a_batch_of_its_own():
  batcher = BatchPlanner(batch_tokens=16, boundaries=(4, 8))  # 4 rows of 4, or 2 rows of 8
  lengths = np.array([3, 8, 4, 2, 7, 4])
  plans = batcher.plan(lengths, lengths)
  assert [(p.rows, p.length, p.example.tolist()) for p in plans] == [(4, 4, [0, 2, 3, 5]), (2, 8, [1, 4])]


def test_only_the_last_batch_has_empty_rows():
  batcher = BatchPlanner(batch_tokens=64, boundaries=(4, 8, 16, 32), row_multiple=2)
  lengths = RNG.integers(1, 33, size=203)
  plans = batcher.plan(lengths, lengths)
  assert all(len(p.example) == p.rows for p in plans[:-1])
  assert sum(len(p.example) for p in plans) == 203


def test_leftovers_of_short_sentences_are_not_stretched_to_the_longest_row():
  (plan,) = BatchPlanner(batch_tokens=64, boundaries=(4, 32)).plan(np.array([2, 3]), np.array([2, 2]))
  assert plan.length == 4 and plan.rows == 16 and plan.row.tolist() == [0, 1]


@pytest.mark.parametrize('packing', [False, True])
def test_examples_of_length_zero_are_left_out(packing):
  plans = BatchPlanner(64, (8, 16), packing=packing).plan(np.array([0, 3, 5]), np.array([4, 3, 0]))
  assert [e for p in plans for e in p.example] == [1]
  assert BatchPlanner(64, (8,), packing=packing).plan(np.array([0]), np.array([0])) == []


pairs = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=80)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(pairs, st.booleans(), st.integers(1, 3))
def test_every_plan_places_each_pair_once_within_its_row_and_over_no_other(pairs, packing, row_multiple):
  source, target = np.array(pairs).T
  batcher = BatchPlanner(96, (4, 8, 16), row_multiple, packing)
  seen = []
  for plan in batcher.plan(source, target):
    assert plan.rows == batcher.rows(plan.length) and plan.rows % row_multiple == 0
    for starts, lengths in ((plan.source_start, source), (plan.target_start, target)):
      taken = np.zeros((plan.rows, plan.length), int)
      for e, r, s in zip(plan.example, plan.row, starts, strict=True):
        assert s + lengths[e] <= plan.length
        taken[r, s : s + lengths[e]] += 1
      assert taken.max() <= 1
    for r in set(plan.row):
      assert sorted(plan.segment[plan.row == r]) == list(range(1, (plan.row == r).sum() + 1))
    seen += plan.example.tolist()
  assert sorted(seen) == list(range(len(pairs)))


def test_packing_opens_a_row_only_when_no_row_has_room():
  row, segment, source_start, target_start = pack(np.array([3, 6, 2, 5]), np.array([3, 2, 2, 5]), 8)
  # 6 opens row 0, 5 row 1; 3 fills row 1, 2 fills row 0.
  assert row.tolist() == [1, 0, 0, 1] and segment.tolist() == [2, 1, 2, 1]
  assert source_start.tolist() == [5, 0, 6, 0] and target_start.tolist() == [5, 0, 2, 0]


def test_packed_batches_mix_rows_of_long_and_of_short_sentences():
  # 64 rows of one long pair each, then 64 rows of 8 short ones: without shuffling, batches would be of one kind.
  lengths = np.array([8] * 64 + [1] * 512)
  plans = BatchPlanner(batch_tokens=128, boundaries=(8,), packing=True).plan(lengths, lengths)
  assert [plan.rows for plan in plans] == [16] * 8
  assert all(2 <= np.sum(lengths[plan.example] == 8) <= 14 for plan in plans)


def test_packing_fills_more_than_nine_tenths():
  lengths = np.clip(RNG.geometric(1 / 30, 5000), 2, 128)
  row, *_ = pack(lengths, np.maximum(lengths - 1, 1), 128)
  assert lengths.sum() / ((row.max() + 1) * 128) > 0.95
