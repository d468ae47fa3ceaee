"""Trains a registered model:

  python -m lingvo_moe.trainer --model=mt.cldr.MoE8E --logdir=DIR --data_dir=CORPUS

Run it again with the same --logdir and it goes on where it was, to the same numbers, after any interruption.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

from absl import flags

from lingvo_moe import app
from lingvo_moe import runtime_flags
from lingvo_moe.core.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string('model', None, "A registered model's name; tools/models.py lists them.", required=True)
flags.DEFINE_string('logdir', None, 'Where everything the run leaves goes.', required=True)
flags.DEFINE_multi_string('gin_file', [], 'Files of gin bindings.')
flags.DEFINE_multi_string('gin_bindings', [], "Bindings such as 'MoE8E.batch_tokens = 2048'.")
flags.DEFINE_string('data_dir', None, "The corpus; in place of the configuration's.")
flags.DEFINE_integer('max_steps', None, "Where training ends; in place of the configuration's.", lower_bound=0)
flags.DEFINE_string('init_from', None, 'A log directory, or a checkpoint in one, whose weights to begin with.')
flags.DEFINE_string('cache_dir', None, 'Where tokenised text is kept; <logdir>/cache unless given.')
flags.DEFINE_bool('jit_compile', False, 'Compile the step with XLA, once for every batch shape (--runtime=local).')
flags.DEFINE_integer(
  'steps_per_loop',
  1,
  'Steps in one call, at most, which a TPU runs in a loop on its host. A call ends where there is something to log, save '
  'or evaluate, and where batches of another shape follow; SIGTERM is heeded after it.',
  lower_bound=1,
)
runtime_flags.define()


def main(argv):
  del argv
  # TensorFlow takes seconds to import: flags are checked before.
  from lingvo_moe.core import configuration
  from lingvo_moe.ops.cpu import threads
  from lingvo_moe.run import checkpoint
  from lingvo_moe.run import reporting
  from lingvo_moe.run import warm_start
  from lingvo_moe.run.rundir import RunDir
  from lingvo_moe.tasks.mt import corpus
  from lingvo_moe.tasks.mt.input import EvalInput
  from lingvo_moe.tasks.mt.input import TrainInput

  stop = _StopSignal()
  choice = runtime_flags.Choice.from_flags()
  choice.connect()
  if choice.runtime == 'local' and not FLAGS.jit_compile:
    threads.set_policy()
  run = RunDir(FLAGS.logdir)
  overrides = {name: FLAGS[name].value for name in ('data_dir', 'max_steps') if FLAGS[name].value is not None}
  config = configuration.resolve(FLAGS.model, FLAGS.gin_file, FLAGS.gin_bindings, **overrides)
  if FLAGS.steps_per_loop > config.log_every:
    raise UserError(
      f'a loop of steps ends where one is logged; saw --steps_per_loop={FLAGS.steps_per_loop} and '
      f'log_every={config.log_every}: bind log_every = {FLAGS.steps_per_loop}, or loop over fewer'
    )
  if config.data_dir:
    config = dataclasses.replace(config, data_dir=os.path.abspath(config.data_dir))
  # Before a vocabulary is made: both splits, and the checkpoint to begin with, must be there.
  for split in ('train', 'dev'):
    corpus.find_pairs(config.data_dir, config.pairs, split, config.split_files)
  if FLAGS.init_from:
    warm_start.find(FLAGS.init_from)
  begin = lambda: (run.lock(), run.begin(FLAGS.model, config))  # locked until the process ends
  lock, begun = choice.together(lambda: begin() if choice.leads else (None, None))
  config = begun if choice.leads else run.load()[1]
  checkpoints = run.checkpoints(config.keep_checkpoints, config.keep_every)
  vocabs = run.vocabs(config)
  cache_dir = FLAGS.cache_dir or run.file('cache')
  runtime = choice.make(config.program(), jit=FLAGS.jit_compile)
  feed = {'process_index': runtime.feed_index, 'process_count': runtime.feed_count, 'quiet': not choice.leads}
  train_input = TrainInput(config, cache_dir, vocabs=vocabs, **feed)
  dev_input = EvalInput(config, cache_dir, max_sentences=config.eval_sentences, vocabs=vocabs, **feed)
  choice.say(f'train: {train_input.stats}\ndev: {dev_input.stats}')

  resumed = checkpoints.latest()
  if resumed is not None:
    warm_start.resume(runtime, checkpoints, resumed)
    ignored = f'; --init_from={FLAGS.init_from} is for new runs and is ignored' if FLAGS.init_from else ''
    choice.say(f'going on from step {resumed}{ignored}')
  else:
    runtime.init()
    if FLAGS.init_from:
      choice.say(warm_start.take_weights(runtime, FLAGS.init_from, vocabs))
  if choice.leads:
    run.unfinish()
  log = reporting.TrainLog(run.path, runtime.step, config.max_steps) if choice.leads else reporting.NoLog()
  stop.in_loop = True

  saver = checkpoint.Saver(checkpoints, runtime)

  def save(step):
    _require_finite_weights(runtime, step, run, saver)
    saver.save()

  def evaluate(step):
    # Several processes evaluate to the end together: they could not give up at the same batch.
    alone = runtime.process_count == 1
    dev_loss = reporting.evaluate(runtime, dev_input, give_up=lambda: alone and stop.signal)
    saver.wait()
    if dev_loss is not None and choice.leads:
      checkpoints.note_dev_loss(step, log.evaluation(step, dev_loss))
    runtime.agree(True)  # all see it noted

  step = runtime.step
  is_due = lambda: step % config.eval_every == 0 or step == config.max_steps
  if resumed is None and step == config.max_steps:
    save(step)
    saver.wait()
  if resumed and is_due() and checkpoints.dev_loss(step) is None:
    evaluate(step)  # an interruption came between saving and evaluating
  reason = _reason_to_end(config, step, checkpoints.best())
  if reason:
    choice.say(f'step {step} of {config.max_steps}: nothing left to do ({reason})')
  loops = in_loops(train_input.dataset(step), step, FLAGS.steps_per_loop, _stops(config))
  while not reason:
    with log.waiting():
      loop = next(loops)
    for metrics in runtime.train_steps(loop):
      step += 1
      _require_finite(metrics, step, run, saver)
      log.step(step, metrics, write=step % config.log_every == 0 or step == config.max_steps)
    if is_due():
      save(step)  # first, since evaluating takes a while
      evaluate(step)
      reason = _reason_to_end(config, step, checkpoints.best())
    signalled = stop.signal  # read once: what comes later is for the next round
    stopping = None if runtime.agree(not signalled) else signalled or signal.SIGTERM
    if stopping or (config.save_every and step % config.save_every == 0):
      save(step)
    if stopping:
      saver.wait()
      log.close()
      choice.say(f'{stopping.name}: saved step {step}; the same command goes on from there')
      return 0 if stopping == signal.SIGTERM else 130
  log.close()
  best_step, best_loss = checkpoints.best() or (step, math.nan)
  choice.say(f'trained to step {step} ({reason}); best dev loss {best_loss:.4f} at step {best_step}')
  if choice.leads:
    run.finish(step, reason)
    lock.close()


def in_loops(batches: Iterable[Mapping], step: int, size: int, stops: Collection[int]) -> Iterator[list[Mapping]]:
  """Batches in lists of one shape each.

  Args:
    batches: from that of the first update after `step` on.
    step: updates made.
    size: of a list at most.
    stops: a list ends at every multiple of one of them.
  """
  shapes = lambda batch: {name: tuple(x.shape) for name, x in batch.items()}
  loop = []
  for batch in batches:
    if loop and shapes(batch) != shapes(loop[0]):
      yield loop
      loop = []
    loop.append(batch)
    step += 1
    if len(loop) == size or any(step % stop == 0 for stop in stops):
      yield loop
      loop = []


def _stops(config) -> set[int]:
  """After how many steps the trainer has something to do between them."""
  return {config.log_every, config.eval_every, config.save_every, config.max_steps} - {0}


def _reason_to_end(config, step, best):
  """'' while training goes on. Told from the checkpoints alone, so that an interruption changes nothing."""
  if step >= config.max_steps:
    return 'max_steps'
  if config.patience and best and step - best[0] >= config.patience * config.eval_every:
    return f'no gain on dev in {config.patience} evaluations'
  return ''


def _require_finite(metrics, step, run, saver):
  if not (math.isfinite(metrics['loss']) and math.isfinite(metrics['grad_norm'])):
    _diverged(f'loss={metrics["loss"]}, grad_norm={metrics["grad_norm"]}', step, run, saver)


def _require_finite_weights(runtime, step, run, saver):
  """A step can end finite and leave weights that are not: those are never saved."""
  name = runtime.not_finite()
  if name:
    _diverged(f'{name} is not finite', step, run, saver)


def _diverged(what, step, run, saver):
  saver.wait()
  kept = saver.checkpoints.latest()
  good = f'the checkpoint of step {kept} is kept' if kept is not None else 'no checkpoint had been saved yet'
  run.finish(step, 'the loss was not finite')  # lest a decoder wait for more
  raise UserError(
    f'the loss must stay finite; at step {step} {what} ({good}): lower learning_rate, lengthen warmup_steps or set '
    'clip_norm, in a new --logdir with --init_from if you like'
  )


class _StopSignal:
  """Notes SIGTERM or SIGINT, to be heeded between steps; a second SIGINT interrupts at once.

  Until the loop begins there is nothing to save: then either ends the job on the spot.
  """

  def __init__(self):
    self.signal: signal.Signals | None = None
    self.in_loop = False
    signal.signal(signal.SIGTERM, self._note)
    signal.signal(signal.SIGINT, self._note)

  def _note(self, number, frame):
    del frame
    if number == signal.SIGINT and (self.signal is not None or not self.in_loop):
      raise KeyboardInterrupt
    if not self.in_loop:
      sys.exit(0)
    self.signal = signal.Signals(number)


if __name__ == '__main__':
  app.run(main)
