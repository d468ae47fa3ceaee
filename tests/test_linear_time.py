"""Regular expressions that read a stranger's text take time that grows with its length alone."""

import ast
import dataclasses
import importlib
import itertools
import pathlib
import re
import time

import pytest
import regex

import lingvo_moe

ROOT = pathlib.Path(lingvo_moe.__file__).parent
OURS = ROOT / 'addons' / 'analysis'  # reads programs that XLA writes
PREFIXES = ('', '<', '<a "', '&', '1', 'a', '\n', '{\\', '/', '%', '{', 'a@')
UNITS = (
  *(
    'a',
    ' ',
    '1',
    '\n',
    '.',
    '-',
    '/',
    '<',
    '&',
    '"',
    '=',
    '{',
    'é',
    '日',
    '\xa0',
    'a ',
    'a=',
    "='",
    '1-',
    '1\n',
    ' \n',
  ),
  *(
    '. ',
    '<a',
    '<a "',
    '<!--',
    '-->',
    '</',
    '<?',
    '<!',
    '&#',
    '&a',
    '{\\',
    '<b>x',
    '<script>',
    'charset ',
    '<meta ',
    '=" ',
  ),
  *(
    ' name="',
    ' -->',
    '\n-',
    '\n<i>',
    '%',
    '0',
    '%s',
    'a%',
    '{a} ',
    '{a,plural,',
    "'{",
    '}',
    'a@',
    'a.',
    '://',
    ':a',
    '\t',
  ),
)
LENGTH, MEASURED = 8_000, 0.003  # characters, and the seconds from which times are compared


def calls(path):
  """(what a method is called of, its name, first argument) of the calls in a module."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
      yield ast.unparse(node.func.value), node.func.attr, node.args[0]


def compiled(value, depth=0):
  """Patterns among the values of a module."""
  if isinstance(value, re.Pattern | regex.Pattern):
    yield value
  elif dataclasses.is_dataclass(value) and not isinstance(value, type):
    yield from compiled([getattr(value, field.name) for field in dataclasses.fields(value)], depth + 1)
  elif isinstance(value, dict | list | tuple) and depth < 4:
    for item in value.values() if isinstance(value, dict) else value:
      yield from compiled(item, depth + 1)


def patterns():
  """Each pattern, and whether it is only ever looked for at the begin of a text."""
  found = {}
  for path in sorted(ROOT.rglob('*.py')):
    if OURS in path.parents or not re.search(
      r'^\s*(import (re|regex)\b|from (re|regex) )', path.read_text(encoding='utf-8'), re.M
    ):
      continue
    module = importlib.import_module('.'.join(('lingvo_moe', *path.relative_to(ROOT).with_suffix('').parts)))
    used = list(calls(path))
    own = {}  # with how it is used
    for name, value in vars(module).items():
      own |= {pattern: {method for of, method, _ in used if of == name} or {'search'} for pattern in compiled(value)}
    for of, method, argument in used:
      if of in ('re', 'regex') and method not in ('escape', 'compile') and isinstance(argument, ast.Constant):
        own[getattr(module, of).compile(argument.value)] = {method}
    for pattern, methods in own.items():
      where = pytest.param(pattern, methods <= {'match', 'fullmatch'}, id=f'{path.stem}: {pattern.pattern!r:.40}')
      found.setdefault((pattern.pattern, pattern.flags), where)
  return list(found.values())


def seconds(pattern, at_begin, text):
  """The least time of three to match a text, and to find all that matches in it."""
  text, found = text.encode() if isinstance(pattern.pattern, bytes) else text, []
  for _ in range(3):
    begin = time.perf_counter()
    pattern.fullmatch(text)
    for _ in () if at_begin else pattern.finditer(text):
      pass
    found.append(time.perf_counter() - begin)
    if found[-1] < MEASURED:
      break
  return min(found)


def growth(pattern, at_begin, prefix, unit, characters=LENGTH):
  """How often as long twice the text takes; 0 where it takes too little to be measured."""
  once, twice = (prefix + unit * (length // len(unit)) for length in (characters, 2 * characters))
  if seconds(pattern, at_begin, once) < MEASURED:
    return 0.0
  return min(seconds(pattern, at_begin, twice) / seconds(pattern, at_begin, once) for _ in range(3))


@pytest.mark.parametrize('pattern, at_begin', patterns())
def test_twice_the_text_takes_at_most_two_and_a_half_times_as_long(pattern, at_begin):
  for prefix, unit in itertools.product(PREFIXES, UNITS):
    assert growth(pattern, at_begin, prefix, unit) <= 2.5, (prefix, unit)


@pytest.mark.parametrize('slow, unit', [(r'[a-z]+;', 'a'), (r'<!.*?>', '<!'), (r'\s*\n', ' ')])
def test_a_pattern_whose_time_grows_faster_is_found(slow, unit):
  assert growth(re.compile(slow), False, '', unit, 3000) > 2.5
