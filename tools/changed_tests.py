#!/usr/bin/env python
"""python tools/changed_tests.py [--since=COMMIT] [--list] [ARGUMENTS OF PYTEST]

Runs the fast tests of what changed since a commit (by default: since the last one, that is, what is not committed):

- changed tests, and tests that import what changed or name it;
- tests/FOLDER/test_NAME.py for each lingvo_moe/FOLDER/NAME.py that changed or imports directly what changed.

Files that took least in the last run of all tests come first. Prints which other tests depend on the change, through
several imports, and were left out. `tools/test --changed` and `tools/test --changed=COMMIT` do the same.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

import import_graph

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = '.pytest_cache/processor_seconds.jsonl'  # of each test, written by tools/test
# Folders of modules, with what the modules' names begin with.
PLACES = {'params': 'lingvo_moe.params', 'lingvo_moe': 'lingvo_moe', 'tools': '', 'tests': ''}


class Checkout:
  """Python files of a checkout, and which imports which.

  Args:
    root: its folder.
    files: its files, relative to it.
  """

  def __init__(self, root: pathlib.Path, files: Iterable[str]):
    self._root = root
    self._module_of = {f: module for f in sorted(files) if (module := module_of(f)) and (root / f).exists()}
    self._file_of = {module: f for f, module in self._module_of.items()}
    self._graph = import_graph.graph({module: root / f for f, module in self._module_of.items()})
    self.tests = [f for f in self._module_of if is_test(f)]

  def chosen(self, changed: Collection[str]) -> list[str]:
    """Tests of the files that changed and of those that import them."""
    tests = {*changed} & {*self.tests}
    modules = {self._module_of[f] for f in changed if f in self._module_of}
    direct = import_graph.importers(modules, self._graph)
    tests |= {self._file_of[module] for module in direct} & {*self.tests}
    tests |= {test for f in [*changed, *map(self._file_of.get, direct)] for test in self._mirrors(f)}
    tests |= {test for f in changed for test in self._naming(f)}
    return sorted(tests)

  def dependent(self, changed: Collection[str]) -> list[str]:
    """Tests that import a file that changed, themselves or through other files."""
    reached = modules = {self._module_of[f] for f in changed if f in self._module_of}
    while modules:
      modules = import_graph.importers(modules, self._graph) - reached
      reached = reached | modules
    return sorted({self._file_of[module] for module in reached} & {*self.tests})

  def _mirrors(self, file: str) -> list[str]:
    place, _, rest = file.partition('/')
    folder, name = os.path.split(rest if place == 'lingvo_moe' else file)
    stem = name.removesuffix('.py')
    wanted = {os.path.normpath(f'tests/{folder}/test_{stem}{end}.py') for end in ('', '_tool')}
    return [] if place == 'tests' else [test for test in self.tests if test in wanted]

  def _naming(self, file: str) -> list[str]:
    """Tests that name a model's file as a model's name does, or a file that is no module by its path's end."""
    if file.endswith('.md'):
      return [test for test in self.tests if test == 'tests/test_docs.py']
    module = self._module_of.get(file, '')
    if module and not file.startswith('params/'):
      return []
    base = os.path.basename(file)  # 'test' of tools/test is a word of every test
    name = f'{module.removeprefix("lingvo_moe.params.")}.' if module else base if '.' in base[1:] else file
    zoo = ['tests/test_zoo.py'] * bool(module)
    return [*zoo, *(test for test in self.tests if name in (self._root / test).read_text(encoding='utf-8'))]


def module_of(file: str) -> str:
  """Dotted name of a module by its path in the checkout; '' for what is no module there."""
  place, _, rest = file.partition('/')
  if place not in PLACES or not rest.endswith('.py'):
    return ''
  return '.'.join(filter(None, [PLACES[place], *pathlib.PurePath(rest).with_suffix('').parts])).removesuffix(
    '.__init__'
  )


def is_test(file: str) -> bool:
  return file.startswith('tests/') and os.path.basename(file).startswith('test_') and file.endswith('.py')


def by_seconds(tests: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
  """Those that take least first; those of which nothing is known last."""
  return sorted(tests, key=lambda test: (seconds.get(test, float('inf')), test))


def files_since(commit: str) -> list[str]:
  """Files of the checkout that differ from a commit's, new ones too."""
  asked = [['diff', '--name-only', '--no-renames', commit], ['ls-files', '--others', '--exclude-standard']]
  return sorted({line for words in asked for line in _git(*words)})


def _git(*words: str) -> list[str]:
  done = subprocess.run(['git', '-c', 'core.quotePath=off', *words], cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    sys.exit(f'error: git {words[0]} failed: {(done.stderr.splitlines() or ["no reason given"])[0]}')
  return done.stdout.splitlines()


def _seconds() -> dict[str, float]:
  """Processor seconds of files in the last run of all tests, as far as they are known."""
  sys.path.insert(0, str(ROOT / 'tests'))
  import processor_seconds

  seconds = collections.Counter()
  if (ROOT / SECONDS).exists():
    for row in processor_seconds.read(ROOT / SECONDS):
      seconds[row.file] += row.seconds
  return seconds


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--since', default='HEAD', metavar='COMMIT')
  parser.add_argument('--list', action='store_true', help='print the files of tests, and run none')
  args, more = parser.parse_known_args(argv)
  changed = files_since(args.since)
  if not changed:
    sys.exit(f'error: nothing differs from {args.since}: name an earlier commit, as --changed=HEAD~1')
  checkout = Checkout(ROOT, _git('ls-files', '--cached', '--others', '--exclude-standard'))
  seconds = _seconds()
  chosen = by_seconds(checkout.chosen(changed), seconds)
  left = collections.Counter(os.path.dirname(test) for test in {*checkout.dependent(changed)} - {*chosen})
  known = sum(seconds[test] for test in chosen if test in seconds)
  print(f'{len(changed)} files differ from {args.since}; {len(chosen)} files of tests, which took {known:.0f} s:')
  print(*chosen, sep='\n', flush=True)
  if 'tests/conftest.py' in changed:
    print('all tests depend on tests/conftest.py: run tools/test')
  code = 0
  if chosen and not args.list:
    workers = ['--numprocesses=2', '--dist=loadfile', '--no-loadscope-reorder']
    command = [sys.executable, '-m', 'pytest', '-m', 'not slow and not compiled', *workers, *more, *chosen]
    code = subprocess.run(command, cwd=ROOT).returncode
  folders = ', '.join(f'{count} in {folder}' for folder, count in sorted(left.items())) or 'none'
  print(f'left out: files that depend on it through other files ({folders}), and tests marked compiled or slow')
  return 0 if code == 5 else code  # pytest's 5: all of them were marked


if __name__ == '__main__':
  sys.exit(main())
