#!/usr/bin/env python
"""python tools/bench.py [--model=mt.bench_s.Dense,mt.bench_s.Moe16] [--what=train,decode] [--set num_groups=4]

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
  text       real text in several engines: --model is the log directory of a translation model, --text=SOURCE,REFERENCE
             its lines, and --search beam or greedy; BLEU, tokens by second of the processors, wall time, memory, and
             one line at a time. --set model_dim=512 times the run widened to a larger model of the same function.

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
medians over --rounds and ratios to the first. --model=FOLDER, a folder that lingvo-moe import takes, compares engines
with its weights; CTranslate2's own converter reads it, which needs transformers. Other measurements of a folder are of
its configuration, with initial weights.

For one core, begin the command with taskset -c 0.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags, logging

from benchmarks import engines, real_text
from benchmarks.clock import Clock, Timing, peak_rss_mib
from lingvo_moe.cli import app, machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import configuration, registry
from lingvo_moe.core import quiet
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import text as text_files
from lingvo_moe.search.beam import EARLY_STOPPING

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the checkout
_COMMAND = (sys.executable, os.path.abspath(__file__))
_OF_ENGINES = ('decode', 'latency')

_MODEL = flags.DEFINE_list('model', ['mt.bench_s.Dense', 'mt.bench_s.Moe16'], 'Registered models, or public folders.')
_WHAT = flags.DEFINE_list('what', ['train', 'decode'], 'What to time, see above.')
_BINDINGS = flags.DEFINE_multi_string('gin_bindings', [], "A gin binding, such as 'Moe16.ff_dim = 512'.")
_SETTINGS = flags.DEFINE_multi_string('set', [], 'Value of a field of the models, such as num_groups=4.')
_CALLS = flags.DEFINE_integer('calls', 9, 'Number of timed calls.', lower_bound=1)
_WARMUP = flags.DEFINE_integer('warmup', 3, 'Number of warm-up calls before the timed ones.', lower_bound=1)
_JIT = flags.DEFINE_bool('jit_compile', False, 'Compile the train step and the MoE layer with XLA.')
_PROFILE = flags.DEFINE_bool('profile', False, 'Show the time of the train step by part of the model.')
_JSON = flags.DEFINE_string('json', None, 'File to which a line of JSON is appended for each measurement.')
_AGAINST = flags.DEFINE_string('against', None, 'File of figures to compare with, written by --json.')
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Number of runs of each engine, or commit.', lower_bound=1)
_ENGINE = flags.DEFINE_list('engine', ['tensorflow'], 'Engines for --what=decode and latency, see above.')
_TEXT = flags.DEFINE_list('text', [], 'With --what=text: files of lines and of their translations; .gz is unpacked.')
_LINES = flags.DEFINE_integer('lines', 0, 'Lines of --text used, from the first; 0: all.', lower_bound=0)
_SINGLE = flags.DEFINE_integer('single', 100, 'Lines of --text translated one at a time too.', lower_bound=0)
_SEARCH = flags.DEFINE_enum('search', 'beam', real_text.SEARCHES, 'With --what=text: how it is translated.')
_STOPPING = flags.DEFINE_enum('early_stopping', 'exact', EARLY_STOPPING, "With --what=text: the engine's beam.")
_CHILD = flags.DEFINE_bool('in_this_process', False, 'Do not start a process for each measurement.')
_DATA_DIR = flags.DEFINE_string('data_dir', '', 'Corpus for --what=input; the default corpus if empty.')
_VERSUS = flags.DEFINE_string('versus', None, 'Commit of this checkout to compare with.')
_PEAK = flags.DEFINE_float('peak_gflop_per_s', 0.0, 'GFLOP/s of large matrix products on this machine; 0: measured.')

_OF_THIS_COMMAND = ('model', 'what', 'gin_bindings', 'set', 'versus', 'rounds', 'engine')


class Measure(NamedTuple):
  """What --what names: a function that times a model of a configuration, and which flags and models it is for."""

  time: Callable[[Any, Clock, RuntimeOptions], list[Timing]]
  said: Callable[[dict], str] = lambda record: ''  # of a result, after its tokens per second and GFLOP/s
  on_a_mesh: bool = True  # with any --runtime
  with_flops: bool = True  # results have flops
  of_experts: bool = False  # not of dense models


def _train(config, clock: Clock, options: RuntimeOptions) -> list[Timing]:
  from benchmarks import steps

  machine.set_threads(options, decoding=False, jit=_JIT.value)
  return [steps.train(config, clock, _runtime(options), profile=_PROFILE.value)]


def _decode(config, clock: Clock, options: RuntimeOptions, rows: int | None = None) -> list[Timing]:
  from benchmarks import steps

  machine.set_threads(options, decoding=True)
  return [steps.decode(config, clock, _runtime(options), rows)]


def _runtime(options: RuntimeOptions) -> Callable:
  return lambda program: machine.connect(options).make_runtime(program, jit=_JIT.value)


def _moe_layer(config, clock: Clock, options: RuntimeOptions) -> list[Timing]:
  from benchmarks import moe_layer

  machine.set_threads(options, decoding=False, jit=_JIT.value)
  return moe_layer.measure(config, clock, jit=_JIT.value)


def _rounds(config, clock: Clock, options: RuntimeOptions) -> list[Timing]:
  from benchmarks import moe_layer

  return moe_layer.measure_rounds(config, clock)


def _said_of_rounds(record: dict) -> str:
  """Load, time, rounds, memory and drops of a layer in rounds."""
  line = f' {record["mode"]}, {record["load"]}, {record["serving"]}: {1e3 * record["median_s"]:.1f} ms, '
  return f'{line}{record["rounds"]:.0f} rounds, {record["bytes"] / 2**20:.1f} MiB, {record["dropped"]:.1%} dropped'


def _input(config, clock: Clock, options: RuntimeOptions) -> list[Timing]:
  from benchmarks import inputs

  return inputs.measure(config, clock, _DATA_DIR.value)


def _beam(config, clock: Clock, options: RuntimeOptions) -> list[Timing]:
  from benchmarks import beam

  machine.set_threads(options, decoding=True)
  return beam.measure(config, clock)


def _said_of_beam(record: dict) -> str:
  return f', {record["flat_over_reordering"]:.2f} times the reordering form at length {record["length"]}'


MEASURES = {
  'train': Measure(_train),
  'decode': Measure(_decode),
  'latency': Measure(lambda *args: _decode(*args, rows=1), lambda record: f', {record["median_s"]:.3f} s a sentence'),
  'moe_layer': Measure(_moe_layer, lambda record: f' by {record["dispatch"]}', on_a_mesh=False, of_experts=True),
  'rounds': Measure(_rounds, _said_of_rounds, on_a_mesh=False, with_flops=False, of_experts=True),
  'input': Measure(_input, on_a_mesh=False, with_flops=False),
  'beam': Measure(_beam, _said_of_beam, on_a_mesh=False, with_flops=False),
}


@app.command(RuntimeOptions, tensorflow=False)  # TensorFlow is imported after the flags are checked
def main(options: RuntimeOptions) -> int | None:
  """Makes the measurements that the flags name; returns the exit status of one that failed."""
  if 'text' in _WHAT.value:
    return _real_text(options)
  plan = _plan(options)
  if _VERSUS.value:
    return _versus(plan)
  if _ENGINE.value != ['tensorflow']:
    return _engines(plan)
  from benchmarks import against, peak

  others = against.read(_AGAINST.value) if _AGAINST.value else []
  gflop_per_s = _PEAK.value
  if not gflop_per_s and any(MEASURES[what].with_flops for *_, what in plan):
    gflop_per_s = peak.measure_apart()
    print(f'matrix products here reach {gflop_per_s:.0f} GFLOP/s', flush=True)
  for name, config, what in plan:
    if _CHILD.value:
      before = {'peak_rss_before_mib': peak_rss_mib()}
      for timing in MEASURES[what].time(config, Clock(_WARMUP.value, _CALLS.value), options):
        record = {'model': name, 'what': what, **timing, **before}
        _report(record, MEASURES[what].said(record), gflop_per_s, others)
    else:
      given = [*_flags_of(name, what), '--in_this_process', f'--peak_gflop_per_s={gflop_per_s}']
      done = subprocess.run([*_COMMAND, *given])
      if done.returncode:
        return done.returncode


def _plan(options: RuntimeOptions) -> list[tuple]:
  """List of (name, configuration, what) of every measurement; UserError for flags that do not fit."""
  _check_flags(options)
  quiet.import_tensorflow()
  from lingvo_moe.tasks.mt.mt_config import MtConfig

  for binding in _BINDINGS.value:
    if not any(binding in _bindings_of(name) for name in _MODEL.value):
      raise UserError(f'--gin_bindings are values of the models timed, {", ".join(_MODEL.value)}; saw {binding!r}')
  configs = {name: _configuration(name) for name in _MODEL.value}
  for name, config in configs.items():
    other = [what for what in _WHAT.value if what != 'train' and not isinstance(config, MtConfig)]
    if other:
      raise UserError(f'--what={other[0]} is of translation models; saw --model={name}: time its --what=train')
  plan = [(name, config, what) for name, config in configs.items() for what in _WHAT.value]
  # Dense models have no MoE layer; they are skipped if another model has one.
  kept = [(name, config, what) for name, config, what in plan if not MEASURES[what].of_experts or config.num_experts]
  if not kept:
    raise UserError(f'--what={plan[0][2]} is of models with experts; saw --model={",".join(configs)}, without any')
  return kept


def _check_flags(options: RuntimeOptions) -> None:
  for flag in (_MODEL, _WHAT, _ENGINE):
    if not flag.value:
      raise UserError(f'--{flag.name} names what is timed; saw none: give one or several, with commas between')
  if of_text := [flag.name for flag in (_TEXT, _LINES, _SINGLE, _SEARCH, _STOPPING) if flag.present]:
    raise UserError(f'--{of_text[0]} is for --what=text; saw --what={",".join(_WHAT.value)}: leave it out')
  on_a_mesh = options.runtime != 'local'
  for flag, known in (_WHAT, [*MEASURES, 'text']), (_ENGINE, engines.ENGINES):
    if unknown := [name for name in flag.value if name not in known]:
      raise UserError(f'--{flag.name} must be of {", ".join(known)}; saw {unknown[0]!r}')
  if on_a_mesh and (other := [what for what in _WHAT.value if not MEASURES[what].on_a_mesh]):
    of_any = ','.join(what for what, measure in MEASURES.items() if measure.on_a_mesh)
    raise UserError(f'--runtime is for --what={of_any}; saw --what={other[0]}: leave either out')
  if _VERSUS.value and _AGAINST.value:
    raise UserError('--versus times a commit, --against reads figures: leave either out')
  if _VERSUS.value and _ENGINE.value != ['tensorflow']:
    raise UserError(f'--versus times commits, --engine={",".join(_ENGINE.value)} other engines: leave either out')
  if _ENGINE.value != ['tensorflow'] and (on_a_mesh or _AGAINST.value or not {*_WHAT.value} <= {*_OF_ENGINES}):
    raise UserError(
      f'--engine is for --what={",".join(_OF_ENGINES)} without --runtime, --versus and --against; saw '
      f'--what={",".join(_WHAT.value)}'
    )
  if _PROFILE.value and 'train' not in _WHAT.value:
    raise UserError(f'--profile is of the train step; saw --what={",".join(_WHAT.value)}: add train')
  if _PROFILE.value and (_JIT.value or on_a_mesh):
    raise UserError("--profile is of TensorFlow's own kernels: leave out --jit_compile and --runtime")
  if options.num_processes > 1:
    raise UserError(
      'the benchmark is one process, with as many devices as it finds; saw '
      f'--num_processes={options.num_processes}: leave it out'
    )


def _folder(name: str) -> str:
  """The name where it is that of a public folder; '' for a registered model."""
  return name if os.path.isdir(name) else ''


def _configuration(name: str) -> Any:
  if not _folder(name):
    return configuration.resolve(name, [], _bindings_of(name), _SETTINGS.value)
  from lingvo_moe.addons.interop import importing

  return importing.read(name, _SETTINGS.value)[2]


def _bindings_of(name: str) -> list[str]:
  """gin bindings of a registered model."""
  if _folder(name):
    return []
  cls = name.rpartition('.')[2]
  return [binding for binding in _BINDINGS.value if binding.split('.')[0].strip() == cls]


def _flags_of(name: str, what: str, without: tuple[str, ...] = ()) -> list[str]:
  """Flags of one measurement, with the other flags as they were given."""
  given = [flags.FLAGS[flag] for flag in flags.FLAGS if flags.FLAGS[flag].present]
  given = [flag for flag in given if flag.name not in (*_OF_THIS_COMMAND, *without)]
  bindings = [f'--gin_bindings={binding}' for binding in _bindings_of(name)]
  bindings += [f'--set={setting}' for setting in _SETTINGS.value]
  others = [line for flag in given for line in flag.serialize().splitlines()]  # a line for each value of a repeated one
  return [f'--model={name}', f'--what={what}', *bindings, *others]


def _report(record: dict, said: str, peak: float, others: list[dict]) -> None:
  """Prints a measurement, as text and as JSON, with the figures of other runs below it."""
  import tensorflow as tf

  from benchmarks import against

  line = f'{record["model"]:20} {record["what"]:9} {record["tokens_per_s"]:9.1f} tokens/s'
  if 'flops' in record:
    record['gflop_per_s'] = round(record['flops'] / record['median_s'] / 1e9, 3)
    record['peak_gflop_per_s'] = round(peak, 1)
    record['share_of_peak'] = round(record['gflop_per_s'] / peak, 4)
    line += f' {record["gflop_per_s"]:7.1f} GFLOP/s, {record["share_of_peak"]:.0%} of peak'
  record |= {'cores': len(os.sched_getaffinity(0)), 'tensorflow': tf.__version__}
  earlier = against.earlier(record, others)
  if earlier:
    ratio = record['tokens_per_s'] / earlier.tokens_per_s
    record['against'] = {record['model']: round(ratio, 4)}
  print(line + said, json.dumps(record))
  for part, seconds in sorted(record.get('parts_s', {}).items(), key=lambda item: -item[1]):
    share = seconds / sum(record['parts_s'].values())
    print(f'  {part:16} {1e3 * seconds:9.3f} ms of kernels a step {share:6.1%}')
  if earlier:
    load = ', disturbed by other processes' if earlier.disturbed else ''
    print(f'{ratio:8.2f} x {earlier.tokens_per_s:9.1f} tokens/s of {record["model"]}{load}', flush=True)
  _append(record)


def _engines(plan: Sequence[tuple]) -> None:
  """Compares engines, measurement by measurement."""
  logging.set_verbosity(logging.WARNING)  # TensorFlow notes each file of an export at INFO
  say = lambda text: print(text, file=sys.stderr, flush=True)
  clock, names = Clock(_WARMUP.value, _CALLS.value), list(dict.fromkeys(_ENGINE.value))
  for name, config, what in plan:
    given = [*_flags_of(name, what, without=('json',)), '--in_this_process', '--peak_gflop_per_s=1']
    rows, rounds = 1 if what == 'latency' else None, _ROUNDS.value if len(names) > 1 else 1
    print(f'{name} {what}: {"engine":20} {"tokens/s":>10} {"s a sentence":>13} {"peak MiB":>9} {"ratio":>7}')
    for found in engines.compare(config, rows, names, clock, rounds, [*_COMMAND, *given], say, _folder(name)):
      speed = f'{found["tokens_per_s"]:10.1f} {found["s_per_sentence"]:13.4f}'
      memory = f'{found["peak_rss_mib"]:9.0f}'
      print(f'{name} {what}: {found["engine"]:20} {speed} {memory} {found["ratio"]:7.3f}', flush=True)
      _append({'model': name, 'what': what, **found})


def _real_text(options: RuntimeOptions) -> None:
  """Compares engines on the lines of --text, with the run that --model names."""
  names = list(dict.fromkeys(real_text.ENGINES[::2] if _ENGINE.value == ['tensorflow'] else _ENGINE.value))
  if _WHAT.value != ['text'] or options.runtime != 'local' or _VERSUS.value or _AGAINST.value:
    raise UserError('--what=text is timed by itself, without --runtime, --versus and --against: leave the others out')
  if others := [flag.name for flag in (_BINDINGS, _WARMUP, _JIT, _PROFILE, _CHILD, _DATA_DIR, _PEAK) if flag.present]:
    raise UserError(f'--{others[0]} has no effect on --what=text: leave it out')
  if unknown := [name for name in names if name not in real_text.ENGINES]:
    raise UserError(f'--engine of --what=text must be of {", ".join(real_text.ENGINES)}; saw {unknown[0]!r}')
  if len(_MODEL.value) != 1 or len(_TEXT.value) != 2:
    raise UserError(
      '--what=text takes a run and two files, --model=LOGDIR --text=SOURCE,REFERENCE; saw '
      f'--model={",".join(_MODEL.value)} --text={",".join(_TEXT.value)}'
    )
  texts, references = (_lines_of(path) for path in _TEXT.value)
  if len(texts) != len(references):
    raise UserError(
      f'files of --text have a translation in each line; saw {len(texts)} lines of {_TEXT.value[0]} and '
      f'{len(references)} of {_TEXT.value[1]}'
    )
  quiet.import_tensorflow()
  logging.set_verbosity(logging.WARNING)
  say = lambda text: print(text, file=sys.stderr, flush=True)
  job = real_text.Job(texts, _SEARCH.value, _STOPPING.value, _CALLS.value, _SINGLE.value)
  compared = real_text.compare(_MODEL.value[0], _SETTINGS.value, names, job, references, _ROUNDS.value, say)
  print(
    f'{"engine":20} {"tokens/processor s":>18} {"wall s":>7} {"peak MiB":>9} {"ms a line":>10} {"BLEU":>6} {"ratio":>7}'
  )
  for found in compared:
    speed = f'{found["tokens_per_processor_s"]:18.1f} {found["wall_s"]:7.2f} {found["peak_rss_mib"]:9.0f}'
    single = f'{found["ms_of_one"]:10.1f}' if 'ms_of_one' in found else f'{"-":>10}'
    print(f'{found["engine"]:20} {speed} {single} {found["bleu"]:6.2f} {found["ratio"]:7.3f}', flush=True)
    _append({'model': found['run'], 'what': 'text', 'cores': len(os.sched_getaffinity(0)), **found})


def _lines_of(path: str) -> list[str]:
  """Lines of a text file, packed or not, as far as --lines goes."""
  lines = list(itertools.islice(text_files.lines([path]), _LINES.value or None))
  if not lines:
    raise UserError(f'--text is of files with text; saw {path}, which is empty')
  return lines


def _versus(plan: list[tuple]) -> None:
  """Compares with a commit, measurement by measurement, so that the rounds of both sides are close in time."""
  from benchmarks import commits

  installed = registry.checkout()
  if installed != os.path.realpath(_ROOT):
    raise UserError(f'--versus times the checkout {_ROOT}, but {installed} is installed: pip install -e {_ROOT}')
  say = lambda text: print(text, file=sys.stderr, flush=True)
  for name, _, what in plan:
    given = _flags_of(name, what, without=('json',))
    for key, this, that, ratio in commits.compare(_ROOT, _VERSUS.value, given, _ROUNDS.value, say):
      text = ' '.join(str(value) for value in key.values())
      print(f'{text}: {ratio:.3f} x {_VERSUS.value}, tokens/s {this} against {that}', flush=True)
      record = {**key, 'versus': _VERSUS.value, 'this_tokens_per_s': this, 'that_tokens_per_s': that, 'ratio': ratio}
      _append(record)


def _append(record: dict) -> None:
  """Appends a result to the file that --json names, if any."""
  if _JSON.value:
    with open(_JSON.value, 'a', encoding='utf-8') as f:
      f.write(json.dumps(record) + '\n')


if __name__ == '__main__':
  main()
