"""Evaluation of a training run: the dev loss at intervals, noted beside the checkpoint of its step."""

import dataclasses
import time
from collections.abc import Callable

from lingvo_moe.run import reporting, warm_start
from lingvo_moe.run.signals import Signals, StoppedBySignal
from lingvo_moe.run.training import Step, Training


@dataclasses.dataclass(frozen=True)
class EvaluationHook:
  """Hook that computes the dev loss every eval_every steps, after their state is saved, since evaluating takes a while.

  Raises StoppedBySignal where a signal comes meanwhile.
  """

  training: Training
  signals: Signals

  def __call__(self, step: Step) -> None:
    if self.training.is_evaluated(step.number):
      self._evaluate(step.number)

  def catch_up(self) -> None:
    """Computes dev losses that are due before the first step of a run that goes on.

    A dev loss is due where it was interrupted; and that of the best checkpoint where the dev text is another than it
    was measured on, unless nothing is evaluated any more.
    """
    training = self.training
    step = training.runtime.step
    is_due = training.is_evaluated(step) and training.checkpoints.evaluation(step) is None
    if training.is_resumed and (is_due or step < training.config.max_steps):
      self._measure_best_again(step)
    if training.is_resumed and is_due:
      self._evaluate(step)

  def _evaluate(self, step: int) -> None:
    """Computes and notes the dev loss of the runtime's state."""

    def measure():
      measured = self._measure(step)
      self.training.log.evaluation(step, measured)
      return measured

    self._note(step, measure)

  def _measure_best_again(self, step: int) -> None:
    """Measures the best checkpoint on the dev text there is, if its loss is of another; the state is then as before."""
    training, best = self.training, self.training.checkpoints.best()
    if best is None or best.dev_text == self._text:
      return

    def measure():
      if best.step != step:
        warm_start.resume(training.runtime, training.checkpoints, best.step)
      measured = self._measure(step)
      if best.step != step:
        warm_start.resume(training.runtime, training.checkpoints, step)
      training.log.best_again(step, best.step, measured)
      return measured

    loss = self._note(best.step, measure)
    why = 'the dev text has changed' if best.dev_text else 'an earlier version did not note the dev text of its losses'
    if best.metric != training.task.dev_metric:
      why = f'checkpoints are ranked by dev {training.task.dev_metric or "loss"} from now on'
    training.group.say(
      f'{why}: the best checkpoint, of step {best.step}, is measured again, so that later ones are compared with it: '
      f'dev loss {loss:.4f}, was {best.dev_loss:.4f}'
    )

  def _measure(self, step: int) -> reporting.DevLoss:
    """Computes the dev loss of the runtime's state; `step` is the one to go on from where a signal comes first."""
    training, signals = self.training, self.signals
    # Several processes evaluate to the end together: they could not give up at the same batch.
    give_up = lambda: training.runtime.process_count == 1 and signals.received
    measured = reporting.evaluate(training.task, training.runtime, training.dev_input, give_up)
    training.saver.wait()
    if measured is None:
      raise StoppedBySignal(signals.received, step)
    if training.task.dev_metric is None:
      return measured
    begin = time.perf_counter()
    scores = training.task.dev_scores(training.runtime, quiet=not training.group.is_leader)
    said = ', '.join(f'{name} {score:.2f}' for name, score in scores.items())
    training.log.say(f'greedy translations of dev text: {said}, in {time.perf_counter() - begin:.1f} s')
    return measured._replace(scores=scores, text=self._text)

  @property
  def _text(self) -> str:
    """What dev losses, and scores, have to be measured on to be compared."""
    text, metric = self.training.dev_input.content_hash, self.training.task.dev_metric
    return text if metric is None else f'{text} {metric} {self.training.config.best_by_sentences}'

  def _note(self, step: int, measure: Callable[[], reporting.DevLoss]) -> float:
    """Notes the dev loss of a checkpoint: the one logged, where a crash kept it from being noted, else as measured."""
    training, metric = self.training, self.training.task.dev_metric
    logged = training.log.measured(step, self._text)
    if training.runtime.agree(logged is not None):
      loss, score = logged
    else:
      measured = measure()
      loss, score = measured.mean, measured.scores.get(metric)
    if training.group.is_leader:
      counts = step % training.config.eval_every == 0  # and not at max_steps alone, which may be raised
      training.checkpoints.note_dev_loss(step, loss, self._text, metric, score, counts)
    training.runtime.agree(True)  # so that every process sees the dev loss that was noted
    return loss
