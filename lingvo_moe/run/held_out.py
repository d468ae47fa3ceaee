"""Results of the decoder: a folder for each step of a run, written whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from lingvo_moe.core.errors import UserError
from lingvo_moe.run.checkpoint import Checkpoints
from lingvo_moe.run.event_file import EventFile
from lingvo_moe.tasks.task import HeldOutJob
from lingvo_moe.tasks.task import Outcome


@dataclasses.dataclass(frozen=True)
class Results:
  """The folder step_<N> of each step that was decoded.

  The summary is written last and holds the settings of the job and the checkpoint's fingerprint. Where there is one,
  the files beside it are complete and belong to these settings.

  Attributes:
    root: where the folders are.
    job: what is computed; it names the files and says what they depend on.
    checkpoints: of the run; a step's files also depend on its checkpoint.
    overwrite: whether files made with other settings may be replaced.
  """

  root: str
  job: HeldOutJob
  checkpoints: Checkpoints
  overwrite: bool = False

  def folder(self, step: int) -> str:
    return os.path.join(self.root, f'step_{step}')

  def done(self, step: int) -> dict | None:
    """The summary of a step, if that was made with these settings."""
    summary = self._read(step)
    return summary if summary and summary['settings'] == self._settings(step) else None

  def begin(self, step: int) -> None:
    """Removes a step's older files, and prints a line where there were any; refuses to remove other settings' files."""
    folder = self.folder(step)
    os.makedirs(folder, exist_ok=True)
    if old := self._read(step):
      changed = [
        self._other_text(old) if name == 'text' else f'{name}={old["settings"].get(name)!r}, now {value!r}'
        for name, value in self.job.settings.items()
        if old['settings'].get(name) != value
      ]
      if changed and not self.overwrite:
        raise UserError(
          f'{folder} holds results made with {"; ".join(changed)}: give --overwrite to replace them, or '
          '--out=FOLDER for a folder of their own'
        )
      print(f'replacing {folder}' + (f' (made with {"; ".join(changed)})' if changed else ''), file=sys.stderr)
    stale = glob.glob(os.path.join(glob.escape(folder), '*' + self.job.suffix))
    stale += [os.path.join(folder, name) for name in (old or {}).get('beside', ())]
    for path in [os.path.join(folder, self.job.summary_file), *stale]:  # the summary first: without it nothing counts
      with contextlib.suppress(FileNotFoundError):
        os.remove(path)

  def write(self, step: int, outcome: Outcome) -> dict:
    """Writes a step's lines, scalars and, last, the summary, which is returned."""
    for name, lines in outcome.lines.items():
      _write(os.path.join(self.folder(step), name + self.job.suffix), ''.join(line + '\n' for line in lines))
    for name, lines in outcome.beside.items():
      _write(os.path.join(self.folder(step), name), ''.join(line + '\n' for line in lines))
    events = EventFile(self.root)
    events.write(step, outcome.scalars)
    events.close()
    own = {'settings': self._settings(step), 'texts': self.job.texts, 'beside': sorted(outcome.beside)}
    summary = {'step': step, **own, **outcome.summary}
    path = os.path.join(self.folder(step), self.job.summary_file)
    _write(path, json.dumps(summary, indent=2, ensure_ascii=False) + '\n')
    return summary

  def _other_text(self, old: dict) -> str:
    """How the text of results that are there differs from the job's, by the names of its parts."""
    before = old.get('texts') or dict.fromkeys(
      old.get('pairs') or old.get('files') or {}
    )  # an earlier version had names
    now = self.job.texts
    if before.keys() != now.keys():
      return f'text of {_names(before)}, now {_names(now)}'
    differ = [name for name in now if before[name] not in (None, now[name])]
    return f'other lines of {_names(differ or now)}'

  def _settings(self, step: int) -> dict[str, Any]:
    return {**self.job.settings, 'checkpoint': self.checkpoints.fingerprint(step)}

  def _read(self, step):
    try:
      with open(os.path.join(self.folder(step), self.job.summary_file), encoding='utf-8') as f:
        summary = json.load(f)
    except (FileNotFoundError, ValueError):
      return None
    return summary if isinstance(summary, dict) and isinstance(summary.get('settings'), dict) else None


def _names(names: Iterable[str]) -> str:
  """Names with commas between, the first of many."""
  names = sorted(names)
  return ', '.join(names[:8]) + (f' and {len(names) - 8} more' if len(names) > 8 else '') or 'none'


def _write(path: str, text: str) -> None:
  """Writes a file whole or not at all."""
  with open(path + '.partial', 'w', encoding='utf-8', newline='\n') as f:
    f.write(text)
  os.replace(path + '.partial', path)
