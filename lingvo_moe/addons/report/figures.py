"""Figures: a plot with its caption and legend, and behind it the table of what it shows."""

from collections.abc import Sequence
from typing import Any

from lingvo_moe.addons.report import svg
from lingvo_moe.addons.report.escaped_html import Html, join, tag
from lingvo_moe.addons.report.series import text
from lingvo_moe.addons.report.svg import Curve


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]], name: str) -> Html:
  """Table of texts, numbers or Html, which scrolls by itself where it is wider than the page.

  The first cell of a row is its heading; `name` is for screen readers.
  """
  columns = tag('tr', *(tag('th', cell, scope='col') for cell in head))
  body = (tag('tr', tag('th', _cell(first), scope='row'), *map(_data, others)) for first, *others in rows)
  whole = tag('table', tag('thead', columns), tag('tbody', *body))
  return tag('div', whole, class_='scroll', tabindex=0, role='region', aria_label=name)


def _data(cell: Any) -> Html:
  return cell if isinstance(cell, Html) and cell.startswith('<td') else tag('td', _cell(cell))


def _cell(value: Any) -> Any:
  return text(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def figure(
  title: str, picture: Html, tables: Html, note: str = '', legend: Html | None = None, scale: Html | None = None
) -> Html:
  """Figure with its caption, a choice of the scale, its legend, and a table to open."""
  caption = tag('figcaption', tag('strong', title), ' ', note)
  behind = tag('details', tag('summary', f'Table: {title}'), tables)
  return tag('figure', caption, scale, picture, legend, behind)


def curves(title: str, shown: Sequence[Curve], x_name: str, note: str = '', from_zero: bool = False) -> Html | None:
  """Figure of curves; None if none has a point."""
  shown = [curve for curve in shown if curve.series.xs]
  if not shown:
    return None
  label = f'{title} over {x_name}. ' + '; '.join(_in_words(curve) for curve in shown)
  picture = svg.curves(shown, x_name, label, from_zero)
  scale = tag('label', tag('input', type='checkbox'), ' logarithmic', class_='scale')
  tables = _tables(title, shown, x_name)
  return figure(title, picture, tables, note, legend(shown), scale if svg.has_logarithms(shown) else None)


def legend(shown: Sequence[Curve], shapes: bool = False) -> Html | None:
  """Names of curves beside a stroke as they have it, or the shape of their dots; None for one alone."""
  if len(shown) < 2:
    return None
  items = []
  for curve in shown:
    stroke = f'curve c{curve.colour % svg.COLOURS} d{curve.dash % svg.DASHES}'
    drawn = [] if shapes else [tag('path', class_=stroke, d='M0 5H24')]
    if shapes or curve.marks:
      drawn.append(svg.markers([(12, 5)], curve.colour, curve.dash if shapes else 0))
    items.append(tag('li', tag('svg', *drawn, viewBox='0 0 24 10', aria_hidden='true'), ' ', curve.name))
  return tag('ul', *items, class_='legend')


def _in_words(curve: Curve) -> str:
  xs, ys = curve.series.xs, curve.series.ys
  return (
    f'{curve.name}: {text(ys[0])} at {text(xs[0])}, {text(ys[-1])} at {text(xs[-1])}, '
    f'least {text(min(ys))}, largest {text(max(ys))}'
  )


def _tables(title: str, shown: Sequence[Curve], x_name: str) -> Html:
  """A table for the curves of each list of xs."""
  groups: dict[tuple[float, ...], list[Curve]] = {}
  for curve in shown:
    groups.setdefault(tuple(curve.series.xs), []).append(curve)
  made = []
  for xs, of_xs in groups.items():
    head, columns = [x_name], []
    for curve in of_xs:
      spread = curve.series.thinned
      head += [curve.name, 'least', 'largest'] if spread else [curve.name]
      columns += [curve.series.ys, curve.series.low, curve.series.high] if spread else [curve.series.ys]
    made.append(table(head, list(zip(xs, *columns, strict=True)), f'{title}: {", ".join(c.name for c in of_xs)}'))
  return join(made)


def grid(*figures: Html | None) -> Html:
  """Figures in a grid, as many in a row as fit."""
  return tag('div', *figures, class_='grid')


def absent(why: str) -> Html:
  """The sentence in place of what a run does not have."""
  return tag('p', why, class_='absent')
