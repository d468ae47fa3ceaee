"""Docstrings name what exists: files, and the modules, classes, functions, fields and values between backticks."""

import ast
import builtins
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ('lingvo_moe', 'params', 'tools', 'tests')
# A file of Grok-1's code, one that docs/add_a_model.md writes, a symbol of M2M-100's vocabulary.
ELSEWHERE = {'model.py', 'harbour.py', '__de__'}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[pathlib.Path]:
  paths = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob('*.py')}
  return sorted(path for path in paths if 'data' not in path.relative_to(ROOT).parts)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
  """The constants of the docstrings of a module, its classes and functions."""
  for node in ast.walk(tree):
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
      yield node.body[0].value


def names_of(tree: ast.Module) -> set[str]:
  """Every name that the code of a module has or reads, and the words of its strings but for docstrings."""
  names, documented = set(), {id(node) for node in docstrings(tree)}
  for node in ast.walk(tree):
    for attribute in 'id', 'attr', 'arg', 'name', 'asname':
      names.update((getattr(node, attribute, None) or '').split('.'))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
      names.update(re.findall(r'\w+', node.value))
  return names


@functools.cache
def known() -> frozenset[str]:
  """Names of the code of all folders, of its files and of Python."""
  names = {*dir(builtins), *ELSEWHERE}
  for path in sources():
    names |= {*path.relative_to(ROOT).with_suffix('').parts, path.name, *names_of(ast.parse(path.read_text()))}
  return frozenset(names)


def stale(text: str, beside: pathlib.Path, names: frozenset[str]) -> list[str]:
  """Files of a docstring that are not there, and names between backticks that no code has."""
  places = (beside, ROOT, *(ROOT / folder for folder in FOLDERS))
  # params/ is lingvo_moe/params where the package is installed
  exists = lambda file: any((place / file.removeprefix('lingvo_moe/params/')).exists() for place in places)
  files = re.findall(r'(?<![\w/.])(?:[a-z_\d]+/)*[a-z_\d]+\.py\b', text)
  found = [file for file in files if file not in names and not exists(file)]
  for quoted in re.findall(r'`([A-Za-z_][\w.]*\w)(?:\(\))?`', text):
    if quoted.rpartition('.')[2] not in names and not exists(quoted):
      found.append(quoted)
  return found


@pytest.mark.parametrize('path', sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_name_what_exists(path):
  text = [node.value for node in docstrings(ast.parse(path.read_text()))]
  assert stale('\n'.join(text), path.parent, known()) == []


def test_a_file_or_a_name_that_has_gone_is_found():
  names = frozenset({'encode', 'search', 'beam_search.py'})
  text = 'See search/beam_search.py, gone/beam_search.py and old_name.py; `search.encode`, `encode()`, `decoded`, `x`.'
  assert stale(text, ROOT / 'lingvo_moe' / 'search', names) == ['gone/beam_search.py', 'old_name.py', 'decoded']
