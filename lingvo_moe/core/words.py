"""Words of messages: a noun in the number that its count asks for."""

from __future__ import annotations


def counted(count: int, one: str, many: str = '') -> str:
  """A count with its noun: '1 line', '1,234 lines'; `many` is given where it is more than `one` and an s."""
  return f'{count:,} {one if count == 1 else many or one + "s"}'
