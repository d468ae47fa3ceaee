"""A run as those see it who only use its weights: decoder and translate."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.run.checkpoint import Checkpoints
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks.mt.decoding import Translator
from lingvo_moe.tasks.mt.vocab import Vocab


def load_config(run: RunDir, model: str | None = None, **overrides) -> Any:
  """The configuration of a run, with the values that are not None in place of its own.

  Args:
    run: where.
    model: the name it must have; None: any.
    **overrides: fields; None leaves them.

  Raises:
    UserError: there is no run, or it is one of another model, or a value is out of its range.
  """
  name, config = run.load()
  if model and model != name:
    raise UserError(
      f'{run.path} holds a run of {name}, not of --model={model}: leave --model out, '
      'or give the --logdir of the other run'
    )
  return dataclasses.replace(config, **{field: value for field, value in overrides.items() if value is not None})


def choose_step(checkpoints: Checkpoints, step: int | None = None, best: bool = False) -> int:
  """The step that was asked for, or that of the best or of the newest checkpoint; UserError if there is none."""
  if step is None and best:
    found = checkpoints.best()
    if found is None:
      raise UserError(
        f'no checkpoint in {checkpoints.directory} was evaluated on dev: use --step=N, or leave --best out'
      )
    step = found[0]
  elif step is None:
    step = checkpoints.latest()
  if step is None:
    raise UserError(
      f'there is no checkpoint in {checkpoints.directory} yet: train first, or let the decoder wait '
      'for one, without --once'
    )
  return step


def translator(runtime: Runtime, config: Any, vocabs: tuple[Vocab, Vocab], **options) -> Translator:
  """Translates with the weights that a runtime holds; options are Translator's."""
  return Translator(config, vocabs, runtime.function, row_multiple=runtime.row_multiple, **options)


def load_weights(runtime: Runtime, checkpoints: Checkpoints, step: int) -> None:
  """Loads the weights of a checkpoint, and not the optimiser's slots."""
  specs = {name: spec.shape for name, spec in runtime.program.weight_specs.items()}
  runtime.load({'step': np.asarray(step), 'weights': checkpoints.restore(step, specs)})
