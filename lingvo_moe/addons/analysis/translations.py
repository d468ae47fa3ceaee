"""Translations that runs have decoded, with their sources and references; read without TensorFlow."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from lingvo_moe.addons.analysis import significance
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.corpora import parallel, text
from lingvo_moe.storage import files, log_directory
from lingvo_moe.storage.log_directory import LogDirectory
from lingvo_moe.tasks.mt import scoring

_ENGLISH = ('en', 'eng')


@dataclasses.dataclass(frozen=True)
class Translations:
  """One pair's translations by one checkpoint."""

  pair: parallel.Pair
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


def read(
  run: LogDirectory, split: str, step: int, data_dir: str | None = None, own_corpus: bool = True
) -> dict[str, Translations]:
  """Every pair's translations by the checkpoint of a step that a run has decoded, with sources and references.

  Args:
    data_dir: the corpus; None: the text that the decoder wrote with its translations, or the run's corpus where an
      earlier version wrote none.
    own_corpus: whether that may be read; a run of someone else may name any folder, and text in it would be shown.
  """
  summary = run.summary(split, step)
  scored, hashes = summary['pairs'], summary.get('hashes') or {}
  written = None if data_dir else _written_pairs(run, split, step, summary)
  if written is None and not data_dir and not own_corpus:
    raise UserError(
      f'{run.path} has no sources and references beside its translations, as an earlier version wrote none, and a '
      'folder that its configuration names is not read: give the corpus that was decoded, --data_dir=...'
    )
  data_dir = data_dir or run.values.get('data_dir') or ''
  if written is None and not files.isdir(files.plain(data_dir)):
    raise UserError(f'references of {run.path} are read from its corpus, and {data_dir!r} is not there: --data_dir=...')
  by_pair = {}
  split_files = [tuple(p) for p in run.values.get('split_files') or ()]
  for pair in written or parallel.find_pairs(data_dir, ','.join(scored), split, split_files):
    path = run.results_file(split, step, pair.name + log_directory.HYPOTHESES)
    for decoded in (path, *(pair.source_files + pair.target_files if written else ())):
      _check_unchanged(decoded, hashes, run.path)
    lines = list(text.lines([path]))
    sources, references = parallel.read_pair(pair)
    if len(lines) != scored[pair.name]['sentences'] or len(lines) > len(references):
      raise UserError(
        f'{path} has {plural(len(lines), "line")}, of {scored[pair.name]["sentences"]} that were decoded and '
        f'{len(references)} in {", ".join(pair.target_files)}: decode it again (--overwrite), or give the corpus that '
        'was, --data_dir=...'
      )
    sources, references = sources[: len(lines)], references[: len(lines)]  # the first ones, with --max_sentences
    for side, given in (log_directory.SOURCES, sources), (log_directory.REFERENCES, references):
      expected = None if written else hashes.get(pair.name + side)
      if expected not in (None, hashlib.sha256(''.join(line + '\n' for line in given).encode()).hexdigest()):
        raise UserError(
          f'{pair.name} was decoded from other text than {data_dir} has: give the corpus that was decoded, '
          '--data_dir=..., or leave it out'
        )
    by_pair[pair.name] = Translations(pair, sources, references, lines, scored[pair.name]['chrf'])
  if lost := sorted(set(scored) - set(by_pair)):
    raise UserError(f'{data_dir} has no {split} of {", ".join(lost)}: give the corpus that was decoded, --data_dir=...')
  return by_pair


def _written_pairs(run: LogDirectory, split: str, step: int, summary: Mapping[str, Any]) -> list[parallel.Pair] | None:
  """Pairs whose text the decoder wrote with its translations; None where it did not of one."""
  hashes, languages = summary.get('hashes') or {}, summary.get('languages') or {}
  pairs = []
  for name in sorted(summary['pairs']):
    sides = [name + log_directory.SOURCES, name + log_directory.REFERENCES]
    cut = languages.get(name) or name.split('-')  # an earlier version did not write languages down
    if len(cut) != 2 or '-'.join(cut) != name or os.path.basename(name) != name or not set(sides) <= set(hashes):
      return None
    pairs.append(parallel.Pair(name, *cut, split, *((run.results_file(split, step, side),) for side in sides)))
  return pairs


def _check_unchanged(path: str, hashes: Mapping[str, str], logdir: str) -> None:
  """Raises UserError for a file of the decoder that is gone, a link out of the run, or not as it was written."""
  if not files.isfile(path) or not files.is_inside(path, logdir):
    raise UserError(f'no such file: {path}; decode the step again (--overwrite)')
  if hashes.get(os.path.basename(path)) not in (None, files.sha256(path)):
    raise UserError(f'{path} is not as the decoder wrote it: decode the step again (--overwrite)')
