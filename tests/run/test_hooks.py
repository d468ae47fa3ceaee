"""Signals of a trainer; what is done for them is tested with the trainer."""

from __future__ import annotations

import math
import os
import pty
import signal
import sys
import types

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.run import hooks
from lingvo_moe.run import reporting
from lingvo_moe.run.training import Step

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers():
  before = {number: signal.getsignal(number) for number in NUMBERS}
  signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize('number', NUMBERS)
def test_a_signal_is_noted_in_the_loop_and_ends_the_process_before_it(number):
  signals = hooks.Signals()
  with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
    os.kill(os.getpid(), number)
  assert number == signal.SIGINT or caught.value.code == 128 + number

  signals.in_loop = True
  os.kill(os.getpid(), number)

  assert signals.received == number
  assert hooks.StoppedBySignal(signals.received, 7).exit_status == 128 + number


def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored():
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
  signals = hooks.Signals()
  signals.in_loop = True

  os.kill(os.getpid(), signal.SIGHUP)

  assert signals.received is None


@pytest.mark.parametrize('loss, grad_norm', [(1.0, math.inf), (1.0, math.nan), (math.nan, 1.0), (-math.inf, 1.0)])
def test_a_loss_or_a_gradient_that_is_not_finite_stops_the_run(loss, grad_norm):
  ended = []
  training = types.SimpleNamespace(
    saver=types.SimpleNamespace(wait=lambda: None),
    checkpoints=types.SimpleNamespace(latest=lambda: 2),
    run=types.SimpleNamespace(finish=lambda *how: ended.append(how)),
  )
  check = hooks.CheckFinite(training)
  check(Step(6, {'loss': 1.0, 'grad_norm': 1e30}, True))
  with pytest.raises(
    UserError, match=f'at step 7 loss={loss}, grad_norm={grad_norm} .the checkpoint of step 2 is kept'
  ):
    check(Step(7, {'loss': loss, 'grad_norm': grad_norm}, True))
  assert ended == [(7, 'the loss was not finite')]


def test_a_signal_in_an_evaluation_that_is_caught_up_with_stops_the_run(monkeypatch):
  noted = {}

  class Checkpoints:
    evaluation = lambda self, step: noted.get(step)
    best_evaluation = lambda self: None
    note_dev_loss = lambda self, step, loss, text: noted.update({step: loss})

  training = types.SimpleNamespace(
    runtime=types.SimpleNamespace(step=3, process_count=1, agree=bool),
    task=None,
    config=types.SimpleNamespace(max_steps=3),
    checkpoints=Checkpoints(),
    saver=types.SimpleNamespace(wait=lambda: None),
    log=types.SimpleNamespace(evaluation=lambda step, loss: loss.mean, measured=lambda step, text: None),
    dev_input=types.SimpleNamespace(subsets=[], content_hash='all'),
    run=types.SimpleNamespace(path=''),
    leads=True,
    is_evaluated=lambda step: True,
  )
  signals = hooks.Signals()
  signals.in_loop = True
  save = hooks.SaveAndEvaluate(training, check=None, signals=signals)

  def interrupted(*args):
    os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(reporting, 'evaluate', interrupted)
  with pytest.raises(hooks.StoppedBySignal, match='SIGTERM: saved step 3') as stopped:
    save.catch_up(resumed=True)
  assert stopped.value.exit_status == 143 and not noted
  signals.received = None
  monkeypatch.setattr(hooks.routing_log, 'write_dev', lambda *args: None)
  monkeypatch.setattr(reporting, 'evaluate', lambda *args: reporting.DevLoss(2.0, {}))
  save.catch_up(resumed=True)
  assert noted == {3: 2.0}


def test_a_signal_within_a_call_of_several_steps_saves_the_state_at_its_end():
  saved = []
  runtime = types.SimpleNamespace(step=4, process_count=1, gather=lambda value: [value])
  training = types.SimpleNamespace(runtime=runtime, saver=types.SimpleNamespace(commit_if_written=lambda: None))
  saving = types.SimpleNamespace(save=lambda wait: saved.append(wait))
  stop = hooks.StopOnSignal(training, saving, types.SimpleNamespace(received=signal.SIGTERM))
  stop(Step(5, {}, ends_call=False))
  assert not saved
  with pytest.raises(hooks.StoppedBySignal, match='SIGTERM: saved step 6'):
    stop(Step(6, {}, ends_call=True))
  assert saved == [True]


SCRIPT = """
import pathlib, sys, time
from lingvo_moe.run import hooks

signals = hooks.Signals()
signals.in_loop = True
print('up', file=sys.stderr, flush=True)
while not signals.received:
  time.sleep(0.05)
print('to a terminal that is gone', file=sys.stderr, flush=True)
pathlib.Path(sys.argv[1]).write_text('saved')
"""


@pytest.mark.slow
def test_a_terminal_that_is_closed_does_not_keep_a_run_from_saving(tmp_path):
  child, terminal = pty.fork()
  if not child:
    os.execv(sys.executable, [sys.executable, '-c', SCRIPT, str(tmp_path / 'done')])
  said = b''
  while b'up' not in said:
    said += os.read(terminal, 1000)
  os.close(terminal)

  _, status = os.waitpid(child, 0)

  assert os.waitstatus_to_exitcode(status) == 0 and (tmp_path / 'done').read_text() == 'saved'
