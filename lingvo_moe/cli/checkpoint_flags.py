"""Options that choose a run, one of its checkpoints, and how it is decoded: the same for every job that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lingvo_moe.cli import machine
from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core.errors import UserError
from lingvo_moe.search.beam import EARLY_STOPPING
from lingvo_moe.search.request import TranslationRequest
from lingvo_moe.text import sentences

if TYPE_CHECKING:
  from lingvo_moe.addons.engine.exported_model import ExportedModel
  from lingvo_moe.cli.machine import RuntimeOptions
  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.tasks.task import TaskConfig

# Options that are fields of a configuration too.
DECODING = (
  *('beam_size', 'length_norm_alpha', 'early_stopping', 'repetition_penalty', 'no_repeat_ngram_size'),
  *('search', 'sample_temperature', 'top_k', 'top_p', 'sample_seed', 'max_new_tokens', 'mbr_samples'),
)


def _step(default: str) -> int | None:
  return flag(None, f'Use the checkpoint of this step; default: {default}.')


def _checkpoint(default: str) -> str | None:
  about = f'Use the one with the lowest dev loss, or the newest; default: {default}.'
  return flag(None, about, one_of=['best', 'last'])


class CheckpointOptions(OptionGroup):
  """Options of a job that uses the newest checkpoint where none is chosen."""

  default_checkpoint: ClassVar[str] = 'last'
  of_runs: ClassVar[tuple[str, ...]] = ('checkpoint', 'best', 'vocab_outside')  # options that an export refuses

  logdir: str = flag(None, 'Log directory of the run, unless it is an argument.')
  model: str | None = flag(None, "Name of the run's model, to have it checked; otherwise the log directory gives it.")
  vocab_outside: bool = flag(False, 'Read vocabularies that the run names outside its log directory.')
  step: int | None = _step('the newest')
  best: bool = flag(False, '--checkpoint=best.')
  checkpoint: str | None = _checkpoint('the newest')
  beam_size: int | None = flag(None, "Hypotheses kept in beam search; default: the run's configuration.")
  length_norm_alpha: float | None = flag(None, "GNMT's length penalty alpha; default: the run's configuration.")
  early_stopping: str | None = flag(
    None, 'When beam search ends; see docs/fields.md; default: as configured.', one_of=list(EARLY_STOPPING)
  )
  repetition_penalty: float | None = flag(
    None, 'Factor of the log-probabilities of symbols that came before; 1: none; default: as configured.'
  )
  no_repeat_ngram_size: int | None = flag(
    None, 'Size of n-grams of symbols that come once at most; 0: any may come again; default: as configured.'
  )
  search: str | None = flag(
    None,
    'Beam search; samples; greedy search; mbr, of a translation model; default: as configured.',
    one_of=['beam', 'sample', 'greedy', 'mbr'],
  )
  sample_temperature: float | None = flag(None, 'Temperature of samples; default: as configured.')
  top_k: int | None = flag(None, 'Samples draw from the k likeliest symbols; default: as configured.')
  top_p: float | None = flag(
    None, 'Samples draw from the symbols that make up this probability; default: as configured.'
  )
  sample_seed: int | None = flag(None, 'Seed of samples; default: as configured.')
  max_new_tokens: int | None = flag(None, 'Most symbols of a continuation; default: as configured.')
  mbr_samples: int | None = flag(None, 'Samples of a sentence among which mbr chooses; default: as configured.')

  def __post_init__(self):
    chosen = {'--step': self.step is not None, '--best': self.best, '--checkpoint': self.checkpoint is not None}
    chosen = [flag for flag, given in chosen.items() if given]
    if len(chosen) > 1:
      raise UserError(f'{" and ".join(chosen)} each choose a checkpoint: give one of them')

  @property
  def run(self) -> RunDir:
    """The log directory."""
    from lingvo_moe.run.rundir import RunDir

    return RunDir(self.logdir, self.vocab_outside)

  def load_export(self, runtime_options: RuntimeOptions) -> ExportedModel | None:
    """The export for the engine that --logdir names; None where it is a log directory. Imports no TensorFlow."""
    from lingvo_moe.addons.engine import manifest

    if not manifest.is_export(self.logdir):
      return None
    if runtime_options != machine.LOCAL:
      raise UserError(f'{self.logdir} is an export, which runs on the CPU of one machine: leave runtime flags out')
    from lingvo_moe.addons.engine import exported_model

    names = ('model', 'step', *DECODING, *self.of_runs, 'ensemble')
    chosen = {name: getattr(self, name) for name in names if hasattr(self, name)}
    return exported_model.load(
      self.logdir, **{n: value for n, value in chosen.items() if value not in (getattr(type(self), n), [])}
    )

  def load_config(self, run: RunDir, **overrides) -> TaskConfig:
    """The run's configuration with the options' values, and `overrides` that are not None, in place of its own."""
    decoding = {name: getattr(self, name) for name in DECODING}
    return run.load_config(self.model, **decoding, **overrides)

  def choose_step(self, run: RunDir) -> int:
    """The step of the checkpoint to use; UserError if there is none."""
    return run.checkpoints().choose(self.step, 'best' if self.best else self.checkpoint or self.default_checkpoint)


class BestCheckpointOptions(CheckpointOptions):
  """Options of a job that uses the best checkpoint where none is chosen, or the newest if none was evaluated."""

  default_checkpoint = 'best if evaluated'

  step: int | None = _step('the best, or the newest where none was evaluated')
  checkpoint: str | None = _checkpoint('the best, or the newest where none was evaluated')


class EnsembleOptions(OptionGroup):
  """Options of a job that may translate with several runs at once."""

  ensemble: Sequence[str] = flag(
    (), 'Further runs, or checkpoints of one, as one model: RUN, RUN@STEP, RUN@best or RUN@last; @STEP: of this run.'
  )


class TextOptions(EnsembleOptions, BestCheckpointOptions):
  """Options of a job that translates texts."""

  split_sentences: str = flag('auto', sentences.ABOUT, one_of=sentences.MODES)


class RequestOptions(OptionGroup):
  """Options of a job that translates: what is asked of each translation; see TranslationRequest."""

  alignments: bool = flag(False, 'Write the tokens of both sides, and which belong together.')
  prefix: str = flag('', 'Text with which each translation begins; its last word may go on, unless a space follows.')
  ban: Sequence[str] = flag((), 'Words that must not come.')
  terms: Sequence[str] = flag(
    (), 'A word and how it must be translated where it comes, such as Hund=hound; may be repeated.', repeated=True
  )

  @property
  def request(self) -> TranslationRequest:
    return TranslationRequest(self.alignments, self.prefix, self.ban, self.terms)
