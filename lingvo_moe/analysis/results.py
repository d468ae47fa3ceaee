"""Results that runs have left: configuration, training log, and translations with their references.

Files are read by their paths alone (see run/rundir.py and decoder.py), so results of an earlier version are read too,
and nothing here needs TensorFlow.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lingvo_moe.analysis import significance
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import text
from lingvo_moe.tasks.mt import corpus
from lingvo_moe.tasks.mt import scoring

_ENGLISH = ('en', 'eng')
_VOCABS = ('source_vocab', 'target_vocab', 'vocab')  # fields that name files
_NONE = '(none)'


@dataclasses.dataclass(frozen=True)
class Run:
  """A log directory.

  Attributes:
    path: of it.
    model: the registered name.
    values: the resolved configuration, as JSON has it.
    averaged: of an average of checkpoints, its steps and the path of the run they are of; else None.
  """

  path: str
  model: str
  values: Mapping[str, Any]
  averaged: Mapping[str, Any] | None = None

  @classmethod
  def read(cls, path: str) -> Run:
    """The run in a log directory; UserError if there is none."""
    path = os.path.normpath(path)
    config = read_json(os.path.join(path, 'config.json'))
    if config is None:
      raise UserError(f'there is no run in {path} (no file {os.path.join(path, "config.json")}): give a log directory')
    try:
      model, values = config['model'], dict(config['values'])
    except (KeyError, TypeError, ValueError):
      raise UserError(f'{path}/config.json is not a configuration written by the trainer: restore it') from None
    return cls(path, model, values, read_json(os.path.join(path, 'averaged.json')))

  @property
  def name(self) -> str:
    return os.path.basename(os.path.abspath(self.path))

  def decoded_steps(self, split: str) -> list[int]:
    """Steps whose translations are there, whole."""
    found = glob.glob(os.path.join(glob.escape(self.path), 'decode', split, 'step_*', 'scores.json'))
    return sorted(int(m[1]) for path in found if (m := re.search(r'step_(\d+)$', os.path.dirname(path))))

  def summary(self, split: str, step: int) -> dict[str, Any]:
    """scores.json of a step: 'pairs', each with its scores, and 'settings'."""
    path = os.path.join(self.path, 'decode', split, f'step_{step}', 'scores.json')
    found = read_json(path)
    if found is None:
      there = ', '.join(map(str, self.decoded_steps(split))) or 'none'
      raise UserError(
        f'{self.path} has no translations of {split} by step {step}; decoded there: {there}. Make them with '
        f'python -m lingvo_moe.decoder --logdir={self.path} --split={split} --step={step}'
      )
    pairs = found.get('pairs') if isinstance(found, dict) else None
    scored = lambda scores: isinstance(scores, dict) and {'sentences', 'chrf'} <= scores.keys()
    if not isinstance(pairs, dict) or not pairs or not all(map(scored, pairs.values())):
      raise UserError(f'{path} is not what the decoder writes: decode the step again (--overwrite)')
    return found

  def train_log(self) -> Iterator[dict[str, Any]]:
    """The lines of train.jsonl; of an average, those of the run it is of; none where that is gone.

    Raises:
      UserError: a line is damaged, other than a last one that is cut short.
    """
    logdir = os.path.join(self.path, self.averaged['of']) if self.averaged else self.path
    return read_json_lines(os.path.join(logdir, 'train.jsonl'))

  def configured(self) -> dict[str, Any]:
    """Model, values, contents of the vocabularies, and steps of an average: what another run may have otherwise."""
    found = {'model': self.model, **self.values}
    for side in _VOCABS:
      if side in self.values:
        found[f'{side}, pieces'] = _fingerprint(os.path.join(self.path, str(self.values[side] or '')))
    if self.averaged:
      found['average of steps'] = self.averaged['steps']
    return found


def read_json_lines(path: str) -> Iterator[dict[str, Any]]:
  """Lines of a file of JSON objects with a step each; none if it is not there. A last line may be cut short.

  Raises:
    UserError: another line is damaged.
  """
  try:
    file = open(path, encoding='utf-8', errors='replace')
  except FileNotFoundError:
    return
  with file:
    for number, line in enumerate(file, start=1):
      try:
        found = json.loads(line)
      except (ValueError, RecursionError):
        found = None
      if isinstance(found, dict) and isinstance(found.get('step'), int):
        yield found
      elif line.endswith('\n') or next(file, None) is not None:
        raise UserError(
          f'each line of {path} is a JSON object with its step; line {number} is not ({line.strip()[:40]!r}): restore '
          'the file from a copy, or remove the line'
        )


@dataclasses.dataclass(frozen=True)
class Translations:
  """One pair's translations by one checkpoint."""

  pair: corpus.Pair
  sources: list[str]
  references: list[str]
  lines: list[str]
  chrf: float  # chrF2 as the decoder scored it

  @property
  def tokenizer(self) -> str:
    return scoring.bleu_tokenizer(self.pair.target)

  @property
  def direction(self) -> str:
    return direction(self.pair.source, self.pair.target)

  def counted(self, counter: significance.LineCounts | None = None) -> np.ndarray:
    """N-gram counts of every line, by `counter`, which has the references; UserError where those were not decoded."""
    counts = (counter or significance.LineCounts(self.references, self.tokenizer))(self.lines)
    chrf = significance.corpus_scores(counts)['chrF2']
    if abs(chrf - self.chrf) > 1e-6:
      raise UserError(
        f'{self.pair.name} was scored chrF2 {self.chrf:.3f} when it was decoded, and {chrf:.3f} against '
        f'{", ".join(self.pair.target_files)}: give the corpus that was decoded, --data_dir=...'
      )
    return counts


def direction(source: str, target: str) -> str:
  """'from_english', 'into_english' or 'other'."""
  if target.split('-')[0] in _ENGLISH:
    return 'into_english'
  return 'from_english' if source.split('-')[0] in _ENGLISH else 'other'


def translations(run: Run, split: str, step: int, data_dir: str | None = None) -> dict[str, Translations]:
  """Every pair's translations by a checkpoint, with their references.

  Args:
    run: which has decoded the step.
    split: test, dev or any file prefix.
    step: of the checkpoint.
    data_dir: the corpus; None: the run's.
  """
  scored = run.summary(split, step)['pairs']
  data_dir = data_dir or run.values.get('data_dir', '')
  if not os.path.isdir(data_dir):
    raise UserError(f'references of {run.path} are read from its corpus, and {data_dir!r} is not there: --data_dir=...')
  split_files = [tuple(p) for p in run.values.get('split_files', ())]
  found = {}
  for pair in corpus.find_pairs(data_dir, ','.join(scored), split, split_files):
    path = os.path.join(run.path, 'decode', split, f'step_{step}', pair.name + '.hyp')
    lines = text.read_lines([path])
    sources, references = corpus.read_pair(pair)
    if len(lines) != scored[pair.name]['sentences'] or len(lines) > len(references):
      raise UserError(
        f'{path} has {len(lines)} lines, of {scored[pair.name]["sentences"]} that were decoded and {len(references)} '
        f'in {", ".join(pair.target_files)}: decode it again (--overwrite), or give the corpus that was, --data_dir=...'
      )
    count = len(lines)  # the first ones, with --max_sentences
    found[pair.name] = Translations(pair, sources[:count], references[:count], lines, scored[pair.name]['chrf'])
  if lost := sorted(set(scored) - set(found)):
    raise UserError(f'{data_dir} has no {split} of {", ".join(lost)}: give the corpus that was decoded, --data_dir=...')
  return found


def _fingerprint(path: str) -> str:
  try:
    with open(path, 'rb') as f:
      return hashlib.sha256(f.read()).hexdigest()[:8]
  except OSError:
    return _NONE


def read_json(path: str) -> Any:
  """What is in a JSON file; None if it is not there."""
  try:
    with open(path, encoding='utf-8') as f:
      return json.load(f)
  except FileNotFoundError:
    return None
  except ValueError as e:
    raise UserError(f'{path} is not JSON ({e}): restore it from a copy, or make it again') from None
