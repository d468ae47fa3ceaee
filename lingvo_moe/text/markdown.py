"""Blocks of Markdown."""

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], names: int | None = None) -> str:
  """Markdown table; the first `names` columns are words, the others numbers, set to the right; None: all are words."""
  line = lambda cells: f'| {" | ".join(cells)} |'
  rules = ['---' if names is None or place < names else '--:' for place in range(len(columns))]
  return '\n'.join([line(columns), line(rules), *map(line, rows)])
