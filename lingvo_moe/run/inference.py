"""Loading a run for inference: its configuration, a checkpoint, and the weights."""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks.task import TaskConfig


def load_config(run: RunDir, model: str | None = None, **overrides) -> TaskConfig:
  """The configuration of a run, with the overrides that are not None in place of its own values.

  Raises:
    UserError: there is no run, or it is not of `model`, or it has no such field, or a value is out of its range.
  """
  name, config = run.load()
  if model and model != name:
    raise UserError(
      f'{run.path} holds a run of {name}, not of --model={model}: leave --model out, '
      'or give the --logdir of the other run'
    )
  overrides = {field: value for field, value in overrides.items() if value is not None}
  known = [field.name for field in dataclasses.fields(config)]
  for field in overrides:
    if field not in known:
      raise UserError(f'{name} has no field {field!r}, so that --{field} has no meaning; {closest(field, known)}')
  return dataclasses.replace(config, **overrides)


def choose_step(checkpoints: Checkpoints, step: int | None = None, which: str = 'last') -> int:
  """The given step, or that of a checkpoint by its rank; UserError if there is none.

  Args:
    checkpoints: of the run.
    step: a step, or None.
    which: 'best': the lowest dev loss; 'last': the newest; 'best if evaluated': the newest where no dev loss is known.
  """
  if step is not None:
    return step
  best = checkpoints.best() if which != 'last' else None
  if best is None and which == 'best':
    raise UserError(f'no checkpoint in {checkpoints.directory} was evaluated on dev: use --step=N, or leave --best out')
  step = best.step if best else checkpoints.latest()
  if step is None:
    raise UserError(
      f'there is no checkpoint in {checkpoints.directory} yet: train first, or let the decoder wait '
      'for one, without --once'
    )
  return step


def describe_step(checkpoints: Checkpoints, step: int) -> str:
  """A checkpoint in words: 'step 600, the best by dev loss (1.234); the newest is of step 900'."""
  best, ranks = checkpoints.best(), {}
  if best is not None:
    ranks[f'the best by dev loss ({best.loss:.4g})'] = best.step
  ranks['the newest'] = checkpoints.latest()
  own = [rank for rank, its_step in ranks.items() if its_step == step]
  others = [f'{rank} is of step {its_step}' for rank, its_step in ranks.items() if its_step != step]
  return '; '.join([', '.join([f'step {step}', *own]), *others])


def load_weights(runtime: Runtime, checkpoints: Checkpoints, step: int) -> None:
  """Loads the weights of a checkpoint, and not the optimiser's slots."""
  specs = {name: spec.shape for name, spec in runtime.program.weight_specs.items()}
  runtime.load({'step': np.asarray(step), 'weights': checkpoints.restore(step, specs)})
