#!/usr/bin/env python
"""lingvo-moe launch 2 -- python tools/time_processes.py --model=mt.cldr.Tiny --runtime=spmd --mesh=data:2

Times what the processes of a run spend on each other, in rounds of turns side by side: steps after each of which they
tell each other of signals, against the trainer's, which do so about once a second; and steps with a checkpoint saved
before they go on, against one that is written beside them. Prints tokens a second (of both sides), median over rounds.
"""

import shutil
import statistics
import tempfile
import time
import types

from absl import flags

from lingvo_moe.cli import app, machine
from lingvo_moe.cli.machine import RuntimeOptions

_MODEL = flags.DEFINE_string('model', None, 'A registered model.', required=True)
_GIN_BINDINGS = flags.DEFINE_multi_string('gin_bindings', [], "E.g. 'Tiny.batch_tokens = 4096'; may be repeated.")
_ROUNDS = flags.DEFINE_integer('rounds', 7, 'Rounds.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 40, 'Steps of a turn.', lower_bound=1)
_SAVE_EVERY = flags.DEFINE_integer('save_every', 20, 'Steps from a checkpoint to the next.', lower_bound=1)


@app.command(RuntimeOptions)
def main(runtime_options: RuntimeOptions):
  from lingvo_moe.config import configuration
  from lingvo_moe.run.checkpoints import Checkpoints, Saver
  from lingvo_moe.run.signals import Signals, StopOnSignal
  from lingvo_moe.run.training import Step
  from lingvo_moe.tasks.task import task_of

  connected = machine.connect(runtime_options)
  group = connected.group
  config = configuration.resolve(_MODEL.value, [], _GIN_BINDINGS.value)
  runtime = connected.make_runtime(config.program())
  runtime.init()
  whole = task_of(config).random_batch()
  rows = lambda x: x[(size := len(x) // runtime.feed_count) * runtime.feed_index :][:size]
  batch = {name: rows(x) for name, x in whole.items()}
  folder = group.on_leader(tempfile.mkdtemp)
  checkpoints = Checkpoints(folder, keep=1)
  saver = Saver(checkpoints, runtime)
  training = types.SimpleNamespace(runtime=runtime, saver=saver)

  def turn(tell, save=lambda: None):
    """Tokens a second over some steps."""
    begun, tokens = time.perf_counter(), 0.0
    for number in range(1, _STEPS.value + 1):
      metrics = runtime.train_steps([batch])[0]
      tokens += sum(float(metrics[name]) for name in task_of(config).token_counts)
      tell(Step(runtime.step, metrics, ends_call=True))
      if number % _SAVE_EVERY.value == 0:
        save()
    saver.wait()
    return tokens / (time.perf_counter() - begun)

  each_step = lambda step: runtime.agree(True)
  rarely = StopOnSignal(training, Signals())
  turns = {
    'told after every step': lambda: turn(each_step),
    'told once a second': lambda: turn(rarely),
    'and saved before going on': lambda: turn(rarely, lambda: checkpoints.save(runtime)),
    'and saved beside training': lambda: turn(rarely, saver.save),
  }
  turn(each_step)  # compiles
  found = {name: [] for name in turns}
  for _ in range(_ROUNDS.value):
    for name, run in turns.items():
      found[name].append(run())
  begun = time.perf_counter()
  for _ in range(100):
    runtime.agree(True)
  told_ms = 10 * (time.perf_counter() - begun)
  group.say(f'telling each other takes {told_ms:.2f} ms; {_MODEL.value}, {group.count} processes')
  for name, pace in found.items():
    spread = f'{min(pace):.0f} to {max(pace):.0f}'
    group.say(f'{name:28}{statistics.median(pace):10.0f} tokens/s   ({spread})')
  group.on_leader(lambda: shutil.rmtree(folder))


if __name__ == '__main__':
  main()
