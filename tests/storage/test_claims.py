"""Claims of processes on pieces of work: when one is taken over."""

import os
import socket
import time

import pytest

from lingvo_moe.storage.claims import Claims


@pytest.fixture
def now(monkeypatch):
  """Clock, in seconds."""
  now = [1000.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  return now


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / 'claim')


def test_a_claim_of_another_machine_is_taken_over_after_two_minutes_without_a_renewal(path, now):
  other = Claims()
  other._holder = 'elsewhere 1 abc'
  assert other.take(path)
  claims = Claims()
  assert not claims.take(path)  # first seen at 0 s
  for passed, taken in ((11, False), (60, False), (120, False), (121, True)):
    now[0] = 1000.0 + passed
    assert claims.take(path) == taken, passed


def test_a_claim_that_is_renewed_stays_with_its_holder(path, now):
  holder, claims = Claims(), Claims()
  holder._holder = 'elsewhere 1 abc'
  assert holder.take(path) and not claims.take(path)
  for _ in range(20):
    now[0] += 21
    holder.renew()
    assert not claims.take(path)


def test_a_claim_of_a_process_that_runs_here_is_kept_and_one_that_ended_is_taken_at_once(path, now):
  with Claims() as mine:
    assert mine.take(path)
    assert not Claims().take(path)
  assert not os.path.exists(path) and not mine.take(path)  # given back, and closed
  pid = os.fork()
  if not pid:
    os._exit(0)
  os.waitpid(pid, 0)
  with open(path, 'w') as f:
    f.write(f'{socket.gethostname()} {pid} abc')
  assert Claims().take(path)


def test_a_claim_of_a_process_of_another_user_is_kept(path, now, monkeypatch):
  def kill(pid, signal):
    raise PermissionError

  with open(path, 'w') as f:
    f.write(f'{socket.gethostname()} 1 abc')
  monkeypatch.setattr(os, 'kill', kill)
  claims = Claims()
  assert not claims.take(path)
  now[0] += 121
  assert claims.take(path)
