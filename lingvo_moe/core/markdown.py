"""Blocks of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Markdown table."""
  line = lambda cells: f'| {" | ".join(cells)} |'
  return '\n'.join([line(columns), line(['---'] * len(columns)), *map(line, rows)])


def image(name: str) -> str:
  """Markdown image: the plot NAME.png in the folder of the page."""
  return f'![{name}]({name}.png)'
