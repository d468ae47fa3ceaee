"""Reading of what runs have left, for a report: the log, routing, scores, translations, and where it was computed."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

from lingvo_moe.addons.analysis import translations
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, text
from lingvo_moe.storage import files, log_directory
from lingvo_moe.storage.log_directory import LogDirectory, number, tokens_so_far


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """A run as a report shows it."""

  run: LogDirectory
  name: str  # heads its columns
  split: str  # held-out set whose results are shown
  place: int = 0  # of the run among those of the report
  alone: bool = True  # whether it is the only one, so that nothing need bear its name
  data_dir: str | None = None  # the corpus, if it was given: a report reads no folder that a run names

  def label(self, quantity: str = '', sole: bool = False) -> str:
    """Name of a quantity of the run: the run's is left out if it is alone, else that of a sole quantity."""
    if self.alone:
      return quantity
    return self.name if sole else f'{self.name}: {quantity}'

  @property
  def averaged(self) -> str:
    """Source of an average, '' for a trained run. The losses and loads of that run are not its average's."""
    if not self.run.averaged:
      return ''
    steps = self.run.averaged['steps']
    of = os.path.basename(os.path.normpath(self.run.averaged['of']))
    return f'{"step" if len(steps) == 1 else "steps"} {", ".join(map(str, steps))} of {of}'

  @functools.cached_property
  def log(self) -> list[dict[str, Any]]:
    """Lines of train.jsonl, none of an average; with `trained`, the seconds of training, where the log has the time."""
    lines = [] if self.averaged else list(self.run.train_log())
    return [{**line, 'trained': seconds} for line, seconds in zip(lines, _training_time(lines), strict=True)]

  @property
  def steps(self) -> list[dict[str, Any]]:
    return [line for line in self.log if 'loss' in line]

  @property
  def evaluations(self) -> list[dict[str, Any]]:
    """Lines of the dev loss on the latest dev text, or of an earlier version, which did not note the text."""
    return [line for line in self.log if 'dev_loss' in line and line.get('dev_text') in (None, self.dev_text)]

  @property
  def best(self) -> tuple[float, Any] | None:
    """Lowest dev loss on the latest dev text, and its step."""
    again = [line for line in self.log if 'dev_loss_of_best' in line and line.get('dev_text') == self.dev_text]
    losses = [(line['dev_loss_of_best'], line.get('best_step')) for line in again]
    # Where the best was measured again, a line of an earlier version may be of other text.
    losses += [(line['dev_loss'], line['step']) for line in self.evaluations if line.get('dev_text') or not again]
    finite = [(y, step) for loss, step in losses if (y := number(loss)) is not None]
    return min(finite, key=lambda loss: loss[0], default=None)

  @property
  def dev_text(self) -> Any:
    """Hash of the dev text of the latest dev loss; None: an earlier version did not note it."""
    return next((line['dev_text'] for line in reversed(self.log) if 'dev_text' in line), None)

  @functools.cached_property
  def layers(self) -> dict[str, list[str]]:
    """By MoE layer, its statistics that train.jsonl has, in the order of the layers."""
    logged = {layer: list(names) for layer, names in log_directory.moe_metrics(next(iter(self.steps), {})).items()}
    loaded = self.run.loads[-1].choices if self.run.loads else ()
    return logged | {layer: logged.get(layer, []) for layer in loaded}

  @functools.cached_property
  def decoded_step(self) -> int | None:
    """The newest step whose translations are there."""
    return max(self.run.decoded_steps(self.split), default=None)

  @functools.cached_property
  def _summary(self) -> dict[str, Any]:
    return {} if self.decoded_step is None else self.run.summary(self.split, self.decoded_step)

  @property
  def scores(self) -> dict[str, dict[str, Any]]:
    """BLEU, chrF and so on by pair, of the newest decoded step; none where nothing was decoded."""
    return self._summary.get('pairs') or {}

  @functools.cached_property
  def texts(self) -> dict[str, tuple[str, str]]:
    """Hashes of sources and references by pair; of an earlier version none."""
    hashes, sides = self._summary.get('hashes') or {}, (log_directory.SOURCES, log_directory.REFERENCES)
    both = {name: tuple(hashes.get(name + side) for side in sides) for name in self.scores}
    return {name: texts for name, texts in both.items() if None not in texts}

  @functools.cached_property
  def translations(self) -> tuple[dict[str, translations.Translations], str]:
    """(translations with source and reference by pair; why there are none)."""
    if self.decoded_step is None:
      return {}, f'{self.name} has not decoded {self.split}.'
    try:
      return translations.read(self.run, self.split, self.decoded_step, self.data_dir, own_corpus=False), ''
    except (UserError, OSError) as e:
      return {}, f'{self.name}: {e}.'

  @functools.cached_property
  def sizes(self) -> tuple[dict[str, int], str]:
    """(size of each pair's training text, unit of it); ({}, '') where it is not known."""
    for environment in reversed(self.run.environments):
      examples = environment.get('examples')
      if isinstance(examples, dict) and examples:
        return {name: int(number(count) or 0) for name, count in examples.items()}, 'examples'
    if not self.data_dir:
      return {}, ''
    values = self.run.values
    try:
      prefixes = [tuple(pair) for pair in values.get('split_files') or ()]
      pairs = parallel.find_pairs(self.data_dir, str(values.get('pairs') or ''), 'train', prefixes)
      size = lambda pair: sum(map(files.size, (*pair.source_files, *pair.target_files)))
      return {pair.name: size(pair) for pair in pairs}, 'bytes'
    except (UserError, OSError, TypeError, ValueError):
      return {}, ''


def read(paths: Sequence[str], split: str, data_dir: str | None = None) -> list[RunRecord]:
  """The runs in log directories, with names that tell them apart; UserError where there is none."""
  runs = [LogDirectory.read(path) for path in paths]
  differ = len({run.name for run in runs}) == len(runs)
  return [
    RunRecord(run, run.name if differ else run.path, split, place, len(runs) == 1, data_dir)
    for place, run in enumerate(runs)
  ]


def differ_in_text(records: Sequence[RunRecord], pair: str) -> bool:
  """Whether runs have translated other lines of a pair, or had other references."""
  return len({text for record in records if (text := record.texts.get(pair)) is not None}) > 1


def hypotheses(record: RunRecord, pair: str) -> list[str]:
  """Translations of a pair, also where sources and references are not at hand; none if the file is lost."""
  if pair in record.translations[0]:
    return record.translations[0][pair].lines
  path = record.run.results_file(record.split, record.decoded_step, pair + log_directory.HYPOTHESES)
  try:
    return list(text.lines([path])) if files.is_inside(path, record.run.path) else []
  except UserError:
    return []


def _training_time(log: Sequence[dict[str, Any]]) -> list[float | None]:
  """Seconds of training up to each line, without evaluations: tokens over the pace, which does not count these either.

  The pace is that of the line or of the next one with a pace; None up to the first tokens that are known.
  """
  paces, pace = [], None
  for line in reversed(log):
    pace = number(line.get('tokens_per_second')) or pace
    paces.append(pace)
  seconds, tokens, trained = None, 0.0, []
  for line, pace in zip(log, reversed(paces), strict=True):
    if pace and (now := tokens_so_far(line)) > tokens:
      seconds, tokens = (seconds or 0.0) + (now - tokens) / pace, now
    trained.append(seconds)
  return trained
