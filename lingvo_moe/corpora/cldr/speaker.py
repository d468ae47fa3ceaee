"""Text of dates, amounts, names and lists in any of CLDR's languages, from the data in the Babel package.

A `Speaker` turns a small tree, such as `('colon', ('name', 'territory', 'PE'), ('quantity', '12', 'length-mile'))`,
into text of one language; the English speaker's text of the same tree is its translation. CLDR's data have gaps, which
Babel fills from its root locale ('+3 d', '12 km', codes for names), and forms that omit something the English states.
If the text would not determine the English, a Speaker raises Unspeakable.
"""

import collections
import copy
import datetime
import decimal
import functools
import re
import unicodedata
from collections.abc import Mapping, Sequence

import babel
from babel import dates, localedata, numbers

from lingvo_moe.corpora.cldr import DATA

# A tree is (kind, argument, ...): the kind names a method `_kind` of Speaker, arguments are words, ints or trees.
Tree = tuple

# Kinds of names, and the attributes of babel.Locale that have them.
_NAMES_OF_LOCALE = {'territory': 'territories', 'language': 'languages', 'script': 'scripts', 'currency': 'currencies'}
_JOINERS = '\u200c\u200d'  # invisible, but part of the spelling in Persian, Malayalam, Sinhala, ...
_DROPPED = ('Cc', 'Cf', 'Cn', 'Co', 'Cs')  # control characters, bidi marks and unassigned characters
_SPACES = ('Zs', 'Zl', 'Zp')
_WIDE = {'zh': ('：', '（', '）'), 'yue': ('：', '（', '）'), 'ja': ('：', '（', '）'), 'fr': (' : ', ' (', ')')}


class Unspeakable(Exception):
  """Tree that a language has no words for, or only words that do not determine the English."""


@functools.cache
def _cleaned(c: str) -> str:
  category = unicodedata.category(c)
  if category in _SPACES or c.isspace():
    return ' '
  return '' if category in _DROPPED and c not in _JOINERS else c


def clean(text: str) -> str:
  """Cleans text: NFC, single ordinary spaces, no control or bidi characters."""
  return ' '.join(''.join(map(_cleaned, unicodedata.normalize('NFC', text))).split())


def script_of(code: str) -> str:
  """Script of a language, as an ISO 15924 code: 'Latn', 'Jpan', 'Deva'."""
  _, _, script, *_ = babel.parse_locale(code)
  if not script:
    _, _, script, *_ = babel.parse_locale(babel.core.get_global('likely_subtags')[code])
  return script


def _locale(code: str) -> babel.Locale:
  """Locale with its own copy of the data.

  Babel resolves an alias (such as stand-alone months to the other months) in place, which may be in data that
  languages share through the root locale: Turkish would then get the months of the language that was loaded first.
  """
  localedata._cache.clear()
  locale = babel.Locale.parse(code)
  locale._Locale__data = localedata.LocaleDataDict(copy.deepcopy(localedata.load(str(locale))))
  return locale


class Speaker:
  """Speaker of one language of CLDR: turns trees into its text.

  Args:
    code: CLDR's code, such as 'de' or 'zh_Hant'.
    inventory: for each kind of name ('territory', 'language', ...) the keys that occur in trees. A name that two of
      them share is never used.
  """

  def __init__(self, code: str, inventory: Mapping[str, Sequence[str]]):
    self.code = code
    self._locale = _locale(code)
    # The data that Babel's formatters read; much of it has no public accessor.
    self._data = self._locale._data
    self._root = localedata.load('root')
    self._english = code == 'en'
    self._latin = script_of(code) == 'Latn'
    zero = DATA['zero'].get(self._locale.default_numbering_system)
    self._digits = {ord('0') + i: ord(zero) + i for i in range(10)} if zero else {}
    self._colon_mark, self._open, self._close = _WIDE.get(code.split('_')[0], (': ', ' (', ')'))
    self._names = {}
    for kind, keys in inventory.items():
      names = {key: self._cldr_name(kind, key) for key in keys}
      times = collections.Counter(names.values())
      self._names[kind] = {key: name for key, name in names.items() if name and times[name] == 1}

  def say(self, tree: Tree) -> str:
    """Text of a tree; raises Unspeakable if the language cannot express it."""
    return clean(self._say(tree).translate(self._digits))

  def _say(self, tree: Tree) -> str:
    kind, *arguments = tree
    if text := getattr(self, f'_{kind}')(*arguments):
      return text
    raise Unspeakable(tree)

  def _own(self, text: str | None) -> str:
    """Returns text in the language's script; raises Unspeakable for 'km' or 'English' within Thai, a gap in CLDR."""
    if not text or (not self._latin and re.search('[A-Za-z]', text)):
      raise Unspeakable(text)
    return text

  # Names.

  def _cldr_name(self, kind: str, key: str) -> str | None:
    locale = self._locale
    if kind in _NAMES_OF_LOCALE:
      name = getattr(locale, _NAMES_OF_LOCALE[kind]).get(key)
    elif kind == 'unit':
      language_names, root = (data['unit_display_names'].get(key, {}) for data in (self._data, self._root))
      language_names, root = (widths.get('long') or widths.get('short') for widths in (language_names, root))
      name = language_names if language_names != root else None
    elif kind == 'zone':
      metazone, form = key.rsplit('.', 1)
      name = locale.meta_zones.get(metazone, {}).get('long', {}).get(form)
    elif kind == 'city':
      name = locale.time_zones.get(key, {}).get('city')
      if not name and self._latin:  # by CLDR's rule the name is then that in the zone's id
        name = key.rsplit('/', 1)[1].replace('_', ' ')
    else:
      name = {'weekday': locale.days, 'month': locale.months}[kind]['stand-alone']['wide'].get(int(key))
    # A digit, slash or colon is a stray note in CLDR and no part of a name (except digits in months of some languages).
    odd = r'[:/﴿]' if kind == 'month' else r'[\d:/﴿]'
    if not name or re.search(odd, name) or (not self._latin and re.search('[A-Za-z]', name)):
      return None
    return name

  def _name(self, kind: str, key: str) -> str:
    name = self._names[kind].get(key)
    if not name:
      raise Unspeakable(kind, key)
    return name

  # Numbers. Values are decimal strings, so that '2.50' keeps its final zero.

  def _number(self, value: str) -> str:
    pattern = '#,##0.00' if re.search(r'\.\d\d$', value) else None
    return numbers.format_decimal(decimal.Decimal(value), pattern, self._locale, numbering_system='default')

  def _percent(self, value: str) -> str:
    return numbers.format_percent(decimal.Decimal(value) / 100, locale=self._locale, numbering_system='default')

  def _compact(self, value: str) -> str:
    """Compact number with a word: '1.5 million', not '1.5M'."""
    # Babel's own format_compact_decimal counts the zeros of the negative pattern too, and so writes '17 thousand' in
    # Swahili as 'elfu 1700'.
    widths = self._data['compact_decimal_formats']
    forms = widths.get('long') or widths['short']
    amount = decimal.Decimal(value)
    magnitude = max((m for m in map(int, forms['other']) if m <= amount), default=None)
    if magnitude is None:
      raise Unspeakable(value)
    zeros = forms['other'][str(magnitude)].pattern.split(';')[0].count('0')
    reduced = f'{(amount / (magnitude // 10 ** max(0, zeros - 1))).normalize():f}'
    form = self._locale.plural_form(decimal.Decimal(reduced))
    pattern = (forms.get(form, {}).get(str(magnitude)) or forms['other'][str(magnitude)]).pattern.split(';')[0]
    word = self._own(pattern.replace('0', '').replace("'", '').strip())
    if (self._latin and len(word) < 3) or re.search('0[A-Z]', pattern):
      raise Unspeakable(pattern)
    form = {'group_separator': len(reduced.split('.')[0]) > 4, 'numbering_system': 'default'}
    number = numbers.format_decimal(decimal.Decimal(reduced), locale=self._locale, **form)
    return re.sub('0+', number, pattern).replace("'", '')

  def _counted(self, forms: Mapping[str, str], value: str, root: Mapping[str, str]) -> str:
    """Inserts a value into the pattern of its plural form."""
    amount = decimal.Decimal(value)
    pattern = self._own(forms.get(self._locale.plural_form(amount)) or forms.get('other'))
    implied = '{0}' not in pattern  # only forms for 1 and 2 imply it, as Arabic's 'two days' does
    if pattern == root.get('other') or (implied and value not in ('1', '2')):
      raise Unspeakable(pattern)
    return pattern.replace('{0}', self._number(value))

  def _quantity(self, value: str, unit: str) -> str:
    widths = self._data['unit_patterns'].get(unit, {})
    # The data omit long forms that equal the short ones.
    forms = {**widths.get('short', {}), **widths.get('long', {})}
    return self._counted(forms, value, self._root['unit_patterns'].get(unit, {}).get('short', {}))

  def _relative(self, direction: str, value: str, field: str) -> str:
    """Relative time: 'in 3 days' (direction 'future') or '3 days ago' ('past')."""
    forms = self._data['date_fields'].get(field, {}).get(direction, {})
    return self._counted(forms, value, self._root['date_fields'][field][direction])

  def _money(self, value: str, currency: str) -> str:
    form = self._locale.plural_form(decimal.Decimal(value))
    names = self._data['currency_names_plural'].get(currency, {})
    name = self._own(names.get(form) or names.get('other') or self._name('currency', currency))
    patterns = self._data['currency_unit_patterns']
    return (patterns.get(form) or patterns['other']).replace('{0}', self._number(value)).replace('{1}', name)

  def _per(self, what: Tree, unit: str) -> str:
    """Ratio: '3 euros per kilogram'."""
    pattern = self._own(self._data['unit_patterns'].get(unit, {}).get('long', {}).get('per'))
    root = self._root['unit_patterns'].get(unit, {}).get('short', {}).get('per')
    if pattern == root or re.search(r'/\w{1,2}$', pattern):  # an abbreviation, such as Quechua's '/k' for a month
      raise Unspeakable(unit)
    return pattern.replace('{0}', self._say(what))

  # Dates and times.

  def _format(self, pattern: str, when: datetime.date | datetime.time) -> str:
    return dates.parse_pattern(pattern).apply(when, self._locale)

  def _date_pattern(self, style: str) -> str:
    if style in ('full', 'long'):
      return self._locale.date_formats[style].pattern
    if style not in self._locale.datetime_skeletons:
      raise Unspeakable(style)
    return _written_out(self._locale.datetime_skeletons[style].pattern)

  def _date(self, style: str, year: int, month: int, day: int) -> str:
    """Date in the style 'full', 'long', or of a skeleton such as yMMMM, with abbreviations written out."""
    pattern = self._date_pattern(style)
    if not {*_STATED[style]} <= _fields(pattern) or (style == 'yMd' and pattern == self._date_pattern('long')):
      raise Unspeakable(pattern)
    return self._own(self._format(pattern, datetime.date(year, month, day)))

  def _time(self, hour: int, minute: int) -> str:
    return self._format(self._locale.time_formats['short'].pattern, datetime.time(hour, minute))

  def _time_at(self, hour: int, minute: int, second: int, zone: str) -> str:
    """Time with a zone: '3:05:30 PM Japan Standard Time'."""
    pattern = self._locale.time_formats['full'].pattern
    name = self._name('zone', zone).replace("'", "''")
    if 'zzzz' not in pattern:
      raise Unspeakable(zone)
    return self._format(pattern.replace('zzzz', f"'{name}'"), datetime.time(hour, minute, second))

  def _datetime(self, date: Tree, time: Tree) -> str:
    glue = self._data['datetime_formats']['full'].replace("'", '')
    return _fill(glue, self._say(time), self._say(date))

  def _dates(self, first: tuple[int, int, int], last: tuple[int, int, int]) -> str:
    """Interval of two days, each (year, month, day), in the format for the largest field in which they differ."""
    field = next(f for f, a, b in zip('yMd', first, last) if a != b)
    parts = self._data['interval_formats'].get('yMMMd', {}).get(field, ())
    # Both ends must state the day and all fields that differ: CLDR's Swahili writes April 4 to May 9 as '4 - 9 May'.
    needed = set('dMy'[: 'dMy'.index(field) + 1])
    if len(parts) != 2 or not all(needed <= _fields(part) for part in parts):
      raise Unspeakable(first, last)
    ends = [self._format(_written_out(part), datetime.date(*day)) for part, day in zip(parts, (first, last))]
    return self._own(''.join(ends))

  # Combinations.

  def _through(self, first: Tree, last: Tree) -> str:
    return _fill(self._data['interval_formats'][None], self._say(first), self._say(last))

  def _list(self, style: str, *items: Tree) -> str:
    """List of items in the style 'standard' ('a, b, and c'), 'or' or 'unit' ('3 hours, 5 minutes')."""
    known = self._data['list_patterns']
    patterns = {}
    for source in _LIST_STYLES[style]:
      patterns.update(known.get(source, {}))
    self._own(''.join(patterns.values()) or None)
    if style == 'or' and not self._english:
      if patterns['2'] in (self._root['list_patterns']['or']['2'], known['standard']['2']):
        raise Unspeakable(style)
    texts = [self._say(item) for item in items]
    if len(texts) == 2:
      return _fill(patterns['2'], *texts)
    text = texts[0]
    for i, item in enumerate(texts[1:], 1):
      text = _fill(patterns['start' if i == 1 else 'end' if i == len(texts) - 1 else 'middle'], text, item)
    return text

  def _colon(self, head: Tree, tail: Tree) -> str:
    return self._say(head) + self._colon_mark + self._say(tail)

  def _paren(self, head: Tree, tail: Tree) -> str:
    return self._say(head) + self._open + self._say(tail) + self._close


# Fields that a date in each style must state to determine its English.
_STATED = {'full': 'yMdE', 'long': 'yMd', 'yMd': 'yMd', 'yMMMM': 'yM', 'yQQQQ': 'yQ', 'MMMMd': 'Md', 'MMMEd': 'MdE'}
# Sources of the list patterns of a style in CLDR; later ones override earlier ones.
_LIST_STYLES = {'standard': ('standard',), 'or': ('or',), 'unit': ('standard', 'unit-short', 'unit')}
_RUN = re.compile(r"'[^']*'|([A-Za-z])\1*")


def _fields(pattern: str) -> set[str]:
  """Date fields in a pattern; a year of two digits does not count."""
  letters = {match.group() for match in _RUN.finditer(pattern) if match.group(1)} - {'yy'}
  return {{'L': 'M', 'c': 'E', 'e': 'E', 'q': 'Q'}.get(run[0], run[0]) for run in letters}


def _written_out(pattern: str) -> str:
  """Widens abbreviated months and weekdays in a pattern, as UTS 35 prescribes (missing skeleton fields)."""
  wide = {'MMM': 'MMMM', 'LLL': 'LLLL', 'E': 'EEEE', 'EEE': 'EEEE', 'ccc': 'cccc'}
  return _RUN.sub(lambda match: wide.get(match.group(), match.group()), pattern)


def _fill(pattern: str, first: str, second: str) -> str:
  return pattern.replace('{0}', '\0').replace('{1}', second).replace('\0', first)
