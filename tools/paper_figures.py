#!/usr/bin/env python
"""python tools/paper_figures.py --out=DIR [--what=table1,figure9] [--tiny]

Reproduces the tables and figures of GShard (arXiv 2006.16668) from programs compiled for the same TPU slices, next to
the paper's numbers, as Markdown (DIR/paper_figures.md, and printed) and plots (DIR/*.png).

figure9 and table4 take a minute. All others compile models with lingvo-moe cost, which takes minutes for each giant
model and some hours for all. Reports are kept in DIR, so the same command resumes after an interruption and compiles
nothing twice. Delete a report to compile it again, for example after a change of the code. --tiny compiles the tiny
siblings of the giants for 8 and 128 cores, to test the command.
"""

import os
import sys
from importlib import metadata

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError, closest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # no accelerator of this machine is needed
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')  # for table4; read when JAX is first used

_OUT = flags.DEFINE_string('out', None, 'Folder for tables, plots and reports.', required=True)
_WHAT = flags.DEFINE_list(
  'what', [], 'Any of figure9,table4,compile,figure8,figure7,table1,table3,newer,programs; all by default.'
)
_TINY = flags.DEFINE_bool('tiny', False, 'Compile the tiny siblings of the giant models instead.')

_COST = ('-m', 'lingvo_moe.cli.commands.main', 'cost')


@app.command()
def main():
  from paper import figures
  from paper.report_cache import ReportCache

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
  """Versions of the compilers' packages: 'tensorflow 2.21.0, jaxlib 0.10.2, no libtpu'."""
  found = []
  for package in ('tensorflow', 'jaxlib', 'libtpu'):
    try:
      found.append(f'{package} {metadata.version(package)}')
    except metadata.PackageNotFoundError:
      found.append(f'no {package}')
  return ', '.join(found)


if __name__ == '__main__':
  main()
