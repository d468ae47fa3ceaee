"""Results of the decoder: a folder for each step of a run or an export, written whole or not at all; and texts so far.

Texts so far are in <summary>.unfinished.jsonl: the settings on which they depend in its first line, {"step",
"settings"}, then a line for each text, {"step", "name", "text"}.
"""

import collections
import dataclasses
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from lingvo_moe.core.errors import UserError, listed, plural
from lingvo_moe.storage import files, json_files, log_directory
from lingvo_moe.tasks.task import HeldOutJob, Outcome

_SUMMARY = ('what the decoder writes', 'the step is decoded again')
_FILE_NAME = json_files.Kind('a file name', lambda name: isinstance(name, str) and name == os.path.basename(name) != '')
_KINDS = {
  'settings': json_files.OBJECT,
  'texts': json_files.optional(json_files.by_name(json_files.optional(json_files.TEXT))),
  'hashes': json_files.optional(json_files.by_name(json_files.TEXT)),
  'beside': json_files.optional(json_files.list_of(_FILE_NAME)),
  'pairs': json_files.optional(json_files.by_name(json_files.OBJECT)),
  'files': json_files.optional(json_files.by_name(json_files.OBJECT)),
}
_LATER = {'length_norm_k': 5.0, 'early_stopping': 'exact'}  # settings that results of earlier versions lack
_UNFINISHED_SECONDS = 10.0  # between two writes of texts so far: so much work is lost at most
_LINE = json_files.Kind('a line of text', lambda value: isinstance(value, str) and '\n' not in value)


class UnfinishedTexts(collections.UserDict[str, str]):
  """Texts by name, from which an interrupted job continues: those of the file, and those that are set.

  These are written at intervals. A file of other settings, or a damaged one, is begun anew. One that cannot be written
  is given up, with a line: the job goes on without.
  """

  def __init__(self, path: str, step: int, settings: Mapping[str, Any]) -> None:
    self._path, self._step = path, step
    self._due = time.monotonic() + _UNFINISHED_SECONDS
    self.data = self._read(settings)
    self._lines = [self._line(settings=dict(settings))]
    self._lines += [self._line(name=name, text=text) for name, text in self.data.items()]

  def __setitem__(self, name: str, text: str) -> None:
    self.data[name] = text
    self._lines.append(self._line(name=name, text=text))
    if time.monotonic() < self._due:
      return
    try:
      files.write(self._path, ''.join(self._lines))
      self._due = time.monotonic() + _UNFINISHED_SECONDS
    except (OSError, UserError) as e:
      self._due = math.inf
      print(f'{self._path} cannot be written ({e}): if interrupted, the job begins anew', file=sys.stderr)

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


@dataclasses.dataclass(frozen=True)
class Results:
  """The folder step_<N> of each step that was decoded.

  The summary is written last and holds the settings of the job and the checkpoint's fingerprint. Where there is one,
  the files next to it are complete and belong to these settings.
  """

  root: str  # where the folders are
  job: HeldOutJob  # what is computed; it names the files and says what they depend on
  home: str  # the log directory, or the folder of an export
  fingerprint: Callable[[int], str]  # of a step's checkpoint, on which its files depend too
  overwrite: bool = False  # whether files made with other settings may be replaced
  given: bool = False  # whether a user named the root, where results of other runs and other files may be
  has_events: bool = True  # whether scalars are written for TensorBoard, which takes TensorFlow

  def folder(self, step: int) -> str:
    return log_directory.step_dir(self.root, step)

  def done(self, step: int) -> dict | None:
    """The summary of a step, if that was made with these settings; one that is damaged counts as none, with a line."""
    try:
      summary = self._read(step)
      if summary is None or summary['settings'] != self.settings(step):
        return None
      self._check(summary, step)
      return summary
    except UserError as e:
      print(e, file=sys.stderr)
      return None

  def settings(self, step: int) -> dict[str, Any]:
    """Settings on which a step's files depend: those of the job, and the checkpoint's fingerprint."""
    return {**self.job.settings, 'checkpoint': self.fingerprint(step)}

  def clear(self, step: int, settings: Mapping[str, Any]) -> None:
    """Removes a step's older files, and prints a line where there were any; refuses to remove other settings' files.

    Texts of an interrupted job stay, unless `overwrite` is set.
    """
    folder = self.folder(step)
    self._make(folder)
    try:
      old = self._read(step) or {}
    except UserError:  # damaged, as `done` has said
      old = {}
    if old:
      changed = self._changed(old, settings if self.given else self.job.settings)
      if changed and not self.overwrite:
        raise UserError(
          f'{folder} holds results made with {changed}: give --overwrite to replace them, or --out=FOLDER for a folder '
          'of their own'
        )
      print(f'replacing {folder}' + (f' (made with {changed})' if changed else ''), file=sys.stderr)
    names = [name for name in files.listdir(folder) if name.endswith(self.job.suffix) and not name.startswith('.')]
    stale = [name for name in names if not self.given or name in (old.get('hashes') or {})]
    paths = {os.path.join(folder, name) for name in (*stale, *(old.get('beside') or ()))} - {self._unfinished(step)}
    # The summary first: without it nothing counts.
    for path in [self._path(step), *sorted(paths), *([self._unfinished(step)] if self.overwrite else ())]:
      files.remove(path)

  def unfinished(self, step: int, settings: Mapping[str, Any]) -> UnfinishedTexts:
    """Texts of the job until they are written as results; prints a line if an interrupted job has left some."""
    texts = UnfinishedTexts(self._unfinished(step), step, settings)
    if texts:
      print(f'going on after {plural(len(texts), "line")} in {self._unfinished(step)}', file=sys.stderr)
    return texts

  def write(self, step: int, settings: Mapping[str, Any], outcome: Outcome) -> dict:
    """Writes a step's lines, scalars and, last, the summary, which is returned."""
    hashes = {}
    lines_of = {name + self.job.suffix: lines for name, lines in outcome.lines.items()}
    for name, lines in {**lines_of, **outcome.other_files}.items():
      data = ''.join(line + '\n' for line in lines).encode()
      files.write(os.path.join(self.folder(step), name), data)
      hashes[name] = hashlib.sha256(data).hexdigest()
    if self.has_events:
      from lingvo_moe.run.reporting import EventFile

      events = EventFile(self.root)
      events.write(step, outcome.scalars)
      events.close()
    summary = {
      'step': step,
      'settings': dict(settings),
      'texts': self.job.texts,
      'beside': sorted(outcome.other_files),
      'hashes': hashes,
      **outcome.summary,
    }
    files.write(self._path(step), json_files.dump(summary, indent=2))
    files.remove(self._unfinished(step))
    return summary

  def _make(self, folder: str) -> None:
    if not self.given and not files.is_inside(folder, self.home):
      raise UserError(
        f'results are written in {self.home}; a link leads from {folder} to {os.path.realpath(folder)}: remove '
        'it, or give --out=FOLDER'
      )
    try:
      files.makedirs(folder)
    except OSError as e:
      raise UserError(f'cannot make {folder} ({e.strerror}): give --out=FOLDER for another place') from None

  def _changed(self, old: dict, settings: Mapping[str, Any]) -> str:
    """Which settings older results were made with, where these are others; '' where all are the same."""
    before = {name: value for name, value in old['settings'].items() if name in settings or name != 'checkpoint'}
    return '; '.join(
      self._other_text(old) if name == 'text' else f'{name}={before.get(name)!r}, now {settings.get(name)!r}'
      for name in {**settings, **before}
      if before.get(name) != settings.get(name)
    )

  def _other_text(self, old: dict) -> str:
    """Differences between the texts of older results and the job's, by the names of their parts."""
    names = dict.fromkeys(old.get('pairs') or old.get('files') or {})  # an earlier version had no more
    before, now = old.get('texts') or names, self.job.texts
    if before.keys() != now.keys():
      return f'text of {listed(sorted(before))}, now {listed(sorted(now))}'
    differ = [name for name in now if before[name] not in (None, now[name])]
    return f'other lines of {listed(sorted(differ or now))}'

  def _path(self, step: int) -> str:
    return os.path.join(self.folder(step), self.job.summary_file)

  def _unfinished(self, step: int) -> str:
    return os.path.splitext(self._path(step))[0] + '.unfinished.jsonl'

  def _read(self, step: int) -> dict[str, Any] | None:
    """The summary of a step; None if there is none; UserError if it is damaged."""
    summary = json_files.read_if_any(self._path(step), *_SUMMARY, **_KINDS)
    for name in _LATER.keys() & self.job.settings.keys() if summary else ():
      summary['settings'].setdefault(name, _LATER[name])
    return summary

  def _check(self, summary: dict[str, Any], step: int) -> None:
    """Raises UserError for a summary that the job cannot show, or a file of lines that is not as it was written."""
    try:
      self.job.report(summary)  # an earlier version wrote no checksum
    except (KeyError, TypeError, ValueError, AttributeError) as e:
      what, way_out = _SUMMARY
      raise UserError(f'{self._path(step)} is not {what} ({type(e).__name__}: {e}): {way_out}') from None
    for name, written in (summary.get('hashes') or {}).items():
      path = os.path.join(self.folder(step), name)
      if files.isfile(path) and files.sha256(path) != written:
        raise UserError(f'{path} is not as the decoder wrote it: the step is decoded again')
