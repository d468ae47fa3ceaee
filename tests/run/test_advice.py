"""Advice: steps of an epoch before the first step, and an estimate of time after some."""

import os
import time
import types

import numpy as np
import pytest

from lingvo_moe.run import advice
from lingvo_moe.run.training import Step


class FakeTraining:
  """100 steps, 40 an epoch; every 10th is saved."""

  def __init__(self, steps_per_epoch=40.0, ended=''):
    self.config = types.SimpleNamespace(max_steps=100, eval_every=10, batch_tokens=512, patience=0)
    self.task = types.SimpleNamespace(dev_metric=None)
    self.dev_input = types.SimpleNamespace(positions=0)
    self.train_input = types.SimpleNamespace(steps_per_epoch=steps_per_epoch)
    self.said = []
    self.log = types.SimpleNamespace(say=self.said.append)
    self.reason_to_end = lambda: ended
    self.is_saved = lambda step: step % 10 == 0


@pytest.fixture
def now(monkeypatch):
  """Clock, in seconds."""
  now = [0.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
  return now


def after(now, training, seconds_of):
  """What is said while steps take seconds_of(number)."""
  hook = advice.Advice(training)
  hook.say_epoch()
  for number in range(1, 101):
    now[0] += seconds_of(number)
    hook(Step(number, {}, ends_call=True))
  return training.said


def test_an_epoch_then_once_how_long_it_takes(now):
  slow_at_first = lambda number: 60.0 if number <= 3 else 1000.0 if number % 10 == 1 else 0.5
  assert after(now, FakeTraining(), slow_at_first) == [
    'an epoch, as many examples as the corpus has, is about 40 steps; max_steps=100 makes 2.5 epochs',
    # Steps 4 to 10, 12 to 20 and 22 to 25 are counted: 11 and 21 had to wait for what was saved.
    '2 steps a second here: an epoch takes about 20 s, and the 75 steps that are left about 38 s, evaluations aside',
  ]


def test_few_slow_steps_are_enough(now):
  _, estimate = after(now, FakeTraining(), lambda number: 30.0)
  assert estimate.startswith('0.0333 steps a second here: an epoch takes about 20 min 0 s, and the 94 steps')


def test_the_estimate_has_the_forward_passes_of_evaluations(now):
  training = FakeTraining()
  training.dev_input.positions = 3 * 1024  # at 0.5 s for 512, a third of it without gradients: 1 s
  assert after(now, training, lambda number: 0.5)[1].endswith(
    # From step 25 on there are 8, at steps 30 to 100.
    'the 75 steps that are left about 46 s, evaluations included'
  )
  training = FakeTraining()
  training.dev_input.positions, training.task.dev_metric = 3 * 1024, 'BLEU'  # translating takes longer
  training.config.patience = 3
  assert after(now, training, lambda number: 0.5)[1].endswith(
    'the 75 steps that are left at most about 38 s, evaluations aside'
  )


def test_an_input_without_an_end_has_no_epoch_and_a_run_that_is_done_no_advice(now):
  (estimate,) = after(now, FakeTraining(steps_per_epoch=None), lambda number: 1.0)
  assert estimate.startswith('1 steps a second here: the 75 steps that are left about')
  training = FakeTraining(ended='max_steps')
  advice.Advice(training).say_epoch()
  assert not training.said


def test_steps_of_one_call_are_timed_together(now):
  training = FakeTraining()
  hook = advice.Advice(training)
  for number in range(1, 101):
    now[0] += 5.0 * (number % 5 == 0)
    hook(Step(number, {}, ends_call=number % 5 == 0))
  assert training.said[-1].startswith('1 steps a second here')


def routed(dropped):
  """Metrics of a step of 100 tokens with two choices each, of which so many are dropped."""
  return {'routing': {'layer': types.SimpleNamespace(tokens=100.0, dropped_R=np.array([dropped, 0.0]))}}


def test_a_logged_step_that_drops_more_than_a_fifth_of_its_choices_is_said_once():
  training = FakeTraining()
  training.is_logged = lambda step: step % 2 == 0
  notice = advice.DroppedNotice(training)
  for number, dropped in enumerate((41, 40, 80, 41, 90, 90), start=1):
    notice(Step(number, routed(float(dropped)), ends_call=True))
    notice(Step(number, {}, ends_call=True))  # of a model without experts
    assert len(training.said) == (number >= 4)
  assert training.said[0].startswith('step 4 dropped 20% of the choices of experts, ')


def said_of_system_time(monkeypatch, share_of, seconds=1.0, steps=100):
  """Steps at which the share of the system is said, while it has share_of(number) of `seconds` of a processor."""
  training, spent, at = FakeTraining(), [0.0, 0.0], []
  monkeypatch.setattr(os, 'times', lambda: types.SimpleNamespace(user=spent[0], system=spent[1]))
  hook = advice.SystemTimeNotice(training)
  for number in range(1, steps + 1):
    spent[0] += seconds * (1 - share_of(number))
    spent[1] += seconds * share_of(number)
    hook(Step(number, {}, ends_call=True))
    at += [number] * (len(training.said) - len(at))
  return training.said, at


def test_system_time_above_a_fifth_is_said_once_with_the_way_out(monkeypatch):
  said, at = said_of_system_time(monkeypatch, lambda number: 0.45)
  assert at == [23]  # 20 processor seconds after the three steps that may trace
  assert said[0].startswith('45% of the processor time of the last steps') and 'docs/questions.md' in said[0]


def test_system_time_below_a_fifth_or_of_tracing_is_not_said_and_a_later_rise_is(monkeypatch):
  assert said_of_system_time(monkeypatch, lambda number: 0.19) == ([], [])
  assert said_of_system_time(monkeypatch, lambda number: 1.0 if number <= 3 else 0.0) == ([], [])
  assert said_of_system_time(monkeypatch, lambda number: 0.0 if number <= 50 else 0.5)[1] == [63]
  assert said_of_system_time(monkeypatch, lambda number: 0.9, seconds=0.1) == ([], [])  # 9.7 processor seconds
