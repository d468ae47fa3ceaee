"""Signals of a trainer; what is done for them in a run is tested with the trainer."""

import os
import pty
import signal
import sys
import types

import pytest

from lingvo_moe.run.signals import Signals, StopOnSignal, StoppedBySignal
from lingvo_moe.run.training import Step

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers():
  before = {number: signal.getsignal(number) for number in NUMBERS}
  signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


def installed():
  signals = Signals()
  signals.install()
  return signals


@pytest.mark.parametrize('number', NUMBERS)
def test_a_signal_is_noted_in_the_loop_and_ends_the_process_before_it(number):
  signals = installed()
  with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as caught:
    os.kill(os.getpid(), number)
  assert number == signal.SIGINT or caught.value.code == 128 + number

  signals.in_loop = True
  os.kill(os.getpid(), number)

  assert signals.received == number
  assert StoppedBySignal(signals.received, 7).exit_status == 128 + number


def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored():
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
  signals = installed()
  signals.in_loop = True

  os.kill(os.getpid(), signal.SIGHUP)

  assert signals.received is None


def test_a_signal_within_a_call_of_several_steps_saves_the_state_at_its_end():
  saved = []
  runtime = types.SimpleNamespace(step=4, process_count=1, gather=lambda value: [value])
  training = types.SimpleNamespace(runtime=runtime, save=lambda wait: saved.append(wait))
  signals = Signals()
  signals.received = signal.SIGTERM
  stop = StopOnSignal(training, signals)
  stop(Step(5, {}, ends_call=False))
  assert not saved
  with pytest.raises(StoppedBySignal, match='SIGTERM: saved step 6'):
    stop(Step(6, {}, ends_call=True))
  assert saved == [True]


SCRIPT = """
import pathlib, sys, time
from lingvo_moe.run.signals import Signals

signals = Signals()
signals.install()
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
