"""Trains a registered model:

  python -m lingvo_moe.trainer --model=mt.cldr.MoE8E --logdir=DIR --data_dir=CORPUS

Run it again with the same --logdir and it goes on where it was, to the same numbers, after any interruption.
"""

from __future__ import annotations

import math
import signal
import sys

from absl import flags

from lingvo_moe import app
from lingvo_moe.errors import UserError

FLAGS = flags.FLAGS
flags.DEFINE_string('model', None, "A registered model's name; tools/models.py lists them.", required=True)
flags.DEFINE_string('logdir', None, 'Where everything the run leaves goes.', required=True)
flags.DEFINE_multi_string('gin_file', [], 'Files of gin bindings.')
flags.DEFINE_multi_string('gin_bindings', [], "Bindings such as 'MoE8E.batch_tokens = 2048'.")
flags.DEFINE_string('data_dir', None, "The corpus; in place of the configuration's.")
flags.DEFINE_integer('max_steps', None, "Where training ends; in place of the configuration's.", lower_bound=0)
flags.DEFINE_string('init_from', None, 'A log directory, or a checkpoint in one, whose weights to begin with.')
flags.DEFINE_string('cache_dir', None, 'Where tokenised text is kept; <logdir>/cache unless given.')
flags.DEFINE_bool('jit_compile', False, 'Compile the step with XLA, once for every batch shape.')


def main(argv):
  del argv
  # TensorFlow takes seconds to import: flags are checked before.
  from lingvo_moe import configuration
  from lingvo_moe import reporting
  from lingvo_moe import warm_start
  from lingvo_moe.rundir import RunDir
  from lingvo_moe.runtime.local import LocalRuntime
  from lingvo_moe.tasks.mt.input import EvalInput
  from lingvo_moe.tasks.mt.input import TrainInput

  run = RunDir(FLAGS.logdir)
  overrides = {name: FLAGS[name].value for name in ('data_dir', 'max_steps') if FLAGS[name].value is not None}
  config = configuration.resolve(FLAGS.model, FLAGS.gin_file, FLAGS.gin_bindings, **overrides)
  config = run.begin(FLAGS.model, config)
  checkpoints = run.checkpoints(config.keep_checkpoints)
  vocabs = run.vocabs(config)
  cache_dir = FLAGS.cache_dir or run.file('cache')
  train_input = TrainInput(config, cache_dir, vocabs=vocabs)
  dev_input = EvalInput(config, cache_dir, max_sentences=config.eval_sentences, vocabs=vocabs)
  print(f'train: {train_input.stats}\ndev: {dev_input.stats}', file=sys.stderr)

  runtime = LocalRuntime(config.program(), jit=FLAGS.jit_compile)
  resumed = checkpoints.latest()
  if resumed is not None:
    warm_start.resume(runtime, checkpoints, resumed)
    print(f'going on from step {resumed}', file=sys.stderr)
  else:
    runtime.init()
    if FLAGS.init_from:
      print(warm_start.take_weights(runtime, FLAGS.init_from), file=sys.stderr)
  if runtime.step >= config.max_steps:
    if resumed is None:
      checkpoints.save(runtime.state())
    run.finish(runtime.step, 'max_steps')
    print(f'step {runtime.step} of {config.max_steps}: nothing left to do', file=sys.stderr)
    return
  run.unfinish()

  stop = _StopSignal()
  log = reporting.TrainLog(run.path, runtime.step, config.max_steps)
  batches = iter(train_input.dataset(runtime.step))
  reason = 'max_steps'
  while (step := runtime.step) < config.max_steps:
    with log.waiting():
      batch = next(batches)
    metrics = runtime.train_step(batch)
    step += 1
    _require_finite(metrics, step, checkpoints)
    log.step(step, metrics, write=step % config.log_every == 0 or step == config.max_steps)
    if step % config.eval_every == 0 or step == config.max_steps:
      dev_loss = log.evaluation(step, reporting.evaluate(runtime, dev_input))
      checkpoints.save(runtime.state(), dev_loss=dev_loss)
      if _out_of_patience(config, step, checkpoints.best()):
        reason = f'no gain on dev in {config.patience} evaluations'
        break
    elif stop.signal or (config.save_every and step % config.save_every == 0):
      checkpoints.save(runtime.state())
    if stop.signal:
      log.close()
      print(f'{stop.signal.name}: saved step {step}; the same command goes on from there', file=sys.stderr)
      return 0 if stop.signal == signal.SIGTERM else 130
  log.close()
  run.finish(runtime.step, reason)
  best_step, best_loss = checkpoints.best() or (runtime.step, math.nan)
  print(
    f'trained to step {runtime.step} ({reason}); best dev loss {best_loss:.4f} at step {best_step}', file=sys.stderr
  )


def _require_finite(metrics, step, checkpoints):
  if math.isfinite(metrics['loss']) and math.isfinite(metrics['grad_norm']):
    return
  kept = checkpoints.latest()
  good = f'the checkpoint of step {kept} is kept' if kept is not None else 'no checkpoint had been saved yet'
  raise UserError(
    f'the loss must stay finite; at step {step} loss={metrics["loss"]}, grad_norm={metrics["grad_norm"]} '
    f'({good}): lower learning_rate, lengthen warmup_steps or set clip_norm, in a new --logdir '
    'with --init_from if you like'
  )


class _StopSignal:
  """Notes the first SIGTERM or SIGINT, to be heeded between steps; a second SIGINT interrupts at once."""

  def __init__(self):
    self.signal: signal.Signals | None = None
    signal.signal(signal.SIGTERM, self._note)
    signal.signal(signal.SIGINT, self._note)

  def _note(self, number, frame):
    del frame
    if self.signal is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.signal = signal.Signals(number)


def _out_of_patience(config, step, best):
  """Whether dev loss has not improved for `patience` evaluations; told from the checkpoints, so resuming changes nothing."""
  return bool(config.patience and best) and step - best[0] >= config.patience * config.eval_every


if __name__ == '__main__':
  app.run(main)
