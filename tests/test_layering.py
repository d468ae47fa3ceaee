"""The layering of the package: imports point from a later line to an earlier one, or stay within a line."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / 'lingvo_moe'

# From the words that all use to the jobs that know all. A module belongs to the first line that names it or a folder
# above it.
ORDER = (
  'core',
  'xla_sharding',
  'ops',
  'layers',
  'optim',
  'search',
  'program',
  'corpora',
  'tasks',
  'runtime',
  'run',
  'analysis',
  'report',
  'bench',
  'app checkpoint_flags runtime_flags launcher',
  'serving',
  'trainer decoder translate',
  'serve',
  'commands',
)
RANK = {name: rank for rank, line in enumerate(ORDER) for name in line.split()}

# Who may be imported by anyone is core; the registry there imports lingvo_moe.params by name, never in a statement.
FILES = sorted(p for p in PACKAGE.rglob('*.py') if p.name != '__init__.py')


def imported(path):
  """The modules of lingvo_moe that a file imports, at its top or inside a function."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split('.')[0] == 'lingvo_moe':
      if node.module == 'lingvo_moe':
        yield from (alias.name for alias in node.names)
      else:
        yield node.module.removeprefix('lingvo_moe.')
    elif isinstance(node, ast.Import):
      yield from (a.name.removeprefix('lingvo_moe.') for a in node.names if a.name.startswith('lingvo_moe.'))


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_nothing_of_a_later_layer(path):
  own = path.relative_to(PACKAGE).with_suffix('').parts[0]
  assert own in RANK, f'{own} has no place in the order'
  for module in imported(path):
    assert RANK[module.split('.')[0]] <= RANK[own], f'{path.relative_to(ROOT)} imports lingvo_moe.{module}'


JOBS = {
  'trainer',
  'decoder',
  'translate',
  'serve',
  'serving',
  'run',
  'runtime',
  'app',
  'checkpoint_flags',
  'runtime_flags',
  'launcher',
}


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_jobs_and_what_they_share_know_no_task_by_name(path):
  if path.relative_to(PACKAGE).with_suffix('').parts[0] in JOBS:
    shared = ('tasks.task', 'tasks.metrics')
    named = [module for module in imported(path) if module.split('.')[0] == 'tasks' and module not in shared]
    assert not named, f'{path.relative_to(ROOT)} imports {named}: use the protocol of tasks/task.py'


def test_params_are_imported_by_name_only():
  for path in FILES:
    assert 'params' not in {module.split('.')[0] for module in imported(path)}, path


def test_the_package_imports_nothing_of_the_studies_below_tools():
  for path in FILES:
    assert not re.search(r'^ *(from|import) (paper|tools)\b', path.read_text(encoding='utf-8'), re.M), path


def test_the_root_has_some_ten_modules():
  assert len(list(PACKAGE.glob('*.py'))) <= 12


def test_every_folder_says_what_is_in_it():
  for folder in {path.parent for path in FILES}:
    assert ast.get_docstring(ast.parse((folder / '__init__.py').read_text(encoding='utf-8'))), folder
