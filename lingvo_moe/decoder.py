"""Translates held-out sets with a run's checkpoints as they appear, and scores the translations:

  python -m lingvo_moe.decoder --logdir=DIR --split=test

It waits for the newest checkpoint it has not decoded yet and ends when the trainer has ended and its last checkpoint
is decoded; --once, --step and --best decode one and end. Model, vocabularies and settings come from the log
directory. In <logdir>/decode/<split>/step_<N>/ it leaves

  <pair>.hyp        the translations, a line for each line of the source
  scores.json       BLEU and chrF of every pair and their mean, with signatures and settings

or, with --score, <pair>.scores (log p of each target given its source, in nats) and perplexity.json. What is there
with the same settings is shown and not made again; --overwrite replaces it, whatever its settings.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator

from absl import flags

from lingvo_moe import app
from lingvo_moe import runtime_flags
from lingvo_moe.core.errors import ProcessLostError
from lingvo_moe.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
  """The flags; see define_flags."""

  logdir: str
  model: str | None = None
  split: str = 'test'
  once: bool = False
  step: int | None = None
  best: bool = False
  beam_size: int | None = None
  length_norm_alpha: float | None = None
  data_dir: str | None = None
  pairs: str | None = None
  max_sentences: int = 0
  score: bool = False
  overwrite: bool = False
  batch_tokens: int = 0
  poll_seconds: float = 5.0

  @property
  def waits(self) -> bool:
    """Whether to go on with checkpoints yet to come."""
    return not (self.once or self.best or self.step is not None)


def define_flags() -> None:
  """Not done by an import: the trainer has flags of the same names."""
  flags.DEFINE_string('logdir', None, 'The log directory of the run.', required=True)
  flags.DEFINE_string('model', None, "The run's model, if you want that checked; the log directory knows it.")
  flags.DEFINE_string('split', 'test', 'The held-out set: test, dev or any file prefix.')
  flags.DEFINE_bool('once', False, 'Decode the newest checkpoint and end.')
  flags.DEFINE_integer('step', None, 'Decode the checkpoint of this step and end.')
  flags.DEFINE_bool('best', False, 'Decode the checkpoint of the best dev loss so far and end.')
  flags.DEFINE_integer('beam_size', None, "Hypotheses kept; in place of the run's configuration.")
  flags.DEFINE_float('length_norm_alpha', None, "GNMT's alpha; in place of the run's configuration.")
  flags.DEFINE_string('data_dir', None, "The corpus; in place of the run's.")
  flags.DEFINE_string('pairs', None, "Pairs, such as 'deu-en,fra-en' or '*-en'; in place of the run's.")
  flags.DEFINE_integer('max_sentences', 0, 'Only the first so many lines of each pair; 0: all.', lower_bound=0)
  flags.DEFINE_bool('score', False, 'Give the log-probability of the targets there are; do not translate.')
  flags.DEFINE_bool('overwrite', False, 'Do again what was done with the same settings.')
  flags.DEFINE_integer('batch_tokens', 0, 'Source tokens of a batch; 0: 2048 at most.', lower_bound=0)
  runtime_flags.define()
  flags.DEFINE_float('poll_seconds', 5.0, 'Between two looks for a new checkpoint.', lower_bound=0.01)


def main(argv) -> None:
  del argv
  options = Options(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Options)})
  app.claim_stdout()
  decode(options, runtime_flags.Choice.from_flags())


def decode(options: Options, choice: runtime_flags.Choice = runtime_flags.LOCAL) -> None:
  """Decodes checkpoints as the options say; returns when there will be no more.

  Of several processes the one that leads looks at the run directory and writes; all of them translate.
  """
  # TensorFlow takes seconds to import: flags are checked before.
  from lingvo_moe.ops.cpu import threads
  from lingvo_moe.run import inference
  from lingvo_moe.run.rundir import RunDir

  if options.step is not None and options.best:
    raise UserError('--step and --best each choose a checkpoint: give one of them')
  if choice.runtime == 'local' and not options.score:  # what is scored is divided as in training, on few cores only
    threads.set_policy(decoding=True)
  choice.connect()
  run = RunDir(options.logdir)
  if options.waits:
    _wait_for_run(run, options.poll_seconds, choice)
  config, vocabs, job = choice.together(lambda: _job(run, options))
  runtime = choice.make(config.program())
  translator = None
  for step in _steps(run, options, choice):
    summary = None if options.overwrite else choice.lead(functools.partial(job.results.done, step))
    if summary:
      choice.say(f'{job.results.folder(step)} was made with the same settings; --overwrite makes it again')
    elif _load(runtime, run, step, options, choice):
      translator = translator or inference.translator(runtime, config, vocabs, batch_tokens=options.batch_tokens)
      summary = _run(job, step, translator, choice)
    if summary:
      report = f'step {step}, {options.split}\n{job.report(summary)}'
      choice.lead(functools.partial(print, report, flush=True))


def _job(run, options: Options) -> tuple:
  """(configuration, vocabularies, job) as the options say."""
  from lingvo_moe.run import held_out
  from lingvo_moe.run import inference

  overrides = {name: getattr(options, name) for name in ('beam_size', 'length_norm_alpha', 'data_dir', 'pairs')}
  config = inference.load_config(run, options.model, **overrides)
  vocabs = run.vocabs(config)
  sets = held_out.read(config, options.split, options.max_sentences, vocabs[0])
  make = held_out.ScoreJob if options.score else held_out.TranslateJob
  job = make(run.file('decode', options.split), config, sets, run.checkpoints(), options.overwrite)
  return config, vocabs, job


def _run(job, step: int, translator, choice: runtime_flags.Choice) -> dict:
  """Does the job for the weights that the translator has; returns the summary."""
  choice.lead(lambda: job.results.begin(step))
  found = choice.together(lambda: job.run(step, translator, quiet=not choice.leads))
  return choice.lead(lambda: job.finish(step, found))


def _wait_for_run(run, poll_seconds: float, choice: runtime_flags.Choice) -> None:
  told = False
  while not choice.lead(lambda: run.exists):
    if not told:
      choice.say(f'waiting for a trainer to begin a run in {run.path}')
    told = True
    time.sleep(poll_seconds)


def _steps(run, options: Options, choice: runtime_flags.Choice) -> Iterator[int]:
  """The steps to decode: when waiting, each time the newest, if that is another than before, until training ends."""
  from lingvo_moe.run import inference

  checkpoints = run.checkpoints()
  choose = lambda: inference.choose_step(checkpoints, options.step, options.best)
  if not options.waits:
    yield choice.lead(choose)
    return
  last, told = None, False
  while True:
    # Whether training has ended is looked at first, so that the last checkpoint is there if it has.
    finished, latest = choice.lead(lambda: (run.finished, checkpoints.latest()))
    if latest is not None and latest != last:
      last, told = latest, False
      yield latest
    elif finished:
      choice.lead(choose)  # tells if there is none
      return
    else:
      if not told:
        choice.say(f'waiting for a new checkpoint in {checkpoints.directory}')
      told = True
      time.sleep(options.poll_seconds)


def _load(runtime, run, step: int, options: Options, choice: runtime_flags.Choice) -> bool:
  """Loads a checkpoint; False where the trainer has dropped it meanwhile for newer ones."""
  from lingvo_moe.run import inference

  checkpoints = run.checkpoints()
  try:
    choice.together(lambda: inference.load_weights(runtime, checkpoints, step))
    return True
  except ProcessLostError:
    raise
  except UserError:
    time.sleep(min(options.poll_seconds, 1.0))  # dropping one takes a moment
    if not choice.lead(lambda: options.waits and step not in checkpoints.steps()):
      raise
    choice.say(f'the checkpoint of step {step} was dropped before it was read')
    return False


if __name__ == '__main__':
  define_flags()
  app.run(main)
