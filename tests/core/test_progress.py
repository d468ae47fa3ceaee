"""Progress of long work: plain lines in a log file, a bar that moves on a terminal of any width."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import time

import pytest

from lingvo_moe.core import progress
from lingvo_moe.core.progress import Progress


def test_a_log_file_gets_a_line_first_now_and_then_and_last(monkeypatch, capsys):
  now = [100.0]
  monkeypatch.setattr(progress, 'LINE_SECONDS', 20)
  monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
  with Progress(4, 'step') as found:
    now[0] += 5
    found.show(loss='2.5')
    found.update()
    now[0] += 19
    found.update()  # too soon for a line
    now[0] += 1
    found.update()
    found.write('a word')
    found.update()
  first, later, word, last = capsys.readouterr().err.splitlines()
  assert first == 'step 1 of 4, 5 s so far, loss 2.5'
  assert later == 'step 3 of 4, 25 s so far, 10 s left, loss 2.5'
  assert (word, last) == ('a word', 'step 4 of 4, 25 s so far, loss 2.5')


def test_what_was_done_before_counts_and_the_last_line_is_printed_once(capsys):
  with Progress(1200, 'step', initial=1199, label='x') as found:
    found.update()
  assert capsys.readouterr().err == 'x: step 1,200 of 1,200, 0 s so far\n'


def test_quiet_work_prints_nothing(capsys):
  with Progress(2, 'step', quiet=True) as found:
    found.update()
    found.write('a word')
  assert capsys.readouterr().err == ''


@contextlib.contextmanager
def terminal_of(columns, monkeypatch):
  """Standard error is a terminal of some columns; yields a list, which later has what was shown there."""
  monkeypatch.setattr(progress, '_TICK_SECONDS', 0.1)
  ours, theirs = pty.openpty()
  shown = []
  fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
  with os.fdopen(theirs, 'w') as terminal:
    monkeypatch.setattr(sys, 'stderr', terminal)
    yield shown
  shown.append(os.read(ours, 1 << 16).decode())
  os.close(ours)


@pytest.mark.parametrize('columns', [0, 100])
def test_a_bar_moves_while_nothing_is_done(columns, monkeypatch):
  with terminal_of(columns, monkeypatch) as shown, Progress(3, 'step') as found:
    found.update()
    time.sleep(2.3)
  assert '|' in shown[0] and '1/3' in shown[0]
  assert '00:01' in shown[0] and '00:02' in shown[0]


def test_a_bar_says_what_runs_while_no_unit_is_done_and_then_its_figures_again(monkeypatch):
  with terminal_of(100, monkeypatch) as shown, Progress(3, 'step') as found:
    found.show(loss='2.5')
    with progress.doing(lambda: 'compiling'), progress.doing(lambda: 'tracing decoder/layer_03'):
      time.sleep(1.3)
    found.update()
    time.sleep(0.5)
  during, _, after = shown[0].rpartition('tracing decoder/layer_03, 1 s')
  assert 'tracing decoder/layer_03, 0 s' in during and 'compiling' not in shown[0]
  assert '1/3' in after and 'loss=2.5' in after


def test_a_log_file_gets_a_line_now_and_then_of_what_runs_long(monkeypatch, capsys):
  monkeypatch.setattr(progress, 'LINE_SECONDS', 0.5)
  with Progress(3, 'step'), progress.doing(lambda: 'compiling'):
    with progress.doing(lambda: 'tracing softmax'):
      time.sleep(0.8)
    time.sleep(0.5)
  assert re.fullmatch(r'tracing softmax, \d s\ncompiling, 1 s\n', capsys.readouterr().err)


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [(0.4, '0 s'), (59.6, '1 min 0 s'), (200, '3 min 20 s'), (7500, '2 h 5 min'), (273600, '3 d 4 h')],
)
def test_durations_are_for_people(seconds, text):
  assert progress.duration(seconds) == text


def test_work_that_is_not_counted_is_said_at_once_and_now_and_then(monkeypatch):
  monkeypatch.setattr(progress, 'LINE_SECONDS', 0.05)
  with contextlib.redirect_stderr(io.StringIO()) as file, progress.working('compiling'):
    assert file.getvalue().splitlines()[0] == 'compiling ...'
    until = time.monotonic() + 60
    while file.getvalue().count('\n') < 2 and time.monotonic() < until:
      time.sleep(0.01)
  assert re.fullmatch(r'compiling \.\.\. \d+ s so far', file.getvalue().splitlines()[1])
