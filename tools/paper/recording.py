"""Records of what a run reached, as JSON lines to be committed: checkpoints may be lost, and logs are large.

A line is of one of two kinds:

eval   an evaluation on dev: the mean loss, and at steps that are multiples of keep_every (of every one, where that is
       0) the loss by pair
test   a pair that the decoder has translated: BLEU, chrF2 and chrF++, and the pair's dev loss where that step has one

Both have the run, model, direction, step, epochs, seconds of training, source and target tokens of training so far, and
the commit that trained. null: not known.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lingvo_moe.addons.analysis import significance, translations
from lingvo_moe.core import progress
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel
from lingvo_moe.storage import files, json_files, log_directory
from lingvo_moe.storage.log_directory import LogDirectory

Record = dict[str, Any]
_SCORE_DIGITS = 4
_LOSS_DIGITS = 5
_SO_FAR = {'seconds': 1, 'source_tokens': 0, 'target_tokens': 0}  # and their decimals

_AMOUNT = json_files.optional(
  json_files.Kind('a positive number', lambda x: json_files.NUMBER.fits(x) and 0 < x < math.inf)
)
_KINDS = {
  'run': json_files.TEXT,
  'step': json_files.INTEGER,
  'seconds': json_files.optional(json_files.NUMBER),
  'target_tokens': _AMOUNT,
}
_KINDS_OF = {
  'eval': {**_KINDS, 'dev_loss': json_files.NUMBER},
  'test': {
    **_KINDS,
    **dict.fromkeys(('split', 'pair'), json_files.TEXT),
    'chrF2': json_files.NUMBER,
    **dict.fromkeys(('chrF++', 'BLEU', 'dev_loss'), json_files.optional(json_files.NUMBER)),
  },
}
_KIND = json_files.Kind(f'one of {", ".join(_KINDS_OF)}', lambda x: isinstance(x, str) and x in _KINDS_OF)

_LOGGED = {
  **{
    name: json_files.optional(json_files.NUMBER)
    for name in ('dev_loss', *(log_directory.so_far(name) for name in _SO_FAR))
  },
  'dev_loss_by_pair': json_files.optional(json_files.by_name(json_files.optional(json_files.NUMBER))),
}


class Log(NamedTuple):
  """What train.jsonl says, by step."""

  so_far: dict[int, dict[str, float]]
  dev_loss: dict[int, float]
  by_pair: dict[int, dict[str, float]]

  @classmethod
  def of(cls, run: LogDirectory) -> Log:
    log = cls({}, {}, {})
    for line in run.train_log(**_LOGGED):
      step = line['step']
      # The first line of a step: what evaluating it took is not yet in its seconds.
      log.so_far.setdefault(
        step, {name: line[log_directory.so_far(name)] for name in _SO_FAR if log_directory.so_far(name) in line}
      )
      if 'dev_loss' in line:
        log.dev_loss[step] = line['dev_loss']
        log.by_pair[step] = line.get('dev_loss_by_pair') or {}
    return log


def read(path: str) -> list[Record]:
  """The records of a file; none if it is not there."""
  try:
    with open(path, 'rb') as f:
      return [_parsed(path, number, line) for number, line in enumerate(f, start=1)]
  except FileNotFoundError:
    return []
  except OSError as e:
    raise UserError(
      f'results are lines of a file; {path} cannot be read ({e.strerror}): give the path of one'
    ) from None


def _parsed(path: str, number: int, line: bytes) -> Record:
  try:
    record = json_files.parse(line, kind=_KIND)
    json_files.check(record, **_KINDS_OF[record['kind']])
    return record
  except ValueError as e:
    raise UserError(
      f'each line of {path} is a record of tools/record_results.py; line {number} is not ({e}; saw {line[:40]!r}): '
      'mend or remove it'
    ) from None


def append(path: str, records: Iterable[Record]) -> tuple[list[Record], int]:
  """Adds records that are not there; the file is written whole or not at all, by one process at a time.

  Returns:
    The records that were added, and how many were there.
  """
  os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
  with files.replacing(path) as f:
    known = read(path)
    old_keys = set(map(_key, known))
    added = {_key(record): record for record in records if _key(record) not in old_keys}
    f.writelines(json.dumps(record, ensure_ascii=False) + '\n' for record in (*known, *added.values()))
  return list(added.values()), len(known)


def new_records(
  run: LogDirectory,
  known: Sequence[Record],
  splits: Sequence[str] = ('test',),
  data_dir: str | None = None,
  commit: str | None = None,
  steps_per_epoch: float | None = None,
) -> list[Record]:
  """What a run has reached beyond the records that there are.

  Args:
    run: the run.
    known: records, of this run or of others.
    splits: decoded sets.
    data_dir: the corpus with the references; None: those beside the translations.
    commit: of the checkout that trained.
    steps_per_epoch: how many updates see the corpus once.

  Raises:
    UserError: a pair is recorded with another score than it has now, or an evaluation with another loss; references are
      missing or others.
  """
  recorded_by_key = {_key(record): record for record in known}
  log = Log.of(run)

  def common(kind, direction, step):
    so_far = log.so_far.get(step, {})
    return {
      'kind': kind,
      'run': run.name,
      'model': run.model,
      'direction': direction,
      'step': step,
      'epochs': round(step / steps_per_epoch, 4) if steps_per_epoch else None,
      **{name: _rounded(so_far.get(name), digits) for name, digits in _SO_FAR.items()},
      'commit': commit,
    }

  new = []
  for step, loss in log.dev_loss.items() if not run.averaged else ():
    by_pair = log.by_pair[step]
    record = {**common('eval', _direction(by_pair), step), 'dev_loss': _rounded(loss, _LOSS_DIGITS)}
    if by_pair and step % (run.values.get('keep_every') or 1) == 0:
      record['dev_loss_by_pair'] = {pair: _rounded(value, _LOSS_DIGITS) for pair, value in by_pair.items()}
    recorded = recorded_by_key.get(_key(record))
    _check_same(recorded, 'dev_loss', loss, _LOSS_DIGITS)
    if not recorded:
      new.append(record)
  for split in splits:
    for step in run.decoded_steps(split):
      scored = run.summary(split, step)['pairs']
      keys = {pair: ('test', run.name, step, split, pair) for pair in scored}
      for pair, key in keys.items():
        _check_same(recorded_by_key.get(key), 'chrF2', scored[pair]['chrf'], _SCORE_DIGITS)
      missing = [pair for pair, key in keys.items() if key not in recorded_by_key]
      if not missing:
        continue
      translated = translations.read(run, split, step, data_dir)
      for pair in progress.over(missing, 'pair'):
        t = translated[pair]
        scores = significance.corpus_scores(t.counted())
        loss = None if run.averaged else log.by_pair.get(step, {}).get(pair)
        new.append(
          {
            **common('test', t.direction, step),
            'split': split,
            'pair': pair,
            'lines': len(t.lines),
            'dev_loss': _rounded(loss, _LOSS_DIGITS),
            **{metric: round(score, _SCORE_DIGITS) for metric, score in scores.items()},
            'tokenizer': t.tokenizer,
            **({'average_of': run.averaged['steps']} if run.averaged else {}),
          }
        )
  return new


def _key(record: Record) -> tuple:
  return tuple(record.get(name) for name in ('kind', 'run', 'step', 'split', 'pair') if name in record)


def _check_same(recorded: Record | None, name: str, value: float, digits: int) -> None:
  if recorded and abs(recorded[name] - value) > 2 * 10.0**-digits:
    of = f', {recorded["pair"]}' if 'pair' in recorded else ''
    raise UserError(
      f'{recorded["run"]} step {recorded["step"]}{of}: {name} {recorded[name]} is recorded, but the run has '
      f'{value:.{digits}f}; results do not change in silence: remove the lines that no longer hold, or rename the log '
      'directory of another run of the same name'
    )


def _direction(pairs: Mapping[str, float]) -> str | None:
  """The direction that all pairs have."""
  directions = {translations.direction(*languages) for languages in parallel.languages_of(pairs)}
  return directions.pop() if len(directions) == 1 else None


def _rounded(value: float | None, digits: int) -> float | int | None:
  if value is None:
    return None
  return round(value, digits) if digits else round(value)
