"""Plots of pages, as PNG files: stacked bars, grouped bars, lines and heat maps."""

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lingvo_moe.core import errors

try:
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot
except ImportError as e:
  raise errors.not_installed('plots need matplotlib', e, 'figures') from None

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#999999', '#332288', '#882255')
_STYLE = {
  'axes.grid': True,
  'axes.axisbelow': True,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'font.size': 10,
  'grid.color': '#dddddd',
  'savefig.dpi': 150,
  'text.parse_math': False,  # names of runs may have a dollar sign
}


@contextlib.contextmanager
def page(path: str, columns: int = 1, rows: int = 1, width: float = 7.0, height: float = 4.2) -> Iterator[list[Any]]:
  """Yields axes to draw on, row by row, and writes them to a file at the end; width and height are inches per axes."""
  with matplotlib.rc_context(_STYLE):
    figure, axes = pyplot.subplots(
      rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout='constrained'
    )
    try:
      yield list(axes.flat)
      figure.savefig(path)
    finally:
      pyplot.close(figure)


def stacked(axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str, width: float = 0.65) -> None:
  """Stacked bars, one per name, with their sums above them."""
  bottom = [0.0] * len(names)
  for colour, (part, values) in zip(COLOURS, parts.items()):
    axes.bar(range(len(names)), values, width, bottom, label=part, color=colour, edgecolor='white', linewidth=0.5)
    bottom = [b + v for b, v in zip(bottom, values)]
  for x, total in enumerate(bottom):
    axes.annotate(f'{total:.3g}', (x, total), xytext=(0, 3), textcoords='offset points', ha='center')
  axes.set_xticks(range(len(names)), names)
  axes.set_ylabel(unit)
  axes.set_ylim(0, 1.08 * max([*bottom, 1e-9]))
  axes.grid(False, axis='x')


def grouped(axes, names: Sequence[str], series: Mapping[str, Sequence[float | None]], unit: str) -> None:
  """Grouped bars, a group per name with a bar per series; None leaves a gap."""
  width = 0.8 / len(series)
  for i, (colour, (label, values)) in enumerate(zip(COLOURS, series.items())):
    at = [x + (i - (len(series) - 1) / 2) * width for x in range(len(names))]
    bars = axes.bar(at, [v or 0 for v in values], width, label=label, color=colour)
    axes.bar_label(bars, [f'{v:.2f}' if v else '' for v in values], padding=2, fontsize=8)
  axes.set_xticks(range(len(names)), names)
  axes.set_ylabel(unit)
  axes.grid(False, axis='x')


def line(axes, xs: Sequence[float], ys: Sequence[float], label: str, colour: str, style: str = '') -> None:
  """Line through points that are marked; with a style such as '--' no points, for reference lines."""
  axes.plot(xs, ys, label=label, color=colour, **({'linestyle': style, 'linewidth': 1} if style else {'marker': 'o'}))


def heat_map(axes, values: Any, rows: Sequence[str], groups: Sequence[str], columns: Sequence[str], label: str) -> None:
  """Heat map with names of rows and columns, rows in the colour of the group they are in; the commonest have one."""
  image = axes.imshow(values, aspect='auto', cmap='magma_r', interpolation='nearest')
  axes.grid(False)
  axes.set_yticks(range(len(rows)), rows, fontsize=6)
  axes.set_xticks(range(len(columns)), columns, fontsize=min(6, 400 / len(columns)), rotation=90)
  common = [group for group, _ in collections.Counter(filter(None, groups)).most_common(len(COLOURS))]
  colours = dict(zip(common, COLOURS))
  for tick, group in zip(axes.get_yticklabels(), groups):
    tick.set_color(colours.get(group, '#000000'))
  axes.figure.colorbar(image, ax=axes, label=label, shrink=0.5)


def powers_of_two(axes, xs: Sequence[int]) -> None:
  """Logarithmic x axis for powers of two, with every number as a label."""
  axes.set_xscale('log', base=2)
  axes.set_xticks(xs, [str(x) for x in xs])
  axes.minorticks_off()


def plain_log(axes, ticks: Sequence[float]) -> None:
  """Logarithmic y axis with plain numbers as labels."""
  axes.set_yscale('log')
  axes.set_yticks(ticks, [f'{tick:g}' for tick in ticks])
  axes.minorticks_off()


def image(name: str) -> str:
  """Markdown image: the plot NAME.png in the folder of the page."""
  return f'![{name}]({name}.png)'
