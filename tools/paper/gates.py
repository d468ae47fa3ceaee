"""Comparison of gates from the runs that trained with them: quality, dropped choices, balance, entropy and pace."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import json_files, log_directory
from lingvo_moe.storage.log_directory import LogDirectory
from lingvo_moe.text import markdown

_LAST = 100  # lines of the training log over which statistics are averaged

COLUMNS = {
  'model': 'model',
  'gate': 'gate',
  'step': 'step',
  'bleu': 'BLEU',
  'dev_loss': 'dev loss',
  'dropped': 'dropped',
  'largest_load': 'largest load',
  'entropy': 'entropy',
  'seconds': 's/step',
}


def row(run: LogDirectory, split: str, step: int | None = None) -> dict[str, Any]:
  """Row of a run at a decoded step, by default the newest.

  BLEU is the mean over pairs. Of the last 100 logged steps: `dropped` is the number of choices without room per token
  (for expert choice the share of tokens that no expert took), `largest_load` the largest over the mean load of an
  expert, `entropy` that of the gate in nats, each a mean over MoE layers; `seconds` is the median of a step. An average
  of checkpoints has no dev loss, and of training what its run had.
  """
  steps = run.decoded_steps(split)
  if step is None and not steps:
    raise UserError(f'{run.path} has no translations of {split}: lingvo-moe decode {run.path} --split={split}')
  step = steps[-1] if step is None else step
  pairs = run.summary(split, step)['pairs'].values()
  log = [line for line in run.train_log() if line['step'] <= step]
  dev = [line['dev_loss'] for line in log if 'dev_loss' in line]
  trained = [line for line in log if 'loss' in line][-_LAST:]
  return {
    'model': run.model,
    'gate': run.values.get('gate', 'top2') if run.values.get('num_experts') else 'none (dense)',
    'step': step,
    'bleu': statistics.fmean(scores['bleu'] for scores in pairs),
    'dev_loss': dev[-1] if dev and not run.averaged else None,
    'dropped': _mean_over_layers(trained, log_directory.is_dropped),
    'largest_load': _mean_over_layers(trained, 'largest_load'.__eq__),
    'entropy': _mean_over_layers(trained, 'entropy'.__eq__),
    'seconds': _seconds_a_step(trained),
  }


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Markdown table of rows."""

  def cell(value):
    if value is None:
      return '-'
    return (
      f'{value:.3g}'
      if isinstance(value, float) and value < 10
      else f'{value:.1f}'
      if isinstance(value, float)
      else str(value)
    )

  return markdown.table(list(COLUMNS.values()), [[cell(row[name]) for name in COLUMNS] for row in rows], names=2)


def _mean_over_layers(log, is_counted: Callable[[str], bool]) -> float | None:
  """Mean over lines and MoE layers of the sum of the statistics that are counted."""
  layers = [of_layer for line in log for of_layer in log_directory.moe_metrics(line).values()]
  counted = [[value for name, value in of_layer.items() if is_counted(name)] for of_layer in layers]
  values = [sum(values) for values in counted if values]
  return statistics.fmean(values) if values else None


def _seconds_a_step(log) -> float | None:
  times = [(line['step'], line['seconds_so_far']) for line in log if json_files.NUMBER.fits(line.get('seconds_so_far'))]
  found = [(then - now) / (later - step) for (step, now), (later, then) in zip(times, times[1:]) if later > step]
  return statistics.median(found) if found else None
