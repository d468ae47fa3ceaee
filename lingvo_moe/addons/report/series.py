"""Series of numbers: thinned out, put on an axis, and written."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lingvo_moe.storage.log_directory import number


class Series(NamedTuple):
  """Points of a curve; each stands for one logged value, or is the mean of several."""

  xs: list[float]
  ys: list[float]
  low: list[float]  # least of the values that a point stands for
  high: list[float]  # largest of them

  @property
  def thinned(self) -> bool:
    """Whether a point stands for several values."""
    return self.low != self.high


def thinned(points: Iterable[tuple[Any, Any]], most: int | None = None) -> Series:
  """Means over at most `most` spans with as many values each, at the last x of a span; of None the points themselves.

  Values that are no finite numbers are left out.
  """
  finite = [(number(x), number(y)) for x, y in points]
  finite = [(x, y) for x, y in finite if x is not None and y is not None]
  count = len(finite) if most is None else min(len(finite), most)
  series = Series([], [], [], [])
  for i in range(count):
    span = finite[i * len(finite) // count : (i + 1) * len(finite) // count]
    ys = [y for _, y in span]
    for values, value in zip(series, (span[-1][0], math.fsum(ys) / len(ys), min(ys), max(ys)), strict=True):
      values.append(value)
  return series


def chosen(count: int, most: int) -> list[int]:
  """At most `most` of the numbers 0 to count - 1, evenly spaced, with the last among them."""
  if count <= most:
    return list(range(count))
  return [(i + 1) * count // most - 1 for i in range(most)]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
  """Round numbers within [low, high], some `about` of them."""
  if not high > low:
    return [low]
  raw = (high - low) / about
  scale = 10.0 ** math.floor(math.log10(raw))
  step = next(m * scale for m in (1, 2, 5, 10) if m * scale >= raw * 0.999)
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
  """Round numbers within [low, high] for a logarithmic scale: powers of ten, with 2 and 5 times these where few are."""
  powers = [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
  for factors in (1,), (1, 2, 5):
    found = [m * power for power in powers for m in factors if low <= m * power <= high]
    if len(found) > 3:
      return found
  return found if len(found) > 2 else ticks(low, high)


def text(value: float | None) -> str:
  """A number to read: four digits, thousands with commas; '' for None."""
  if value is None:
    return ''
  if value == int(value) and abs(value) < 1e15:
    return f'{int(value):,}'
  return f'{value:,.0f}' if abs(value) >= 10_000 else f'{value:.4g}'


def tick_text(value: float) -> str:
  """A tick's number: short, with k and M for thousands and millions."""
  for size, letter in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if abs(value) >= size:
      return f'{value / (1e3 if letter == "k" else size):.4g}{letter}'
  return f'{value:.4g}'


def extent(values: Sequence[float]) -> tuple[float, float]:
  """Least and largest value, apart even if all are equal; (0, 1) of none."""
  low, high = min(values, default=0.0), max(values, default=1.0)
  if low == high:
    pad = abs(low) * 0.1 or 1.0
    return low - pad, high + pad
  return low, high
