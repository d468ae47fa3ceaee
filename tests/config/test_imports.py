"""Imports of a user's own code: one line for every mistake, and nothing that is not named is executed."""

import os
import sys

import forks
import pytest

from lingvo_moe.config import imports, registry
from lingvo_moe.core.errors import UserError

MODEL = '''
from lingvo_moe.config import registry
from lingvo_moe.params.mt import cldr


@registry.register
class {name}(cldr.Tiny):
  """For a test."""
'''


@pytest.fixture
def write(tmp_path, monkeypatch):
  """Function that writes a file, and returns its path; what it imports and registers is forgotten after the test."""
  zoo = {name: registry.get(name) for name in registry.names()}  # what the files import of it stays registered
  monkeypatch.setattr(registry, '_models', zoo)  # without what other modules of tests register
  before = set(sys.modules)

  def write(text, name='harbour_of_a_test.py'):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)

  yield write
  for name in set(sys.modules) - before:
    if (getattr(sys.modules[name], '__file__', None) or '').startswith(str(tmp_path)):
      del sys.modules[name]


def test_a_file_is_the_module_of_its_name_and_is_executed_once(write):
  path = write('import sys\nsys.stdout.write("executed ")\n' + MODEL.format(name='Mine'))
  done = forks.run(['-c', f'from lingvo_moe.config import registry\nfor _ in "ab": registry.install([{path!r}])'])
  assert done.stdout == 'executed ' and not done.stderr
  registry.install([path])
  assert registry.get('harbour_of_a_test.Mine').__module__ == 'harbour_of_a_test'
  assert registry.own_names() == ['harbour_of_a_test.Mine'] and 'harbour_of_a_test.Mine' not in registry.names()
  assert not os.path.exists(os.path.join(os.path.dirname(path), '__pycache__'))


def test_what_was_compiled_of_another_text_is_not_executed(write, tmp_path):
  path = write(MODEL.format(name='Theirs'))
  other = forks.run(['-m', 'py_compile', path], check=True)
  (compiled,) = (tmp_path / '__pycache__').iterdir()
  stat = os.stat(path)
  (tmp_path / 'harbour_of_a_test.py').write_text(MODEL.format(name='Theres'))
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of the same size and time: Python would take the other
  assert not other.stderr and compiled.exists()
  registry.install([path])
  assert registry.own_names() == ['harbour_of_a_test.Theres']


def test_a_later_file_may_import_an_earlier_one(write):
  first = write(MODEL.format(name='First'), 'first_of_a_test.py')
  second = write(
    'from first_of_a_test import First\nfrom lingvo_moe.config import registry\n\n\n'
    '@registry.register\nclass Second(First):\n  """For a test."""\n\n  ff_dim: int = 96\n',
    'second_of_a_test.py',
  )
  registry.install([first, second])
  assert registry.get('second_of_a_test.Second')().ff_dim == 96


MISTAKES = {
  'does not parse': ('x = 1\ndef f(:\n', r'harbour_of_a_test.py, line 2 raised SyntaxError: invalid syntax'),
  'raises': ('\n\nraise KeyError("gone")\n', r"harbour_of_a_test.py, line 3 raised KeyError: 'gone'"),
  'raises deep in a library': (
    'import json\njson.loads("{")\n',
    r'harbour_of_a_test.py, line 2 raised JSONDecodeError: ',
  ),
  'ends the process': ('import sys\nsys.exit(3)\n', r'harbour_of_a_test.py, line 2 raised SystemExit: 3'),
  'registers nothing': ('x = 1\n', r'harbour_of_a_test.py is for what registers models; saw none: decorate a class'),
  'needs a module': ('import not_there.x\n', r'line 1 needs the module not_there, which is not installed'),
  'a name twice': (
    MODEL.format(name='Mine') + MODEL.format(name='Mine'),
    r'line 14 raised ValueError: two classes are called harbour_of_a_test.Mine',
  ),
  'a misspelt field': (
    MODEL.format(name='Mine') + '\n  ff_dims: int = 3\n',
    r'raised ValueError: Mine.ff_dims overrides no field: closest: ff_dim',
  ),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(mistake, write):
  text, answer = MISTAKES[mistake]
  path = write(text)
  with pytest.raises(UserError, match=answer) as caught:
    registry.install([path])
  assert '\n' not in str(caught.value) and registry.own_names() == []
  registry.install([write(MODEL.format(name='Mine'))])  # mended, in the same process
  assert registry.own_names() == ['harbour_of_a_test.Mine']


@pytest.mark.parametrize(
  'name, answer',
  [
    ('none.py', 'none.py: there is no such file'),
    ('runs/', 'runs/: there is no such file'),
    ('my-models.py', 'a file is named as a module of Python is, such as harbour.py'),
    ('json.py', r'there is a module json already \(.*json/__init__.py\): rename the file'),
    ('mt.py', r'mt.Mine begins as names of the zoo do \(mt\.\): give the file, or the package, another name'),
    ('lingvo_moe.py', 'there is a module lingvo_moe already'),
    ('not a module', "'not a module': give a file, such as harbour.py, or an installed module"),
    ('not_installed.models', 'not_installed.models needs the module not_installed, which is not installed'),
  ],
)
def test_what_cannot_be_imported_is_refused(name, answer, write, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write(MODEL.format(name='Mine'), '-'.join(name.split('/')) if name == 'runs/' else name)
  if name == 'none.py':
    os.remove(name)
  with pytest.raises(UserError, match=answer):
    registry.install([name])
  assert registry.own_names() == []


def test_another_file_of_the_same_name_is_refused(write):
  registry.install([write(MODEL.format(name='Mine'))])
  other = write(MODEL.format(name='Other'), 'other/harbour_of_a_test.py')
  with pytest.raises(UserError, match=r'there is a module harbour_of_a_test already \(.*/harbour_of_a_test.py\)'):
    registry.install([other])


def test_a_file_that_imports_tensorflow_starts_as_quietly_as_the_package(write):
  path = write('import tensorflow as tf\n' + MODEL.format(name='Mine'))
  code = f'from lingvo_moe.config import registry\nregistry.install([{path!r}])\nprint(registry.own_names())'
  done = forks.run(['-c', code])
  assert done.stdout == "['harbour_of_a_test.Mine']\n" and done.stderr == ''


def test_modules_that_packages_name_are_listed_and_not_imported(monkeypatch):
  from importlib import metadata

  points = [metadata.EntryPoint('b', 'seaside.models', 'lingvo_moe.models')] * 2
  monkeypatch.setattr(metadata, 'entry_points', lambda group: points if group == 'lingvo_moe.models' else [])
  assert imports.installed() == ['seaside.models'] and 'seaside' not in sys.modules
