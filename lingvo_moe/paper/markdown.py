"""Blocks of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A table of Markdown."""
  line = lambda cells: f'| {" | ".join(cells)} |'
  return '\n'.join([line(columns), line(['---'] * len(columns)), *map(line, rows)])


def image(name: str) -> str:
  """The plot NAME.png beside the page."""
  return f'![{name}]({name}.png)'
