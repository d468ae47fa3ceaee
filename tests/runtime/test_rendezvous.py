"""Rendezvous of the processes of a run: who is waited for, mistakes, strangers; in threads, without JAX."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time

import pytest

from lingvo_moe.cli.commands import launch as launcher
from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime import rendezvous


class Meeting:
  """Processes that meet at one address, each in a thread."""

  def __init__(self, seconds=20.0):
    self.address = f'127.0.0.1:{launcher.free_port()}'
    self.seconds = seconds
    self.said = []
    self.errors = {}
    self.arrived = []
    self._threads = []

  def join(self, index, count):
    def run():
      try:
        rendezvous.meet(self.address, count, index, self.seconds, self.said.append)
        self.arrived.append(index)
      except UserError as e:
        self.errors[index] = str(e)

    self._threads.append(threading.Thread(target=run))
    self._threads[-1].start()

  def end(self):
    for thread in self._threads:
      thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in self._threads)


@pytest.mark.parametrize('order', [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_all_go_on_when_the_last_has_come(order):
  meeting = Meeting()
  for index in order[:-1]:
    meeting.join(index, 4)
  time.sleep(0.3)
  assert not meeting.arrived
  meeting.join(order[-1], 4)
  meeting.end()
  assert sorted(meeting.arrived) == [0, 1, 2, 3] and not meeting.errors
  with socket.create_server(('127.0.0.1', int(meeting.address.rpartition(':')[2]))):
    pass  # the port is free again


def test_a_wait_says_for_whom_and_where_and_ends_in_one_line(monkeypatch):
  monkeypatch.setattr(rendezvous, '_FIRST_WORD_SECONDS', 0)
  monkeypatch.setattr(rendezvous, '_WORD_SECONDS', 0.1)
  meeting = Meeting(seconds=2.0)
  meeting.join(0, 4)
  meeting.join(2, 4)
  meeting.end()
  assert any(
    line.startswith(f'process 0 of 4 waits for processes 1, 3, at {meeting.address} (') for line in meeting.said
  )
  assert any(line.startswith('process 2 of 4 waits for') for line in meeting.said)
  assert meeting.errors[0] == (
    f'process 0 of 4 waited 2 s for processes 1, 3, at {meeting.address}: start all processes, with the same '
    'coordinator, or wait longer by --connect_seconds'
  )
  assert meeting.errors[2] == meeting.errors[0] and not meeting.arrived  # process 0 tells the others


def test_a_process_waits_for_process_0():
  meeting = Meeting(seconds=0.5)
  meeting.join(1, 2)
  meeting.end()
  assert meeting.errors[1].startswith(f'process 1 of 2 waited 0.5 s for process 0, at {meeting.address}')


@pytest.mark.parametrize(
  'others, met',
  [([(1, 3), (1, 3)], 'process 1 of 3 twice'), ([(1, 2)], 'process 1 of 2'), ([(5, 6)], 'process 5 of 6')],
)
def test_processes_that_disagree_are_told(others, met):
  meeting = Meeting()
  meeting.join(0, 3)
  for index, count in others:
    meeting.join(index, count)
  meeting.end()
  assert met in meeting.errors[0] and 'different numbers below one --num_processes' in meeting.errors[0]
  assert meeting.errors[others[0][0]] == meeting.errors[0] and not meeting.arrived


def test_strangers_and_processes_that_come_and_go_are_not_counted():
  meeting = Meeting()
  meeting.join(0, 3)
  host, _, port = meeting.address.rpartition(':')
  for word in (b'GET / HTTP/1.1\r\n\r\n', b'', b'\xff' * 2000, b'lingvo_moe: process 1 of 3\n'):
    with contextlib.suppress(ConnectionRefusedError):
      time.sleep(0.2)
      with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(word)
  meeting.join(2, 3)
  time.sleep(0.5)
  assert not meeting.arrived
  meeting.join(1, 3)
  meeting.end()
  assert sorted(meeting.arrived) == [0, 1, 2]


def test_an_address_where_something_else_answers_is_tried_again():
  meeting = Meeting()
  port = int(meeting.address.rpartition(':')[2])
  with socket.create_server(('127.0.0.1', port)) as other:
    meeting.join(1, 2)
    connection, _ = other.accept()
    with connection:
      connection.sendall(b'\x00\x00\x18\x04\xff\xff')  # as gRPC does, which JAX's coordinator speaks
  meeting.join(0, 2)
  meeting.end()
  assert sorted(meeting.arrived) == [0, 1]


def test_a_port_that_is_taken_and_an_address_that_is_none():
  with socket.create_server(('', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f'process 0 listens at port {port} of --coordinator=h:{port}, which it cannot'):
      rendezvous.meet(f'h:{port}', 2, 0, 1.0, print)
  for address in ('nowhere', ':1', 'h:0', 'h:70000', 'h:x'):
    with pytest.raises(UserError, match='--coordinator is HOST:PORT, such as node0:7000; saw'):
      rendezvous.meet(address, 2, 1, 1.0, print)


def test_a_signal_ends_a_wait_at_once(monkeypatch):
  monkeypatch.setattr(rendezvous, '_FIRST_WORD_SECONDS', 0)
  previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
  begun = time.monotonic()
  timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
  try:
    with pytest.raises(SystemExit) as ended:
      rendezvous.meet(f'127.0.0.1:{launcher.free_port()}', 2, 0, 60.0, lambda line: timer.start())
  finally:
    timer.join()
    signal.signal(signal.SIGTERM, previous)
  assert ended.value.code == 143 and time.monotonic() - begun < 10
