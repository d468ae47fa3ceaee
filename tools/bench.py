#!/usr/bin/env python
"""python tools/bench.py [--what=moe_layer,rounds,input,beam] [--versus=COMMIT] [flags of lingvo-moe bench]

Times what lingvo-moe bench times, with its flags and output, and also, by --what,
  moe_layer  one MoE layer, forward and backward, with each dispatcher.
  rounds     one MoE layer compiled by XLA, under even and skewed loads: dropping, dropless in rounds, and with slots
             for all tokens.
  input      input pipeline on one core: --data_dir, or the default corpus of 16 languages.
  beam       attention of flat beam search against the form that reorders keys and values, at lengths 16, 64 and 256.

--versus=COMMIT alternates between this checkout and another commit, and prints the ratio.
"""

import os
import sys

from absl import flags

from lingvo_moe.bench.clock import Clock, Timing
from lingvo_moe.cli import app, machine
from lingvo_moe.cli.commands import bench
from lingvo_moe.cli.commands.bench import Measure
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError

_DATA_DIR = flags.DEFINE_string('data_dir', '', 'Corpus for --what=input; the default corpus if empty.')
_VERSUS = flags.DEFINE_string('versus', None, 'Commit of this checkout to compare with.')

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the checkout


def _moe_layer(config, clock: Clock, options: RuntimeOptions) -> list[Timing]:
  from benchmarks import moe_layer

  jit = flags.FLAGS.jit_compile
  machine.set_threads(options, decoding=False, jit=jit)
  return moe_layer.measure(config, clock, jit=jit)


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


MEASURES = bench.MEASURES | {
  'moe_layer': Measure(_moe_layer, lambda record: f' by {record["dispatch"]}', on_a_mesh=False, of_experts=True),
  'rounds': Measure(_rounds, _said_of_rounds, on_a_mesh=False, with_flops=False, of_experts=True),
  'input': Measure(_input, on_a_mesh=False, with_flops=False),
  'beam': Measure(_beam, _said_of_beam, on_a_mesh=False, with_flops=False),
}


@app.command(RuntimeOptions, tensorflow=False)
def main(options: RuntimeOptions):
  if not _VERSUS.value:
    return bench.run(options, MEASURES, [sys.executable, os.path.abspath(__file__)])
  given = flags.FLAGS
  if given.against:
    raise UserError('--versus times a commit, --against reads figures: leave either out')
  if given.engine != ['tensorflow']:
    raise UserError(f'--versus times commits, --engine={",".join(given.engine)} other engines: leave either out')
  _versus(bench.make_plan(options, MEASURES))


def _versus(plan: list[tuple]) -> None:
  """Compares with a commit, measurement by measurement, so that the rounds of both sides are close in time."""
  from benchmarks import commits

  installed = registry.checkout()
  if installed != os.path.realpath(_ROOT):
    raise UserError(f'--versus times the checkout {_ROOT}, but {installed} is installed: pip install -e {_ROOT}')
  say = lambda text: print(text, file=sys.stderr, flush=True)
  for name, _, what in plan:
    own = bench.flags_of(name, what, without=('json',))
    for key, this, that, ratio in commits.compare(_ROOT, _VERSUS.value, own, flags.FLAGS.rounds, say):
      text = ' '.join(str(value) for value in key.values())
      print(f'{text}: {ratio:.3f} x {_VERSUS.value}, tokens/s {this} against {that}', flush=True)
      record = {**key, 'versus': _VERSUS.value, 'this_tokens_per_s': this, 'that_tokens_per_s': that, 'ratio': ratio}
      bench.append(record)


if __name__ == '__main__':
  flags.adopt_module_key_flags(bench)  # for --help
  main()
