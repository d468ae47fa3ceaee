"""Evaluates the checkpoints of a run on held-out text as they appear, a translation model by BLEU and chrF:

  lingvo-moe decode RUN --split=test

RUN is a log directory (or --logdir=RUN). RUN may also be what lingvo-moe export --format=litert wrote, which is
evaluated on the text of --data_dir without TensorFlow.

The decoder waits for the newest checkpoint that it has not decoded, and ends after the last checkpoint of a finished
run. --once, --step, --checkpoint and --best decode one checkpoint and end. Model, vocabularies and settings come from
the log directory. For translation it writes to <logdir>/decode/<split>/step_<N>/, or to OUT/step_<N>/ with --out=OUT:

  <pair>.hyp        translations, a line for each line of the source
  <pair>.src .ref   the source and its reference
  <pair>.align      with --alignments: tokens of both sides, and the numbers of those that belong together
  scores.json       BLEU and chrF of every pair and their mean, with signatures and settings

With --score it writes <pair>.scores (log p of each target given its source, in nats) and perplexity.json. For a
language model it writes perplexity.json and, without --score, samples.jsonl with continuations of --prompt; for span
corruption the same, with windows of the text filled in.

Existing results with the same settings are shown and not made again; --overwrite replaces results of any settings. An
interrupted translation continues where it was, within some seconds, unless --overwrite is given.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lingvo_moe.cli import app, checkpoint_flags
from lingvo_moe.cli import machine as machine_lib
from lingvo_moe.cli.machine import Machine, RuntimeOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core import quiet
from lingvo_moe.core.errors import ProcessLostError, UserError
from lingvo_moe.corpora import text
from lingvo_moe.run import process_group
from lingvo_moe.run.process_group import ProcessGroup
from lingvo_moe.storage import log_directory
from lingvo_moe.tasks.task import HeldOutJob, HeldOutOptions, TaskConfig, job_of_export, task_of
from lingvo_moe.text import sentences

# Modules that import TensorFlow, which takes seconds, are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  from lingvo_moe.addons.engine.exported_model import ExportedModel
  from lingvo_moe.run.ensemble_members import Member
  from lingvo_moe.run.results import Results
  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.runtime.runtime import Runtime


class Options(checkpoint_flags.RequestOptions, checkpoint_flags.EnsembleOptions, checkpoint_flags.CheckpointOptions):
  """Options of the decoder."""

  of_runs = (*checkpoint_flags.CheckpointOptions.of_runs, 'batch_tokens', 'prompt', 'num_samples')

  split: str = flag('test', 'Held-out set: test, dev or any file prefix.')
  once: bool = flag(False, 'Decode the newest checkpoint and end; default: wait for more.')
  data_dir: str | None = flag(None, "Folder of the corpus; default: the run's.")
  pairs: str | None = flag(None, "Language pairs, such as 'deu-en,fra-en' or '*-en'; default: the run's.")
  max_sentences: int = flag(0, 'Lines used of each pair, from the first; 0: all.', lower_bound=0)
  score: bool = flag(False, 'Compute log-probabilities of the references; do not translate.')
  overwrite: bool = flag(False, 'Replace results that are there.')
  batch_tokens: int = flag(0, 'Source tokens of a batch; 0: 2048 at most.', lower_bound=0)
  prompt: str | None = flag(None, 'What the samples of a language model continue; default: as configured.')
  num_samples: int | None = flag(None, 'Samples of a language model; default: as configured.', lower_bound=0)
  poll_seconds: float = flag(5.0, 'Seconds between two looks for a new checkpoint.', lower_bound=0.01, upper_bound=1e6)
  metric_command: str | None = flag(
    None, 'Print the scores of another metric too: a command that reads source, translation and reference, as TSV.'
  )
  split_sentences: str = flag('never', sentences.ABOUT, one_of=sentences.MODES)
  out: str | None = flag(None, 'Folder of the results; default: <logdir>/decode/<split>.')

  def __post_init__(self):
    super().__post_init__()
    if not self.split or os.path.isabs(self.split) or '..' in self.split.split('/'):
      raise UserError(
        f'--split is the prefix of files in --data_dir, such as test; saw {self.split!r}: give their folder as '
        '--data_dir'
      )
    if self.score and self.split_sentences != 'never':
      raise UserError('--score gives the probability of whole lines, and --split_sentences splits them: leave one out')
    if self.score and self.request.asked:
      raise UserError(f'--score makes no translations; saw --{self.request.asked[0]} too: leave one of them out')

  @property
  def waits(self) -> bool:
    """Whether to wait for later checkpoints."""
    return not (self.once or self.best or self.checkpoint or self.step is not None)


@app.command(Options, RuntimeOptions, tensorflow=False, takes=('logdir',))
def main(options: Options, runtime_options: RuntimeOptions) -> None:
  app.claim_stdout()
  decode(options, runtime_options)


def decode(options: Options, runtime_options: RuntimeOptions = machine_lib.LOCAL) -> None:
  """Decodes checkpoints as the options say; returns when there will be no more.

  Of several processes the leader reads and writes the log directory; all of them translate.
  """
  if exported := options.load_export(runtime_options):
    return decode_step(results_of_export(options, exported), exported.step, options)
  quiet.import_tensorflow()
  from lingvo_moe.run.ensemble_members import Member

  machine_lib.set_threads(runtime_options, decoding=not options.score)
  machine = machine_lib.connect(runtime_options)
  run, group = options.run, machine.group
  if options.waits:
    wait_for_run(run, options, group)
  members = group.on_all(lambda: [Member.read(name, run) for name in options.ensemble])
  runtime, results = set_up(run, options, machine, members)
  for step in steps(run, options, group):
    decode_step(results, step, options, group, functools.partial(load, runtime, run, step, members, options, group))


def decode_step(
  results: Results,
  step: int,
  options: Options,
  group: ProcessGroup = process_group.ALONE,
  load_weights: Callable[[], bool] = lambda: True,
) -> None:
  """Shows the results of a step, which are made first unless they are there; none without the step's weights."""
  summary = None if options.overwrite else group.on_leader(lambda: results.done(step))
  if summary:
    group.say(f'{results.folder(step)} was made with the same settings; --overwrite makes it again')
  else:
    settings = group.on_leader(lambda: results.settings(step))  # a trainer may drop the checkpoint
    if load_weights():
      summary = evaluate(results, step, settings, group)
  if summary:
    report = f'step {step}, {options.split}\n{results.job.report(summary)}'
    group.on_leader(lambda: print(report, flush=True))
  if summary and options.metric_command:
    group.on_leader(lambda: print_scores(results, step, summary, options.metric_command))


def print_scores(results: Results, step: int, summary: Mapping[str, Any], command: str) -> None:
  """Prints the mean of an external metric over the lines of each pair."""
  if results.job.suffix != log_directory.HYPOTHESES:
    raise UserError('--metric_command scores translations, and there are none: leave it out')
  from lingvo_moe.addons.analysis import external_metric

  suffixes = log_directory.SOURCES, log_directory.HYPOTHESES, log_directory.REFERENCES
  for pair in summary['pairs']:
    sides = [list(text.lines([os.path.join(results.folder(step), pair + suffix)])) for suffix in suffixes]
    print(f'{command}, {pair}: {external_metric.scores(command, *sides).mean():.4f}', flush=True)


def results_of_export(options: Options, model: ExportedModel) -> Results:
  """The folder of results of an export for the engine, in --out or the export, with the job that makes them."""
  job = job_of_export(model, _held_out(options), options.data_dir, options.pairs)
  return _results(options, job, model.path, lambda step: model.fingerprint, has_events=False)


def _held_out(options: Options, trained: TaskConfig | None = None) -> HeldOutOptions:
  first = options.split, options.max_sentences, options.score, options.batch_tokens
  return HeldOutOptions(*first, trained, options.split_sentences, options.request)


def _results(
  options: Options,
  job: HeldOutJob,
  home: str,
  fingerprint: Callable[[int], str],
  group: ProcessGroup = process_group.ALONE,
  has_events: bool = True,
) -> Results:
  from lingvo_moe.run.results import Results

  if job.warning:
    group.say(f'warning: {job.warning}')
  root = options.out or log_directory.results_dir(home, options.split)
  return Results(root, job, home, fingerprint, options.overwrite, bool(options.out), has_events)


def set_up(run: RunDir, options: Options, machine: Machine, members: Sequence[Member] = ()) -> tuple[Runtime, Results]:
  """The runtime for the run's model, and the folder of results with the task's job that makes them."""
  from lingvo_moe.run import ensemble_members

  group = machine.group
  of_task = {name: getattr(options, name) for name in ('data_dir', 'pairs', 'prompt', 'num_samples')}
  config = group.on_all(lambda: options.load_config(run, **of_task))
  group.on_all(lambda: _check_split(run, config, options))
  config = group.on_all(lambda: ensemble_members.joined(config, members))
  runtime = machine.make_runtime(config.program())
  given = options.data_dir or options.pairs  # else the text is of the run's own pairs
  trained = group.on_all(lambda: run.load()[1]) if given else None
  job = group.on_all(lambda: task_of(config).held_out_job(runtime, _held_out(options, trained)))
  if members:
    job.settings['ensemble'] = [member.run.checkpoints().fingerprint(member.step) for member in members]
  return runtime, _results(options, job, run.path, run.checkpoints().fingerprint, group)


def _check_split(run: RunDir, config: TaskConfig, options: Options) -> None:
  """Raises UserError where a run, which may be a stranger's, maps the split to files that its model does not name."""
  prefix, usual = (dict(getattr(c, 'split_files', ())).get(options.split) for c in (config, type(config)()))
  if not options.data_dir and prefix not in (None, options.split, usual):
    raise UserError(
      f'{run.config_file} maps {options.split} to the files {prefix}.* in {config.data_dir}, and a run of someone else '
      f'could name any: give --data_dir={config.data_dir} if it is right'
    )


def evaluate(results: Results, step: int, settings: Mapping[str, Any], group: ProcessGroup) -> dict:
  """Runs the job with the weights that its runtime holds; writes the results and returns their summary."""
  group.on_leader(lambda: results.clear(step, settings))
  unfinished = results.unfinished(step, settings) if group.is_leader else {}
  names = group.on_leader(lambda: list(unfinished))
  if not group.is_leader:
    unfinished = dict.fromkeys(names, '')
  computed = group.on_all(lambda: results.job.run(f'step {step}', not group.is_leader, unfinished))
  return group.on_leader(lambda: results.write(step, settings, results.job.finish(computed)))


def wait_for_run(run: RunDir, options: Options, group: ProcessGroup) -> None:
  """Returns once a trainer has begun the run."""
  has_begun = lambda: group.on_leader(lambda: run.exists)
  if not has_begun():
    group.say(f'waiting for a trainer to begin a run in {run.path}')
  while not has_begun():
    time.sleep(options.poll_seconds)


def steps(run: RunDir, options: Options, group: ProcessGroup) -> Iterator[int]:
  """The steps to decode. When waiting: the newest, each time there is a new one, until training ends."""
  checkpoints = run.checkpoints()
  if not options.waits:
    yield group.on_leader(lambda: options.choose_step(run))
    return
  last, said = None, False
  while True:
    # Whether training has ended is looked at first, so that the last checkpoint is there if it has.
    finished, latest = group.on_leader(lambda: (run.finished, checkpoints.latest()))
    if latest is not None and latest != last:
      last, said = latest, False
      yield latest
    elif finished:
      group.on_leader(lambda: options.choose_step(run))  # raises UserError if there is none
      return
    else:
      if not said:
        group.say(f'waiting for a new checkpoint in {checkpoints.directory}')
      said = True
      time.sleep(options.poll_seconds)


def load(
  runtime: Runtime, run: RunDir, step: int, members: Sequence[Member], options: Options, group: ProcessGroup
) -> bool:
  """Loads a checkpoint; False where the trainer has dropped it meanwhile for newer ones."""
  from lingvo_moe.run import ensemble_members

  checkpoints = run.checkpoints()
  try:
    group.on_all(lambda: ensemble_members.load_weights(runtime, run, step, members))
    return True
  except ProcessLostError:
    raise
  except UserError:
    time.sleep(min(options.poll_seconds, 1.0))  # dropping one takes a moment
    if not group.on_leader(lambda: options.waits and step not in checkpoints.steps()):
      raise
    group.say(f'the checkpoint of step {step} was dropped before it was read')
    return False


if __name__ == '__main__':
  main()
