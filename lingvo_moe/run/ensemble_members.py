"""Ensembles: several runs, or checkpoints of one, that translate as one model."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks.task import TaskConfig, task_of


class Member(NamedTuple):
  """A further checkpoint of an ensemble."""

  run: RunDir
  config: TaskConfig
  step: int

  @classmethod
  def read(cls, name: str, first: RunDir) -> Self:
    """The checkpoint that 'RUN', 'RUN@STEP', 'RUN@best' or 'RUN@last' names; without RUN of the first."""
    path, _, which = name.rpartition('@') if '@' in name else (name, '', 'best if evaluated')
    run = RunDir(path, first.vocab_outside) if path else first
    step = int(which) if which.isdecimal() else None
    if step is None and which not in ('best', 'last', 'best if evaluated'):
      raise UserError(f'a run of an ensemble is RUN, RUN@STEP, RUN@best or RUN@last; saw {name!r:.80}')
    return cls(run, run.load_config(), run.checkpoints().choose(step, which))

  def __str__(self) -> str:
    return f'{self.run.path} at step {self.step}'


def joined(config: TaskConfig, members: Sequence[Member]) -> TaskConfig:
  """Configuration of a run with further members; itself without any."""
  if not members:
    return config
  return task_of(config).ensemble([(str(member), task_of(member.config)) for member in members])


def load_weights(runtime: Runtime, run: RunDir, step: int, members: Sequence[Member] = ()) -> None:
  """Loads the weights of a checkpoint, and those of further members, into a runtime."""
  if not members:
    run.checkpoints().load_weights(runtime, step)
    return
  if runtime.only_rows:
    raise UserError('an ensemble is for one CPU or GPU: leave --ensemble out, or --mesh and --num_processes')
  first = Member(run, run.load_config(), step)
  weights = {
    f'{i}/{name}': weight
    for i, member in enumerate((first, *members))
    for name, weight in member.run.checkpoints().merged(member.step, member.config).items()
  }
  runtime.load({'step': np.asarray(step), 'weights': weights})
