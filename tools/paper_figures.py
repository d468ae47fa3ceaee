#!/usr/bin/env python
"""python tools/paper_figures.py --out=DIR [--what=table1,figure9] [--tiny]

Holds this zoo against GShard (arXiv 2006.16668): its tables and figures beside what programs compiled for the same TPU
slices tell, as Markdown (DIR/paper_figures.md, and here) and plots (DIR/*.png).

figure9 and table4 take a minute. All others compile models with tools/cost.py, minutes each for the giants and
some hours for all; reports are kept in DIR, so that the same command goes on after an interruption and compiles nothing
twice. Delete a report there to have it compiled again, as after a change of the code. --tiny compiles the giants' tiny
siblings for 8 and 128 cores, to see that the command works.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata

from absl import flags

from lingvo_moe import app
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import closest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # whatever this machine has is not needed
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')  # for table4; read when JAX is first used

_OUT = flags.DEFINE_string('out', None, 'Folder for tables, plots and reports.', required=True)
_WHAT = flags.DEFINE_list('what', [], 'Some of: figure9,table4,compile,figure8,figure7,table1,table3,newer; none: all.')
_TINY = flags.DEFINE_bool('tiny', False, "Compile the giants' tiny siblings in their place.")

_COST = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'cost.py')


def main(argv):
  del argv
  from lingvo_moe.paper import figures
  from lingvo_moe.paper.report_cache import ReportCache

  for name in _WHAT.value:
    if name not in figures.NAMES:
      raise UserError(f'--what names tables and figures; saw {name!r}; {closest(name, figures.NAMES)}')
  names = [name for name in figures.NAMES if name in (_WHAT.value or figures.NAMES)]
  reports = ReportCache(_OUT.value, _COST, lambda line: print(line, file=sys.stderr, flush=True))
  making = figures.Figures(reports, _OUT.value, _TINY.value)
  blocks = ['# GShard, measured from compiled programs', f'With {_versions()}.']
  if _TINY.value:
    blocks.append('**Tiny siblings**: this shows that the command works, and nothing about the models of the paper.')
  print('\n\n'.join(blocks), flush=True)
  path = os.path.join(_OUT.value, 'paper_figures.md')
  for i, name in enumerate(names, 1):
    print(f'{name} ({i} of {len(names)})', file=sys.stderr, flush=True)
    made = making.make(name)
    print('\n' + '\n\n'.join(made), flush=True)
    blocks += made
    with open(path, 'w', encoding='utf-8') as f:
      f.write('\n\n'.join(blocks) + '\n')
  print(f'{path} and its plots are written', file=sys.stderr)


def _versions() -> str:
  """'tensorflow 2.21.0, jaxlib 0.10.2, libtpu 0.0.42.1'; what is not installed is said to be."""
  found = []
  for package in ('tensorflow', 'jaxlib', 'libtpu'):
    try:
      found.append(f'{package} {metadata.version(package)}')
    except metadata.PackageNotFoundError:
      found.append(f'no {package}')
  return ', '.join(found)


if __name__ == '__main__':
  app.run(main)
