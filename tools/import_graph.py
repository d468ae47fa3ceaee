"""Imports of a checkout's Python files, read and not executed."""

import ast
import pathlib
from collections.abc import Iterable, Iterator, Mapping


def imported(path: pathlib.Path, package: str = '') -> Iterator[str]:
  """What a file imports of a package, or of any, at its top or inside a function: modules, or names in modules."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.ImportFrom) and not node.level:
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    else:
      continue
    yield from (name for name in names if not package or name.startswith(f'{package}.'))


def graph(modules: Mapping[str, pathlib.Path]) -> dict[str, set[str]]:
  """The modules that each of some modules imports, of these, by their dotted names."""
  module_of = lambda name: name if name in modules else name.rpartition('.')[0]
  return {
    name: {module_of(other) for other in imported(path)} & modules.keys() - {name} for name, path in modules.items()
  }


def importers(names: Iterable[str], graph: Mapping[str, set[str]]) -> set[str]:
  """Modules that import one of some modules directly."""
  names = {*names}
  return {module for module, others in graph.items() if others & names}
