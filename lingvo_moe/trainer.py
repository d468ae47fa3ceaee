"""Trains a registered model:

  lingvo-moe train --model=mt.cldr.MoE8E --logdir=DIR --data_dir=CORPUS --set batch_tokens=2048

The same command goes on where the run was interrupted, to the same numbers; --logdir=DIR alone does too, with the model
and the values that the run has, but for those that --set may change. SIGTERM, SIGHUP and Ctrl-C save first. The exit
status is 0 where training has ended, 143 after SIGTERM, 129 after SIGHUP and 130 after Ctrl-C, when there is more to do;
1 after a mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import IO, TYPE_CHECKING

from absl import flags

from lingvo_moe import app
from lingvo_moe import runtime_flags
from lingvo_moe.core import log_directory
from lingvo_moe.core.errors import UserError

# Modules that import TensorFlow, which takes seconds, are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  from lingvo_moe.run.checkpoint import Checkpoints
  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.run.training import Training
  from lingvo_moe.runtime.runtime import Runtime
  from lingvo_moe.tasks.task import Task
  from lingvo_moe.tasks.task import TaskConfig
  from lingvo_moe.tasks.task import TrainInput

FLAGS = flags.FLAGS
flags.DEFINE_string(
  'model', None, "A registered model's name; lingvo-moe models lists them. Default: that of the run in --logdir."
)
flags.DEFINE_string('logdir', None, 'Directory for checkpoints, logs and everything else of the run.', required=True)
flags.DEFINE_multi_string(
  'set', [], 'Value of a field of the model, such as batch_tokens=2048 or pairs=de-en; may be repeated.'
)
flags.DEFINE_multi_string('gin_file', [], 'File of gin bindings.')
flags.DEFINE_multi_string('gin_bindings', [], "A gin binding, such as 'MoE8E.batch_tokens = 2048'.")
flags.DEFINE_string('data_dir', None, "Folder of the corpus; default: the configuration's.")
flags.DEFINE_integer('max_steps', None, "Steps to train in all; default: the configuration's.", lower_bound=0)
flags.DEFINE_string('init_from', None, 'Log directory, or checkpoint, whose weights a new run begins with.')
flags.DEFINE_string('cache_dir', None, 'Folder for tokenised text; default: <logdir>/cache.')
flags.DEFINE_bool('accept_changed_corpus', False, 'Go on with a run though its corpus has changed since.')
flags.DEFINE_bool('jit_compile', False, 'Compile the step with XLA, once for every batch shape (--runtime=local).')
flags.DEFINE_integer(
  'steps_per_loop',
  1,
  'Most steps of one call of the runtime, which a TPU makes in a loop on its host. A call ends early where a step is '
  'logged, saved or evaluated, and where batches of another shape follow. Signals are handled between calls.',
  lower_bound=1,
)
runtime_flags.define()
flags.adopt_module_key_flags(runtime_flags)  # so that --help shows them


def main(argv) -> int | None:
  """Trains until max_steps, out of patience, or stopped by a signal; returns the exit status."""
  del argv
  from lingvo_moe.run import advice as advice_lib
  from lingvo_moe.run import hooks as hooks_lib
  from lingvo_moe.run import training as training_lib

  signals = hooks_lib.Signals()
  choice = runtime_flags.Choice.from_flags()
  choice.set_threads(decoding=False, jit=FLAGS.jit_compile)
  choice.connect()
  training, resumed = set_up(choice)
  signals.in_loop = True
  check = hooks_lib.CheckFinite(training)
  save = hooks_lib.SaveAndEvaluate(training, check, signals)
  advice = advice_lib.Advice(training)
  hooks = (
    check,
    hooks_lib.Log(training),
    hooks_lib.LogRouting(training),
    advice,
    save,
    hooks_lib.StopOnSignal(training, save, signals),
  )
  try:
    advice.say_epoch()
    save.catch_up(resumed)
    say_what_is_next(training)
    for step in training_lib.steps(training, FLAGS.steps_per_loop):
      for hook in hooks:
        hook(step)
  except hooks_lib.StoppedBySignal as stopped:
    training.log.close()
    training.say(str(stopped))
    return stopped.exit_status
  finally:
    training.log.end_progress()  # an error is printed on a line of its own
  finish(training)


def set_up(choice: runtime_flags.Choice) -> tuple[Training, bool]:
  """Opens the log directory and the corpus, and restores or initialises the state; also returns whether it restored."""
  from lingvo_moe.run.rundir import RunDir

  run = RunDir(FLAGS.logdir)
  name, config = requested_config(run, choice)
  config, lock = begin(run, name, config, choice)
  # Before what takes long: a decoder would take the checkpoints that are there for the last.
  with run.unfinished() if choice.leads else contextlib.nullcontext():
    return open_and_restore(run, config, lock, choice)


def open_and_restore(
  run: RunDir, config: TaskConfig, lock: IO | None, choice: runtime_flags.Choice
) -> tuple[Training, bool]:
  """Opens the corpus of a run that has begun, and restores or initialises the state; also returns whether it restored."""
  from lingvo_moe.run import checkpoint
  from lingvo_moe.run import reporting
  from lingvo_moe.run.training import Training
  from lingvo_moe.tasks.task import Feed
  from lingvo_moe.tasks.task import task_of

  task = task_of(config)
  _ = task.vocabs  # refuses what does not fit, before what takes long
  runtime = choice.make(config.program(), jit=FLAGS.jit_compile)
  feed = Feed(runtime.feed_index, runtime.feed_count, quiet=not choice.leads)
  train_input = task.train_input(cache_dir(run), feed)
  dev_input = task.dev_input(cache_dir(run), feed)
  choice.say(f'train: {train_input.stats}\ndev: {dev_input.stats}')
  checkpoints = run.checkpoints(config.keep_checkpoints, config.keep_every)
  resumed = restore(runtime, run, checkpoints, task, choice)
  if choice.leads:
    note_environment(run, runtime.step, train_input, choice)
  log = reporting.TrainLog(run.path, task, runtime.step) if choice.leads else reporting.NoLog()
  saver = checkpoint.Saver(checkpoints, runtime)
  training = Training(
    task=task,
    run=run,
    lock=lock,
    checkpoints=checkpoints,
    runtime=runtime,
    train_input=train_input,
    dev_input=dev_input,
    saver=saver,
    log=log,
    leads=choice.leads,
    say=choice.say,
  )
  return training, resumed


def cache_dir(run: RunDir) -> str:
  """Folder for tokenised text."""
  return FLAGS.cache_dir or run.cache_dir


def note_environment(run: RunDir, step: int, train_input: TrainInput, choice: runtime_flags.Choice) -> None:
  """Records versions, machine and mesh, and the size of each part of the corpus."""
  from lingvo_moe.run import environment

  given = {f.name: value for f in dataclasses.fields(choice) if (value := getattr(choice, f.name)) != f.default}
  given = {name: value for name, value in given.items() if name in ('mesh', 'backend', 'num_processes', 'split_dense')}
  environment.record(run.path, step, runtime={'name': choice.runtime, **given}, examples=dict(train_input.examples))


def requested_config(run: RunDir, choice: runtime_flags.Choice) -> tuple[str, TaskConfig]:
  """Model and configuration that the flags ask for, or those of the run; checked as far as that needs no writing."""
  from lingvo_moe.core import bindings
  from lingvo_moe.core import configuration
  from lingvo_moe.core import files
  from lingvo_moe.run import warm_start
  from lingvo_moe.tasks.task import task_of

  if run.exists and files.exists(run.file(log_directory.AVERAGED)):
    raise UserError(
      f'{run.path} holds an average, which has no optimizer slots to go on from: begin a run with its weights, '
      f'--init_from={run.path} and another --logdir'
    )
  overrides = {name: FLAGS[name].value for name in ('data_dir', 'max_steps') if FLAGS[name].value is not None}
  name, base = FLAGS.model, None
  if not name:
    if not run.exists:
      raise UserError(
        f'--model says what to train; saw none, and there is no run in --logdir={run.path} to go on with: give one '
        'that lingvo-moe models lists'
      )
    name, base = run.load()
    choice.say(f'going on with {name} as {run.config_file} has it; --set may change {run.may_change(base)}')
  given = [*FLAGS.gin_bindings, *bindings.from_settings(name, FLAGS['set'].value)]
  config = configuration.resolve(name, FLAGS.gin_file, given, base=base, **overrides)
  if FLAGS.steps_per_loop > config.log_every:
    raise UserError(
      f'a call of several steps ends where one is logged; saw --steps_per_loop={FLAGS.steps_per_loop} and '
      f'log_every={config.log_every}: bind log_every = {FLAGS.steps_per_loop}, or lower --steps_per_loop'
    )
  if config.data_dir:
    config = dataclasses.replace(config, data_dir=files.absolute(config.data_dir))
  if not run.exists:
    choice.check_fits(config.program)
  task_of(config).check_corpus()
  if FLAGS.init_from:
    warm_start.find(FLAGS.init_from)
  return name, config


def begin(run: RunDir, name: str, config: TaskConfig, choice: runtime_flags.Choice) -> tuple[TaskConfig, IO | None]:
  """Begins the run or goes on with it, in the leader process; returns its configuration, and the lock on its directory.

  The lock holds until it is closed, or the process ends.
  """
  from lingvo_moe.run import corpus_record
  from lingvo_moe.run import warm_start

  def check_corpus(config, begun):
    accept = FLAGS.accept_changed_corpus
    corpus_record.check(run.file(log_directory.CORPUS), config, cache_dir(run), begun, accept, choice.say)

  lock, begun = choice.together(
    lambda: run.lock_and_begin(name, config, check_corpus) if choice.leads else (None, None)
  )
  if FLAGS.init_from:
    choice.lead(lambda: warm_start.note(run, FLAGS.init_from))
  return (begun if choice.leads else run.load()[1]), lock


def restore(
  runtime: Runtime,
  run: RunDir,
  checkpoints: Checkpoints,
  task: Task,
  choice: runtime_flags.Choice,
) -> bool:
  """Restores the newest checkpoint; without one, initialises. Returns which of both.

  The run begins with the weights of --init_from, or of the one that it was begun with.
  """
  from lingvo_moe.run import warm_start

  choice.lead(checkpoints.sweep)
  resumed = checkpoints.latest()
  if resumed is not None:
    warm_start.resume(runtime, checkpoints, resumed)
    ignored = f'; --init_from={FLAGS.init_from} is for new runs and is ignored' if FLAGS.init_from else ''
    choice.say(f'going on from step {resumed}{ignored}')
    return True
  runtime.init()
  source = FLAGS.init_from or warm_start.noted(run)
  if source and not FLAGS.init_from:
    choice.say(f'{run.path} has no checkpoint yet and was begun with --init_from={source}, so its weights are taken')
  if source:
    try:
      choice.say(warm_start.take_weights(runtime, source, task))
    except UserError:
      if FLAGS.init_from and choice.leads:
        warm_start.forget(run)
      raise
  return False


def say_what_is_next(training: Training) -> None:
  reason = training.reason_to_end()
  if not reason:
    training.log.say('building the graph, which takes a while; then the first step')
  else:
    training.say(f'step {training.runtime.step} of {training.config.max_steps}: nothing left to do ({reason})')


def finish(training: Training) -> None:
  """Closes the log, prints the best dev loss, and marks the run as finished, for which decoders wait."""
  training.log.close()
  step, reason = training.runtime.step, training.reason_to_end()
  best_step, best_loss = training.checkpoints.best() or (step, math.nan)
  training.say(f'trained to step {step} ({reason}); best dev loss {best_loss:.4f} at step {best_step}')
  if training.leads:
    training.run.finish(step, reason)
    training.lock.close()


def command() -> None:
  """The command as typed."""
  app.run(main)


if __name__ == '__main__':
  command()
