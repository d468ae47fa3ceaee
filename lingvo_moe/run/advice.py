"""Advice before and during training: steps of an epoch, how long they take here, dropped choices, system time."""

import os
import time

from lingvo_moe.core.progress import duration
from lingvo_moe.optim import schedule
from lingvo_moe.run.training import Step, Training
from lingvo_moe.tasks import metrics

_SKIPPED = 3  # calls of the runtime that may trace and compile
_DROPPED = 0.2  # share of the choices of a step
_FORWARD = 1 / 3  # of a step's time, where no gradient is computed
_STEPS, _FEW_STEPS, _SECONDS = 20, 3, 60.0  # an estimate needs _STEPS, or _FEW_STEPS that took _SECONDS
_SYSTEM, _CPU_SECONDS = 0.2, 20.0  # share of the system in so many processor seconds


class Advice:
  """Advice on time: prints the steps of an epoch, if the input says it, then, as a hook, once how long one takes."""

  def __init__(self, training: Training):
    self._training = training
    self._epoch = 0.0 if training.reason_to_end() else training.train_input.steps_per_epoch or 0.0
    self._calls = self._steps = 0
    self._seconds = 0.0
    self._last: tuple[int, float] | None = None  # step and time of the last call
    self._said = False

  def say_schedule(self) -> None:
    """Prints what is left of the schedule, if its warm-up is too long for its end."""
    program, config = self._training.runtime.program, self._training.config
    if not self._training.reason_to_end() and (what := schedule.cut_short(program.schedule)):
      self._training.log.say(
        f'schedule={config.schedule} with max_steps={config.max_steps} and warmup_steps={config.warmup_steps}: {what}. '
        'Lower warmup_steps in a new run, or raise max_steps'
      )

  def say_epoch(self) -> None:
    """Prints how many steps an epoch has, and how many epochs the run."""
    if self._epoch:
      total = self._training.config.max_steps
      self._training.log.say(
        f'an epoch, as many examples as the corpus has, is about {max(self._epoch, 1):,.0f} steps; '
        f'max_steps={total} makes {total / self._epoch:.3g} epochs'
      )

  def __call__(self, step: Step) -> None:
    """Counts a step and its time, without those that save or evaluate; says the estimate once there are enough."""
    if self._said or not step.ends_call:
      return
    now, last = time.perf_counter(), self._last
    self._last = (step.number, now)
    self._calls += 1
    if last is None or self._calls <= _SKIPPED or self._training.is_saved(last[0]):
      return
    self._steps += step.number - last[0]
    self._seconds += now - last[1]
    if self._steps >= _STEPS or (self._steps >= _FEW_STEPS and self._seconds >= _SECONDS):
      self._said = True
      self._training.log.say(self._estimate(step.number))

  def _estimate(self, step: int) -> str:
    config, each = self._training.config, self._seconds / self._steps
    epoch = f'an epoch takes about {duration(each * self._epoch)}, and ' if self._epoch else ''
    left = max(config.max_steps - step, 0)
    positions = 0 if self._training.task.dev_metric else self._training.dev_input.positions
    evaluations = -(-config.max_steps // config.eval_every) - step // config.eval_every
    of_dev = each * evaluations * _FORWARD * positions / config.batch_tokens
    about = 'at most about' if config.patience else 'about'
    return (
      f'{1 / each:.3g} steps a second here: {epoch}the {left:,} steps that are left {about} '
      f'{duration(each * left + of_dev)}, evaluations {"included" if positions else "aside"}'
    )


class DroppedNotice:
  """Notice, printed once, of a logged step whose experts had no slot for more than a fifth of the tokens' choices."""

  def __init__(self, training: Training):
    self._training = training
    self._said = False

  def __call__(self, step: Step) -> None:
    if self._said or not self._training.is_logged(step.number):
      return
    if (share := metrics.dropped_share(step.metrics)) > _DROPPED:
      self._said = True
      self._training.log.say(
        f'step {step.number} dropped {share:.0%} of the choices of experts, which had no slot left. First steps may; '
        'if it stays so, raise aux_loss_weight, or begin a run with a larger capacity_factor, or None, which drops none'
      )


class SystemTimeNotice:
  """Notice, printed once, of steps in which the system has more than a fifth of the processor time."""

  def __init__(self, training: Training):
    self._training = training
    self._calls = 0
    self._since = os.times()
    self._said = False

  def __call__(self, step: Step) -> None:
    if self._said or not step.ends_call:
      return
    self._calls += 1
    now = os.times()
    if self._calls <= _SKIPPED:
      self._since = now
    user, system = now.user - self._since.user, now.system - self._since.system
    if user + system < _CPU_SECONDS:
      return
    self._since = now
    if (share := system / (user + system)) > _SYSTEM:
      self._said = True
      self._training.log.say(
        f"{share:.0%} of the processor time of the last steps is the operating system's, which mostly hands out "
        'memory and takes it back: docs/questions.md, "The system takes much of the time", has what helps'
      )
