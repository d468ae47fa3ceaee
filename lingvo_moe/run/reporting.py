"""Logs of a training run: progress, scalars as JSON lines and in TensorBoard's event file, and which experts are used.

routing.jsonl      {"step", "steps", "choices": {layer: [E]}} for each fiftieth of a run: the choices with a slot of
                   every expert, summed over the `steps` steps up to `step`. A resumed run has the steps since.
dev_routing.json   {"step", "subsets": [P], "choices": {layer: [P, E]}}: the same of each part of the dev text
"""

import contextlib
import datetime
import errno
import math
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe.core import errors
from lingvo_moe.core.progress import Progress
from lingvo_moe.inputs.feed import DevInput
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.storage import files, json_files, log_directory
from lingvo_moe.tasks.metrics import by_unit, loads
from lingvo_moe.tasks.task import Task

_ROUTING_LINES = 50  # of a whole run


class DevLoss(NamedTuple):
  """Mean cross-entropy in nats a target token."""

  mean: float  # over all tokens
  by_subset: dict[str, float | None]  # None: no token
  by_unit: Mapping[str, float] = types.MappingProxyType({})  # perplexity a word, bits a byte, where these are counted
  choices: Mapping[str, np.ndarray] = types.MappingProxyType({})  # by MoE layer: of each expert, by subset [P, E]
  text: str = ''  # DevInput.content_hash of what it was measured on, and what else losses are compared by
  scores: Mapping[str, float] = types.MappingProxyType({})  # of Task.dev_scores


def evaluate(
  task: Task, runtime: Runtime, dev: DevInput, give_up: Callable[[], object] = lambda: False
) -> DevLoss | None:
  """The loss on dev text; None if `give_up` came true meanwhile."""
  xent_P, tokens_P = np.zeros(len(dev.subsets)), np.zeros(len(dev.subsets))
  xent = tokens = 0.0
  choices: dict[str, np.ndarray] = {}
  for batch in dev:
    if give_up():
      return None
    metrics = runtime.eval_step(batch)
    xent += float(metrics['xent'])
    tokens += float(metrics['target_tokens'])
    xent_P += metrics[f'xent_by_{task.subset}']
    tokens_P += metrics[f'target_tokens_by_{task.subset}']
    for layer, choices_PE in metrics.get(f'choices_by_{task.subset}', {}).items():
      choices[layer] = choices.get(layer, 0.0) + np.asarray(choices_PE, np.float64)
  by_subset = {
    name: float(of_subset / count) if count else None
    for name, of_subset, count in zip(dev.subsets, xent_P, tokens_P, strict=True)
  }
  units = by_unit(xent, **dev.units) if dev.units else {}
  return DevLoss(xent / max(tokens, 1.0), by_subset, units, choices, dev.content_hash)


class TrainLog:
  """Log of a run from `first_step` on.

  Lines of train.jsonl beyond that step, left by a process that died after its last checkpoint, are dropped, since their
  steps are made again. Every line has its time (UTC), and the seconds of work and the tokens of training
  (Task.token_counts) since the run began, over all restarts; time between them is not counted, nor are steps that
  were lost. A checkpoint of a step that was not logged has a line of these alone.
  """

  def __init__(self, logdir: str, task: Task, first_step: int):
    self._task = task
    self._logdir = logdir
    self._path = os.path.join(logdir, log_directory.TRAIN_LOG)
    self._totals = dict.fromkeys(('seconds', *task.token_counts), 0.0)
    self._measured: dict[tuple[int, str], tuple[float, float | None]] = {}
    kinds = {log_directory.so_far(name): json_files.optional(json_files.NUMBER) for name in self._totals}
    json_files.keep_lines_up_to(self._path, first_step, self._note, **kinds)
    self._started = time.perf_counter() - self._totals['seconds']
    self._file = files.append(self._path)
    self._events = EventFile(logdir)
    self._routing = RoutingLog(logdir, task.config.max_steps, first_step)
    self._progress = Progress(task.config.max_steps, 'step', initial=first_step)
    self._waited = 0.0
    self._unlogged = False  # whether steps were made since the last line
    self._reset()

  @contextlib.contextmanager
  def waiting(self):
    """Times how long the loop waits for its next batch."""
    start = time.perf_counter()
    yield
    self._waited += time.perf_counter() - start

  def step(self, step: int, metrics: Mapping, write: bool) -> None:
    """Counts a step; with `write`, also logs its scalars and the pace since the last step that was logged."""
    for name in self._task.token_counts:
      self._tokens += float(metrics[name])
      self._totals[name] += float(metrics[name])
    self._unlogged = True
    if write:
      elapsed = time.perf_counter() - self._since
      pace = {'tokens_per_second': self._tokens / elapsed, 'input_wait_share': self._waited / elapsed}
      values = {'objective': float(metrics['objective']), **self._task.scalars(metrics), **pace}
      self._write(step, values)
      self._progress.show(loss=f'{values["loss"]:.3f}', **{'tokens/s': f'{pace["tokens_per_second"]:.0f}'})
      self._reset()
    self._progress.update()
    self._routing.step(step, loads(metrics))

  def evaluation(self, step: int, loss: DevLoss) -> None:
    """Logs a dev loss; the pace of training does not count evaluating."""
    if loss.choices:
      routing = {'step': step, 'subsets': list(loss.by_subset), 'choices': _as_integers(loss.choices)}
      files.write(os.path.join(self._logdir, log_directory.DEV_ROUTING), json_files.dump(routing))
    values = {'dev_loss': loss.mean, 'dev_perplexity': math.exp(min(loss.mean, 50.0))}
    values |= {f'dev_{name.lower()}': value for name, value in {**loss.by_unit, **loss.scores}.items()}
    self._write(step, values, {log_directory.dev_loss_by(self._task.subset): loss.by_subset, 'dev_text': loss.text})
    self._progress.write(f'step {step}: dev loss {loss.mean:.4f}')
    self._reset()

  def best_again(self, step: int, best_step: int, loss: DevLoss) -> None:
    """Logs, at a step, the dev loss of an earlier one, the best, that was measured on other dev text before."""
    scores = {f'dev_{name.lower()}_of_best': score for name, score in loss.scores.items()}
    self._write(step, {}, {'best_step': best_step, 'dev_loss_of_best': loss.mean, 'dev_text': loss.text, **scores})
    self._reset()

  def measured(self, step: int, text: str) -> tuple[float, float | None] | None:
    """Dev loss of a step on a text, and the score that ranks it, which were logged before this start."""
    return self._measured.get((step, text))

  def flush(self, step: int) -> None:
    """Makes sure that neither what was logged up to the checkpoint of a step is lost nor the totals so far."""
    if self._unlogged:
      self._write(step, {})
    files.sync(self._file)

  def say(self, text: str) -> None:
    """Prints a line above the progress bar."""
    self._progress.write(text)

  def end_progress(self) -> None:
    """Shows the last state of the progress, and a line end."""
    self._progress.close()

  def close(self) -> None:
    self.end_progress()
    self._file.close()
    self._events.close()

  def _write(self, step, values, nested=None):
    self._totals['seconds'] = time.perf_counter() - self._started
    so_far = {log_directory.so_far(name): total for name, total in self._totals.items()}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='milliseconds').replace('+00:00', 'Z')
    line = json_files.dump({'step': step, 'time': now, **so_far, **values, **(nested or {})})
    try:
      self._file.write(line)
      self._file.flush()
    except OSError as e:
      raise OSError(e.errno, e.strerror, self._path) from None  # a write that fails does not say to which file
    self._unlogged = False
    if values:
      self._events.write(step, values)

  def _note(self, line: Mapping[str, Any]) -> None:
    for name in self._totals:
      self._totals[name] = line.get(log_directory.so_far(name)) or self._totals[name]
    for step, loss in (('step', 'dev_loss'), ('best_step', 'dev_loss_of_best')):
      if loss in line:
        score = line.get(loss.replace('loss', (self._task.dev_metric or '').lower()))
        self._measured[line.get(step), line.get('dev_text')] = line[loss], score

  def _reset(self):
    self._tokens = 0.0
    self._waited = 0.0
    self._since = time.perf_counter()


class RoutingLog:
  """Sums of the choices of every expert, and the file they are written to.

  Lines of the file after `first_step` are dropped, since their steps are made again.
  """

  def __init__(self, logdir: str, max_steps: int, first_step: int):
    self._path = os.path.join(logdir, log_directory.ROUTING_LOG)
    self._max_steps = max_steps
    self._every = max(1, -(-max_steps // _ROUTING_LINES))
    self._steps = 0
    self._choices: dict[str, np.ndarray] = {}
    json_files.keep_lines_up_to(self._path, first_step)

  def step(self, step: int, loads: Mapping[str, np.ndarray]) -> None:
    """Adds the loads of a step, [E] by layer, and writes a line where one is due."""
    if not loads:
      return
    self._steps += 1
    for layer, load_E in loads.items():
      self._choices[layer] = self._choices.get(layer, 0.0) + np.asarray(load_E, np.float64)
    if step % self._every == 0 or step == self._max_steps:
      line = {'step': step, 'steps': self._steps, 'choices': _as_integers(self._choices)}
      with files.append(self._path) as f:
        f.write(json_files.dump(line))
      self._steps, self._choices = 0, {}


def _as_integers(choices: Mapping[str, np.ndarray]) -> dict[str, list]:
  return {layer: np.rint(counts).astype(np.int64).tolist() for layer, counts in choices.items()}


class NoLog:
  """TrainLog of a process other than the leader: writes nothing."""

  waiting = staticmethod(contextlib.nullcontext)
  step = evaluation = best_again = staticmethod(lambda *args, **kwargs: None)
  flush = say = end_progress = close = staticmethod(lambda *args: None)
  measured = staticmethod(lambda step, text: (math.nan, None))  # whether a loss was logged, the leader says


class EventFile:
  """Appends scalars to a new event file in a directory, without TensorBoard, which tf.summary.scalar needs.

  Its methods raise OSError where that cannot be written.
  """

  def __init__(self, directory: str):
    self._directory = directory
    with self._system_errors():
      self._writer = tf.summary.create_file_writer(directory)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """All of a step's scalars by tag, as one event."""
    value = [tf.compat.v1.Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
    with self._system_errors(), self._writer.as_default():
      tf.summary.experimental.write_raw_pb(tf.compat.v1.Summary(value=value).SerializeToString(), step=step)

  def close(self) -> None:
    with self._system_errors():
      self._writer.close()

  @contextlib.contextmanager
  def _system_errors(self) -> Iterator[None]:
    try:
      yield
    except tf.errors.OpError as e:
      raise OSError(errno.EIO, errors.reason(e), self._directory) from None
