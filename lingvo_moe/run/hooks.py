"""Hooks of the training loop: each is called with every step, and does one thing.

check_finite   ends a run that diverged
Log            writes the log
LogRouting     writes which experts are used
Advice         says how long training takes (advice.py)
Save           saves checkpoints
Evaluation     computes the dev loss (evaluation.py)
StopOnSignal   saves and stops after SIGTERM, SIGINT or SIGHUP (signals.py)
"""

from __future__ import annotations

import math

from lingvo_moe.run.routing_log import RoutingLog
from lingvo_moe.run.training import Diverged, Step, Training
from lingvo_moe.tasks.metrics import loads


def check_finite(step: Step) -> None:
  """Raises Diverged when the loss or the gradient is not finite."""
  loss, grad_norm = step.metrics['loss'], step.metrics['grad_norm']
  if not (math.isfinite(loss) and math.isfinite(grad_norm)):
    raise Diverged(step.number, f'loss={loss}, grad_norm={grad_norm}')


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
    if training.group.is_leader:
      self._log = RoutingLog(training.run.path, training.config.max_steps, training.runtime.step)

  def __call__(self, step: Step) -> None:
    if self._log:
      self._log.step(step.number, loads(step.metrics))


class Save:
  """Saves the state every save_every and every eval_every steps, in the background."""

  def __init__(self, training: Training):
    self._training = training

  def __call__(self, step: Step) -> None:
    if self._training.is_saved(step.number):
      self._training.save()
