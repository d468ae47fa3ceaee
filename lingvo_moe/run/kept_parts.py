"""Parts of results, kept as they are done, so that an interrupted job goes on after them.

The file has the settings on which the parts depend in its first line, {"step", "settings"}, then a line for each part,
{"step", "name", "value"}.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping
from typing import IO, Any, Self

from lingvo_moe.core import files
from lingvo_moe.core import json_files
from lingvo_moe.core.errors import UserError


def read(path: str, settings: Mapping[str, Any]) -> dict[str, Any]:
  """Parts by name; none where there is no such file, or, with a line to say so, where it is of other settings or damaged."""
  found = {}
  try:
    for number, (_, line) in enumerate(json_files.lines(path)):
      if number:
        found[line['name']] = line['value']
      elif line.get('settings') != settings:
        print(f'{path} was left by a job with other settings, and is begun anew', file=sys.stderr)
        return {}
  except (UserError, KeyError, TypeError) as e:
    print(f'{path} is damaged, and is begun anew ({e})', file=sys.stderr)
    return {}
  return found


class KeptParts(collections.UserDict[str, Any]):
  """Parts by name, each written to a file when it is set; a context, which closes that.

  Args:
    path: of the file.
    step: of the checkpoint.
    settings: on which the parts depend.
    parts: those that an interrupted job has left; see `read`.
  """

  def __init__(self, path: str, step: int, settings: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    super().__init__()
    self.data = dict(parts)
    self._path, self._step, self._settings = path, step, settings
    self._file: IO | None = None

  def __setitem__(self, name: str, value: Any) -> None:
    self.data[name] = value
    if self._file is None:
      # Written anew with what is there: the last line of an interrupted job may be cut short.
      first = [{'settings': dict(self._settings)}]
      files.write(self._path, ''.join(map(self._line, [*first, *map(_part, self.data, self.data.values())])))
      self._file = files.append(self._path)
    else:
      self._file.write(self._line(_part(name, value)))
      self._file.flush()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    if self._file is not None:
      self._file.close()

  def _line(self, of: Mapping[str, Any]) -> str:
    return json_files.dump({'step': self._step, **of})


def _part(name: str, value: Any) -> dict[str, Any]:
  return {'name': name, 'value': value}
