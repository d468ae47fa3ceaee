"""The layering of the package: imports point from a later line to an earlier one, or stay within a line."""

import ast
import collections
import graphlib
import pathlib
import re

import import_graph
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / 'lingvo_moe'

# From what all use to the jobs that know all. A module belongs to the longest name here that is its own or of a folder
# above it.
ORDER = (
  'core',
  'storage',
  'config',
  'vocab.vocab vocab.text_vocab vocab.language_tags',
  # What steers a search, without TensorFlow.
  'search.length_norm search.beam search.constraints search.automaton search.text_constraints search.repetition '
  'search.continuations search.request search.minimum_bayes_risk',
  'text',
  'corpora',
  'xla_sharding',
  'ops',
  'layers',
  'optim',
  'search',
  'vocab',
  'addons.documents addons.engine',
  'program models',
  'inputs',
  'tasks',
  'runtime',
  'run',
  'addons.interop addons.analysis addons.report addons.export',
  'cli',
  'addons.serving',
  'trainer decoder translate serve',
  'cli.commands',
)
RANK = {name: rank for rank, line in enumerate(ORDER) for name in line.split()}

# Modules of the zoo that may import an addon: the commands, lingvo_moe.load, and exports.
DOORS = {
  '': 'lingvo_moe.load',
  'cli': 'commands, and the options of jobs that take an export in place of a run',
  'decoder': 'the command decode',
  'serve': 'the command serve',
  'tasks.task': 'exports, as text to be scored',
  'tasks.mt.held_out': 'exports, as text to be scored',
}

FILES = sorted(p for p in PACKAGE.rglob('*.py') if p.name != '__init__.py')


def imported(path):
  """What a file imports of the package: modules, or names in modules, without the package's own."""
  return [name.removeprefix('lingvo_moe.') for name in import_graph.imported(path, 'lingvo_moe')]


def module_of(path):
  """Dotted name of a file in the package, without the package's own; '' for its __init__.py."""
  return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts).removesuffix('__init__').rstrip('.')


def place(module, names):
  """The longest of some names that is the module's own, or of a folder above it; None if there is none."""
  parts = module.split('.')
  return next((name for n in range(len(parts), 0, -1) if (name := '.'.join(parts[:n])) in names), None)


def circle(package):
  """Modules that import each other, one after the other and the first again; [] if there is no circle."""
  files = [p for p in package.rglob('*.py') if p.name != '__init__.py']
  modules = {'.'.join(p.relative_to(package.parent).with_suffix('').parts): p for p in files}
  try:
    graphlib.TopologicalSorter(import_graph.graph(modules)).prepare()
  except graphlib.CycleError as e:
    return e.args[1]
  return []


def arrows():
  """Imports of files of one room by those of another: their number, by (room that imports, room)."""
  pairs = collections.Counter()
  for path in FILES:
    of_path = place(module_of(path), RANK)
    of_imports = {place(module, RANK) for module in imported(path)}
    pairs.update((of_path, room) for room in of_imports - {of_path})
  return pairs


def test_no_arrow_between_rooms_points_upward():
  """Prints, with pytest -s, the files of each room and the rooms that they import, with the number of files that do."""
  files = collections.Counter(place(module_of(path), RANK) for path in FILES)
  between = arrows()
  for room in RANK:
    others = ', '.join(f'{other} {count}' for (of, other), count in sorted(between.items()) if of == room)
    print(f'{files[room]:3} {room}: {others}')
  print(f'{sum(files.values())} files, {len(between)} arrows')
  assert not [(room, other) for room, other in between if RANK[other] > RANK[room]]


def test_the_order_names_each_place_once():
  assert len(RANK) == sum(len(line.split()) for line in ORDER)


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_nothing_of_a_later_layer(path):
  room = place(module_of(path), RANK)
  assert room, f'{path.relative_to(ROOT)} has no place in the order'
  for module in imported(path):
    assert RANK[place(module, RANK)] <= RANK[room], f'{path.relative_to(ROOT)} imports lingvo_moe.{module}'


def test_the_zoo_enters_addons_by_the_listed_doors_alone():
  entered = set()
  for path in PACKAGE.rglob('*.py'):
    module = module_of(path)
    if not module.startswith('addons') and any(f'{name}.'.startswith('addons.') for name in imported(path)):
      door = place(module, DOORS) if module else ''
      assert door is not None, f'{path.relative_to(ROOT)} imports an addon: is it a door?'
      entered.add(door)
  assert entered == DOORS.keys()


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
  assert sorted(set(circle(package))) == ['toy.a', 'toy.b', 'toy.folder.c']


JOBS = set('trainer decoder translate serve run runtime addons.serving cli.app cli.checkpoint_flags'.split())
JOBS |= {'cli.machine', 'cli.options'}


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_jobs_and_what_they_share_know_no_task_by_name(path):
  if place(module_of(path), JOBS):
    shared = ('tasks.task.', 'tasks.metrics.')
    named = [name for name in imported(path) if name.startswith('tasks.') and not f'{name}.'.startswith(shared)]
    assert not named, f'{path.relative_to(ROOT)} imports {named}: use the protocol of tasks/task.py'


def test_params_are_imported_by_name_only():
  for path in FILES:
    assert 'params' not in {module.split('.')[0] for module in imported(path)}, path


@pytest.mark.parametrize(
  ('package', 'importers'), [('absl import .*flags', ['cli/app.py', 'cli/options.py']), ('gin', ['config/bindings.py'])]
)
def test_flags_and_gin_are_each_read_in_one_place(package, importers):
  line = re.compile(rf'^ *(from|import) {package}\b', re.M)
  found = [path for path in FILES if line.search(path.read_text(encoding='utf-8'))]
  assert [str(path.relative_to(PACKAGE)) for path in found] == importers


def test_the_package_imports_nothing_of_the_studies_below_tools():
  for path in FILES:
    assert not re.search(r'^ *(from|import) (paper|tools)\b', path.read_text(encoding='utf-8'), re.M), path


def test_the_root_has_some_ten_modules():
  assert len(list(PACKAGE.glob('*.py'))) <= 12


def test_every_folder_says_what_is_in_it():
  for folder in {path.parent for path in FILES}:
    assert ast.get_docstring(ast.parse((folder / '__init__.py').read_text(encoding='utf-8'))), folder


def test_no_two_modules_have_one_name():
  """A command's module has the name of the command, and params have those of models."""
  commands = PACKAGE / 'cli' / 'commands'
  names = collections.Counter(path.name for path in FILES if commands not in path.parents)
  assert [name for name, count in names.items() if count > 1] == []


def repeated_classes(package):
  """Names of several classes that are not one class, with those that are derived from it or share its base."""
  bases = {}  # by name, the names of the bases of each class of that name
  for path in package.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      if isinstance(node, ast.ClassDef):
        bases.setdefault(node.name, []).append({ast.unparse(base).rpartition('.')[2] for base in node.bases})
  ancestors = lambda parents: parents.union(*(ancestors(more - parents) for p in parents for more in bases.get(p, ())))
  roots = {name: [ancestors(parents) for parents in several if name not in parents] for name, several in bases.items()}
  return sorted(n for n, several in roots.items() if len(several) > 1 and not set.intersection(*several) & bases.keys())


def test_a_name_of_a_class_stands_for_one_thing():
  assert repeated_classes(PACKAGE) == []


@pytest.mark.parametrize(
  ('first', 'second', 'repeated'),
  [
    ('class Batch:', 'class Batch:', ['Batch']),
    ('class Batch(NamedTuple):', 'class Batch(NamedTuple):', ['Batch']),
    ('class Input:', 'class Input(a.Input):', []),
    ('class Base:\n  ...\nclass Input(Base):', 'class Input(a.Base):', []),
  ],
)
def test_classes_of_one_name_are_told_apart_unless_one_is_made_of_the_other(tmp_path, first, second, repeated):
  (tmp_path / 'a.py').write_text(f'{first}\n  ...\n')
  (tmp_path / 'b.py').write_text(f'{second}\n  ...\n')
  assert repeated_classes(tmp_path) == repeated
