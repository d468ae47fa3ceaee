"""Trains a registered model:

  lingvo-moe train --model=mt.cldr.MoE8E --logdir=DIR --data_dir=CORPUS --set batch_tokens=2048

The same command resumes an interrupted run, to the same numbers. --logdir=DIR alone resumes too: a run keeps the
values that it began with, until --set and the like give it others, for fields that a run may change. SIGTERM, SIGHUP
and Ctrl-C save first. The exit status is 0 if training has ended, 143 after SIGTERM, 129 after SIGHUP and 130 after
Ctrl-C, when training is not finished, and 1 after a mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import IO, TYPE_CHECKING

from lingvo_moe.cli import app
from lingvo_moe.cli import machine as machine_lib
from lingvo_moe.cli.machine import Machine, RuntimeOptions
from lingvo_moe.cli.model_flags import FileOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.config import configuration, fields
from lingvo_moe.core.errors import UserError
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.storage import files, log_directory
from lingvo_moe.tasks.task import TaskConfig, task_of

# Modules that import TensorFlow, which takes seconds, are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  from lingvo_moe.run.process_group import ProcessGroup
  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.run.signals import Signals
  from lingvo_moe.run.training import Training


class Options(FileOptions):
  """Options of the trainer."""

  logdir: str = flag(None, 'Directory for checkpoints, logs and everything else of the run.', required=True)
  model: str | None = flag(
    None, "A registered model's name; lingvo-moe models lists them. Default: the run's in --logdir, or in --init_from."
  )
  data_dir: str | None = flag(None, "Folder of the corpus; default: the configuration's.")
  max_steps: int | None = flag(None, "Steps to train in all; default: the configuration's.", lower_bound=0)
  init_from: str | None = flag(None, 'Log directory, or checkpoint, whose weights a new run begins with.')
  cache_dir: str | None = flag(None, 'Folder for tokenised text; default: <logdir>/cache.')
  accept_changed_corpus: bool = flag(False, 'Go on with a run though its corpus has changed since.')
  jit_compile: bool = flag(False, 'Compile the step with XLA, once for every batch shape (--runtime=local).')
  steps_per_loop: int = flag(
    1,
    'Most steps of one call of the runtime, which a TPU makes in a loop on its host. A call ends early where a step is '
    'logged, saved or evaluated, and where batches of another shape follow. Signals are handled between calls.',
    lower_bound=1,
  )

  def cache_of(self, run: RunDir) -> str:
    return self.cache_dir or run.cache_dir


@app.command(Options, RuntimeOptions)
def main(options: Options, runtime_options: RuntimeOptions) -> int | None:
  from lingvo_moe.run.signals import Signals

  signals = Signals()
  signals.install()
  return train(options, runtime_options, signals)


def train(
  options: Options, runtime_options: RuntimeOptions = machine_lib.LOCAL, signals: Signals | None = None
) -> int | None:
  """Trains until max_steps, out of patience, or stopped by a signal; returns the exit status."""
  from lingvo_moe.run.advice import Advice, DroppedNotice, SystemTimeNotice
  from lingvo_moe.run.evaluation import EvaluationHook
  from lingvo_moe.run.signals import Signals, StopOnSignal, StoppedBySignal
  from lingvo_moe.run.training import Diverged, check_finite, steps

  signals = signals or Signals()
  machine_lib.set_threads(runtime_options, decoding=False, jit=options.jit_compile)
  training = set_up(options, machine_lib.connect(runtime_options))
  signals.in_loop = True
  advice = Advice(training)
  evaluation = EvaluationHook(training, signals)
  notices = advice, DroppedNotice(training), SystemTimeNotice(training)
  hooks = (check_finite, training.log_step, *notices, training.save_step, evaluation, StopOnSignal(training, signals))
  try:
    advice.say_epoch()
    advice.say_schedule()
    if not training.is_resumed and (training.config.max_steps == 0 or training.runtime.program.constant):
      training.save(wait=True)
    evaluation.catch_up()
    if not (reason := training.reason_to_end()):
      training.log.say('building the graph, which takes a while; then the first step')
    else:
      training.group.say(f'step {training.runtime.step} of {training.config.max_steps}: nothing left to do ({reason})')
    for step in steps(training, options.steps_per_loop):
      for hook in hooks:
        hook(step)
  except StoppedBySignal as stopped:
    training.log.close()
    training.group.say(str(stopped))
    return stopped.exit_status
  except Diverged as diverged:
    raise training.end(diverged) from None
  finally:
    training.log.end_progress()  # an error is printed on a line of its own
  finish(training)


def set_up(options: Options, machine: Machine) -> Training:
  """Begins or continues a run: its log directory, the corpus, and the state, which is restored or initialised."""
  from lingvo_moe.run import environment, reporting, warm_start
  from lingvo_moe.run.checkpoints import Saver
  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.run.training import Training

  run, group = RunDir(options.logdir), machine.group
  name, config = configure(run, options, machine)
  begun = group.on_all(lambda: begin(run, name, config, options, group) if group.is_leader else None)
  config, lock = begun or (run.load()[1], None)
  # Before what takes long: a decoder would take the checkpoints that are there for the last.
  with run.unfinished() if group.is_leader else contextlib.nullcontext():
    task = task_of(config)
    _ = task.vocabs  # refuses what does not fit, before what takes long
    runtime = machine.make_runtime(config.program(), jit=options.jit_compile)
    feed = Feed(runtime.feed_index, runtime.feed_count, quiet=not group.is_leader)
    train_input = task.train_input(options.cache_of(run), feed)
    dev_input = task.dev_input(options.cache_of(run), feed)
    group.say(f'train: {train_input.stats}\ndev: {dev_input.stats}')
    constant = runtime.program.constant
    saver = Saver(run.checkpoints(config.keep_checkpoints, config.keep_every, constant), runtime)
    is_resumed = warm_start.restore_or_init(runtime, run, saver.checkpoints, task, options.init_from, group)
    log = reporting.NoLog()
    if group.is_leader:
      about = {'runtime': machine.describe(), 'examples': dict(train_input.examples)}
      environment.record(run.path, runtime.step, **about)
      log = reporting.TrainLog(run.path, task, runtime.step)
    return Training(task, run, lock, runtime, train_input, dev_input, saver, log, group, is_resumed)


def configure(run: RunDir, options: Options, machine: Machine) -> tuple[str, TaskConfig]:
  """Model and configuration that the options ask for, or those of the run; checked as far as that needs no writing."""
  from lingvo_moe.run import warm_start
  from lingvo_moe.runtime import local

  if run.exists and files.exists(run.file(log_directory.AVERAGED)):
    raise UserError(
      f'{run.path} holds an average, which has no optimizer slots to go on from: begin a run with its weights, '
      f'--init_from={run.path} and another --logdir'
    )
  name, base = options.model, None
  if run.exists:
    name, base = run.load(name)
    may_change = '' if options.model else f'; --set may change {", ".join(fields.may_change(type(base)))}'
    machine.group.say(f'going on with {name} as {run.config_file} has it{may_change}')
  elif not name and options.init_from:
    name, base = warm_start.run_around(warm_start.find(options.init_from)).load_open()
    machine.group.say(f'a new run of {name} with the values of --init_from={options.init_from}, but for --set')
  elif not name:
    raise UserError(
      f'--model says what to train; saw none, and there is no run in --logdir={run.path} to go on with: give one '
      'that lingvo-moe models lists'
    )
  overrides = {'data_dir': options.data_dir, 'max_steps': options.max_steps}
  overrides = {field: value for field, value in overrides.items() if value is not None}
  config = options.resolve(name, base=base, **overrides)
  if options.steps_per_loop > config.log_every:
    raise UserError(
      f'a call of several steps ends where one is logged; saw --steps_per_loop={options.steps_per_loop} and '
      f'log_every={config.log_every}: bind log_every = {options.steps_per_loop}, or lower --steps_per_loop'
    )
  if config.data_dir:
    config = dataclasses.replace(config, data_dir=files.absolute(config.data_dir))
  if not run.exists and machine.options.runtime == 'local':
    local.check_fits(config.program())
  task_of(config).check_corpus()
  if options.init_from:
    warm_start.find(options.init_from)
  elif config.program().lora and run.checkpoints().latest() is None and not warm_start.noted(run):
    raise UserError('lora_rank adapts weights that were trained; saw a new run of initial ones: give --init_from=RUN')
  return name, config


def begin(run: RunDir, name: str, config: TaskConfig, options: Options, group: ProcessGroup) -> tuple[TaskConfig, IO]:
  """Begins or continues the run; returns its configuration, and the lock on its directory, which holds until closed."""
  from lingvo_moe.run import warm_start

  with run.locked() as lock:
    old = run.load()[1] if run.exists else None
    config = run.begin(name, config, lambda config: settled(run, config, options, group))
    if old is not None:
      say_changes(old, config, run.checkpoints().latest(), group)
    if options.init_from:
      warm_start.note(run, options.init_from)
    return config, lock


def say_changes(old: TaskConfig, config: TaskConfig, step: int | None, group: ProcessGroup) -> None:
  """Prints the values of a run that change, and the learning rates where another schedule meets its checkpoint."""
  from lingvo_moe.optim import schedule

  if changed := configuration.differences(old, config):
    group.say(f'of the run change: {"; ".join(changed)}')
  before, now = old.program().schedule, config.program().schedule
  if step and schedule.rate(before, step + 1) != (rate := schedule.rate(now, step + 1)):
    group.say(
      f'schedule={config.schedule} ends at max_steps, {now.end} and no longer {before.end}: the learning rate was '
      f'{schedule.rate(before, step):.3g} at step {step}, and is {rate:.3g} at step {step + 1}, where it would have '
      f'been {schedule.rate(before, step + 1):.3g}'
    )


def settled(run: RunDir, config: TaskConfig, options: Options, group: ProcessGroup) -> TaskConfig:
  """The configuration with numbers where fields are left to the corpus; checks that against the record of the run."""
  from lingvo_moe.run import corpus_record

  cache_dir = options.cache_of(run)
  corpus_record.check(run, config, cache_dir, options.accept_changed_corpus, group.say)
  config, why = task_of(config).settled(cache_dir)
  if why:
    group.say(why)
  return config


def finish(training: Training) -> None:
  """Closes the log, prints the best dev loss or score, and marks the run as finished, for which decoders wait."""
  training.log.close()
  step, reason, best = training.runtime.step, training.reason_to_end(), training.checkpoints.best()
  measured = f'best {" ".join(best.measured(".4f"))} at step {best.step}' if best else 'dev was not measured'
  training.group.say(f'trained to step {step} ({reason}); {measured}')
  if training.group.is_leader:
    training.run.finish(step, reason)
    training.lock.close()


if __name__ == '__main__':
  main()
