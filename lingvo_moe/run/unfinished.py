"""Finished texts of a job in a file, from which an interrupted job continues.

The file has the settings on which the texts depend in its first line, {"step", "settings"}, then a line for each text,
{"step", "name", "text"}.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Mapping
from typing import Any

from lingvo_moe.core import files, json_files
from lingvo_moe.core.errors import UserError

_SECONDS = 10.0  # between two writes: so much work is lost at most
_LINE = json_files.Kind('a line of text', lambda value: isinstance(value, str) and '\n' not in value)


class UnfinishedTexts(collections.UserDict[str, str]):
  """Texts by name: those that the file has, and those that are set, which are written at intervals.

  A file of other settings, or a damaged one, is begun anew. One that cannot be written is given up, with a line: the
  job goes on without.

  Args:
    path: of the file.
    step: of the checkpoint.
    settings: on which the texts depend.
  """

  def __init__(self, path: str, step: int, settings: Mapping[str, Any]) -> None:
    self._path, self._step = path, step
    self._gives_up, self._written = False, time.monotonic()
    self.data = self._read(settings)
    self._lines = [self._line(settings=dict(settings))]
    self._lines += [self._line(name=name, text=text) for name, text in self.data.items()]

  def __setitem__(self, name: str, text: str) -> None:
    self.data[name] = text
    self._lines.append(self._line(name=name, text=text))
    if not self._gives_up and time.monotonic() - self._written >= _SECONDS:
      self._write()

  def _write(self) -> None:
    try:
      files.write(self._path, ''.join(self._lines))
    except (OSError, UserError) as e:
      self._gives_up = True
      print(f'{self._path} cannot be written ({e}): if interrupted, the job begins anew', file=sys.stderr)
    self._written = time.monotonic()

  def _read(self, settings: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    try:
      for number, (_, line) in enumerate(json_files.lines(self._path)):
        if number:
          json_files.check(line, name=_LINE, text=_LINE)
          texts[line['name']] = line['text']
        elif line.get('settings') != settings:
          raise ValueError('its settings are others')
    except (OSError, ValueError) as e:  # a UserError is a ValueError
      print(f'{self._path} is begun anew, as it is of no use: {e}', file=sys.stderr)
      return {}
    return texts

  def _line(self, **values: Any) -> str:
    return json_files.dump({'step': self._step, **values})
