"""Sequence-level distillation: a corpus whose target side is what a model translates (Kim and Rush, arXiv 1606.07947).

A hidden folder beside the corpus, `.unfinished_<name>`, holds the translations of each 1000 lines, a shard, and
distillation.json with the settings on which they depend. Any number of processes, on machines that see the folder,
translate shards side by side: each claims those that nobody has (storage/claims.py). When all are made, one process
joins them to the corpus, which appears whole, and has distillation.json too.
"""

import collections
import contextlib
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lingvo_moe.core.errors import UserError, plural, shown
from lingvo_moe.core.progress import Advance, Progress
from lingvo_moe.corpora import packed, parallel, text
from lingvo_moe.corpora.parallel import Pair
from lingvo_moe.storage import files, json_files, new_folder
from lingvo_moe.storage.claims import Claims
from lingvo_moe.text.translator import Answers

RECORD = 'distillation.json'
_SHARD_LINES = 1000
_WAIT_SECONDS = 2.0  # between looks at the shards that other processes make
_TEXTS = json_files.list_of(json_files.list_of(json_files.TEXT))  # of each line

Translate = Callable[[Pair, Sequence[str], Advance], Answers]


def text_settings(pairs: Sequence[Pair]) -> dict[str, str]:
  """Hash of each source file, by name; a setting on which translations depend."""
  paths = {f'{pair.name}/{os.path.basename(path)}': path for pair in pairs for path in pair.source_files}
  return {name: files.sha256(path)[:16] for name, path in paths.items()}


def record(out: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
  """What is noted in a corpus that was distilled with these settings; None where it is still to be made.

  Raises:
    UserError: something else is at the path.
  """
  if (noted := json_files.read_if_any(os.path.join(out, RECORD), settings=json_files.OBJECT)) is None:
    new_folder.check(out, 'a corpus')
  elif changed := _changed(noted['settings'], settings):
    raise UserError(f'{out} is a corpus made with {changed}: choose another --out, or remove that one')
  return noted


def write(
  out: str, pairs: Sequence[Pair], settings: Mapping[str, Any], about: Mapping[str, Any], translate: Translate
) -> dict[str, Any]:
  """Writes the corpus, with other processes that do, and goes on where they or an earlier call were; its record.

  Args:
    out: folder to make.
    pairs: each with the training text of a corpus; Pair.split is the prefix of its files.
    settings: all that translations depend on, besides the lines.
    about: more to note.
    translate: answers lines of a pair, and calls a function with the number of those done since the last call.
  """
  total = sum(map(parallel.count_lines, pairs))
  parent, name = os.path.split(os.path.abspath(out))
  unfinished = os.path.join(parent, f'.unfinished_{name}')
  try:
    _begin(unfinished, settings)
    made = {path: len(lines) for _, path, lines in _shards(pairs, unfinished) if _read(path)}
    if made:
      print(f'going on after {plural(sum(made.values()), "line")} in {unfinished}', file=sys.stderr)
    with Claims() as claims, Progress(total, 'line', initial=sum(made.values()), label='distilling') as bar:

      def progress(lines: int) -> None:
        bar.update(lines)
        claims.renew()

      while not os.path.exists(out):
        is_idle = True
        for pair, path, lines in _shards(pairs, unfinished):
          if path in made:
            continue
          if claims.take(f'{path}.claim'):
            if not _read(path) and not os.path.exists(out):  # else another process has just made it
              _write_shard(path, translate(pair, lines, progress))
              made[path], is_idle = len(lines), False
            claims.release(f'{path}.claim')
          if path not in made and _read(path):
            made[path] = len(lines)
            bar.update(len(lines))
        if sum(made.values()) == total and claims.take(joining := os.path.join(unfinished, 'corpus.claim')):
          if not os.path.exists(out):
            _join(out, pairs, unfinished, {'settings': settings, **about}, claims.renew)
          claims.release(joining)
        elif is_idle:
          time.sleep(_WAIT_SECONDS)
  except FileNotFoundError:
    if not os.path.exists(out):  # else another process has just removed the unfinished folder
      raise
  except OSError as e:
    raise UserError(
      f'cannot write {e.filename or unfinished} ({e.strerror}): make room; the same command goes on from there'
    ) from None
  files.rmtree(unfinished)
  return record(out, settings)


def _begin(folder: str, settings: Mapping[str, Any]) -> None:
  """Makes the unfinished folder, or refuses one of other settings."""
  with files.lock(folder):
    path = os.path.join(folder, RECORD)
    if (before := json_files.read_if_any(path, settings=json_files.OBJECT)) is None:
      files.write(path, json_files.dump({'settings': dict(settings)}))
    elif changed := _changed(before['settings'], settings):
      raise UserError(
        f'{folder} has a part of this corpus, made with {changed}: give the same options to go on, another --out, or '
        'remove that folder'
      )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
  """Settings that differ; '' where all are the same."""
  names = (name for name in {**now, **before} if before.get(name) != now.get(name))
  return '; '.join(f'{name}={shown(before.get(name))}, now {shown(now.get(name))}' for name in names)


def _shards(pairs: Sequence[Pair], folder: str) -> Iterator[tuple[Pair, str, list[str]]]:
  """Yields (pair, path of the translations, source lines) of each shard."""
  for pair in pairs:
    batches = itertools.chain.from_iterable(text.line_batches(path, _SHARD_LINES) for path in pair.source_files)
    for number, batch in enumerate(batches):
      path = os.path.join(folder, f'{pair.name}.{pair.split}.{number:05d}.json')
      yield pair, path, [line.decode('utf-8') for line in batch]


def _read(path: str) -> dict[str, Any] | None:
  """Translations of a shard; None where they are not made, or damaged."""
  with contextlib.suppress(FileNotFoundError, UserError):
    return json_files.read(path, texts=_TEXTS, too_long=json_files.INTEGER)
  return None


def _write_shard(path: str, answers: Answers) -> None:
  """Writes the distinct translations of each line, best first: none of a line of which only a part was read."""
  of_lines = [dict.fromkeys(h.text for h in of_line if not text.is_empty(h.text)) for of_line in answers.hypotheses]
  texts = [[] if i in set(answers.truncated) else list(of_line) for i, of_line in enumerate(of_lines)]
  files.write(path, json_files.dump({'texts': texts, 'too_long': len(answers.truncated)}))


def _join(
  out: str, pairs: Sequence[Pair], unfinished: str, noted: Mapping[str, Any], renew: Callable[[], object]
) -> None:
  """Writes the corpus from all shards and, as they are, the other files of its pairs."""
  counts = collections.Counter(read=0, written=0, too_long=0, untranslated=0)
  with new_folder.writing(out) as folder:
    for pair, path, lines in _shards(pairs, unfinished):
      renew()
      if (shard := _read(path)) is None:
        raise UserError(f'{path} was damaged: the same command makes it again')
      rows = [(line, t) for line, of_line in zip(lines, shard['texts'], strict=True) for t in of_line]
      os.makedirs(os.path.join(folder, pair.name), exist_ok=True)
      for side, language in enumerate((pair.source, pair.target)):
        with open(os.path.join(folder, pair.name, f'{pair.split}.{language}'), 'ab') as f:
          f.writelines(row[side].encode() + b'\n' for row in rows)
      left_out = shard['texts'].count([]) - shard['too_long']
      counts.update(read=len(lines), written=len(rows), too_long=shard['too_long'], untranslated=left_out)
    translated = {path for pair in pairs for path in (*pair.source_files, *pair.target_files)}
    for pair in pairs:
      for _, language, path in packed.named(os.path.dirname(pair.source_files[0])):
        if language in (pair.source, pair.target) and path not in translated:
          copy = os.path.join(folder, pair.name, os.path.basename(path))
          with files.open_to_read(path) as f, open(copy, 'wb') as to:
            shutil.copyfileobj(f, to)
    files.write(os.path.join(folder, RECORD), json_files.dump({**noted, 'lines': counts}, indent=2))
