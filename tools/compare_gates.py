#!/usr/bin/env python
"""python tools/compare_gates.py RUN RUN ... [--split=test] [--step=N]

Compares gates: a Markdown table with a row for each run, of its BLEU, dev loss, dropped choices, largest over mean
load, entropy of the gate and seconds a step. A run is a log directory, trained and decoded. params/mt/cldr_gates.py has
models for most gates, each with as many FLOPs a token, for the corpus that lingvo-moe cldr makes:

  lingvo-moe cldr --out_dir=gates/data --languages=quickstart
  python -m lingvo_moe.trainer --model=mt.cldr_gates.Switch --logdir=gates/Switch --data_dir=gates/data --max_steps=600
  python -m lingvo_moe.decoder --logdir=gates/Switch --split=test --once
  python tools/compare_gates.py gates/Switch
"""

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError

_SPLIT = flags.DEFINE_string('split', 'test', 'The held-out set: test, dev or any file prefix.')
_STEP = flags.DEFINE_integer('step', None, 'Step of every run; default: the newest that each has decoded.')


@app.command(tensorflow=False, arguments=True)
def main(argv):
  if len(argv) < 2:
    raise UserError('at least one run is shown: tools/compare_gates.py RUN RUN ...; saw none')
  from lingvo_moe.storage.log_directory import LogDirectory
  from paper import gates

  print(gates.table([gates.row(LogDirectory.read(path), _SPLIT.value, _STEP.value) for path in argv[1:]]))


if __name__ == '__main__':
  main()
