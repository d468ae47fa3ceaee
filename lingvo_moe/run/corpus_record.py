"""Record of a run's corpus: corpus.json, a hash of each file, checked when the run resumes.

{"parts": {"train of de-en": {"de-en/train.de": SHA-256, ...}, "dev of de-en": {...}}}

A path is relative to data_dir, which may move. A run of an earlier version has no record and gets one.
"""

import os
from collections.abc import Callable, Mapping

from lingvo_moe.core.errors import UserError, listed
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.storage import content_hashes, files, json_files, log_directory
from lingvo_moe.tasks.task import TaskConfig, task_of

Record = Mapping[str, Mapping[str, str]]  # hashes by part and path
_MOST_NAMED = 5


def check(run: RunDir, config: TaskConfig, cache_dir: str, accept: bool, say: Callable[[str], None]) -> None:
  """Compares the corpus of a configuration with the record of its run, then writes the record.

  Where no run was begun yet, an older record is of another one. `accept` says whether to go on with a corpus that has
  changed, `say` prints a line, and `cache_dir` keeps hashes of files; see content_hashes.

  Raises:
    UserError: the corpus has changed, and that is not accepted; or the record is damaged.
  """
  if not (parts := task_of(config).corpus_files()):
    return
  kind = json_files.by_name(json_files.by_name(json_files.TEXT))
  way_out = 'restore it from a copy, or remove it, and the corpus is taken as it is'
  path = run.file(log_directory.CORPUS)
  before = json_files.read_if_any(path, 'a record of a corpus', way_out, parts=kind) if run.exists else None
  hashes = iter(content_hashes.of([path for paths in parts.values() for path in paths], cache_dir))
  relative = lambda path: os.path.relpath(path, config.data_dir)
  now = {part: {relative(path): next(hashes) for path in paths} for part, paths in parts.items()}
  if before is not None and before['parts'] == now:
    return
  if before is not None and (changes := _changes(before['parts'], now, config.data_dir)):
    named = listed(changes, _MOST_NAMED, '; ')
    if not accept:
      raise UserError(
        f'{config.data_dir} is not the corpus that the run in {run.path} has learnt from: {named}: put '
        'it back, or go on with it as it is by --accept_changed_corpus'
      )
    say(f'going on with another corpus: {named}')
  files.write(path, json_files.dump({'parts': now}))


def _changes(before: Record, now: Record, data_dir: str) -> list[str]:
  is_same = lambda old, new, path: old and new and content_hashes.is_same(old, new, os.path.join(data_dir, path))
  old, new = ({(part, path): h for part, by in record.items() for path, h in by.items()} for record in (before, now))
  what = lambda file: 'is new' if file not in old else 'is gone' if file not in new else 'has other text'
  changed = [file for file in sorted(old.keys() | new.keys()) if not is_same(old.get(file), new.get(file), file[1])]
  return [f'{path} ({part}) {what((part, path))}' for part, path in changed]
