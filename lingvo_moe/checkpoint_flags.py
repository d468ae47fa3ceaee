"""Flags that choose a run, one of its checkpoints, and how it is decoded: the same for decoder and translate."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Self

from absl import flags

from lingvo_moe.core.errors import UserError

if TYPE_CHECKING:
  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.tasks.task import TaskConfig

# Flags that are fields of a configuration too.
_DECODING = (
  *('beam_size', 'length_norm_alpha'),
  *('search', 'sample_temperature', 'top_k', 'top_p', 'sample_seed', 'max_new_tokens'),
)


def define(best_by_default: bool = False) -> None:
  """Called where a job defines its own flags; not done by an import, as the trainer has flags of the same names.

  Args:
    best_by_default: what --help says of the checkpoint that the job uses; see Options.best_by_default.
  """
  flags.DEFINE_string('logdir', None, 'Log directory of the run, unless it is an argument.')
  flags.DEFINE_string(
    'model', None, "Name of the run's model, to have it checked; otherwise the log directory gives it."
  )
  flags.DEFINE_bool('vocab_outside', False, 'Read vocabularies that the run names outside its log directory.')
  default = 'the best, or the newest where none was evaluated' if best_by_default else 'the newest'
  flags.DEFINE_integer('step', None, f'Use the checkpoint of this step; default: {default}.')
  flags.DEFINE_enum(
    'checkpoint', None, ['best', 'last'], f'Use the one with the lowest dev loss, or the newest; default: {default}.'
  )
  flags.DEFINE_bool('best', False, '--checkpoint=best.')
  flags.DEFINE_integer('beam_size', None, "Hypotheses kept in beam search; default: the run's configuration.")
  flags.DEFINE_float('length_norm_alpha', None, "GNMT's length penalty alpha; default: the run's configuration.")
  flags.DEFINE_enum(
    'search', None, ['sample', 'greedy', 'beam'], 'How a language model goes on; default: as configured.'
  )
  flags.DEFINE_float('sample_temperature', None, 'Temperature of samples; default: as configured.')
  flags.DEFINE_integer('top_k', None, 'Samples draw from the k likeliest symbols; default: as configured.')
  flags.DEFINE_float(
    'top_p', None, 'Samples draw from the symbols that make up this probability; default: as configured.'
  )
  flags.DEFINE_integer('sample_seed', None, 'Seed of samples; default: as configured.')
  flags.DEFINE_integer('max_new_tokens', None, 'Most symbols of a continuation; default: as configured.')


@dataclasses.dataclass(frozen=True)
class Options:
  """Values of the flags, one field each. A job adds its own flags by a subclass.

  Attributes:
    best_by_default: whether the job uses the best checkpoint where none is chosen, and was evaluated; else the newest.
  """

  best_by_default: ClassVar[bool] = False

  logdir: str
  model: str | None = None
  vocab_outside: bool = False
  step: int | None = None
  best: bool = False
  checkpoint: str | None = None
  beam_size: int | None = None
  length_norm_alpha: float | None = None
  search: str | None = None
  sample_temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  sample_seed: int | None = None
  max_new_tokens: int | None = None

  def __post_init__(self):
    chosen = {'--step': self.step is not None, '--best': self.best, '--checkpoint': self.checkpoint is not None}
    chosen = [flag for flag, given in chosen.items() if given]
    if len(chosen) > 1:
      raise UserError(f'{" and ".join(chosen)} each choose a checkpoint: give one of them')

  @classmethod
  def from_flags(cls) -> Self:
    return cls(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(cls)})

  @property
  def run(self) -> RunDir:
    """The log directory."""
    from lingvo_moe.run.rundir import RunDir

    return RunDir(self.logdir, self.vocab_outside)

  def load_config(self, run: RunDir, **overrides) -> TaskConfig:
    """The run's configuration with the flags' values, and `overrides` that are not None, in place of its own."""
    from lingvo_moe.run import inference

    decoding = {name: getattr(self, name) for name in _DECODING}
    return inference.load_config(run, self.model, **decoding, **overrides)

  def choose_step(self, run: RunDir) -> int:
    """The step of the checkpoint to use; UserError if there is none."""
    from lingvo_moe.run import inference

    default = 'best if evaluated' if self.best_by_default else 'last'
    which = 'best' if self.best else self.checkpoint or default
    return inference.choose_step(run.checkpoints(), self.step, which)
