"""SVG plots: curves, dots by name, and heat maps; colours are classes of the style sheet, which follow the theme.

Plots are 420 units wide: about as many pixels in a column of a desktop's window and on a phone, so text stays readable.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from lingvo_moe.addons.report import series as series_lib
from lingvo_moe.addons.report.escaped_html import Html, join, tag
from lingvo_moe.addons.report.series import Series
from lingvo_moe.corpora import text

WIDTH = 420
COLOURS, DASHES = 8, 5  # of the style sheet; a further curve has those of an earlier one
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 10, 36
Scale = Callable[[float], float]
_NAMES = 84  # room for names at the left of a plot
# Shapes of markers: class of the style sheet, rise of the path's first point, path from there.
_SHAPES = ('marks', 0, 'h0'), ('diamonds', 4.5, 'l4.5 4.5 -4.5 4.5 -4.5 -4.5z')


@dataclasses.dataclass(frozen=True)
class Curve:
  """A named series."""

  name: str  # in the legend
  series: Series
  colour: int = 0  # number of a colour of the style sheet
  dash: int = 0  # number of a pattern of dashes of the style sheet, 0: none
  marks: bool = False  # whether points are marked, as of few ones


def has_logarithms(shown: Sequence[Curve]) -> bool:
  """Whether curves are drawn over a logarithmic scale too: all are above 0, and some are twice as large as others."""
  ys = [y for curve in shown for y in curve.series.ys]
  return 0 < 2 * min(ys) <= max(ys)


def curves(shown: Sequence[Curve], x_name: str, label: str, from_zero: bool = False) -> Html:
  """Curves, at least one and each with points, over an x axis `x_name`; `label` is what a screen reader says.

  Where they have logarithms they are drawn over these too, without bands; the style sheet shows one of both.
  """
  height, right = 240, WIDTH - _RIGHT
  bottom = height - _BOTTOM
  x_range = series_lib.extent([x for curve in shown for x in curve.series.xs])
  at_x = lambda x: _LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (right - _LEFT)
  low, high = _y_range(shown, from_zero)
  drawn = []
  for x in series_lib.ticks(*x_range, about=6):
    drawn.append(tag('path', class_='rule', d=f'M{at_x(x):.1f} {_TOP}V{bottom}'))
    drawn.append(tag('text', series_lib.tick_text(x), x=f'{at_x(x):.1f}', y=bottom + 14, class_='mid'))
  drawn.append(tag('text', x_name, x=(_LEFT + right) // 2, y=height - 4, class_='mid'))
  at_y = lambda y: bottom - (min(max(y, low), high) - low) / (high - low) * (bottom - _TOP)
  drawn.append(tag('g', _over(shown, at_x, at_y, series_lib.ticks(low, high), bands=True), class_='lin'))
  if has_logarithms(shown):
    least, most = series_lib.extent([y for curve in shown for y in curve.series.ys])
    share = lambda y: math.log(min(max(y, least), most) / least) / math.log(most / least)
    at_y = lambda y: bottom - share(y) * (bottom - _TOP)
    drawn.append(tag('g', _over(shown, at_x, at_y, series_lib.log_ticks(least, most)), class_='log'))
  return _picture(height, label, drawn, data_x=x_name)


def _over(shown: Sequence[Curve], at_x: Scale, at_y: Scale, ticks: Sequence[float], bands: bool = False) -> Html:
  """Curves and rules over a scale; of each curve the last path has all its points."""
  drawn = []
  for y in ticks:
    drawn.append(tag('path', class_='rule', d=f'M{_LEFT} {at_y(y):.1f}H{WIDTH - _RIGHT}'))
    drawn.append(tag('text', series_lib.tick_text(y), x=_LEFT - 5, y=f'{at_y(y) + 4:.1f}', class_='end'))
  for curve in shown:
    xs, *bounds = curve.series
    points, low, high = ([(at_x(x), at_y(y)) for x, y in zip(xs, ys)] for ys in bounds)
    paths = []
    if bands and curve.series.thinned and len(points) > 1:
      paths.append(tag('path', class_='band', d=_polyline(high + low[::-1]) + 'z'))
    if len(points) > 1:
      paths.append(tag('path', class_=f'curve d{curve.dash % DASHES}', d=_polyline(points)))
    if curve.marks or len(points) == 1:
      paths.append(tag('path', class_='marks', d=_marks(points)))
    drawn.append(tag('g', *paths, class_=f'c{curve.colour % COLOURS}', data_name=curve.name))
  return join(drawn)


def dots(names: Sequence[str], rows: Sequence[Curve], high: float, x_name: str, label: str) -> Html:
  """Dots of several quantities, `rows`, on a line for every name, over an axis from 0 to `high`.

  The xs of a quantity's series are numbers of lines, from the top, and ys its values. `dash` chooses the shape.
  """
  left, step = _NAMES, 17
  bottom, right = _TOP + step * len(names), WIDTH - _RIGHT
  at = lambda value: left + min(max(value, 0), high) / high * (right - left)
  at_row = lambda row: _TOP + step * (row + 0.5)
  drawn = []
  for x in series_lib.ticks(0, high):
    drawn.append(tag('path', class_='rule', d=f'M{at(x):.1f} {_TOP}V{bottom}'))
    drawn.append(tag('text', series_lib.tick_text(x), x=f'{at(x):.1f}', y=bottom + 14, class_='mid'))
  drawn.append(tag('text', x_name, x=(left + right) // 2, y=bottom + 30, class_='mid'))
  for row, name in enumerate(names):
    drawn.append(tag('text', text.shortened(name, 11), x=left - 6, y=f'{at_row(row) + 4:.1f}', class_='end'))
  for curve in rows:
    points = [(at(value), at_row(row)) for row, value in zip(curve.series.xs, curve.series.ys)]
    drawn.append(markers(points, curve.colour, curve.dash))
  return _picture(bottom + 36, label, drawn)


def markers(points: Sequence[tuple[float, float]], colour: int, shape: int = 0) -> Html:
  """Markers at points: dots, or of an odd shape diamonds."""
  kind, *_ = _SHAPES[shape % 2]
  return tag('path', class_=f'{kind} c{colour % COLOURS}', d=_marks(points, shape))


def _marks(points: Sequence[tuple[float, float]], shape: int = 0) -> str:
  _, rise, path = _SHAPES[shape % 2]
  return ''.join(f'M{x:.1f} {y - rise:.1f}{path}' for x, y in points)


def heat_map(
  levels: Sequence[Sequence[int]], row_names: Sequence[str], column_names: Sequence[str], columns: str, label: str
) -> Html:
  """Heat map: a rectangle for each number of `levels`, filled by the class l<level> of the style sheet.

  Rows are given from the top. Of the names, as many are written as there is room for; `columns` is what columns are.
  """
  rows, count = len(levels), len(levels[0])
  left = _NAMES
  cell = max(3, min(16, 320 // rows))
  height, width = cell * rows, (WIDTH - left - _RIGHT) / count
  paths: dict[int, list[str]] = {}
  for y, row in enumerate(levels):
    x = 0
    for level, run in itertools.groupby(row):  # equal neighbours are one rectangle
      length = len(list(run))
      paths.setdefault(level, []).append(f'M{x} {y}h{length}v1h-{length}z')
      x += length
  cells = [tag('path', class_=f'l{level}', d=''.join(rectangles)) for level, rectangles in sorted(paths.items())]
  place = f'translate({left} {_TOP}) scale({width:.4f} {cell})'
  drawn = [tag('g', *cells, transform=place, shape_rendering='crispEdges')]
  for y in range(0, rows, math.ceil(12 / cell)):
    at = f'{_TOP + cell * (y + 0.5) + 4:.1f}'
    drawn.append(tag('text', text.shortened(row_names[y], 11), x=left - 6, y=at, class_='end'))
  room = max(map(len, column_names)) * 7 + 10
  for x in range(0, count, max(1, math.ceil(room / width))):
    at = left + width * (x + 0.5)
    drawn.append(tag('text', column_names[x], x=f'{at:.1f}', y=_TOP + height + 14, class_='mid'))
  drawn.append(tag('text', columns, x=(left + WIDTH) // 2, y=_TOP + height + 30, class_='mid'))
  return _picture(_TOP + height + 36, label, drawn)


def _picture(height: float, label: str, drawn: Sequence[Html], **attributes: str) -> Html:
  return tag('svg', join(drawn), viewBox=f'0 0 {WIDTH} {height:g}', role='img', aria_label=label, **attributes)


def _y_range(shown: Sequence[Curve], from_zero: bool) -> tuple[float, float]:
  """Range of the means, and of the bands as far as they do not dwarf them."""
  means = [y for curve in shown for y in curve.series.ys]
  low, high = min(means), max(means)
  room = high - low
  low = max(low - room, min(y for curve in shown for y in curve.series.low))
  high = min(high + room, max(y for curve in shown for y in curve.series.high))
  if from_zero and low >= 0:
    return 0.0, high or 1.0
  return series_lib.extent([low, high])


def _polyline(points: Sequence[tuple[float, float]]) -> str:
  return 'M' + 'L'.join(f'{x:.1f} {y:.1f}' for x, y in points)
