"""Hooks of the training loop: each is called with every step, and does one thing.

CheckFinite      ends a run that diverged
Log              writes the log
LogRouting       writes which experts are used
SaveAndEvaluate  saves checkpoints and computes the dev loss
StopOnSignal     saves and stops after SIGTERM, SIGINT or SIGHUP
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time

from lingvo_moe.core.errors import UserError
from lingvo_moe.run import reporting
from lingvo_moe.run import routing_log
from lingvo_moe.run import warm_start
from lingvo_moe.run.routing_log import RoutingLog
from lingvo_moe.run.training import Step
from lingvo_moe.run.training import Training
from lingvo_moe.tasks.metrics import loads

_TELL_SECONDS = 1.0  # between two calls in which processes tell each other of signals


class CheckFinite:
  """Raises UserError when the loss, the gradient or, before they are saved, the weights are not finite."""

  def __init__(self, training: Training):
    self._training = training

  def __call__(self, step: Step) -> None:
    loss, grad_norm = step.metrics['loss'], step.metrics['grad_norm']
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
      self._diverged(step.number, f'loss={loss}, grad_norm={grad_norm}')

  def check_weights(self) -> None:
    """A step can end with a finite loss and leave weights that are not finite; they must not be saved."""
    name = self._training.runtime.not_finite()
    if name:
      self._diverged(self._training.runtime.step, f'{name} is not finite')

  def _diverged(self, step, what):
    training = self._training
    training.saver.wait()
    kept = training.checkpoints.latest()
    good = f'the checkpoint of step {kept} is kept' if kept is not None else 'no checkpoint had been saved yet'
    training.run.finish(step, 'the loss was not finite')  # otherwise a decoder would wait for more
    raise UserError(
      f'the loss must stay finite; at step {step} {what} ({good}): lower learning_rate, lengthen warmup_steps or set '
      'clip_norm, in a new --logdir with --init_from if you like'
    )


class Log:
  """Writes a step's scalars to the log, every log_every steps."""

  def __init__(self, training: Training):
    self._training = training

  def __call__(self, step: Step) -> None:
    self._training.log.step(step.number, step.metrics, write=self._training.is_logged(step.number))


class LogRouting:
  """Writes the loads of all experts at intervals; see routing_log.py."""

  def __init__(self, training: Training):
    self._log = None
    if training.leads:
      self._log = RoutingLog(training.run.path, training.config.max_steps, training.runtime.step)

  def __call__(self, step: Step) -> None:
    if self._log:
      self._log.step(step.number, loads(step.metrics))


class SaveAndEvaluate:
  """Saves every save_every steps; saves and computes the dev loss every eval_every steps."""

  def __init__(self, training: Training, check: CheckFinite, signals: Signals):
    self._training = training
    self._check = check
    self._signals = signals

  def __call__(self, step: Step) -> None:
    if self._training.is_saved(step.number):
      self.save()  # first, since evaluating takes a while
    if self._training.is_evaluated(step.number):
      self._evaluate(step.number)

  def catch_up(self, resumed: bool) -> None:
    """Does what is due before the first step: the checkpoint of a run of no steps; dev losses.

    A dev loss is due where it was interrupted; and that of the best checkpoint where the dev text is another than it was
    measured on, unless nothing is evaluated any more.

    Raises:
      StoppedBySignal: that was interrupted again.
    """
    training = self._training
    step = training.runtime.step
    if not resumed and step == training.config.max_steps:
      self.save(wait=True)
    is_due = resumed and training.is_evaluated(step) and training.checkpoints.evaluation(step) is None
    if resumed and (is_due or step < training.config.max_steps):
      self._measure_best_again(step)
    if is_due and not self._evaluate(step):
      raise StoppedBySignal(self._signals.received, step)

  def _measure_best_again(self, step: int) -> None:
    """Measures the best checkpoint on the dev text there is, if its loss is of another; the state is then as before."""
    training = self._training
    text = training.dev_input.content_hash
    best_step, best = training.checkpoints.best_evaluation() or (step, None)
    if best is None or best.text == text:
      return
    loss = self._logged(best_step, text)
    if loss is None:
      if best_step != step:
        warm_start.resume(training.runtime, training.checkpoints, best_step)
      measured = self._measure()
      if best_step != step:
        warm_start.resume(training.runtime, training.checkpoints, step)
      if measured is None:
        raise StoppedBySignal(self._signals.received, step)
      training.log.best_again(step, best_step, measured)
      loss = measured.mean
    if training.leads:
      training.checkpoints.note_dev_loss(best_step, loss, text)
    training.runtime.agree(True)
    why = 'the dev text has changed' if best.text else 'an earlier version did not note the dev text of its losses'
    training.say(
      f'{why}: the best checkpoint, of step {best_step}, is measured again, so that later ones are compared with it: '
      f'dev loss {loss:.4f}, was {best.loss:.4f}'
    )

  def _logged(self, step: int, text: str) -> float | None:
    """Dev loss that was logged before a crash kept it from being noted beside its checkpoint."""
    logged = self._training.log.measured(step, text)
    # The leader process alone reads the log; in others the value is not used.
    has_one = self._training.runtime.agree(not self._training.leads or logged is not None)
    return (logged if self._training.leads else math.nan) if has_one else None

  def _measure(self) -> reporting.DevLoss | None:
    """Computes the dev loss; None if a signal came first."""
    training = self._training
    # Several processes evaluate to the end together: they could not give up at the same batch.
    alone = training.runtime.process_count == 1
    return reporting.evaluate(
      training.task, training.runtime, training.dev_input, lambda: alone and self._signals.received
    )

  def save(self, wait: bool = False) -> None:
    """Saves the runtime's state, in the background unless `wait`."""
    self._check.check_weights()
    self._training.log.flush(self._training.runtime.step)
    self._training.saver.save()
    if wait:
      self._training.saver.wait()

  def _evaluate(self, step: int) -> bool:
    """Computes and notes the dev loss; False if a signal came first."""
    training = self._training
    text = training.dev_input.content_hash
    loss = self._logged(step, text)
    if loss is None:
      measured = self._measure()
      training.saver.wait()
      if measured is None:
        return False
      if training.leads:
        routing_log.write_dev(training.run.path, step, list(training.dev_input.subsets), measured.choices)
      loss = training.log.evaluation(step, measured)
    if training.leads:
      training.checkpoints.note_dev_loss(step, loss, text)
    training.runtime.agree(True)  # so that every process sees the dev loss that was noted
    return True


class StoppedBySignal(Exception):
  """Training stopped, its state saved."""

  def __init__(self, number: signal.Signals, step: int):
    super().__init__(f'{number.name}: saved step {step}; the same command goes on from there')
    self.exit_status = 128 + number  # as of a process that a signal ends; a scheduler tells it from a finished run


class StopOnSignal:
  """Saves and raises StoppedBySignal once a process of the run has received SIGTERM, SIGINT or SIGHUP.

  Several processes tell each other after the same steps, about once a second, and then commit a checkpoint that all of
  them have written meanwhile.
  """

  def __init__(self, training: Training, saving: SaveAndEvaluate, signals: Signals):
    self._training = training
    self._saving = saving
    self._signals = signals
    self._last = self._next = training.runtime.step
    self._told = time.monotonic()

  def __call__(self, step: Step) -> None:
    if not step.ends_call or step.number < self._next:
      return
    training = self._training
    received = self._signals.received  # read once: a signal that comes later is for the next call
    until_next = min(training.runtime.gather(0 if received else self._steps_a_second(step.number)))
    if not until_next:
      self._saving.save(wait=True)
      raise StoppedBySignal(received or signal.SIGTERM, step.number)
    self._last, self._next, self._told = step.number, step.number + until_next, time.monotonic()
    training.saver.commit_if_written()

  def _steps_a_second(self, step: int) -> int:
    """Steps until the next call that tells, from the pace since the last one; with one process, 1."""
    made = step - self._last
    if self._training.runtime.process_count == 1 or not made:
      return 1
    pace = made / (time.monotonic() - self._told)
    return max(1, min(round(pace * _TELL_SECONDS), 2 * made))  # 2: a fast stretch says little about the next


class Signals:
  """Notes SIGTERM, SIGINT or SIGHUP for StopOnSignal; a second SIGINT interrupts at once.

  Before `in_loop` is set there is nothing to save, and each of them ends the process at once. SIGHUP counts unless it is
  ignored, as under nohup. It may mean that the terminal is gone; output then goes nowhere.
  """

  def __init__(self):
    self.received: signal.Signals | None = None
    self.in_loop = False
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
