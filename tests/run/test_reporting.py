"""Log of a training run: totals over restarts, and dev losses of the parts of dev text."""

import json
import types

import numpy as np

from lingvo_moe.config import configuration
from lingvo_moe.inputs.feed import DevInput
from lingvo_moe.run import reporting
from lingvo_moe.tasks.task import task_of

TASK = task_of(configuration.resolve('mt.cldr.Tiny', '', ['Tiny.log_every = 20']))


def lines(path):
  return [json.loads(line) for line in (path / 'train.jsonl').read_text().splitlines()]


def train(path, first, last):
  """Steps of 128 target and 100 source tokens; the last is saved."""
  log = reporting.TrainLog(str(path), TASK, first)
  metrics = dict.fromkeys(('objective', 'xent', 'aux_loss', 'grad_norm', 'learning_rate'), 1.0)
  metrics |= {'target_tokens': 128.0, 'source_tokens': 100.0, 'routing': {}}
  for step in range(first + 1, last + 1):
    log.step(step, metrics, write=step % TASK.config.log_every == 0)
  log.flush(last)
  log.close()


def test_tokens_of_steps_that_were_not_logged_are_counted_over_restarts(tmp_path):
  train(tmp_path, 0, 19)
  train(tmp_path, 19, 38)
  train(tmp_path, 38, 40)
  logged = lines(tmp_path)
  assert [line['step'] for line in logged] == [19, 20, 38, 40]
  assert [line['target_tokens_so_far'] for line in logged] == [128.0 * n for n in (19, 20, 38, 40)]
  assert [line['source_tokens_so_far'] for line in logged] == [100.0 * n for n in (19, 20, 38, 40)]
  assert ['loss' in line for line in logged] == [False, True, False, True]
  assert sorted(line['seconds_so_far'] for line in logged) == [line['seconds_so_far'] for line in logged]


def test_a_part_of_dev_text_without_tokens_has_no_dev_loss():
  metrics = {
    'xent': 6.0,
    'target_tokens': 3.0,
    'xent_by_pair': np.array([6.0, 0.0]),
    'target_tokens_by_pair': np.array([3.0, 0.0]),
  }

  class Dev(DevInput):
    subsets, content_hash = ('de-en', 'xx-en'), ''

    def __iter__(self):
      return iter([{}])

  runtime = types.SimpleNamespace(eval_step=lambda batch: metrics)
  found = reporting.evaluate(TASK, runtime, Dev())
  assert (found.mean, found.by_subset) == (2.0, {'de-en': 2.0, 'xx-en': None})
