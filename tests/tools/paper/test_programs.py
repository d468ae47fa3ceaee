"""Table of all programs: the cases, rounds of random and of skewed routing, and times by rounds."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip('jax')

from lingvo_moe.addons.analysis import cost
from paper import claims, programs
from paper.report_cache import configured

CASES = programs.cases()


def test_every_model_of_table_1_has_every_program():
  assert len(CASES) == len({dataclasses.astuple(case) for case in CASES}) == len(claims.TABLE_1) * len(cost.PROGRAMS)
  assert {case.program for case in CASES} == set(cost.PROGRAMS)
  assert [case for case in CASES if case.program == 'train'] == [row.case for row in claims.TABLE_1]


def test_a_core_decodes_as_many_sentences_in_every_model():
  for case in CASES:
    config = configured(case)
    if case.program in ('score', 'encode', 'decode'):
      assert config.eval_batch_tokens == case.devices * programs.ROWS_A_CORE * config.max_length


@pytest.mark.parametrize('tokens, chance, queues', [(64, 0.1, 500), (16, 0.5, 3), (200, 0.01, 4000)])
def test_the_longest_queue_is_that_of_random_choices(tokens, chance, queues):
  rng = np.random.default_rng(0)
  longest = rng.binomial(tokens, chance, [200, queues]).max(axis=1)
  assert abs(programs.longest_queue(tokens, chance, queues) - np.median(longest)) <= 1


def test_a_queue_that_all_tokens_join_is_as_long_as_the_group():
  assert programs.longest_queue(7, 1.0, 5) == 7 and programs.longest_queue(7, 0.0, 5) == 1


def test_rounds_grow_with_skew_and_only_where_nothing_is_dropped():
  by_program = {case.program: case for case in CASES if case.model == 'mt.m4.MoE128E36L'}
  assert programs.rounds_of(by_program['train'], 4.0) is None
  random, skewed = (programs.rounds_of(by_program['eval'], skew) for skew in (1.0, 4.0))
  # 512 tokens of a group, 8 slots of each of 128 experts: 4 times 8 tokens for a popular one, and some by chance.
  assert 1 < random < skewed and 4 < skewed < 10
  (dense,) = (case for case in CASES if case.model == 'mt.m4.T96L' and case.program == 'eval')
  assert programs.rounds_of(dense, 4.0) is None


def test_time_is_linear_in_rounds():
  report = {'rounds': 1, 'step_seconds_compiler': 3.0, 'round_seconds_compiler': 0.5}
  assert programs.seconds(report, 1) == 3.0 and programs.seconds(report, 5) == 5.0
