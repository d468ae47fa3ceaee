#!/usr/bin/env python
"""python tools/bench.py [--model=mt.bench_s.Dense,mt.bench_s.Moe16] [--what=train,decode] [--gin_bindings=B] [--json=FILE]

Times the train step, and flat beam search, of models on random ids at their full batch: rows of max_length tokens a
side without padding, as many as batch_tokens holds. A train step is forward, backward and update, and its tokens are
counted on both sides; decoding never ends a translation before max_length, and its tokens are the symbols put out.
Each measurement has a process of its own, so its peak memory is its own, and prints one line: the median over the
calls after warming up, tokens a second, first call (trace or compile), peak memory, and how many cores other processes
kept busy meanwhile: only figures with next to none are worth comparing. --runtime=spmd --mesh=expert:2 times a mesh.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time

from absl import flags

from lingvo_moe import app
from lingvo_moe import runtime_flags
from lingvo_moe.errors import UserError

_MODEL = flags.DEFINE_list('model', ['mt.bench_s.Dense', 'mt.bench_s.Moe16'], 'Registered models.')
_WHAT = flags.DEFINE_list('what', ['train', 'decode'], 'What to time: train, decode.')
_GIN_BINDINGS = flags.DEFINE_multi_string('gin_bindings', [], "E.g. 'Moe16.num_groups = 4'; may be repeated.")
_CALLS = flags.DEFINE_integer('calls', 9, 'Timed calls.', lower_bound=1)
_WARMUP = flags.DEFINE_integer('warmup', 3, 'Calls before those.', lower_bound=1)
_JIT = flags.DEFINE_bool('jit_compile', False, 'Compile the train step with XLA.')
_JSON = flags.DEFINE_string('json', None, 'Where to append one line of JSON for each measurement.')
runtime_flags.define()
_CHILD = flags.DEFINE_bool('in_this_process', False, 'Do not start a process for the one measurement asked for.')


def time_train(config) -> dict:
  """Times train steps on one batch."""
  from lingvo_moe.tasks.mt.random_batch import random_batch

  batch = random_batch(config)
  runtime = _runtime(config.program())
  losses = []
  found = _timed(lambda: losses.append(runtime.train_step(batch)))
  dropped = [float((s.first_dropped + s.second_dropped) / s.tokens / 2) for s in losses[-1].get('routing', {}).values()]
  return {
    **found,
    'tokens_per_s': round(2 * batch['src_ids'].size / found['median_s'], 1),
    'loss_went_down': bool(losses[-1]['loss'] < losses[0]['loss']),
    'num_groups': config.num_groups,
    'dropped_share': [round(share, 4) for share in dropped],
  }


def time_decode(config) -> dict:
  """Times beam search over one batch, to max_length."""
  import tensorflow as tf

  from lingvo_moe.tasks.mt import assembly
  from lingvo_moe.tasks.mt import decoding
  from lingvo_moe.tasks.mt.model import TranslationModel
  from lingvo_moe.tasks.mt.random_batch import random_batch
  from lingvo_moe.tasks.mt.vocab import EOS

  class Endless(TranslationModel):
    def decode_step(self, *args):
      logits_BWV, cache = super().decode_step(*args)
      return logits_BWV - 1e4 * tf.one_hot(EOS, logits_BWV.shape[-1]), cache

  program = config.program()
  runtime = _runtime(program)
  model = Endless(**vars(program.task))
  search = runtime.function(lambda weights, batch: decoding.search(model, program.theta(weights), batch, config))
  batch = {name: value for name, value in random_batch(config).items() if name in assembly.SOURCE_KEYS}
  results = []
  found = _timed(lambda: results.append(search(batch).steps))
  if results[-1] != config.max_length:
    raise UserError(f'decoding must make {config.max_length} steps to be timed; it made {results[-1]}')
  return {
    **found,
    'tokens_per_s': round(batch['src_ids'].size / found['median_s'], 1),
    'beam_size': config.beam_size,
  }


def _runtime(program):
  choice = runtime_flags.Choice.from_flags()
  choice.require_one_process('benchmark')
  choice.connect()
  runtime = choice.make(program, jit=_JIT.value)
  runtime.init()
  return runtime


def _timed(call) -> dict:
  """Seconds of calls after warming up; the first call's by itself; and who else was busy meanwhile."""
  seconds = []
  for number in range(_WARMUP.value + _CALLS.value):
    if number == _WARMUP.value:
      busy, own, start = _cpu()
    begun = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - begun)
  busy_now, own_now, now = _cpu()
  timed = seconds[_WARMUP.value :]
  return {
    'median_s': round(statistics.median(timed), 4),
    'min_s': round(min(timed), 4),
    'max_s': round(max(timed), 4),
    'first_call_s': round(seconds[0], 2),
    'own_cores': round((own_now - own) / (now - start), 2),
    'other_cores': round(max(0.0, (busy_now - busy) - (own_now - own)) / (now - start), 2),
    'peak_rss_mib': round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
  }


def _cpu() -> tuple[float, float, float]:
  """CPU seconds of the whole machine and of this process, and the time."""
  with open('/proc/stat', encoding='ascii') as f:
    fields = [int(x) for x in f.readline().split()[1:]]
  busy = (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf('SC_CLK_TCK')
  times = os.times()
  return busy, times.user + times.system, time.perf_counter()


_TIMERS = {'train': time_train, 'decode': time_decode}


def main(argv):
  del argv
  for what in _WHAT.value:
    if what not in _TIMERS:
      raise UserError(f'--what must be of {", ".join(_TIMERS)}; saw {what!r}')
  if _CHILD.value:
    return _measure(_MODEL.value[0], _WHAT.value[0])
  for model in _MODEL.value:
    for what in _WHAT.value:
      done = subprocess.run([sys.executable, *sys.argv, f'--model={model}', f'--what={what}', '--in_this_process'])
      if done.returncode:
        return done.returncode


def _measure(name: str, what: str) -> None:
  from lingvo_moe import configuration

  cls = name.rsplit('.', 1)[-1]
  bindings = [b for b in _GIN_BINDINGS.value if b.split('.')[0].strip() == cls]
  found = {'model': name, 'what': what, **_TIMERS[what](configuration.resolve(name, [], bindings))}
  print(f'{name:24} {what:7} {found["tokens_per_s"]:9.1f} tokens/s', json.dumps(found), flush=True)
  if _JSON.value:
    with open(_JSON.value, 'a', encoding='utf-8') as f:
      f.write(json.dumps(found) + '\n')


if __name__ == '__main__':
  app.run(main)
