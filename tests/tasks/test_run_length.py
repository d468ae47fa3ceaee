"""Length of a run, chosen from the size of its corpus."""

import dataclasses
import types

import pytest

from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import run_length

OPEN = registry.get('mt.starter.MoE8E')()


def chosen(steps_per_epoch, examples=50_000, **values):
  config, why = run_length.settled(dataclasses.replace(OPEN, **values), steps_per_epoch, examples)
  return (config.max_steps, config.eval_every, config.warmup_steps), why


@pytest.mark.parametrize(
  'steps_per_epoch, batch_tokens, expected',
  [
    (4, 2500, (800, 40, 80)),  # 20,000 * sqrt(10,000) positions are 800 batches of 2500
    (100, 4096, (3120, 156, 312)),  # 20,000 * 640 / 4096 = 3125; a twentieth is 156.25
    (62_500, 4096, (78_120, 3906, 4000)),  # 20,000 * 16,000 / 4096 = 78,125; a tenth is over 4000
  ],
)
def test_positions_of_training_are_20000_roots_of_those_of_an_epoch(steps_per_epoch, batch_tokens, expected):
  assert chosen(steps_per_epoch, batch_tokens=batch_tokens, max_length=128)[0] == expected


def test_more_text_makes_more_steps_and_fewer_epochs():
  sizes = [0.5 * 3**power for power in range(16)]
  steps = [chosen(size)[0][0] for size in sizes]
  assert steps == sorted(set(steps))
  epochs = [n / size for n, size in zip(steps, sizes)]
  assert epochs == sorted(epochs, reverse=True) and epochs[-1] < 1 < epochs[0]


def test_values_that_are_given_win_and_the_others_follow_from_them():
  assert chosen(100, max_steps=1000)[0] == (1000, 50, 100)
  assert chosen(100, max_steps=7)[0] == (7, 1, 1)
  assert chosen(100, eval_every=500, warmup_steps=9)[0] == (3120, 500, 9)
  assert chosen(100, max_steps=0)[0] == (0, 156, 312)  # a run that is begun here and trained elsewhere


def test_what_is_chosen_is_said_and_what_is_given_is_not():
  assert chosen(100)[1] == (
    'chosen for 50,000 examples, 100 steps an epoch: max_steps=3120, eval_every=156, warmup_steps=312'
  )
  assert chosen(100, max_steps=1000)[1].endswith('an epoch: eval_every=50, warmup_steps=100')


def test_few_examples_are_said_to_be_few_with_what_to_do():
  assert 'little text' not in chosen(10, 2000)[1]
  assert (
    'little text, and the model will make many mistakes: fine-tune a public model (lingvo-moe' in chosen(10, 1999)[1]
  )
  assert 'little text' not in chosen(10, 1999, max_steps=5)[1]


def test_hardly_any_lines_are_refused():
  run_length.check(100)
  with pytest.raises(UserError, match='at least 100 lines; saw 99, .*: fine-tune .*; or give --max_steps'):
    run_length.check(99)


def test_text_without_an_end_is_refused():
  with pytest.raises(UserError, match='max_steps is chosen for text that has an end'):
    chosen(None)


def test_a_configuration_is_open_while_one_of_its_fields_is():
  values = dict(max_steps=1, eval_every=1, warmup_steps=1)
  assert not run_length.is_open(types.SimpleNamespace(**values))
  for name in values:
    assert run_length.is_open(types.SimpleNamespace(**values | {name: None}))
