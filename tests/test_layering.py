"""The layering of the package: imports point from a later line to an earlier one, or stay within a line."""

import ast
import graphlib
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / 'lingvo_moe'

# From the words that all use to the jobs that know all. A module belongs to the first line that names it or a folder
# above it.
ORDER = (
  'core',
  'documents engine interop',
  'mesh',
  'xla_sharding',
  'ops',
  'layers',
  'optim',
  'search',
  'corpora',
  'program',
  'corpora',
  'tasks',
  'runtime',
  'run',
  'analysis',
  'report',
  'bench',
  'app options checkpoint_flags machine',
  'serving',
  'trainer decoder translate',
  'serve',
  'commands',
)
RANK = {name: rank for rank, line in enumerate(ORDER) for name in line.split()}

# Who may be imported by anyone is core; the registry there imports lingvo_moe.params by name, never in a statement.
FILES = sorted(p for p in PACKAGE.rglob('*.py') if p.name != '__init__.py')


def imported(path, package='lingvo_moe'):
  """What a file imports of a package, at its top or inside a function: modules, or names in modules."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.ImportFrom) and f'{node.module}.'.startswith(f'{package}.'):
      yield from (f'{node.module}.{alias.name}'.removeprefix(f'{package}.') for alias in node.names)
    elif isinstance(node, ast.Import):
      yield from (a.name.removeprefix(f'{package}.') for a in node.names if a.name.startswith(f'{package}.'))


def circle(package):
  """Modules that import each other, one after the other and the first again; [] if there is no circle."""
  files = {p.relative_to(package).with_suffix(''): p for p in package.rglob('*.py') if p.name != '__init__.py'}
  files = {'.'.join(path.parts): p for path, p in files.items()}
  module_of = lambda name: name if name in files else name.rpartition('.')[0]
  graph = {name: {module_of(n) for n in imported(p, package.name)} & files.keys() for name, p in files.items()}
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as e:
    return e.args[1]
  return []


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_nothing_of_a_later_layer(path):
  own = path.relative_to(PACKAGE).with_suffix('').parts[0]
  assert own in RANK, f'{own} has no place in the order'
  for module in imported(path):
    assert RANK[module.split('.')[0]] <= RANK[own], f'{path.relative_to(ROOT)} imports lingvo_moe.{module}'


def test_no_modules_import_each_other():
  assert circle(PACKAGE) == []


@pytest.mark.parametrize('line', ['from toy.b import f', 'from toy import b', 'def f():\n  import toy.b'])
def test_a_circle_is_found_wherever_the_import_stands(tmp_path, line):
  package = tmp_path / 'toy'
  (package / 'folder').mkdir(parents=True)
  (package / 'a.py').write_text(f'{line}\n')
  (package / 'b.py').write_text('import os\nfrom toy.folder.c import g\n')
  (package / 'folder' / 'c.py').write_text('')
  assert circle(package) == []
  (package / 'folder' / 'c.py').write_text('def g():\n  from toy import a\n')
  assert sorted(set(circle(package))) == ['a', 'b', 'folder.c']


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
  'machine',
  'options',
}


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_jobs_and_what_they_share_know_no_task_by_name(path):
  if path.relative_to(PACKAGE).with_suffix('').parts[0] in JOBS:
    shared = ('tasks.task.', 'tasks.metrics.')
    named = [name for name in imported(path) if name.startswith('tasks.') and not f'{name}.'.startswith(shared)]
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
