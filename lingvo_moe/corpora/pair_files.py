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
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import IO
from xml.parsers import expat

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import Advance
from lingvo_moe.corpora import language_id, packed, parallel, text

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
_CODE = r'([a-z]{2,3}(?:[-_][A-Z][a-z]{3})?(?:[-_](?:[A-Z]{2}|\d{3}))?)'
_PAIR = re.compile(rf'(?<![^.-]){_CODE}-{_CODE}\Z')  # at the end of a name
_FEW = 10  # rows, of which the two columns of a table are taken as text
_WORDS_OF_A_NAME = range(1, 4)
_LOOK = 200  # rows by which the columns with text are known
_SEPARATOR = re.compile('sep=[,;]?')  # first cell of a line in which Excel says what the separator is
# Numbers, dates, addresses, and identifiers.
_NO_TEXT = re.compile(r'[\W\d_]*+|(?=\S*?(?:://|@))\S++|(?=[!-~]*?[\d_])[!-~]++')

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
    columns: columns of the source and the target: numbers from 1, or names in the first row, or keys of JSON; empty:
      those that the first row names by the languages or 'source' and 'target', else the only two with text.
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
    self.note = ''  # once they are read: which first row was taken as a pair, and may have names of columns
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
        pairs = self._of_table(rows)
      for batch in text.batches(pairs, raw, progress):
        yield tuple([_bytes(pair[side]) for pair in batch] for side in (0, 1))

  def _of_table(self, rows: Iterator[list[str]]) -> _Pairs:
    """Pairs of a table, whose first row may name its columns."""
    columns, sides, path = self._columns, self.sides, self.paths[0]
    first = [row for row in itertools.islice(rows, _LOOK) if not (row and _SEPARATOR.fullmatch(row[0]))]
    if not first:
      return
    place = names = _places(first[0], columns, sides)
    if columns and columns[0].isdecimal():
      place = [int(column) - 1 for column in columns]
      if names == place[::-1]:
        raise UserError(
          f'--columns={",".join(columns)} are {" and ".join(sides)}; the first row of {path} has {_some(first[0])}: '
          'exchange the numbers, or the languages of --pair'
        )
    elif columns and names is None:
      raise UserError(
        f'--columns={",".join(columns)} must be names in the first row of {path}; it has {_some(first[0])}'
      )
    place = place or _text_columns(first, sides, path)
    cells = [first[0][i].strip() for i in place if i < len(first[0])]
    if self._format == 'csv' and names is None and all(len(cell.split()) in _WORDS_OF_A_NAME for cell in cells):
      self.note = (
        f'the first row of {path}, {_some(cells)}, was taken as a pair: if it has the names of the columns, give '
        f'--columns={shlex.quote(",".join(cells))}'
      )
    for row in itertools.chain(first[names is not None :], rows):
      yield tuple(row[i] if i < len(row) else None for i in place)

  def _found_separator(self) -> str:
    """The one separator by which the first row names the columns, or by which all rows have as many."""
    splitting, alike = [], []
    for separator in SEPARATORS.values():
      with packed.opened(self._files[0]) as (_, contents):
        counts = set()
        if named := re.match(rb'sep=([,;\t])\r?\n', contents.peek(8)):  # as Excel has it
          return named[1].decode()
        with contextlib.suppress(csv.Error):
          for row in filter(None, _csv(_lines(contents), separator)):
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
    named = _PAIR.search(stem) if not pair else None
    if named and all(map(language_id.is_known, named.groups())):
      return named.groups()
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


def _are_rows(lines: Sequence[str], separator: str, cells: int) -> bool:
  """Whether lines would be rows of `cells` cells without their quote marks; after a comma of a text stands a space."""
  rows = [line.split(separator) for line in lines]
  return all(len(row) == cells and not any(cell.startswith(' ') for cell in row[1:]) for row in rows)


def _columns_of(contents: IO[bytes]) -> Iterator[list[str]]:
  """Rows of TSV."""
  return (line.rstrip('\r\n').split('\t') for line in _lines(contents))


def _csv(lines: Iterable[str], separator: str) -> Iterator[list[str]]:
  csv.field_size_limit(_LONGEST_CELL)
  return csv.reader(lines, delimiter=separator, strict=True)


def _cells(contents: IO[bytes], separator: str, path: str) -> Iterator[list[str]]:
  """Rows of CSV. A quote mark at the beginning of a cell that does not quote the whole cell is text."""
  taken: list[str] = []  # lines of a row
  rows = _csv((taken.append(line) or line for line in _lines(contents)), separator)
  cells = 0  # of the first row
  while True:
    taken.clear()
    try:
      row = next(rows)
      is_whole = len(taken) == 1 or (cells in (0, len(row)) and not _are_rows(taken, separator, len(row)))
    except StopIteration:
      return
    except csv.Error:
      row = taken[0].rstrip('\r\n').split(separator)
      is_whole = len(taken) == 1 and cells in (0, len(row))
    if not is_whole:
      raise UserError(
        f'a quote mark that begins a cell of CSV must end it; that in line {rows.line_num - len(taken) + 1} of {path} '
        'does not, or takes in other rows: write it twice within quotes, or write the file as TSV'
      )
    cells = cells or len(row)
    yield row


def _places(header: Sequence[str], columns: Sequence[str], sides: Sequence[str]) -> list[int] | None:
  """Places of source and target in a row that names its columns; None in one that does not."""
  names = [cell.strip(' "').lower() for cell in header]
  by_name = columns and not columns[0].isdecimal()
  wanted = [[name.lower() for name in columns]] if by_name else [[side.lower() for side in sides], *_USUAL_NAMES]
  for pair in wanted:
    if set(pair) <= set(names):
      return [names.index(name) for name in pair]
  source, target = _named(header, sides)
  return [*source, *target] if not by_name and len(source) == len(target) == 1 and source != target else None


def _named(header: Sequence[str], sides: Sequence[str]) -> tuple[list[int], list[int]]:
  """Places of the cells that name the source, and the target: codes with or without a region, or names."""
  return tuple(
    [i for i, cell in enumerate(header) if language_id.is_name(cell.strip(' "'), side, sides)] for side in sides
  )


def _text_columns(rows: Sequence[Sequence[str]], sides: Sequence[str], path: str) -> list[int]:
  """Places of the two columns with text: neither numbers, addresses or codes, nor one value alone, nor mostly empty."""
  rows = list(filter(None, rows))
  columns = list(itertools.zip_longest(*rows, fillvalue=''))
  is_small = len(columns) == 2 and len(rows) < _FEW
  texts = []
  for place, cells in enumerate(columns):
    cells = [cell for cell in cells if cell.strip()]
    is_full = len(columns) == 2 or (2 * len(cells) > len(rows) and (len({*cells}) > 1 or len(rows) == 1))
    if is_small or (is_full and 2 * sum(_NO_TEXT.fullmatch(cell.strip()) is None for cell in cells) > len(cells)):
      texts.append(place)
  if len(columns) < 2:
    cells = columns[0] if columns else ('',)
    is_po = any(cell.startswith('msgid ') for cell in cells)
    form = 'a PO catalogue' if is_po else 'with | between the cells' if '|' in cells[0] else 'lines'
    raise UserError(
      f'pairs are in two columns of TSV or CSV; {path} is {form} ({text.shortened(cells[0], 30)!r}): write it as TSV, '
      'TMX or JSON lines'
    )
  if len(texts) != 2 or {*texts} & {*itertools.chain(*_named(rows[0], sides))}:
    seen = ', '.join(f'{i} {text.shortened(cell, 30)!r}' for i, cell in enumerate(rows[0][:8], start=1))
    raise UserError(
      f'a table names its columns in the first row, {" and ".join(sides)}, or has two columns of text; {path} has '
      f'{len(texts)} of {len(columns)}, and begins with {seen}: say which two, e.g. --columns=1,2'
    )
  return texts


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
  variants: list[set[str]] = [set(), set()]  # of each side, that were read
  has_pair = False
  try:
    for block in iter(lambda: contents.read(1 << 16), b''):
      reader.parser.Parse(block)
      units, reader.units = reader.units, []
      for unit in units:
        segments = [_in_language(unit, side) for side in sides]
        for side, names, found in zip(sides, variants, segments, strict=True):
          names |= {*found}
          if len(found) > 1 or len({*map(language_id.script, names)}) > 1:
            ways = '-'.join(max(names) if one == side else one for one in sides)
            raise UserError(
              f'{path} has several variants of {side}: {_some(sorted(names))}: name one, as --pair={ways}'
            )
        pair = tuple(next(iter(found.values()), None) for found in segments)
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


def _in_language(unit: dict[str, str], language: str) -> dict[str, str]:
  """Segments by name of a language; without one of that very name, of its regions and scripts: en-US for en."""
  wanted = language.replace('_', '-').lower()
  if wanted in unit:
    return {wanted: unit[wanted]}
  return {name: segment for name, segment in unit.items() if name.startswith(wanted + '-')}


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
        first = contents.read(packed.LOOK)
        packed.refuse_what_is_no_text(f'{name} in {shown}', first)
        contents.seek(len(codecs.BOM_UTF8) * first.startswith(codecs.BOM_UTF8))
        while batch := [line.rstrip(b'\r\n') for line in itertools.islice(contents, _BATCH)]:
          yield batch
    except packed.DAMAGE as e:
      raise UserError(f'{name} in {shown} is damaged or locked ({e}): fetch it again') from None
    if progress:
      progress(info.compress_size)

  return names, [lines(name) for name in names]


class _Tmx:
  """Units of TMX as the parser meets them: the first segment of each language, by its name in small letters."""

  _ALONE = frozenset(('it', 'ph', 'ut'))  # codes that are no part of a word, as those of line breaks
  _CODES = frozenset(('bpt', 'ept', *_ALONE))

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
    self._has_code = False  # whether one of those that are no part of a word is behind the text
    self._root = ''

  def _start(self, name: str, attributes: dict[str, str]) -> None:
    self._root = self._root or name
    if self._root.rpartition(':')[2].lower() != 'tmx':
      raise UserError(f'{self._path} is XML of <{self._root:.40}>, which is not TMX: convert it to TMX or TSV')
    if name == 'tu':
      self._unit = {}
    elif name == 'tuv':
      self._language = (attributes.get('xml:lang') or attributes.get('lang') or '').replace('_', '-').lower()
    elif name == 'seg':
      self._segment = []
    self._codes += name in self._CODES

  def _end(self, name: str) -> None:
    self._codes -= name in self._CODES
    self._has_code = self._has_code or name in self._ALONE
    if name == 'seg' and self._segment is not None:
      self._unit.setdefault(self._language, ''.join(self._segment))
      self._segment = None
    elif name == 'tu':
      self.units.append(self._unit)

  def _text(self, data: str) -> None:
    if self._segment is not None and not self._codes:
      if self._has_code and self._segment and self._segment[-1][-1].isalnum() and data[0].isalnum():
        self._segment.append(' ')
      self._segment.append(data)
      self._has_code = False

  def _entity(self, *_) -> None:
    raise UserError(f'{self._path} defines entities of its own, which may unpack to very much: write it without')


def _some(names: Sequence[str]) -> str:
  return ', '.join(map(repr, names[:8])) + ', ...' * (len(names) > 8)
