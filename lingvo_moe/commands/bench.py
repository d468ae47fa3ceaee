"""lingvo-moe bench [--model=mt.bench_s.Dense,mt.bench_s.Moe16] [--what=train,decode] [--set num_groups=4] [--json=FILE]

Times models on random ids with full batches: rows of max_length tokens per side without padding, as many as
batch_tokens allows. --what is one or several of
  train      train step of any model: forward, backward and update; tokens of both sides count. --profile adds the time
             by part.
  decode     flat beam search to max_length (no translation ends earlier); output symbols count.
  latency    flat beam search for one sentence: median_s is the seconds per sentence.
  moe_layer  one MoE layer, forward and backward, with each dispatcher.
  rounds     one MoE layer compiled by XLA, under even and skewed loads: dropping, dropless in rounds, and with slots
             for all tokens.
  input      input pipeline on one core: --data_dir, or the default corpus of 16 languages.
  beam       attention of flat beam search against the form that reorders keys and values, at lengths 16, 64 and 256.

Each measurement runs in a process of its own, for its peak memory (--in_this_process runs all in one process, which
starts sooner). A line shows
  tokens per second, the median over the calls after the warm-up
  GFLOP/s of the model's matrix products by formula, and their share of those of a large matrix product on this machine
  all values as JSON: first call (trace or compile), peak memory and that after the imports alone, groups and dropped
  choices, and other_cores, the number of cores that other processes kept busy
Compare only figures for which other_cores is near 0. GFLOP/s count all slots of the experts, also empty ones, which
training on a CPU does not compute.

--runtime=spmd --mesh=expert:2 times a mesh. --against=FILE compares each figure with that of earlier runs (--json).
--versus=COMMIT alternates between this checkout and another commit, and prints the ratio.
--engine=litert_int8,ctranslate2_int8 times decode and latency in other engines (of tensorflow, litert_int8,
litert_float32, ctranslate2_int8, ctranslate2_float32), each in a process that imports it alone; alternates, and prints
medians over --rounds and ratios to the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from absl import flags, logging

from lingvo_moe import app, machine
from lingvo_moe.bench import engines
from lingvo_moe.commands import values
from lingvo_moe.core import configuration, quiet, registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime_flags import RuntimeOptions

_WHATS = ('train', 'decode', 'latency', 'moe_layer', 'rounds', 'input', 'beam')
_OF_EXPERTS = ('moe_layer', 'rounds')
_ON_A_MESH = ('train', 'decode', 'latency')
_OF_ENGINES = ('decode', 'latency')
_WITH_FLOPS = (*_ON_A_MESH, 'moe_layer')

_MODEL = flags.DEFINE_list('model', ['mt.bench_s.Dense', 'mt.bench_s.Moe16'], 'Registered models.')
_WHAT = flags.DEFINE_list('what', ['train', 'decode'], f'What to time: {", ".join(_WHATS)}.')
_BINDINGS = values.define('num_groups=4')
_CALLS = flags.DEFINE_integer('calls', 9, 'Number of timed calls.', lower_bound=1)
_WARMUP = flags.DEFINE_integer('warmup', 3, 'Number of warm-up calls before the timed ones.', lower_bound=1)
_JIT = flags.DEFINE_bool('jit_compile', False, 'Compile the train step and the MoE layer with XLA.')
_DATA_DIR = flags.DEFINE_string('data_dir', '', 'Corpus for --what=input; the default corpus if empty.')
_PROFILE = flags.DEFINE_bool('profile', False, 'Show the time of the train step by part of the model.')
_JSON = flags.DEFINE_string('json', None, 'File to which a line of JSON is appended for each measurement.')
_AGAINST = flags.DEFINE_string('against', None, 'File of figures to compare with, written by --json.')
_VERSUS = flags.DEFINE_string('versus', None, 'Commit of this checkout to compare with.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Number of runs of each side, with --versus and --engine.', lower_bound=1)
_ENGINE = flags.DEFINE_list('engine', ['tensorflow'], 'Engines for --what=decode and latency, of bench/engines.py.')
_CHILD = flags.DEFINE_bool('in_this_process', False, 'Do not start a process for each measurement.')
_PEAK = flags.DEFINE_float('peak_gflop_per_s', 0.0, 'GFLOP/s of large matrix products on this machine; 0: measured.')

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # of the checkout, if this is one
_OF_THIS_COMMAND = ('model', 'what', 'gin_bindings', 'set', 'versus', 'rounds', 'engine')


@app.command(RuntimeOptions, tensorflow=False)  # TensorFlow is imported after the flags are checked
def main(runtime_options: RuntimeOptions):
  _check_flags(runtime_options)
  quiet.import_tensorflow()
  plan = _plan()
  if _VERSUS.value:
    return _versus(plan)
  if _ENGINE.value != ['tensorflow']:
    return _engines(plan)
  from lingvo_moe.bench import against, peak
  from lingvo_moe.bench.clock import peak_rss_mib

  others = against.read(_AGAINST.value) if _AGAINST.value else []
  gflop_per_s = _PEAK.value
  if not gflop_per_s and any(what in _WITH_FLOPS for *_, what in plan):
    gflop_per_s = peak.measure_apart()
    print(f'matrix products here reach {gflop_per_s:.0f} GFLOP/s', flush=True)
  for name, config, what in plan:
    if _CHILD.value:
      before = {'peak_rss_before_mib': peak_rss_mib()}
      for timing in _measure(config, what, runtime_options):
        _report({'model': name, 'what': what, **timing, **before}, gflop_per_s, others)
    else:
      own = [*_flags_of(name, what), '--in_this_process', f'--peak_gflop_per_s={gflop_per_s}']
      done = subprocess.run([sys.executable, '-P', '-m', 'lingvo_moe.commands.bench', *own])  # -P: not of this folder
      if done.returncode:
        return done.returncode


def _check_flags(runtime_options: RuntimeOptions) -> None:
  on_a_mesh = runtime_options.runtime != 'local'
  for what in _WHAT.value:
    if what not in _WHATS:
      raise UserError(f'--what must be of {", ".join(_WHATS)}; saw {what!r}')
    if on_a_mesh and what not in _ON_A_MESH:
      raise UserError(f'--runtime is for --what={",".join(_ON_A_MESH)}; saw --what={what}: leave either out')
  for engine in _ENGINE.value:
    if engine not in engines.ENGINES:
      raise UserError(f'--engine must be of {", ".join(engines.ENGINES)}; saw {engine!r}')
  if _ENGINE.value != ['tensorflow']:
    others = [what for what in _WHAT.value if what not in _OF_ENGINES]
    if others or on_a_mesh or _VERSUS.value or _AGAINST.value:
      raise UserError(
        f'--engine is for --what={",".join(_OF_ENGINES)} without --runtime, --versus and --against; saw '
        f'--what={",".join(_WHAT.value)}'
      )
  if _PROFILE.value and 'train' not in _WHAT.value:
    raise UserError(f'--profile is of the train step; saw --what={",".join(_WHAT.value)}: add train')
  if _PROFILE.value and (_JIT.value or on_a_mesh):
    raise UserError("--profile is of TensorFlow's own kernels: leave out --jit_compile and --runtime")
  if _VERSUS.value and _AGAINST.value:
    raise UserError('--versus times a commit, --against reads figures: leave either out')
  if runtime_options.num_processes > 1:
    raise UserError(
      'the benchmark is one process, with as many devices as it finds; saw '
      f'--num_processes={runtime_options.num_processes}: leave it out'
    )


def _plan() -> list[tuple]:
  """List of (name, configuration, what) of every measurement; UserError for flags that do not fit."""
  from lingvo_moe.tasks.mt.config import MtConfig

  for flag in (_MODEL, _WHAT, _ENGINE):
    if not flag.value:
      raise UserError(f'--{flag.name} names what is timed; saw none: give one or several, with commas between')
  for binding in flags.FLAGS['gin_bindings'].value:
    if not any(binding in _bindings_of(name) for name in _MODEL.value):
      raise UserError(f'--gin_bindings are values of the models timed, {", ".join(_MODEL.value)}; saw {binding!r}')
  configs = {name: configuration.resolve(name, [], _bindings_of(name)) for name in _MODEL.value}
  for name, config in configs.items():
    other = [what for what in _WHAT.value if what != 'train' and not isinstance(config, MtConfig)]
    if other:
      raise UserError(f'--what={other[0]} is of translation models; saw --model={name}: time its --what=train')
  plan = [(name, config, what) for name, config in configs.items() for what in _WHAT.value]
  # Dense models have no MoE layer; they are skipped if another model has one.
  kept = [(name, config, what) for name, config, what in plan if what not in _OF_EXPERTS or config.num_experts]
  if not kept:
    raise UserError(f'--what={plan[0][2]} is of models with experts; saw --model={",".join(configs)}, without any')
  return kept


def _bindings_of(name: str) -> list[str]:
  """gin bindings of a model."""
  cls = name.rpartition('.')[2]
  return [binding for binding in _BINDINGS(name) if binding.split('.')[0].strip() == cls]


def _flags_of(name: str, what: str, without: tuple[str, ...] = ()) -> list[str]:
  """Flags of one measurement, with the other flags as they were given."""
  given = [flags.FLAGS[flag] for flag in flags.FLAGS if flags.FLAGS[flag].present]
  given = [flag for flag in given if flag.name not in (*_OF_THIS_COMMAND, *without)]
  bindings = [f'--gin_bindings={binding}' for binding in _bindings_of(name)]
  return [f'--model={name}', f'--what={what}', *bindings, *(flag.serialize() for flag in given)]


def _measure(config, what: str, runtime_options: RuntimeOptions) -> list[dict]:
  from lingvo_moe.bench import beam, inputs, moe_layer, steps
  from lingvo_moe.bench.clock import Clock

  clock = Clock(_WARMUP.value, _CALLS.value)
  runtime = lambda program: machine.connect(runtime_options).make_runtime(program, jit=_JIT.value)
  measures = {
    'train': lambda: [steps.train(config, clock, runtime, profile=_PROFILE.value)],
    'decode': lambda: [steps.decode(config, clock, runtime)],
    'latency': lambda: [steps.decode(config, clock, runtime, rows=1)],
    'moe_layer': lambda: moe_layer.measure(config, clock, jit=_JIT.value),
    'rounds': lambda: moe_layer.measure_rounds(config, clock),
    'input': lambda: inputs.measure(config, clock, _DATA_DIR.value),
    'beam': lambda: beam.measure(config, clock),
  }
  if what != 'input':
    jit = what == 'rounds' or (_JIT.value and what in ('train', 'moe_layer'))
    decoding = what in ('decode', 'latency', 'beam')
    machine.set_threads(runtime_options, decoding=decoding, jit=jit)
  return measures[what]()


def _report(record: dict, peak: float, others: list[dict]) -> None:
  """Prints a measurement, as text and as JSON, with the figures of other runs below it."""
  import tensorflow as tf

  from lingvo_moe.bench import against

  line = f'{record["model"]:20} {record["what"]:9} {record["tokens_per_s"]:9.1f} tokens/s'
  if 'flops' in record:
    record['gflop_per_s'] = round(record['flops'] / record['median_s'] / 1e9, 3)
    record['peak_gflop_per_s'] = round(peak, 1)
    record['share_of_peak'] = round(record['gflop_per_s'] / peak, 4)
    line += f' {record["gflop_per_s"]:7.1f} GFLOP/s, {record["share_of_peak"]:.0%} of peak'
  if record['what'] == 'moe_layer':
    line += f' by {record["dispatch"]}'
  if record['what'] == 'rounds':
    line += f' {record["mode"]}, {record["load"]}, {record["serving"]}: {1e3 * record["median_s"]:.1f} ms, '
    line += f'{record["rounds"]:.0f} rounds, {record["bytes"] / 2**20:.1f} MiB, {record["dropped"]:.1%} dropped'
  if record['what'] == 'latency':
    line += f', {record["median_s"]:.3f} s a sentence'
  if record['what'] == 'beam':
    line += f', {record["flat_over_reordering"]:.2f} times the reordering form at length {record["length"]}'
  record |= {'cores': len(os.sched_getaffinity(0)), 'tensorflow': tf.__version__}
  earlier = against.earlier(record, others)
  if earlier:
    ratio = record['tokens_per_s'] / earlier.tokens_per_s
    record['against'] = {record['model']: round(ratio, 4)}
  print(line, json.dumps(record))
  for part, seconds in sorted(record.get('parts_s', {}).items(), key=lambda item: -item[1]):
    share = seconds / sum(record['parts_s'].values())
    print(f'  {part:16} {1e3 * seconds:9.3f} ms of kernels a step {share:6.1%}')
  if earlier:
    load = ', disturbed by other processes' if earlier.disturbed else ''
    print(f'{ratio:8.2f} x {earlier.tokens_per_s:9.1f} tokens/s of {record["model"]}{load}', flush=True)
  _append(record)


def _versus(plan: list[tuple]) -> None:
  """Compares with a commit, measurement by measurement, so that the rounds of both sides are close in time."""
  from lingvo_moe.bench import versus

  installed = registry.checkout()
  if installed != os.path.realpath(_ROOT):
    raise UserError(f'--versus times the checkout {_ROOT}, but {installed} is installed: pip install -e {_ROOT}')
  say = lambda text: print(text, file=sys.stderr, flush=True)
  for name, _, what in plan:
    own = _flags_of(name, what, without=('json',))
    for key, this, that, ratio in versus.compare(_ROOT, _VERSUS.value, own, _ROUNDS.value, say):
      text = ' '.join(str(value) for value in key.values())
      print(f'{text}: {ratio:.3f} x {_VERSUS.value}, tokens/s {this} against {that}', flush=True)
      _append({**key, 'versus': _VERSUS.value, 'this_tokens_per_s': this, 'that_tokens_per_s': that, 'ratio': ratio})


def _engines(plan: list[tuple]) -> None:
  """Compares engines, measurement by measurement."""
  from lingvo_moe.bench.clock import Clock

  logging.set_verbosity(logging.WARNING)  # TensorFlow notes each file of an export at INFO
  say = lambda text: print(text, file=sys.stderr, flush=True)
  clock, names = Clock(_WARMUP.value, _CALLS.value), list(dict.fromkeys(_ENGINE.value))
  for name, config, what in plan:
    own = [*_flags_of(name, what, without=('json',)), '--in_this_process', '--peak_gflop_per_s=1']
    command = [sys.executable, '-P', '-m', 'lingvo_moe.commands.bench', *own]
    rows, rounds = 1 if what == 'latency' else None, _ROUNDS.value if len(names) > 1 else 1
    print(f'{name} {what}: {"engine":20} {"tokens/s":>10} {"s a sentence":>13} {"peak MiB":>9} {"ratio":>7}')
    for found in engines.compare(config, rows, names, clock, rounds, command, say):
      speed = f'{found["tokens_per_s"]:10.1f} {found["s_per_sentence"]:13.4f}'
      memory = f'{found["peak_rss_mib"]:9.0f}'
      print(f'{name} {what}: {found["engine"]:20} {speed} {memory} {found["ratio"]:7.3f}', flush=True)
      _append({'model': name, 'what': what, **found})


def _append(record: dict) -> None:
  if _JSON.value:
    with open(_JSON.value, 'a', encoding='utf-8') as f:
      f.write(json.dumps(record) + '\n')


if __name__ == '__main__':
  main()
