"""What a training run tells: a progress bar, TensorBoard's event file, and the same scalars as JSON lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping

import tqdm

from lingvo_moe.event_file import EventFile
from lingvo_moe.runtime.runtime import Runtime


def evaluate(
  runtime: Runtime, batches: Iterable[Mapping], give_up: Callable[[], object] = lambda: False
) -> float | None:
  """Mean cross-entropy, in nats a target token, over all batches; None if `give_up` came true meanwhile."""
  xent = tokens = 0.0
  for batch in batches:
    if give_up():
      return None
    metrics = runtime.eval_step(batch)
    xent += float(metrics['xent'])
    tokens += float(metrics['target_tokens'])
  return xent / max(tokens, 1.0)


def scalars(metrics: Mapping) -> dict[str, float]:
  """The task's metrics by name; of every layer with experts: balance, drops and entropy."""
  tokens = max(float(metrics['target_tokens']), 1.0)
  flat = {
    'loss': metrics['loss'],
    'xent': metrics['xent'] / tokens,
    'aux_loss': metrics['aux_loss'],
    'grad_norm': metrics['grad_norm'],
    'learning_rate': metrics['learning_rate'],
    'target_tokens': metrics['target_tokens'],
  }
  for layer, stats in metrics['routing'].items():
    routed = max(float(stats.tokens), 1.0)
    flat.update(
      {
        f'moe/{layer}/aux_loss': stats.aux_loss / max(float(stats.groups), 1.0),
        f'moe/{layer}/first_dropped': stats.first_dropped / routed,
        f'moe/{layer}/second_dropped': stats.second_dropped / routed,
        f'moe/{layer}/second_skipped': stats.second_skipped / routed,
        f'moe/{layer}/entropy': stats.entropy / routed,
        f'moe/{layer}/largest_load': stats.tokens_E.max() / max(stats.tokens_E.mean(), 1e-9),
      }
    )
  return {name: float(value) for name, value in flat.items()}


class TrainLog:
  """The log of a run from `first_step` on.

  Lines of train.jsonl beyond that step, left by a run that died after its last checkpoint, are dropped: their steps
  come again.
  """

  def __init__(self, logdir: str, first_step: int, max_steps: int):
    self._path = os.path.join(logdir, 'train.jsonl')
    _keep_lines_up_to(self._path, first_step)
    self._file = open(self._path, 'a', encoding='utf-8')
    self._events = EventFile(logdir)
    interval = 0.5 if sys.stderr.isatty() else 30
    self._bar = tqdm.tqdm(total=max_steps, initial=first_step, unit='step', mininterval=interval, file=sys.stderr)
    self._waited = 0.0
    self._reset()

  @contextlib.contextmanager
  def waiting(self):
    """Times how long the loop waits for its next batch."""
    start = time.perf_counter()
    yield
    self._waited += time.perf_counter() - start

  def step(self, step: int, metrics: Mapping, write: bool) -> None:
    """Takes note of a step; with `write`, also logs its scalars and the pace since the last that was logged."""
    self._tokens += float(metrics['source_tokens'] + metrics['target_tokens'])
    self._bar.update(1)
    if not write:
      return
    elapsed = time.perf_counter() - self._since
    pace = {'tokens_per_second': self._tokens / elapsed, 'input_wait_share': self._waited / elapsed}
    values = {**scalars(metrics), **pace}
    self._write(step, values)
    self._bar.set_postfix(loss=f'{values["loss"]:.3f}', tok_s=f'{pace["tokens_per_second"]:.0f}', refresh=False)
    self._reset()

  def evaluation(self, step: int, dev_loss: float) -> float:
    """Logs a dev cross-entropy and returns it; evaluating does not count as training time."""
    self._write(step, {'dev_loss': dev_loss, 'dev_perplexity': math.exp(min(dev_loss, 50.0))})
    self._bar.write(f'step {step}: dev loss {dev_loss:.4f}', file=sys.stderr)
    self._reset()
    return dev_loss

  def close(self) -> None:
    self._bar.close()
    self._file.close()
    self._events.close()

  def _write(self, step, values):
    self._file.write(json.dumps({'step': step, **values}) + '\n')
    self._file.flush()
    self._events.write(step, values)

  def _reset(self):
    self._tokens = 0.0
    self._waited = 0.0
    self._since = time.perf_counter()


class NoLog:
  """What a process that does not lead has in place of a TrainLog."""

  def waiting(self):
    return contextlib.nullcontext()

  def step(self, step: int, metrics: Mapping, write: bool) -> None:
    """Not told."""

  def close(self) -> None:
    """Nothing to close."""


def _keep_lines_up_to(path: str, step: int) -> None:
  if not os.path.exists(path):
    return
  partial = path + '.partial'
  if step == 0 and os.path.getsize(path):
    os.replace(path, path + '.old')  # of a run whose checkpoints are gone
    return
  with open(path, encoding='utf-8', errors='replace') as old, open(partial, 'w', encoding='utf-8') as new:
    for line in old:
      if _step_of(line) <= step:
        new.write(line)
  os.replace(partial, path)


def _step_of(line: str) -> float:
  try:
    return json.loads(line)['step']
  except (ValueError, KeyError, TypeError):
    return math.inf  # cut short by the crash
