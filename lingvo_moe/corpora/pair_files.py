"""Files of sentence pairs to prepare: two files of lines, also in a Moses zip, or one of columns, TMX, or JSON lines.

Each may be packed (corpora/packed.py), and may be a pipe, which is copied to a temporary file, as text is read twice. A
line break within a side of a pair becomes a space.
"""

import codecs
import contextlib
import csv
import itertools
import json
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO
from xml.parsers import expat

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import Advance
from lingvo_moe.corpora import packed, parallel, text

_FORMATS = {
  'tmx': 'tmx',
  'jsonl': 'jsonl',
  'ndjson': 'jsonl',
  'json': 'jsonl',
  'csv': 'csv',
  'tsv': 'tsv',
  'zip': 'zip',
}
_USUAL_NAMES = (('source', 'target'), ('src', 'tgt'))
_BATCH = 4096  # lines
SEPARATORS = {'comma': ',', 'semicolon': ';', 'tab': '\t'}  # of CSV
_LONGEST_CELL = 1 << 20  # characters of a cell of CSV

Side = list[bytes | None]  # lines of one side; None where a pair lacks it
_Pairs = Iterator[tuple[str | None, str | None]]


class Texts:
  """Pairs of lines to prepare.

  Args:
    source: file of source lines; '' with another file.
    target: file of their translations.
    tsv: file of columns with tabs between, without quotes.
    pairs_file: file of pairs whose ending says what it is: .tmx, .jsonl, .csv, .tsv, .zip; without such an ending
      its beginning says so.
    columns: columns of the source and the target: numbers from 1, or names in the first row, or keys of JSON; empty: 1
      and 2, or the names of the languages or 'source' and 'target' if the first row has them.
    pair: the languages, as 'de-en'; '': from the ends of the files' names.
    separator: key of SEPARATORS, between the cells of CSV; '': the one by which all rows have as many.
  """

  def __init__(
    self,
    source: str = '',
    target: str = '',
    tsv: str = '',
    pairs_file: str = '',
    columns: Sequence[str | int] = (),
    pair: str = '',
    separator: str = '',
  ):
    given = [paths for paths in ((source, target), (tsv,), (pairs_file,)) if any(paths)]
    if len(given) != 1 or not all(given[0]):
      raise UserError(
        'text comes from two files or from one of pairs: give --source and --target, or --tsv, or --pairs_file'
      )
    (self.paths,) = given  # of the files, as given
    self.sides = _languages(self.paths, pair)  # (source, target)
    self._columns = _checked(columns)
    for path in self.paths:
      if not os.path.exists(path) or os.path.isdir(path):
        raise UserError(f'no such file: {path}')
      if not pairs_file and (kind := _FORMATS.get(_ending(path).lower(), 'tsv')) != 'tsv':
        raise UserError(f'--source, --target and --tsv are plain lines; {path} is {kind}: give it by --pairs_file')
    if len({os.path.realpath(path) for path in self.paths}) < len(self.paths):
      raise UserError(f'--source and --target must be two files; both are {source}')
    self._copies = [None if os.path.isfile(path) else _copy(path) for path in self.paths]
    self._files = [copy.name if copy else path for path, copy in zip(self.paths, self._copies, strict=True)]
    self._format = 'tsv' if tsv else _format(self._files[0], _ending(pairs_file).lower()) if pairs_file else ''

    if self._format == 'csv':
      self._separator = SEPARATORS[separator] if separator else self._found_separator()
    elif separator:
      raise UserError(f'--separator is for CSV; {" and ".join(self.paths)} is none: leave it out')

  def bytes(self) -> int:
    """Bytes of the files, as they lie on disk."""
    return sum(os.path.getsize(path) for path in self._files)

  def batches(self, progress: Advance | None = None) -> Iterator[tuple[Side, Side]]:
    """Yields (source lines, target lines), as many of both, some thousands at a time.

    Raises:
      UserError: a file cannot be read, or the two have different numbers of lines.
    """
    if self._format not in ('', 'zip'):
      yield from self._batches_of_pairs(progress)
      return
    counts = [0, 0]
    if self._format:
      names, sides = _of_zip(self._files[0], self.sides, self.paths[0], progress)
    else:
      names, sides = self.paths, [text.line_batches(path, progress=progress, strict=False) for path in self._files]
    for batches in itertools.zip_longest(*sides, fillvalue=[]):
      counts = [count + len(batch) for count, batch in zip(counts, batches, strict=True)]
      if counts[0] == counts[1]:
        yield batches
    if counts[0] != counts[1]:
      raise parallel.unequal_sides(names[0], counts[0], names[1], counts[1])

  def _batches_of_pairs(self, progress: Advance | None) -> Iterator[tuple[Side, Side]]:
    (path,) = self.paths
    with packed.opened(self._files[0], any_encoding=self._format == 'tmx') as (raw, contents):
      if self._format == 'tmx':
        pairs = _of_tmx(contents, self.sides, path)
      elif self._format == 'jsonl':
        pairs = _of_json_lines(contents, self._columns, self.sides, path)
      else:
        rows = _cells(contents, self._separator, path) if self._format == 'csv' else _columns_of(contents)
        pairs = _of_table(rows, self._columns, self.sides, path)
      for batch in text.batches(pairs, raw, progress):
        yield tuple([_bytes(pair[side]) for pair in batch] for side in (0, 1))

  def _found_separator(self) -> str:
    """The one separator by which the first row names the columns, or by which all rows have as many."""
    splitting, alike = [], []
    for separator in SEPARATORS.values():
      with packed.opened(self._files[0]) as (_, contents):
        counts = set()
        with contextlib.suppress(csv.Error):
          for row in filter(None, _csv(contents, separator, strict=True)):
            if not counts and _places(row, self._columns, self.sides):
              return separator
            counts.add(len(row))
            if len(counts) > 1:
              break
          else:
            alike += [separator] * (max(counts, default=1) > 1)
        splitting += [separator] * (max(counts, default=1) > 1)
    separators = alike if len(alike) == 1 else splitting
    if len(separators) > 1:
      names = ', '.join(name for name, separator in SEPARATORS.items() if separator in separators)
      raise UserError(
        f'one separator must give all rows of CSV as many cells; saw {names}, '
        f'{"each of which does" if alike else "none of which does"}, in {self.paths[0]}: name it by --separator, or '
        'write the file as TSV'
      )
    return separators[0] if separators else ','

  def where(self, side: int) -> str:
    """Name of the file of the source (0) or the target (1), for a message."""
    return self.paths[side] if len(self.paths) == 2 else self.paths[0]


def _checked(columns: Sequence[str | int]) -> tuple[str, ...]:
  """Columns as text, or none; two different names, or numbers from 1 on."""
  columns = tuple(map(str, columns))
  numbers = [column for column in columns if re.fullmatch(r'-?\d+', column)]
  bad_numbers = numbers and not all(re.fullmatch(r'0*[1-9]\d{0,8}', column) for column in columns)
  if columns and (len(columns) != 2 or columns[0] == columns[1] or bad_numbers):
    raise UserError(
      f'columns are two different numbers from 1 on, or two names; saw {",".join(columns)}: e.g. --columns=1,2'
    )
  return columns


def _stem(path: str) -> str:
  """Name of a file, without the ending of a packed one."""
  return packed.ENDING.sub('', os.path.basename(path))


def _ending(path: str) -> str:
  """Ending of a file's name before that of a packed file: 'tmx' of 'a.tmx.gz'."""
  return _stem(path).rpartition('.')[2]


def _format(path: str, ending: str) -> str:
  """Format of a file of pairs: by the ending of its name, else by its beginning."""
  if ending in _FORMATS:
    return _FORMATS[ending]
  with packed.opened(path, any_encoding=True) as (_, contents):
    return {b'<': 'tmx', b'{': 'jsonl'}.get(contents.peek(1).lstrip(b'\xff\xfe\0 \t\r\n')[:1], 'tsv')


def _copy(pipe: str) -> IO[bytes]:
  """Temporary file of what comes from a pipe; it is removed when it is no longer used."""
  try:
    copy = tempfile.NamedTemporaryFile(prefix='lingvo_moe.')
    with open(pipe, 'rb') as f:
      shutil.copyfileobj(f, copy)
    copy.flush()
    return copy
  except OSError as e:
    raise UserError(f'cannot copy {pipe} to {tempfile.gettempdir()}: {e.strerror or e}: give a file') from None


def _languages(paths: Sequence[str], pair: str) -> tuple[str, str]:
  """(source, target) languages: of `pair`, or of the ends of the files' names."""
  languages = [_ending(path) for path in paths]
  if len(paths) == 1:  # 'de-en.tmx', 'mine.de-en.tsv'
    stem = _stem(paths[0]).rpartition('.')[0].removesuffix('.txt')  # 'de-en.txt.zip' of OPUS
    pair = pair or stem.rpartition('.')[2] * ('-' in stem)
  seen = f'--pair={pair}' if pair else ' and '.join(map(os.path.basename, paths))
  if pair and pair != '-'.join(languages):
    (languages,) = parallel.languages_of([pair]) or [()]
  if len({*languages}) != 2 or not all(re.fullmatch(r'\w[\w-]*', name) for name in languages):
    raise UserError(
      'two different languages must be named, of letters, digits, hyphens and underscores, by --pair or by the ends of '
      f"the files' names (a.de, a.pt-BR.gz); saw {seen}: give e.g. --pair=de-en"
    )
  return tuple(languages)


def _bytes(cell: str | None) -> bytes | None:
  """A side of a pair, on one line. What was not UTF-8 in the file, or is half of a surrogate pair, is not UTF-8."""
  if cell is None:
    return None
  line = re.sub(r'(?<!\s)(?:(?![\r\n])\s)*+[\r\n]\s*+', ' ', cell.strip('\r\n'))
  try:
    return line.encode('utf-8', 'surrogateescape')
  except UnicodeEncodeError:
    return line.encode('utf-8', 'surrogatepass')


def _lines(contents: IO[bytes]) -> Iterator[str]:
  return (line.decode('utf-8', 'surrogateescape') for line in contents)


def _columns_of(contents: IO[bytes]) -> Iterator[list[str]]:
  """Rows of TSV."""
  return (line.rstrip('\r\n').split('\t') for line in _lines(contents))


def _csv(contents: IO[bytes], separator: str, strict: bool) -> Iterator[list[str]]:
  csv.field_size_limit(_LONGEST_CELL)
  return csv.reader(_lines(contents), delimiter=separator, strict=strict)


def _cells(contents: IO[bytes], separator: str, path: str) -> Iterator[list[str]]:
  """Rows of CSV."""
  try:
    yield from _csv(contents, separator, strict=False)
  except csv.Error as e:
    raise UserError(f'{path} is not CSV ({e}): close its quotes, or write it as TSV') from None


def _of_table(rows: Iterator[list[str]], columns: Sequence[str], sides: Sequence[str], path: str) -> _Pairs:
  """Pairs of a table, whose first row may name its columns."""
  header = next(rows, None)
  if header is None:
    return
  place = _places(header, columns, sides)
  if place is None and (not columns or columns[0].isdecimal()):
    place = [int(column) - 1 for column in columns or ('1', '2')]
    rows = itertools.chain([header], rows)
  if place is None:
    raise UserError(f'--columns={",".join(columns)} must be names in the first row of {path}; it has {_some(header)}')
  for row in rows:
    yield tuple(row[i] if i < len(row) else None for i in place)


def _places(header: Sequence[str], columns: Sequence[str], sides: Sequence[str]) -> list[int] | None:
  """Places of source and target in a row that names its columns; None in one that does not."""
  if columns and columns[0].isdecimal():
    return None
  names = [cell.strip().lower() for cell in header]
  wanted = [[name.lower() for name in columns]] if columns else [[side.lower() for side in sides], *_USUAL_NAMES]
  return next(([names.index(name) for name in pair] for pair in wanted if set(pair) <= set(names)), None)


def _of_json_lines(contents: IO[bytes], columns: Sequence[str], sides: Sequence[str], path: str) -> _Pairs:
  """Pairs of objects, one a line: {"de": ..., "en": ...}, or so within {"translation": ...}."""
  wanted = [columns] if columns else [sides, *_USUAL_NAMES]
  has_text, keys = False, []
  for number, line in enumerate(contents, start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line.decode('utf-8', 'surrogateescape'))
    except (ValueError, RecursionError) as e:
      raise UserError(f'{path} must have a JSON object in each line; line {number} has none ({e})') from None
    if not isinstance(row, dict):
      raise UserError(
        f'{path} must have a JSON object in each line; line {number} has another value: write a list as lines, e.g. '
        "with jq -c '.[]'"
      )
    if isinstance(row.get('translation'), dict):
      row = row['translation']
    keys = keys or list(row)
    pair = next((pair for pair in wanted if all(isinstance(row.get(name), str) for name in pair)), None)
    has_text = has_text or pair is not None
    yield tuple(row[name] for name in pair) if pair else (None, None)
  if keys and not has_text:
    tried = ' or '.join(','.join(pair) for pair in wanted)
    raise UserError(f'no line of {path} has text by the keys {tried}; it has {_some(keys)}: name two with --columns')


def _of_tmx(contents: IO[bytes], sides: Sequence[str], path: str) -> _Pairs:
  """Pairs of the translation units of TMX. Codes within a segment (bpt, ept, it, ph, ut) are no text."""
  reader = _Tmx(path)
  seen: set[str] = set()
  has_pair = False
  try:
    for block in iter(lambda: contents.read(1 << 16), b''):
      reader.parser.Parse(block)
      units, reader.units = reader.units, []
      for unit in units:
        pair = tuple(_in_language(unit, side) for side in sides)
        has_pair = has_pair or None not in pair
        if not has_pair and len(seen) < 20:
          seen |= set(unit)
        yield pair
    reader.parser.Parse(b'', True)
  except expat.ExpatError as e:
    raise UserError(f'{path} is damaged or not TMX ({e}): make or fetch it again') from None
  if seen and not has_pair:
    raise UserError(
      f'no unit of {path} has both {sides[0]} and {sides[1]}; its languages are {_some(sorted(seen))}: name two of '
      'them with --pair'
    )


def _in_language(unit: dict[str, str], language: str) -> str | None:
  """Segment of a language; without one of that very name, of one of its regions: en-US for en."""
  wanted = language.replace('_', '-').lower()
  if wanted in unit:
    return unit[wanted]
  return next((segment for name, segment in unit.items() if name.startswith(wanted + '-')), None)


def _of_zip(
  path: str, sides: Sequence[str], shown: str, progress: Advance | None
) -> tuple[list[str], list[Iterator[list[bytes]]]]:
  """Names of the files of both sides in a zip, as x.de-en.de and x.de-en.en of OPUS, and their lines."""
  try:
    archive = zipfile.ZipFile(path)
  except (zipfile.BadZipFile, OSError) as e:
    raise UserError(f'{shown} is damaged or no zip ({e}): fetch it again') from None
  stems = [{os.path.splitext(i.filename)[0] for i in archive.infolist() if _ending(i.filename) == s} for s in sides]
  both = sorted(set.intersection(*stems))
  if len(both) != 1:
    seen = _some(archive.namelist())
    raise UserError(
      f'a zip of pairs has two files of one name that end in .{sides[0]} and .{sides[1]}; {shown} has {seen}: '
      'unpack it, and give the files by --source and --target'
    )
  names = [f'{both[0]}.{side}' for side in sides]

  def lines(name: str) -> Iterator[list[bytes]]:
    info = archive.getinfo(name)
    if info.file_size > packed.most_bytes(info.compress_size):
      raise UserError(f'{name} in {shown} would unpack to {info.file_size:,} bytes: unpack it yourself if it is text')
    try:
      with archive.open(info) as contents:
        if contents.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
          contents.seek(0)
        while batch := [line.rstrip(b'\r\n') for line in itertools.islice(contents, _BATCH)]:
          yield batch
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as e:  # the last of a password
      raise UserError(f'{name} in {shown} is damaged or locked ({e}): fetch it again') from None
    if progress:
      progress(info.compress_size)

  return names, [lines(name) for name in names]


class _Tmx:
  """Units of TMX as the parser meets them: the first segment of each language, by its name in small letters."""

  _CODES = frozenset(('bpt', 'ept', 'it', 'ph', 'ut'))

  def __init__(self, path: str):
    self.parser = expat.ParserCreate()
    self.parser.buffer_text = True
    self.parser.StartElementHandler = self._start
    self.parser.EndElementHandler = self._end
    self.parser.CharacterDataHandler = self._text
    self.parser.EntityDeclHandler = self._entity
    self._path = path
    self.units: list[dict[str, str]] = []
    self._unit: dict[str, str] = {}
    self._language = ''
    self._segment: list[str] | None = None
    self._codes = 0  # elements around that are codes

  def _start(self, name: str, attributes: dict[str, str]) -> None:
    if name == 'tu':
      self._unit = {}
    elif name == 'tuv':
      self._language = (attributes.get('xml:lang') or attributes.get('lang') or '').replace('_', '-').lower()
    elif name == 'seg':
      self._segment = []
    self._codes += name in self._CODES

  def _end(self, name: str) -> None:
    self._codes -= name in self._CODES
    if name == 'seg' and self._segment is not None:
      self._unit.setdefault(self._language, ''.join(self._segment))
      self._segment = None
    elif name == 'tu':
      self.units.append(self._unit)

  def _text(self, data: str) -> None:
    if self._segment is not None and not self._codes:
      self._segment.append(data)

  def _entity(self, *_) -> None:
    raise UserError(f'{self._path} defines entities of its own, which may unpack to very much: write it without')


def _some(names: Sequence[str]) -> str:
  return ', '.join(map(repr, names[:8])) + ', ...' * (len(names) > 8)
