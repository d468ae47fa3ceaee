"""Signals that end training early, its state saved: SIGTERM, SIGINT and SIGHUP."""

import os
import signal
import sys
import time

from lingvo_moe.run.training import Step, Training

_EXCHANGE_SECONDS = 1.0  # between two calls in which processes exchange signals


class StoppedBySignal(Exception):
  """Training stopped, its state saved."""

  def __init__(self, number: signal.Signals, step: int):
    super().__init__(f'{number.name}: saved step {step}; the same command goes on from there')
    self.exit_status = 128 + number  # as of a process that a signal ends; a scheduler tells it from a finished run


class Signals:
  """Notes SIGTERM, SIGINT or SIGHUP, once installed, for StopOnSignal; a second SIGINT interrupts at once.

  Before `in_loop` is set there is nothing to save, and each of them ends the process at once. SIGHUP counts unless it
  is ignored, as under nohup. It may mean that the terminal is gone; output then goes nowhere.
  """

  def __init__(self):
    self.received: signal.Signals | None = None
    self.in_loop = False
    self._terminals: list[int] = []

  def install(self) -> None:
    """Handles the signals of this process from now on."""
    signal.signal(signal.SIGTERM, self._note)
    signal.signal(signal.SIGINT, self._note)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
      self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
      signal.signal(signal.SIGHUP, self._hang_up)

  def _note(self, number, frame):
    del frame
    if number == signal.SIGINT and (self.received is not None or not self.in_loop):
      raise KeyboardInterrupt
    if not self.in_loop:
      sys.exit(128 + number)
    self.received = signal.Signals(number)

  def _hang_up(self, number, frame):
    for fd in self._terminals:
      if not os.isatty(fd):  # to write there would be an error, and nothing would be saved
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    self._note(number, frame)


class StopOnSignal:
  """Saves and raises StoppedBySignal once a process of the run has received SIGTERM, SIGINT or SIGHUP.

  Several processes exchange signals after the same steps, about once a second, and then commit a checkpoint that all of
  them have written meanwhile.
  """

  def __init__(self, training: Training, signals: Signals):
    self._training = training
    self._signals = signals
    self._last = self._next = training.runtime.step
    self._exchanged = time.monotonic()

  def __call__(self, step: Step) -> None:
    if not step.ends_call or step.number < self._next:
      return
    training = self._training
    received = self._signals.received  # read once: a signal that comes later is for the next call
    until_next = min(training.runtime.gather(0 if received else self._steps_a_second(step.number)))
    if not until_next:
      training.save(wait=True)
      raise StoppedBySignal(received or signal.SIGTERM, step.number)
    self._last, self._next, self._exchanged = step.number, step.number + until_next, time.monotonic()
    training.saver.commit_if_written()

  def _steps_a_second(self, step: int) -> int:
    """Steps until the next exchange, from the pace since the last one; with one process, 1."""
    made = step - self._last
    if self._training.runtime.process_count == 1 or not made:
      return 1
    pace = made / (time.monotonic() - self._exchanged)
    return max(1, min(round(pace * _EXCHANGE_SECONDS), 2 * made))  # 2: a fast stretch says little about the next
