"""Results that runs have left: configuration, training log, and translations with their references.

Files are read by their paths alone (see run/rundir.py and decoder.py), so results of an earlier version are read too,
and nothing here needs TensorFlow, but for a log directory or a corpus that is remote (core/files.py).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lingvo_moe.analysis import significance
from lingvo_moe.core import files
from lingvo_moe.core import json_files
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import counted
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
    files.check_scheme('a log directory', path, files.SCHEMES)
    path = path.rstrip('/') if files.is_remote(path) else os.path.normpath(files.plain(path))
    kinds = dict(model=json_files.TEXT, values=json_files.OBJECT)
    config = read_json(os.path.join(path, 'config.json'), 'a configuration written by the trainer', **kinds)
    if config is None:
      raise UserError(f'there is no run in {path} (no file {os.path.join(path, "config.json")}): give a log directory')
    averaged = read_json(
      os.path.join(path, 'averaged.json'), of=json_files.TEXT, steps=json_files.list_of(json_files.INTEGER)
    )
    return cls(path, config['model'], config['values'], averaged)

  @property
  def name(self) -> str:
    return os.path.basename(os.path.abspath(self.path))

  def decoded_steps(self, split: str) -> list[int]:
    """Steps whose translations are there, whole."""
    return self.steps_with('scores.json', split)

  def steps_with(self, name: str, split: str) -> list[int]:
    """Steps whose results on a held-out set have a file of that name."""
    folder = os.path.join(self.path, 'decode', split)
    names = files.listdir(folder) if files.isdir(folder) else []
    steps = [int(m[1]) for step in names if (m := re.fullmatch(r'step_(\d+)', step))]
    return sorted(step for step in steps if files.exists(os.path.join(folder, f'step_{step}', name)))

  def summary(self, split: str, step: int) -> dict[str, Any]:
    """scores.json of a step: 'pairs', each with its scores, and 'settings'."""
    path = os.path.join(self.path, 'decode', split, f'step_{step}', 'scores.json')
    kinds = {
      'pairs': json_files.Kind('an object, each value one with numbers sentences, bleu and chrf', _are_scores),
      'hashes': json_files.optional(json_files.by_name(json_files.TEXT)),
      'languages': json_files.optional(json_files.by_name(json_files.list_of(json_files.TEXT))),
      'settings': json_files.optional(json_files.OBJECT),
    }
    found = read_json(path, 'what the decoder writes', 'decode the step again (--overwrite)', **kinds)
    if found is None:
      there = ', '.join(map(str, self.decoded_steps(split))) or 'none'
      raise UserError(
        f'{self.path} has no translations of {split} by step {step}; decoded there: {there}. Make them with '
        f'lingvo-moe decode {self.path} --split={split} --step={step}'
      )
    return found

  @property
  def train_log_path(self) -> str:
    """Path of train.jsonl; of an average, of the one of the run it is of."""
    return os.path.join(self.path, self.averaged['of'] if self.averaged else '', 'train.jsonl')

  def train_log(self, **kinds: json_files.Kind) -> Iterator[dict[str, Any]]:
    """The lines of train.jsonl; of an average, those of the run it is of; none where that is gone.

    Raises:
      UserError: a line is damaged, other than a last one that is cut short.
    """
    return read_json_lines(self.train_log_path, **kinds)

  def configured(self) -> dict[str, Any]:
    """Model, values, contents of the vocabularies, and steps of an average: what another run may have otherwise."""
    found = {'model': self.model, **self.values}
    for side in _VOCABS:
      if side in self.values:
        found[f'{side}, pieces'] = _fingerprint(os.path.join(self.path, str(self.values[side] or '')))
    if self.averaged:
      found['average of steps'] = self.averaged['steps']
    return found


def read_json_lines(path: str, **kinds: json_files.Kind) -> Iterator[dict[str, Any]]:
  """Lines of a file of JSON objects with a step each; none if it is not there. A last line may be cut short.

  Raises:
    UserError: another line is damaged.
  """
  return (found for _, found in json_files.lines(path, **kinds))


@dataclasses.dataclass(frozen=True)
class Translations:
  """One pair's translations by one checkpoint."""

  pair: corpus.Pair
  sources: list[str]
  references: list[str]
  lines: list[str]
  chrf: float  # chrF2 as the decoder scored it

  @functools.cached_property
  def tokenizer(self) -> str:
    return scoring.tokenizer(self.pair.target, self.references)

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


def translations(
  run: Run, split: str, step: int, data_dir: str | None = None, own_corpus: bool = True
) -> dict[str, Translations]:
  """Every pair's translations by a checkpoint, with their sources and references.

  Args:
    run: which has decoded the step.
    split: test, dev or any file prefix.
    step: of the checkpoint.
    data_dir: the corpus; None: the text that the decoder wrote beside its translations, or the run's corpus where an
      earlier version wrote none.
    own_corpus: whether that may be read; a run of someone else may name any folder, and text in it would be shown.
  """
  summary = run.summary(split, step)
  folder = os.path.join(run.path, 'decode', split, f'step_{step}')
  scored, hashes = summary['pairs'], summary.get('hashes') or {}
  beside = None if data_dir else _pairs_beside(folder, split, summary)
  if beside is None and not data_dir and not own_corpus:
    raise UserError(
      f'{run.path} has no sources and references beside its translations, as an earlier version wrote none, and a folder '
      'that its configuration names is not read: give the corpus that was decoded, --data_dir=...'
    )
  data_dir = data_dir or run.values.get('data_dir') or ''
  if beside is None and not files.isdir(files.plain(data_dir)):
    raise UserError(f'references of {run.path} are read from its corpus, and {data_dir!r} is not there: --data_dir=...')
  split_files = [tuple(p) for p in run.values.get('split_files') or ()]
  found = {}
  for pair in beside or corpus.find_pairs(data_dir, ','.join(scored), split, split_files):
    path = os.path.join(folder, pair.name + '.hyp')
    for written in (path, *(pair.source_files + pair.target_files if beside else ())):
      _check_written(written, hashes, run.path)
    lines = text.read_lines([path])
    sources, references = corpus.read_pair(pair)
    count = len(lines)  # the first ones, with --max_sentences
    if len(lines) != scored[pair.name]['sentences'] or len(lines) > len(references):
      raise UserError(
        f'{path} has {counted(len(lines), "line")}, of {scored[pair.name]["sentences"]} that were decoded and {len(references)} '
        f'in {", ".join(pair.target_files)}: decode it again (--overwrite), or give the corpus that was, --data_dir=...'
      )
    for side, given in (('src', sources), ('ref', references)) if not beside else ():
      if hashes.get(f'{pair.name}.{side}') not in (None, _hash_of(given[:count])):
        raise UserError(
          f'{pair.name} was decoded from other text than {data_dir} has: give the corpus that was decoded, '
          '--data_dir=..., or leave it out'
        )
    found[pair.name] = Translations(pair, sources[:count], references[:count], lines, scored[pair.name]['chrf'])
  if lost := sorted(set(scored) - set(found)):
    raise UserError(f'{data_dir} has no {split} of {", ".join(lost)}: give the corpus that was decoded, --data_dir=...')
  return found


def _pairs_beside(folder: str, split: str, summary: Mapping[str, Any]) -> list[corpus.Pair] | None:
  """Pairs whose text is the files that the decoder wrote beside its translations; None where one has none."""
  hashes, languages = summary.get('hashes') or {}, summary.get('languages') or {}
  found = []
  for name in sorted(summary['pairs']):
    sides = [f'{name}.src', f'{name}.ref']
    cut = languages.get(name) or _only_cut(name)
    if '-'.join(cut) != name or len(cut) != 2 or os.path.basename(name) != name or not set(sides) <= set(hashes):
      return None
    found.append(corpus.Pair(name, *cut, split, *((os.path.join(folder, side),) for side in sides)))
  return found


def _only_cut(name: str) -> list[str]:
  """Languages of a pair's name with one hyphen; [] of another, which an earlier version did not write down."""
  return name.split('-') if name.count('-') == 1 else []


def _check_written(path: str, hashes: Mapping[str, str], logdir: str) -> None:
  """Raises UserError for a file of the decoder that is gone, a link out of the run, or not as it was written."""
  if not files.isfile(path) or not files.is_inside(path, logdir):
    raise UserError(f'no such file: {path}; decode the step again (--overwrite)')
  if hashes.get(os.path.basename(path)) not in (None, files.sha256(path)):
    raise UserError(f'{path} is not as the decoder wrote it: decode the step again (--overwrite)')


def _hash_of(lines: Iterable[str]) -> str:
  return hashlib.sha256(''.join(line + '\n' for line in lines).encode()).hexdigest()


def _are_scores(pairs: Any) -> bool:
  numbers = lambda scores: (
    isinstance(scores, dict) and all(json_files.NUMBER.fits(scores.get(name)) for name in ('sentences', 'bleu', 'chrf'))
  )
  return isinstance(pairs, dict) and bool(pairs) and all(map(numbers, pairs.values()))


def _fingerprint(path: str) -> str:
  try:
    return files.sha256(path)[:8]
  except OSError:
    return _NONE


def read_json(
  path: str,
  what: str = 'what was written there',
  way_out: str = 'restore it from a copy, or make it again',
  **kinds: json_files.Kind,
) -> dict[str, Any] | None:
  """The object in a JSON file; None if it is not there; see json_files.read."""
  try:
    return json_files.read(path, what, way_out, **kinds)
  except FileNotFoundError:
    return None
