"""Regular expressions and functions that read a stranger's text take time that grows with its length alone."""

import ast
import contextlib
import dataclasses
import gc
import importlib
import inspect
import itertools
import pathlib
import re
import tempfile
import time

import pytest
import regex

import lingvo_moe
from lingvo_moe.addons.documents import formats
from lingvo_moe.addons.documents import markup as markup_lib
from lingvo_moe.addons.serving import query
from lingvo_moe.core.alignment import Alignment, Token
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import near_duplicates, pair_files, words
from lingvo_moe.corpora import text as text_lib
from lingvo_moe.search import automaton
from lingvo_moe.search.request import TranslationRequest
from lingvo_moe.text import placeholders, sentences
from lingvo_moe.text.inline_placement import Aligned
from lingvo_moe.text.placeholder_keeper import PlaceholderKeeper
from lingvo_moe.text.translator import Answers, Hypothesis, Translator

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
LENGTH, MEASURED = 4_000, 0.003  # characters, and the seconds from which times are compared


@pytest.fixture(autouse=True)
def no_garbage_collection():
  """A collection takes longer than what is measured."""
  gc.disable()
  yield
  gc.enable()


def calls(path):
  """(what a method is called of, its name, first argument) of the calls in a module; None of a method handed on."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
      yield ast.unparse(node.func.value), node.func.attr, node.args[0]
    elif isinstance(node, ast.Attribute):
      yield ast.unparse(node.value), node.attr, None


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
    begin = time.process_time()
    pattern.fullmatch(text)
    for _ in () if at_begin else pattern.finditer(text):
      pass
    found.append(time.process_time() - begin)
    if found[-1] < MEASURED:
      break
  return min(found)


def growth(pattern, at_begin, prefix, unit, characters=LENGTH):
  """How often as long twice the text takes; 0 where it takes too little to be measured."""
  once, twice = (prefix + unit * (length // len(unit)) for length in (characters, 2 * characters))
  if seconds(pattern, at_begin, once) < MEASURED:
    return 0.0
  ratios = (seconds(pattern, at_begin, twice) / seconds(pattern, at_begin, once) for _ in range(5))
  return next((ratio for ratio in ratios if ratio <= 2.5), 3.0)


@pytest.mark.parametrize('pattern, at_begin', patterns())
def test_twice_the_text_takes_at_most_two_and_a_half_times_as_long(pattern, at_begin):
  for prefix, unit in itertools.product(PREFIXES, UNITS):
    assert growth(pattern, at_begin, prefix, unit) <= 2.5, (prefix, unit)


class Echo(Translator):
  """Translates nothing; each letter has come from the letter of its place."""

  n_best, able = 1, ('alignments', 'placeholders')

  def sampling(self, request):
    return 'beam', None

  def translate(self, texts, target=None, known=(), keep=None, request=None):
    hypotheses = [[Hypothesis(text, 0.0, 0.0, self.align([text], [text])[0])] for text in texts]
    return Answers(hypotheses, [])

  def align(self, sources, targets, target=None):
    tokens = lambda text: [Token(match[0], *match.span()) for match in re.finditer(r'\S', text)]
    return [
      Alignment(tokens(a), tokens(b), [(i, i) for i in range(min(len(tokens(a)), len(tokens(b))))])
      for a, b in zip(sources, targets)
    ]


def translated(text):
  paragraphs = sentences.Paragraphs(PlaceholderKeeper(Echo()), 'always', sentences.TrainingLines(), 10**9)
  paragraphs.translate([text], None, ['en'], request=TranslationRequest(alignments=True))


def marked_up(markup):
  def written(text):
    document = markup_lib.MarkedUp(text, markup)
    document.written([Aligned(line) for line in document.texts])

  return written


def pairs(ending):
  def read(text):
    with tempfile.NamedTemporaryFile('w', suffix=ending, encoding='utf-8', errors='surrogatepass') as f:
      f.write(text)
      f.flush()
      with contextlib.suppress(UserError):
        for _ in pair_files.Texts(pairs_file=f.name, pair='de-en').batches():
          pass

  return read


READERS = {
  'placeholders': placeholders.with_what_is_beside,
  'sentences with placeholders': translated,
  **{name: marked_up(getattr(formats, name)) for name in ('HTML', 'DOCX', 'ODT', 'SRT')},
  **{ending: pairs(ending) for ending in ('.tsv', '.csv', '.tmx', '.jsonl')},
  'key': text_lib.key,
  'near-duplicates': lambda text: near_duplicates.keys([text], 0.9),
  'term in a source': lambda text: automaton.occurs('a a b', text),
  'banned word': lambda text: automaton.is_barred('a a b', text),
  'marks around a term': lambda text: automaton.occurs('a', text.replace('.', '\u0301')),
  'form': lambda text: refused(query.parse, text.encode(), 'multipart/form-data; boundary=a'),
  'URL-encoded form': lambda text: refused(query.parse, text.encode(), 'application/x-www-form-urlencoded'),
  'JSON': lambda text: refused(query.parse, text.encode()),
  **{
    f'words.{name}': function
    for name, function in vars(words).items()
    if inspect.isfunction(function) and not name.startswith('_')
  },
}
# What begins or repeats in markup, tables, subtitles and interface strings, beside those of patterns.
TEXTS = (
  *('{a} ', '%s', '{a}b', 'a{b}', '({a})', '{a, plural, other {', "{a, select, b {'{'}} ", '%0', '%d, ', '{a}. B c. '),
  *(
    'A b. ',
    'a',
    'a ',
    '.',
    '. ',
    '"',
    '"a',
    ',"',
    'a,"b\n',
    'a\tb\n',
    '日',
    '日。',
    '<b>a ',
    '<b>a</b> ',
    '<g>',
    '</g>',
  ),
  *('<select>', '<p>a', '&', '&amp;', '1\n00:01 --> 00:02\na\n\n', '- a\n', '{"', '[', '{"de": "a", "en": "b"}\n'),
  *(
    '<tu><tuv xml:lang="de"><seg>a</seg></tuv><tuv xml:lang="en"><seg>a</seg></tuv></tu>',
    '<ph/>a',
    '\r',
    '\n',
    '--a\r\n',
  ),
  *('<w:p><w:r><w:t>a</w:t></w:r></w:p>', '<w:r><w:t>a</w:t></w:r>', '<text:p>a</text:p>', '<text:span>a', 'a%3D&'),
)


def refused(function, *arguments):
  with contextlib.suppress(query.BadQueryError):
    function(*arguments)


def time_of(function, text):
  begin = time.process_time()
  function(text)
  return time.process_time() - begin


@pytest.mark.parametrize('name', READERS)
def test_functions_take_at_most_two_and_a_half_times_as_long_for_twice_the_text(name):
  """Kind: loops over what a text has so much of, each of which reads all of it again."""
  function = READERS[name]
  function('a ')  # what is loaded once
  for begin, unit in itertools.product(('', '<tmx><body>' * (name == '.tmx'))[: 1 + (name == '.tmx')], TEXTS):
    once, twice = (begin + unit * (length // len(unit)) for length in (2000, 4000))
    if time_of(function, once) > 0.01:
      ratios = (time_of(function, twice) / time_of(function, once) for _ in range(5))
      assert any(ratio <= 2.6 for ratio in ratios), unit


def test_a_text_of_a_stranger_keeps_a_server_busy_for_less_than_seconds():
  for text in ('%' + '0' * 12_000, '{a} ' * 3000 + 'w', '%s' * 4000):
    assert time_of(translated, text) < 4


@pytest.mark.parametrize('slow, unit', [(r'[a-z]+;', 'a'), (r'<!.*?>', '<!'), (r'\s*\n', ' ')])
def test_a_pattern_whose_time_grows_faster_is_found(slow, unit):
  assert growth(re.compile(slow), False, '', unit, 2000) > 2.5
