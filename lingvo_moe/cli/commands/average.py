"""lingvo-moe average RUN --last=4 [--out=RUN_average]

Averages the weights of the last checkpoints of a run, or of --steps=1000,2000. Step 0, which is not trained, does not
count. Writes the average as the only checkpoint of a new log directory, under the last of these steps. Decoder and
translate use this directory like any other:

  lingvo-moe decode runs/mine_average --split=test --once

RUN is a log directory (or --logdir=RUN) and is not changed. The average has no optimizer slots, so training cannot
resume from it, but may start with its weights (--init_from=runs/mine_average). Sums are in float64, one weight at a
time, and need little memory.

A run that was trained with average_decay (--set average_decay=0.999) keeps an exponential moving average of its weights
in every checkpoint. --exponential takes the average of the newest checkpoint, or of --steps=1000.
"""

import os
import re
import shlex
from collections.abc import Sequence

from lingvo_moe.cli import app
from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core import quiet
from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.storage import files


class Options(OptionGroup):
  """Options of the command."""

  logdir: str = flag(None, 'The log directory of the run, unless it is an argument.')
  last: int | None = flag(None, 'How many of the newest checkpoints to average.', lower_bound=1)
  steps: Sequence[str] = flag((), 'Steps to average, with commas between, in place of --last.')
  exponential: bool = flag(False, 'Take the moving average that one checkpoint holds.')
  out: str | None = flag(None, 'The log directory to make; default: that of the run with _average behind it.')


def _steps(options: Options) -> list[int]:
  if options.exponential:
    if options.last is not None or len(options.steps) > 1:
      raise UserError('--exponential takes one checkpoint, the newest or that of --steps=1000: leave --last out')
  elif bool(options.steps) == (options.last is not None):
    raise UserError('what to average is given either as --last=4 or as --steps=1000,2000: give one of them')
  if wrong := [text for text in options.steps if not re.fullmatch(r'\d{1,18}', text.strip())]:
    raise UserError(f'--steps are numbers with commas between, e.g. --steps=1000,2000; saw {shown(wrong[0])}')
  return [int(text) for text in options.steps]


@app.command(Options, tensorflow=False, takes=('logdir',))
def main(options: Options) -> None:
  asked = _steps(options)
  if files.is_remote(options.logdir):
    raise UserError(
      f'checkpoints are averaged on a mounted file system; saw {options.logdir}: copy the run to this machine, '
      'and give its folder'
    )
  quiet.import_tensorflow()
  from lingvo_moe.run import averaging
  from lingvo_moe.run.rundir import RunDir

  path = os.path.normpath(files.plain(options.logdir))
  run = RunDir(os.path.abspath(path) if os.path.basename(path) in ('.', '..') else path)
  out = options.out or run.path + '_average'
  steps = averaging.choose_steps(run, 1 if options.exponential and not asked else options.last, asked)
  if options.exponential:
    (step,) = steps
    averaging.take_moving_average(run, step, out)
    print(f'{out}: the moving average of the weights of {run.path} up to step {step}')
  else:
    step = averaging.average(run, steps, out)
    print(f'{out}: the mean of steps {", ".join(map(str, steps))} of {run.path}, as step {step}')
  print(f'lingvo-moe decode {shlex.quote(out)} --split=test --step={step}')


if __name__ == '__main__':
  main()
