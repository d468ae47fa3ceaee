"""Phrases of the CLDR corpus: a small random grammar of the trees that a `speaker.Speaker` turns into text.

A phrase is a tree without words. Its parts come from ranked lists (territories, currencies, units, ...) whose first
entries are drawn most often, so that small languages have the common names, and large ones also the rare ones.
"""

import bisect
import datetime
import itertools
import random
from collections.abc import Callable, Sequence

from lingvo_moe.corpora.cldr import DATA
from lingvo_moe.corpora.cldr.speaker import Tree

# For each kind of name, its keys.
INVENTORY = {kind: keys.split() if isinstance(keys, str) else list(keys) for kind, keys in DATA['names'].items()}
_RANKS_SHARED = 12  # entry r is drawn in proportion to 1 / (r + _RANKS_SHARED)


class Phrases:
  """Endless series of random trees, the same for the same seed on any machine."""

  def __init__(self, seed: int):
    # Only random() of random.Random is guaranteed to be the same in all Python versions.
    self._random = random.Random(seed).random
    self._ranked = {
      kind: list(itertools.accumulate(1 / (rank + _RANKS_SHARED) for rank in range(len(keys))))
      for kind, keys in INVENTORY.items()
    }
    several = lambda kind, most: lambda: self._names(kind, 2, most)
    self._heads = (
      (5, lambda: self._name(self._city_or_territory(0.4))),
      (5, lambda: self._names(self._city_or_territory(0.3), 2, 3)),
      (3, self._city_of),
      (7, self._when),
      (3, self._days),
      (4, self._relative),
      (2, lambda: ('time_at', *self._clock(), self._pick((0, 0, 15, 30, 45)), self._key('zone'))),
    )
    self._bodies = (
      (5, several('territory', 4)),
      (5, several('language', 4)),
      (4, self._varieties),
      (3, several('currency', 3)),
      (3, several('unit', 3)),
      (3, lambda: self._names(self._pick(('weekday', 'month')), 2, 4)),
      (7, self._measures),
      (6, lambda: self._list([self._price() for _ in range(self._between(1, 2))])),
      (3, self._duration),
      (2, self._opening_hours),
      (1, lambda: ('percent', str(self._between(1, 99)))),
      (2, self._compact),
    )

  def draw(self) -> Tree:
    """Draws a tree: a head and a body ('March 2018: 300 euros'), or one of them alone."""
    if self._random() < 0.12:
      return self._choose(self._heads)
    body = self._choose(self._bodies)
    return body if self._random() < 0.22 else ('colon', self._choose(self._heads), body)

  # Chance.

  def _choose(self, rules: Sequence[tuple[int, Callable[[], Tree]]]) -> Tree:
    """Tree of one of some rules, each with its share."""
    return rules[self._index(list(itertools.accumulate(share for share, _ in rules)))][1]()

  def _index(self, sums: list[float]) -> int:
    return bisect.bisect_right(sums, self._random() * sums[-1], hi=len(sums) - 1)

  def _between(self, low: int, high: int) -> int:
    return low + int(self._random() * (high - low + 1))

  def _pick(self, options):
    return options[int(self._random() * len(options))]

  def _key(self, kind: str) -> str:
    return INVENTORY[kind][self._index(self._ranked[kind])]

  def _name(self, kind: str) -> Tree:
    return ('name', kind, self._key(kind))

  # Names.

  def _names(self, kind: str, low: int = 1, high: int = 3) -> Tree:
    keys = {}
    wanted = self._between(low, high)
    while len(keys) < wanted:
      keys[self._key(kind)] = None
    return self._list([('name', kind, key) for key in keys])

  def _list(self, items: list[Tree], style: str = 'standard') -> Tree:
    items = list(dict.fromkeys(items))
    if len(items) == 1:
      return items[0]
    return ('list', 'or' if self._random() < 0.3 else style, *items)

  def _varieties(self) -> Tree:
    """Languages with a territory or script: 'Portuguese (Brazil) and Serbian (Cyrillic)'."""
    draw = lambda: ('paren', self._name('language'), self._name('script' if self._random() < 0.3 else 'territory'))
    return self._list([draw() for _ in range(self._between(1, 3))])

  def _city_or_territory(self, share: float) -> str:
    return 'city' if self._random() < share else 'territory'

  def _city_of(self) -> Tree:
    city = self._key('city')
    return ('paren', ('name', 'city', city), ('name', 'territory', DATA['names']['city'][city]))

  # Amounts.

  def _small(self) -> str:
    if self._random() < 0.08:
      return '1'
    return str(self._between(2, 12) if self._random() < 0.6 else self._between(13, 60))

  def _large(self) -> str:
    return str(self._between(2, 19) * 50 if self._random() < 0.6 else self._between(2, 18) * 500)

  def _measure(self) -> Tree:
    unit = self._key('unit')
    sizes = DATA['names']['unit'][unit]
    if self._random() < 0.12:
      value = f'{self._between(1, 12)}.5'
    elif sizes == 'small' or (sizes == 'either' and self._random() < 0.6):
      value = self._small()
    else:
      value = self._large()
    return ('quantity', value, unit)

  def _measures(self) -> Tree:
    """Measures: '5 kilometers, 3 hours'.

    The list style is always that of units, so that '5 hours and 3 minutes' has only one source.
    """
    measures = [self._measure() for _ in range(self._between(1, 3))]
    return self._list(list({unit: (kind, value, unit) for kind, value, unit in measures}.values()), 'unit')

  def _compact(self) -> Tree:
    scale = self._pick((3, 6, 6, 9))
    if scale > 3 and self._random() < 0.3:
      return ('compact', str((self._between(1, 9) * 10 + 5) * 10 ** (scale - 1)))
    return ('compact', str(self._between(2, 30) * 10**scale))

  def _price(self) -> Tree:
    value = self._pick((self._small, self._small, self._large))()
    if self._random() < 0.1:
      value = f'{self._between(2, 20)}.50'
    money = ('money', value, self._key('currency'))
    if self._random() < 0.35:
      units = ('mass-kilogram', 'duration-hour', 'duration-day', 'volume-liter', 'duration-month', 'duration-year')
      return ('per', money, self._pick(units))
    return money

  def _duration(self) -> Tree:
    first, second, most = self._pick(
      (('hour', 'minute', 59), ('day', 'hour', 23), ('week', 'day', 6), ('year', 'month', 11), ('minute', 'second', 59))
    )
    draw = lambda most, unit: ('quantity', str(self._between(1, most)), f'duration-{unit}')
    return ('list', 'unit', draw(12, first), draw(most, second))

  # Times.

  def _clock(self) -> tuple[int, int]:
    return self._between(0, 23), self._pick((0, 0, 5, 10, 15, 20, 30, 30, 40, 45, 50))

  def _day(self) -> tuple[int, int, int]:
    first = datetime.date(2000, 1, 1)
    day = first + datetime.timedelta(days=self._between(0, (datetime.date(2030, 1, 1) - first).days - 1))
    return day.year, day.month, day.day

  def _date(self) -> Tree:
    style = self._pick(('full', 'full', 'long', 'long', 'yMMMM', 'yMMMM', 'MMMMd', 'MMMEd', 'yMd', 'yQQQQ'))
    year, month, day = self._day()
    # Fields that the style does not show are fixed, so that equal texts have equal trees.
    if style == 'yMMMM':
      day = 1
    elif style == 'yQQQQ':
      month, day = (month - 1) // 3 * 3 + 1, 1
    elif style == 'MMMMd':
      year = 2000
    return ('date', style, year, month, day)

  def _when(self) -> Tree:
    date = self._date()
    if date[1] in ('full', 'long') and self._random() < 0.35:
      return ('datetime', date, ('time', *self._clock()))
    return date

  def _days(self) -> Tree:
    first = datetime.date(*self._day())
    last = first + datetime.timedelta(days=self._pick((2, 3, 5, 9, 14, 30, 60)))
    return ('dates', (first.year, first.month, first.day), (last.year, last.month, last.day))

  def _relative(self) -> Tree:
    field = self._pick(('day', 'day', 'hour', 'hour', 'week', 'month', 'year', 'minute', 'second'))
    return ('relative', self._pick(('past', 'future')), self._small(), field)

  def _opening_hours(self) -> Tree:
    first = self._between(0, 5)
    days = self._names('weekday', 1, 2)
    if self._random() < 0.6:
      days = ('through', ('name', 'weekday', str(first)), ('name', 'weekday', str(self._between(first + 1, 6))))
    open_, close = self._between(0, 13), self._between(1, 10)
    half = self._pick((0, 0, 30))
    return ('paren', days, ('through', ('time', open_, half), ('time', open_ + close, self._pick((0, 30, 45)))))
