#!/usr/bin/env python
"""python tools/mutants.py [--count=120] [--seed=1] [NAME ...]

Mutation test: would a test notice? mutmut changes one expression at a time in the files that pyproject.toml names, and
runs the fast tests of their packages that execute it, a minute of them at most. Prints, by package, how many mutants
were caught, and the names of the others. It needs mutmut:

  pip install 'mutmut>=3.8,<4'

Without names it draws a sample, in proportion to the mutants of each package but at least 10 of each; with names,
patterns such as 'lingvo_moe.optim.adam.*', it takes those. 120 take half an hour; all of them, 9,000, would take days.
The first call also runs every test once, a quarter of an hour, to see which functions it executes. All is kept in
mutants/, which may be deleted at any time. There, a mutant that survived can be given any test, such as one that is
slow:

  cd mutants && MUTANT_UNDER_TEST=NAME python -m pytest --rootdir=. tests/layers/test_stack.py

and `python -c 'from mutmut.__main__ import cli; cli()' show NAME` prints what was changed.
"""

import argparse
import collections
import fnmatch
import importlib.util
import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
AT_LEAST = 10  # mutants of a package
CAUGHT = ('killed', 'timeout', 'segfault', 'suspicious')  # a process that ends by a signal does not pass a test either


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('names', nargs='*')
  parser.add_argument('--count', type=int, default=120)
  parser.add_argument('--seed', type=int, default=1)
  args = parser.parse_args()
  if importlib.util.find_spec('mutmut') is None:
    sys.exit("mutmut is not installed: pip install 'mutmut>=3.8,<4'")
  # mutmut copies lingvo_moe/ alone, and params/ is a package in it.
  shutil.copytree(ROOT / 'params', ROOT / 'mutants/lingvo_moe/params', dirs_exist_ok=True)
  if not (ROOT / 'mutants/mutmut-stats.json').exists():
    mutmut('run', '--max-children=1', 'lingvo_moe.optim.schedule.x__count__mutmut_1')
  everything = results()
  wanted = args.names or sample(everything, args.count, args.seed)
  chosen = [name for name in everything if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)]
  if not chosen:
    sys.exit(
      f'no mutant has a name like {", ".join(wanted) or "any"}: mutants/mutmut-stats.json has those of functions'
    )
  mutmut('run', '--max-children=1', *chosen)
  print(table(chosen, results()))


def mutmut(*args: str, **options) -> subprocess.CompletedProcess:
  """Runs mutmut; tests/mutation/ has a pytest plugin and a list of modules for it."""
  environment = {**os.environ, 'PYTHONPATH': 'tests/mutation', 'TF_CPP_MIN_LOG_LEVEL': '3'}
  command = [sys.executable, '-c', 'from mutmut.__main__ import cli; cli()', *args]
  return subprocess.run(command, cwd=ROOT, env=environment, check=True, **options)


def results() -> dict[str, str]:
  """Status by name of every mutant, in the order of names."""
  lines = mutmut('results', '--all=true', capture_output=True, text=True).stdout.splitlines()
  return dict(sorted(line.strip().split(': ') for line in lines))


def package(name: str) -> str:
  return name.split('.')[1]


def sample(names: Iterable[str], count: int, seed: int) -> list[str]:
  """Names drawn at random, by package."""
  by_package = collections.defaultdict(list)
  for name in names:
    by_package[package(name)].append(name)
  total, rng = sum(map(len, by_package.values())), random.Random(seed)
  shares = {key: max(AT_LEAST, round(count * len(group) / total)) for key, group in by_package.items()}
  return [name for key, group in by_package.items() for name in rng.sample(group, min(shares[key], len(group)))]


def table(names: Iterable[str], statuses: Mapping[str, str]) -> str:
  """Mutants and those caught by package, and the names of the others."""
  count = collections.Counter((package(name), statuses[name] in CAUGHT) for name in names)
  lines = [f'{"package":12}  mutants  caught']
  for key in sorted({key for key, _ in count}):
    lines.append(f'{key:12}  {count[key, True] + count[key, False]:7}  {count[key, True]:6}')
  return '\n'.join(lines + [f'{name}: {statuses[name]}' for name in names if statuses[name] not in CAUGHT])


if __name__ == '__main__':
  main()
