"""What a training run tells: a progress bar, TensorBoard's event file, and the same scalars as JSON lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tqdm

from lingvo_moe.run.event_file import EventFile
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks.mt.input import EvalInput


class DevLoss(NamedTuple):
  """Mean cross-entropy in nats a target token."""

  mean: float  # over all tokens
  by_pair: dict[str, float]


def evaluate(runtime: Runtime, dev: EvalInput, give_up: Callable[[], object] = lambda: False) -> DevLoss | None:
  """The loss of held-out text; None if `give_up` came true meanwhile."""
  xent_P, tokens_P = np.zeros(len(dev.pairs)), np.zeros(len(dev.pairs))
  xent = tokens = 0.0
  for batch in dev:
    if give_up():
      return None
    metrics = runtime.eval_step(batch)
    xent += float(metrics['xent'])
    tokens += float(metrics['target_tokens'])
    xent_P += metrics['xent_by_pair']
    tokens_P += metrics['target_tokens_by_pair']
  by_pair = dict(zip(dev.pairs, (xent_P / np.maximum(tokens_P, 1.0)).tolist(), strict=True))
  return DevLoss(xent / max(tokens, 1.0), by_pair)


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
  come again. Every line has the seconds of work and the source and target tokens of training since the run began, in all
  its processes one after the other: time between them is not counted, nor are steps that were lost.
  """

  def __init__(self, logdir: str, first_step: int, max_steps: int):
    self._path = os.path.join(logdir, 'train.jsonl')
    self._totals = dict.fromkeys(('seconds', 'source_tokens', 'target_tokens'), 0.0)
    self._totals |= _keep_lines_up_to(self._path, first_step, self._totals)
    self._begun = time.perf_counter() - self._totals['seconds']
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
    for side in ('source_tokens', 'target_tokens'):
      self._tokens += float(metrics[side])
      self._totals[side] += float(metrics[side])
    self._bar.update(1)
    if not write:
      return
    elapsed = time.perf_counter() - self._since
    pace = {'tokens_per_second': self._tokens / elapsed, 'input_wait_share': self._waited / elapsed}
    values = {**scalars(metrics), **pace}
    self._write(step, values)
    self._bar.set_postfix(loss=f'{values["loss"]:.3f}', tok_s=f'{pace["tokens_per_second"]:.0f}', refresh=False)
    self._reset()

  def evaluation(self, step: int, loss: DevLoss) -> float:
    """Logs a dev cross-entropy and returns its mean; the pace of training does not count evaluating."""
    values = {'dev_loss': loss.mean, 'dev_perplexity': math.exp(min(loss.mean, 50.0))}
    self._write(step, values, {'dev_loss_by_pair': loss.by_pair})
    self._bar.write(f'step {step}: dev loss {loss.mean:.4f}', file=sys.stderr)
    self._reset()
    return loss.mean

  def close(self) -> None:
    self._bar.close()
    self._file.close()
    self._events.close()

  def _write(self, step, values, nested=None):
    self._totals['seconds'] = time.perf_counter() - self._begun
    so_far = {f'{name}_so_far': total for name, total in self._totals.items()}
    self._file.write(json.dumps({'step': step, **so_far, **values, **(nested or {})}) + '\n')
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


def _keep_lines_up_to(path: str, step: int, totals: Mapping[str, float]) -> dict[str, float]:
  """Drops later lines of a log; returns the totals so far that the last line kept has, of those named."""
  if not os.path.exists(path):
    return {}
  partial = path + '.partial'
  if step == 0 and os.path.getsize(path):
    os.replace(path, path + '.old')  # of a run whose checkpoints are gone
    return {}
  last = {}
  with open(path, encoding='utf-8', errors='replace') as old, open(partial, 'w', encoding='utf-8') as new:
    for line in old:
      if _step_of(line) <= step:
        new.write(line)
        last = json.loads(line)
  os.replace(partial, path)
  return {name: last[f'{name}_so_far'] for name in totals if f'{name}_so_far' in last}


def _step_of(line: str) -> float:
  try:
    return json.loads(line)['step']
  except (ValueError, KeyError, TypeError):
    return math.inf  # cut short by the crash
