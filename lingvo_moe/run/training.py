"""Training run that is set up, the stream of its steps, and hooks, which the loop calls with every step.

Other hooks: Advice (advice.py), Evaluation (evaluation.py) and StopOnSignal (signals.py).
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.inputs.feed import DevInput, TrainInput
from lingvo_moe.run.checkpoints import Checkpoints, Saver
from lingvo_moe.run.process_group import ProcessGroup
from lingvo_moe.run.reporting import NoLog, TrainLog
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.storage import log_directory
from lingvo_moe.tasks.task import Task, TaskConfig


class Diverged(Exception):
  """An objective, a gradient or a weight that is not finite, after a step."""

  def __init__(self, step: int, what: str):
    super().__init__(f'at step {step} {what}')
    self.step = step


class Step(NamedTuple):
  """A training step that was made."""

  number: int  # updates made with it, from 1
  metrics: Mapping[str, Any]  # the task's, 'grad_norm' and 'learning_rate'
  ends_call: bool  # whether it was the last of one call of the runtime, whose state is then that of this step


@dataclasses.dataclass(frozen=True)
class Training:
  """A run that is set up: what the loop and its hooks work with."""

  task: Task
  run: RunDir
  lock: IO | None  # keeps other trainers out of the log directory; None in processes that do not lead
  runtime: Runtime  # holds the state, which is restored or initialised
  train_input: TrainInput
  dev_input: DevInput
  saver: Saver
  log: TrainLog | NoLog  # from the restored step on
  group: ProcessGroup
  is_resumed: bool  # whether the state is of a checkpoint of the run

  @property
  def checkpoints(self) -> Checkpoints:
    return self.saver.checkpoints

  @property
  def config(self) -> TaskConfig:
    return self.task.config

  def reason_to_end(self) -> str:
    """'' while training goes on. Depends on the checkpoints alone, so that an interruption changes nothing."""
    if self.runtime.step >= self.config.max_steps:
      return 'max_steps'
    if self.config.patience and self._evaluations_without_gain() >= self.config.patience:
      return f'no gain on dev in {plural(self.config.patience, "evaluation")}'
    return ''

  def _evaluations_without_gain(self) -> int:
    best = self.checkpoints.best()
    if best is None:
      return 0
    if best.evaluated_after is None:
      return (self.runtime.step - best.step) // self.config.eval_every
    return sum(step <= self.runtime.step for step in best.evaluated_after)

  def save(self, wait: bool = False) -> None:
    """Saves the runtime's state, in the background unless `wait`.

    Raises:
      Diverged: a weight is not finite, as a step with a finite objective can leave it.
    """
    if name := self.runtime.not_finite():
      raise Diverged(self.runtime.step, f'{name} is not finite')
    self.log.flush(self.runtime.step)
    self.saver.save()
    if wait:
      self.saver.wait()

  def save_step(self, step: Step) -> None:
    """Saves the state every save_every and every eval_every steps, in the background."""
    if self.is_saved(step.number):
      self.save()

  def log_step(self, step: Step) -> None:
    """Logs a step's scalars, every log_every steps."""
    self.log.step(step.number, step.metrics, write=self.is_logged(step.number))

  def end(self, diverged: Diverged) -> UserError:
    """Marks the run as finished, as a decoder would wait for more; returns the error to raise."""
    self.saver.wait()
    last = self.checkpoints.latest()
    good = f'the checkpoint of step {last} is kept' if last is not None else 'no checkpoint had been saved yet'
    self.run.finish(diverged.step, log_directory.NOT_FINITE)
    return UserError(
      f'the loss must stay finite; {diverged} ({good}): lower learning_rate, lengthen warmup_steps or set clip_norm, '
      'in a new --logdir with --init_from if you like'
    )

  def is_logged(self, step: int) -> bool:
    return step % self.config.log_every == 0 or step == self.config.max_steps

  def is_evaluated(self, step: int) -> bool:
    return step % self.config.eval_every == 0 or step == self.config.max_steps

  def is_saved(self, step: int) -> bool:
    every = self.config.save_every
    return self.is_evaluated(step) or bool(every and step % every == 0)


def check_finite(step: Step) -> None:
  """Raises Diverged when the objective or the gradient is not finite."""
  objective, grad_norm = step.metrics['objective'], step.metrics['grad_norm']
  if not (math.isfinite(objective) and math.isfinite(grad_norm)):
    raise Diverged(step.number, f'objective={objective}, grad_norm={grad_norm}')


def steps(training: Training, steps_per_loop: int = 1) -> Iterator[Step]:
  """Makes training steps from the runtime's state on, until there is a reason to end."""
  config, runtime = training.config, training.runtime
  step = runtime.step
  stops = {config.log_every, config.eval_every, config.save_every, config.max_steps} - {0}
  calls = batches_by_call(training.train_input.dataset(step), step, steps_per_loop, stops)
  ends = bool(training.reason_to_end())
  while not ends:
    with training.log.waiting():
      batches = next(calls)
    for left, metrics in zip(reversed(range(len(batches))), runtime.train_steps(batches), strict=True):
      step += 1
      yield Step(step, metrics, ends_call=left == 0)
    ends = training.is_evaluated(step) and bool(training.reason_to_end())


def batches_by_call(
  batches: Iterable[Mapping], step: int, size: int, stops: Collection[int]
) -> Iterator[list[Mapping]]:
  """Groups batches into lists of one shape each, for one call of the runtime.

  Args:
    batches: from that of the first update after `step` on.
    step: updates made.
    size: most batches of a list.
    stops: a list ends at every multiple of one of them.
  """
  shapes = lambda batch: {name: tuple(x.shape) for name, x in batch.items()}
  call = []
  for batch in batches:
    if call and shapes(batch) != shapes(call[0]):
      yield call
      call = []
    call.append(batch)
    step += 1
    if len(call) == size or any(step % stop == 0 for stop in stops):
      yield call
      call = []
