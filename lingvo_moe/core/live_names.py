"""Names in a table for whose entries something holds, as the table is when one asks: users add entries of their own."""

import abc
from collections.abc import Collection, Iterator, Mapping
from typing import Any


class LiveNames(Collection[str]):
  """Names of the entries of a table for which `holds`, in the order of the table."""

  table: Mapping[str, Any]  # entries by name; a subclass has it

  @abc.abstractmethod
  def holds(self, entry: Any) -> bool:
    """Whether an entry's name is one of these."""

  def __contains__(self, name: object) -> bool:
    return name in self.table and self.holds(self.table[name])

  def __iter__(self) -> Iterator[str]:
    return (name for name, entry in self.table.items() if self.holds(entry))

  def __len__(self) -> int:
    return sum(map(self.holds, self.table.values()))
