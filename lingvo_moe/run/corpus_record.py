"""Record of the corpus that a run learns from: corpus.json, a hash of each file, checked when the run goes on.

{"parts": {"train of de-en": {"de-en/train.de": SHA-256, ...}, "dev of de-en": {...}}}

A path is relative to data_dir, which may move. A run of an earlier version has no record and gets one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from lingvo_moe.core import content_hashes
from lingvo_moe.core import files
from lingvo_moe.core import json_files
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.task import TaskConfig
from lingvo_moe.tasks.task import task_of

Record = Mapping[str, Mapping[str, str]]  # hashes by part and path
_MOST_NAMED = 5


def check(path: str, config: TaskConfig, cache_dir: str, begun: bool, accept: bool, say: Callable[[str], None]) -> None:
  """Compares the corpus with the record of a run that goes on, then writes the record.

  Args:
    path: of the record.
    config: of the run.
    cache_dir: where hashes of files are kept, so that one that has not changed is not read again.
    begun: whether the run was begun before; otherwise a record that is there is not of this run.
    accept: whether to go on with a corpus that has changed.
    say: prints a line.

  Raises:
    UserError: the corpus has changed, and that is not accepted; or the record is damaged.
  """
  if not (parts := task_of(config).corpus_files()):
    return
  before = _read(path) if begun else None
  now = _record(parts, config.data_dir, cache_dir)
  if before == now:
    return
  if before is not None:
    changes = _changes(before, now)
    listed = '; '.join(changes[:_MOST_NAMED]) + (
      f'; and {len(changes) - _MOST_NAMED} more' * (len(changes) > _MOST_NAMED)
    )
    if not accept:
      raise UserError(
        f'{config.data_dir} is not the corpus that the run in {os.path.dirname(path)} has learnt from: {listed}: put it '
        'back, or go on with it as it is by --accept_changed_corpus'
      )
    say(f'going on with another corpus: {listed}')
  files.write(path, json_files.dump({'parts': now}))


def _read(path: str) -> Record | None:
  kind = json_files.by_name(json_files.by_name(json_files.TEXT))
  way_out = 'restore it from a copy, or remove it, and the corpus is taken as it is'
  try:
    return json_files.read(path, 'a record of a corpus', way_out, parts=kind)['parts']
  except FileNotFoundError:
    return None


def _record(parts: Mapping[str, Sequence[str]], data_dir: str, cache_dir: str) -> Record:
  hashes = iter(content_hashes.of_cache(cache_dir).of([path for paths in parts.values() for path in paths]))
  relative = lambda path: os.path.relpath(path, data_dir)
  return {part: {relative(path): next(hashes) for path in paths} for part, paths in parts.items()}


def _changes(before: Record, now: Record) -> list[str]:
  """What has changed, file by file."""
  changes = []
  for part in sorted(before.keys() | now.keys()):
    old, new = before.get(part, {}), now.get(part, {})
    for path in sorted(old.keys() | new.keys()):
      if old.get(path) != new.get(path):
        what = 'is new' if path not in old else 'is gone' if path not in new else 'has other text'
        changes.append(f'{path} ({part}) {what}')
  return changes
