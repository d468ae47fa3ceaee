"""Sequence-level distillation: a corpus whose target side a model has translated (Kim and Rush, arXiv 1606.07947).

Beside the corpus `.unfinished_<name>` has the translations of each 1000 lines, a shard, and distillation.json with the
settings. Processes that see this folder translate shards side by side: each claims those that nobody has. When all are
made, one process joins them to the corpus, which appears whole, with its own distillation.json.
"""

import collections
import contextlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.core.progress import Advance, Progress
from lingvo_moe.corpora import packed, parallel, text
from lingvo_moe.corpora.parallel import Pair
from lingvo_moe.storage import files, json_files, new_folder
from lingvo_moe.storage.claims import Claims
from lingvo_moe.text.translator import Answers

_RECORD = 'distillation.json'
_SHARD_LINES = 1000
_COUNTS = dict.fromkeys(('lines', 'pairs', 'too_long', 'untranslated'), json_files.INTEGER)  # of a finished corpus
_TEXTS = json_files.list_of(json_files.list_of(json_files.TEXT))  # of each line

Translate = Callable[[Pair, list[str], Advance], Answers]


def is_finished(out: str) -> bool:
  """Whether there is a corpus that was distilled; UserError if there is anything else."""
  if os.path.isfile(os.path.join(out, _RECORD)):
    return True
  new_folder.check(out, 'a corpus')
  return False


def distill(out: str, pairs: Sequence[Pair], settings: Mapping[str, Any], translate: Translate) -> dict[str, Any]:
  """Writes the corpus, with other processes that do, after what an interrupted call has left; returns its record.

  Args:
    out: its folder.
    pairs: what is translated; Pair.split is the prefix of the files.
    settings: what translations depend on besides the lines, other than before refused; and the path 'teacher'.
    translate: answers lines of a pair, and calls a function with the number done since the last call.
  """
  sources = {f'{pair.name}/{os.path.basename(path)}': path for pair in pairs for path in pair.source_files}
  settings = {**settings, **{name: files.sha256(path) for name, path in sources.items()}}
  parent, name = os.path.split(os.path.abspath(out))
  unfinished = os.path.join(parent, f'.unfinished_{name}')
  was_finished = is_finished(out)
  if not was_finished:
    try:
      _make(out, pairs, unfinished, settings, translate)
    except OSError as e:
      what = f'{e.filename or unfinished} cannot be written ({e.strerror})'
      if not os.path.exists(out):  # else another process has finished, and removed it
        raise UserError(f'{what}: make room, and the same command goes on') from None
  record = _record(out, settings, **_COUNTS)
  if was_finished:
    print(f'{out} is finished already', file=sys.stderr)
  files.rmtree(unfinished)
  return record


def _record(folder: str, settings: Mapping[str, Any], **counts: json_files.Kind) -> dict[str, Any] | None:
  """The record in a folder; None if there is none; UserError if its settings are others."""
  record = json_files.read_if_any(os.path.join(folder, _RECORD), settings=json_files.OBJECT, **counts)
  before = record['settings'] if record else settings
  names = {**settings, **before}.keys() - {'teacher'}
  if differ := sorted(name for name in names if before.get(name) != settings.get(name)):
    changed = '; '.join(f'{name}={shown(before.get(name))}, now {shown(settings.get(name))}' for name in differ)
    raise UserError(f'{folder} was made with {changed}: give the options as before, or another --out, or remove it')
  return record


def _make(out: str, pairs: Sequence[Pair], unfinished: str, settings: Mapping[str, Any], translate: Translate) -> None:
  total = sum(map(parallel.count_lines, pairs))
  with files.lock(unfinished):
    if not _record(unfinished, settings):
      files.write(os.path.join(unfinished, _RECORD), json_files.dump({'settings': settings}))
  made = {path: len(lines) for _, path, lines in _shards(pairs, unfinished) if _read(path)}  # lines by shard
  with Claims() as claims, Progress(total, 'line', initial=sum(made.values()), label='distilling') as bar:
    progress = lambda lines: (bar.update(lines), claims.renew())

    def is_made(shard: tuple[Pair, str, list[str]]) -> bool:
      _, path, lines = shard
      if path not in made and _read(path):  # by another process
        made[path] = len(lines)
        bar.update(len(lines))
      return path in made or os.path.exists(out)

    shards = lambda: _shards(pairs, unfinished)
    for pair, path, lines in claims.until_made(shards, lambda shard: f'{shard[1]}.claim', is_made):
      answers = translate(pair, lines, progress)
      best = [dict.fromkeys(h.text for h in of_line if not text.is_empty(h.text)) for of_line in answers.hypotheses]
      texts = [[] if i in answers.truncated else list(of_line) for i, of_line in enumerate(best)]
      files.write(path, json_files.dump({'texts': texts, 'too_long': len(answers.truncated)}))
      made[path] = len(lines)
    joining = os.path.join(unfinished, 'corpus.claim')
    for _ in claims.until_made(lambda: [out], lambda out: joining, os.path.exists):
      _join(out, pairs, unfinished, settings, claims.renew)


def _shards(pairs: Sequence[Pair], folder: str) -> Iterator[tuple[Pair, str, list[str]]]:
  """Yields (pair, path of the translations, source lines) of each shard."""
  for pair in pairs:
    batches = itertools.chain.from_iterable(text.line_batches(path, _SHARD_LINES) for path in pair.source_files)
    for number, batch in enumerate(batches):
      yield pair, os.path.join(folder, f'{pair.name}.{number:05d}.json'), [line.decode('utf-8') for line in batch]


def _read(path: str) -> dict[str, Any] | None:
  """Translations of a shard; None where they are not made, or damaged."""
  with contextlib.suppress(FileNotFoundError, UserError):
    return json_files.read(path, texts=_TEXTS, too_long=json_files.INTEGER)


def _join(out: str, pairs: Sequence[Pair], unfinished: str, settings: Mapping[str, Any], renew: Callable) -> None:
  """Writes the corpus: what was translated from the shards, and the other files of its pairs as they are."""
  counts = collections.Counter()
  with new_folder.writing(out) as folder:
    for pair, path, lines in _shards(pairs, unfinished):
      renew()
      if (shard := _read(path)) is None:
        raise UserError(f'{path} is damaged: the same command makes it again')
      rows = [(line, t) for line, of_line in zip(lines, shard['texts'], strict=True) for t in of_line]
      os.makedirs(os.path.join(folder, pair.name), exist_ok=True)
      for side, language in enumerate((pair.source, pair.target)):
        with open(os.path.join(folder, pair.name, f'{pair.split}.{language}'), 'ab') as f:
          f.writelines(row[side].encode() + b'\n' for row in rows)
      untranslated = shard['texts'].count([]) - shard['too_long']
      counts.update(lines=len(lines), pairs=len(rows), too_long=shard['too_long'], untranslated=untranslated)
    if not counts['pairs']:
      saw = f'{counts["too_long"]:,} of {counts["lines"]:,} too long, {counts["untranslated"]:,} without a translation'
      raise UserError(f'a corpus has pairs of lines; all were left out, {saw}: give other lines, or another teacher')
    for pair in pairs:
      for _, language, path in packed.named(os.path.dirname(pair.source_files[0])):
        if language in (pair.source, pair.target) and path not in (*pair.source_files, *pair.target_files):
          copy = os.path.join(folder, pair.name, os.path.basename(path))
          with files.open_to_read(path) as f, open(copy, 'wb') as to:
            shutil.copyfileobj(f, to)
    files.write(os.path.join(folder, _RECORD), json_files.dump({'settings': settings, **counts}, indent=2))
