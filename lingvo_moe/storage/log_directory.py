"""Log directory of a run: names of its files and metrics, and what it holds, read without TensorFlow.

docs/log_directory.md says what each file holds. Results of earlier versions are read too. A remote log directory
(storage/files.py) needs TensorFlow.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.quality import METRICS
from lingvo_moe.storage import files, json_files
from lingvo_moe.storage.json_files import read_if_any

AVERAGED = 'averaged.json'
CACHE = 'cache'
CHECKPOINTS = 'checkpoints'
CONFIG = 'config.json'
CORPUS = 'corpus.json'
DEV_ROUTING = 'dev_routing.json'
ENVIRONMENT = 'environment.jsonl'
FINISHED = 'finished.json'
IMPORTED = 'imported.json'
INIT_FROM = 'init_from.json'
ORIGINAL = 'original'
REPORT = 'report.html'
ROUTING_LOG = 'routing.jsonl'
TRAIN_LOG = 'train.jsonl'
VOCAB = 'vocab'

NOT_FINITE = 'the loss was not finite'  # reason in finished.json why training ended

# Files of a decoded step: summaries, and endings after the name of a pair.
SCORES = 'scores.json'
PERPLEXITY = 'perplexity.json'
HYPOTHESES, SOURCES, REFERENCES, LOG_PROBS, ALIGNMENTS = '.hyp', '.src', '.ref', '.scores', '.align'

_RANKS = 'first second third fourth fifth sixth seventh eighth'.split()  # of a token's choices of experts
_VOCAB_FIELDS = ('source_vocab', 'target_vocab', 'vocab')
_NONE = '(none)'
_TAIL = 1 << 20  # bytes of the training log that are searched for the last dev loss


def results_dir(logdir: str, split: str) -> str:
  """Folder of the decoder's results on a held-out set."""
  return os.path.join(logdir, 'decode', split)


def step_dir(results: str, step: int) -> str:
  """Folder of a decoded step below `results_dir`."""
  return os.path.join(results, f'step_{step}')


def moe_metric(layer: str, statistic: str) -> str:
  """Name in the training log of a statistic of a MoE layer: 'moe/encoder/layer_01/entropy'."""
  return f'moe/{layer}/{statistic}'


def moe_metrics(line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Statistics by name of each MoE layer in a line of the training log."""
  by_layer: dict[str, dict[str, Any]] = {}
  for name, value in line.items():
    if name.startswith('moe/') and name.count('/') > 1:
      layer, _, statistic = name.removeprefix('moe/').rpartition('/')
      by_layer.setdefault(layer, {})[statistic] = value
  return by_layer


def objective_part(name: str) -> str:
  """Name in the training log of a part of the objective: 'objective/balance'."""
  return f'objective/{name}'


def renamed(line: dict[str, Any]) -> dict[str, Any]:
  """Line of the training log in today's names: an earlier version called the objective 'loss', and the loss 'xent'."""
  if 'xent' not in line or 'objective' in line:
    return line
  today = {'xent': 'loss', 'loss': 'objective'}
  return {today.get(name, name): value for name, value in line.items()}


def dropped(rank: int) -> str:
  """Statistic of the choices of a rank, from 0, that found no slot: 'first_dropped'."""
  return f'{_RANKS[rank] if rank < len(_RANKS) else f"choice_{rank + 1}"}_dropped'


def is_dropped(statistic: str) -> bool:
  """Whether `dropped` made the name of a statistic."""
  return statistic.endswith('_dropped')


def dev_loss_by(subset: str) -> str:
  """Name in the training log of the dev losses of parts of the text, such as 'dev_loss_by_pair'."""
  return f'dev_loss_by_{subset}'


def dev_losses(line: Mapping[str, Any]) -> dict[str, Any]:
  """Dev losses by part of the text, in a line of the training log; {} where it has none."""
  return next((v for k, v in line.items() if k.startswith(dev_loss_by('')) and isinstance(v, dict)), {})


def so_far(name: str) -> str:
  """Name in the training log of a total since the run began."""
  return f'{name}_so_far'


def tokens_so_far(line: Mapping[str, Any]) -> float:
  """Tokens of training up to a line of the training log, of source and target; 0: an earlier version wrote none."""
  return sum(number(value) or 0.0 for key, value in line.items() if key.endswith(so_far('_tokens')))


def number(value: Any) -> float | None:
  """A finite number as a float; None for all else."""
  return float(value) if json_files.NUMBER.fits(value) and math.isfinite(value) else None


_NUMBERS = json_files.Kind(
  'a list of numbers', lambda values: isinstance(values, list) and values != [] and None not in map(number, values)
)
_SCORES_OF_PAIR = json_files.Kind(
  'one with numbers sentences, bleu and chrf, and no other values of metrics than numbers',
  lambda scores: (
    isinstance(scores, dict)
    and all(json_files.NUMBER.fits(scores.get(name)) for name in ('sentences', 'bleu', 'chrf'))
    and all(json_files.NUMBER.fits(scores.get(name, 0)) for name in METRICS)
  ),
)
_LOADS = json_files.by_name(_NUMBERS)
_LOADS_BY_SUBSET = json_files.by_name(json_files.list_of(_NUMBERS))
_SUMMARY = {
  'pairs': json_files.by_name(_SCORES_OF_PAIR, empty=False),
  'hashes': json_files.optional(json_files.by_name(json_files.TEXT)),
  'languages': json_files.optional(json_files.by_name(json_files.list_of(json_files.TEXT))),
  'settings': json_files.optional(json_files.OBJECT),
}


class Loads(NamedTuple):
  """Choices with a slot, by expert, summed over some steps."""

  step: int  # the last of them
  steps: int  # how many
  choices: Mapping[str, list[float]]  # by layer


@dataclasses.dataclass(frozen=True)
class LogDirectory:
  """Run that a log directory holds."""

  path: str
  model: str  # the registered name
  values: Mapping[str, Any]  # the resolved configuration, as JSON has it
  averaged: Mapping[str, Any] | None = None  # of an average of checkpoints: its steps, and the path of their run

  @classmethod
  def read(cls, path: str) -> Self:
    """The run in a log directory; UserError if there is none."""
    files.check_scheme('a log directory', path, files.SCHEMES)
    path = path.rstrip('/') if files.is_remote(path) else os.path.normpath(files.plain(path))
    kinds = dict(model=json_files.TEXT, values=json_files.OBJECT)
    config_file = os.path.join(path, CONFIG)
    config = read_if_any(config_file, 'a configuration written by the trainer', **kinds)
    if config is None:
      raise UserError(f'there is no run in {path} (no file {config_file}): give a log directory')
    kinds = dict(of=json_files.TEXT, steps=json_files.list_of(json_files.INTEGER))
    return cls(path, config['model'], config['values'], read_if_any(os.path.join(path, AVERAGED), **kinds))

  @property
  def name(self) -> str:
    return os.path.basename(os.path.abspath(self.path))

  def results_file(self, split: str, step: int, name: str) -> str:
    """Path of a file of a decoded step."""
    return os.path.join(step_dir(results_dir(self.path, split), step), name)

  def decoded_steps(self, split: str, summary: str = SCORES) -> list[int]:
    """Steps whose results on a held-out set are complete: `summary` is written last."""
    folder = results_dir(self.path, split)
    names = files.listdir(folder) if files.isdir(folder) else []
    steps = [int(m[1]) for name in names if (m := re.fullmatch(r'step_(\d+)', name))]
    return sorted(step for step in steps if files.exists(self.results_file(split, step, summary)))

  def summary(self, split: str, step: int) -> dict[str, Any]:
    """scores.json of a step: 'pairs', each with its scores, and 'settings'."""
    path, way_out = self.results_file(split, step, SCORES), 'decode the step again (--overwrite)'
    summary = read_if_any(path, 'what the decoder writes', way_out, **_SUMMARY)
    if summary is None:
      decoded = ', '.join(map(str, self.decoded_steps(split))) or 'none'
      raise UserError(
        f'{self.path} has no translations of {split} by step {step}; decoded there: {decoded}. Make them with '
        f'lingvo-moe decode {self.path} --split={split} --step={step}'
      )
    return summary

  def perplexities(self, split: str) -> tuple[int, dict[str, Any]] | None:
    """(step, summary) of the newest evaluation of a language model; None where there is none."""
    step = max(self.decoded_steps(split, PERPLEXITY), default=None)
    summary = None if step is None else read_if_any(self.results_file(split, step, PERPLEXITY))
    return (step, summary) if summary and isinstance(summary.get('files'), dict) else None

  def of_training(self, name: str) -> str:
    """Path of a file of the log directory in which the weights were trained: of an average, that of its run."""
    return os.path.join(self.path, self.averaged['of'] if self.averaged else '', name)

  def train_log(self, **kinds: json_files.Kind) -> Iterator[dict[str, Any]]:
    """Lines of the log of training, `renamed`, see json_files.lines; none where that is gone."""
    return map(renamed, _read_lines(self.of_training(TRAIN_LOG), **kinds))

  @functools.cached_property
  def loads(self) -> list[Loads]:
    """Loads of experts over time; none of runs of an earlier version."""
    lines = [line for line in _read_lines(os.path.join(self.path, ROUTING_LOG)) if _LOADS.fits(line.get('choices'))]
    return [Loads(line['step'], int(number(line.get('steps')) or 1), line['choices']) for line in lines]

  @functools.cached_property
  def dev_routing(self) -> dict[str, Any] | None:
    """Choices of experts by part of the dev text: 'step', 'subsets' and, by layer, 'choices'; None: not recorded."""
    routing = read_if_any(os.path.join(self.path, DEV_ROUTING)) or {}
    choices, subsets = routing.get('choices'), routing.get('subsets')
    if not isinstance(subsets, list) or not _LOADS_BY_SUBSET.fits(choices):
      return None
    return routing if all(len(rows) == len(subsets) for rows in choices.values()) else None

  @functools.cached_property
  def environments(self) -> list[dict[str, Any]]:
    """Environments of training: a line for each start of the trainer with something new."""
    return list(_read_lines(self.of_training(ENVIRONMENT)))

  @functools.cached_property
  def finished(self) -> dict[str, Any]:
    """Step and reason of the end of training; {} while training continues."""
    return read_if_any(os.path.join(self.path, FINISHED)) or {}

  def configured(self) -> dict[str, Any]:
    """Model, values, contents of the vocabularies, and steps of an average, to compare with those of another run."""
    values = {'model': self.model, **self.values}
    for name in _VOCAB_FIELDS:
      if name in self.values:
        values[f'{name}, pieces'] = _fingerprint(os.path.join(self.path, str(self.values[name] or '')))
    return values | ({'average of steps': self.averaged['steps']} if self.averaged else {})


def dev_loss_parts(logdir: str, subset: str) -> list[str]:
  """Names of the parts of the dev text by which a run last logged its dev loss; none where it has not."""
  try:
    with files.open_to_read(os.path.join(logdir, TRAIN_LOG)) as f:
      f.seek(max(0, f.seek(0, 2) - _TAIL))
      lines = f.read().decode('utf-8', errors='replace').splitlines()
  except OSError:
    return []
  name = dev_loss_by(subset)
  for line in reversed(lines):
    if f'"{name}"' in line:
      with contextlib.suppress(ValueError):
        return sorted(json_files.parse(line, **{name: json_files.OBJECT})[name])
  return []


def _read_lines(path: str, **kinds: json_files.Kind) -> Iterator[dict[str, Any]]:
  return (line for _, line in json_files.lines(path, **kinds))


def _fingerprint(path: str) -> str:
  try:
    return files.sha256(path)[:8]
  except OSError:
    return _NONE
