"""Held-out sets, what the decoder does to all of them with one checkpoint, and the files that leaves."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm

from lingvo_moe.core.errors import UserError
from lingvo_moe.run.checkpoint import Checkpoints
from lingvo_moe.run.event_file import EventFile
from lingvo_moe.tasks.mt import corpus
from lingvo_moe.tasks.mt import scoring
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.mt.decoding import Translator
from lingvo_moe.tasks.mt.vocab import Vocab


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """One pair's held-out lines."""

  name: str
  target: str
  tag: str | None  # the target language, if the model's sources are tagged
  sources: list[str]
  targets: list[str]


def read(config: MtConfig, split: str, max_sentences: int, source_vocab: Vocab) -> list[HeldOut]:
  """Every pair that has the split, or its first lines.

  Args:
    config: its data_dir, pairs, split_files and tag_target are used.
    split: test, dev, or any file prefix.
    max_sentences: of each pair; 0: all.
    source_vocab: must know the tags.
  """
  sets = []
  for pair in corpus.find_pairs(config.data_dir, config.pairs, split, config.split_files):
    if config.tag_target:
      source_vocab.tag_id(pair.target)  # refuses a language the model does not know, before any work
    sources, targets = corpus.read_pair(pair)
    count = max_sentences or len(sources)
    sets.append(
      HeldOut(pair.name, pair.target, pair.target if config.tag_target else None, sources[:count], targets[:count])
    )
  return sets


@dataclasses.dataclass(frozen=True)
class Results:
  """The folder step_<N> of each step that was decoded.

  The summary is written last and holds the settings: one that is there says that the files beside it are whole, and
  what they are of.

  Attributes:
    root: where the folders are.
    summary: name of the JSON file.
    suffix: of the files with a line for each line of a pair.
    settings: what the files depend on, the weights aside.
    checkpoints: of the run; a step's files also depend on its checkpoint.
    overwrite: whether files made with other settings may be replaced.
  """

  root: str
  summary: str
  suffix: str
  settings: dict[str, Any]
  checkpoints: Checkpoints
  overwrite: bool = False

  def folder(self, step: int) -> str:
    return os.path.join(self.root, f'step_{step}')

  def done(self, step: int) -> dict | None:
    """The summary of a step, if that was made with these settings."""
    summary = self._read(step)
    return summary if summary and summary['settings'] == self._settings(step) else None

  def begin(self, step: int) -> None:
    """Makes way for a step's files, and says so where others were."""
    folder = self.folder(step)
    os.makedirs(folder, exist_ok=True)
    if old := self._read(step):
      changed = [
        f'{name}={old["settings"].get(name)!r}, now {value!r}'
        for name, value in self.settings.items()
        if old['settings'].get(name) != value
      ]
      if changed and not self.overwrite:
        raise UserError(
          f'{folder} holds results made with {"; ".join(changed)}: give --overwrite to replace them, or move them away'
        )
      print(f'replacing {folder}' + (f' (made with {"; ".join(changed)})' if changed else ''), file=sys.stderr)
    stale = glob.glob(os.path.join(glob.escape(folder), '*' + self.suffix))
    for path in [os.path.join(folder, self.summary), *stale]:  # the summary first: without it nothing counts
      with contextlib.suppress(FileNotFoundError):
        os.remove(path)

  def write_lines(self, step: int, pair: str, lines: Iterable[str]) -> None:
    _write(os.path.join(self.folder(step), pair + self.suffix), ''.join(line + '\n' for line in lines))

  def finish(self, step: int, values: Mapping[str, Any]) -> dict:
    """Writes the summary and returns it."""
    summary = {'step': step, 'settings': self._settings(step), **values}
    path = os.path.join(self.folder(step), self.summary)
    _write(path, json.dumps(summary, indent=2, ensure_ascii=False) + '\n')
    return summary

  def _settings(self, step: int) -> dict[str, Any]:
    return {**self.settings, 'checkpoint': self.checkpoints.fingerprint(step)}

  def event(self, step: int, values: Mapping[str, float]) -> None:
    """Adds scalars to TensorBoard's."""
    events = EventFile(self.root)
    events.write(step, values)
    events.close()

  def _read(self, step):
    try:
      with open(os.path.join(self.folder(step), self.summary), encoding='utf-8') as f:
        summary = json.load(f)
    except (FileNotFoundError, ValueError):
      return None
    return summary if isinstance(summary, dict) and isinstance(summary.get('settings'), dict) else None


class Translations(NamedTuple):
  """Of every pair by name."""

  texts: dict[str, list[str]]
  truncated: dict[str, int]  # lines that were translated in part


class LogProbs(NamedTuple):
  """Of every pair by name."""

  log_probs: dict[str, np.ndarray]  # of each line, in nats
  tokens: dict[str, np.ndarray]  # symbols of each target
  truncated: dict[str, int]  # lines that were scored in part


class TranslateJob:
  """Translates every set and scores the translations: <pair>.hyp and scores.json."""

  def __init__(
    self, root: str, config: MtConfig, sets: Sequence[HeldOut], checkpoints: Checkpoints, overwrite: bool = False
  ):
    self._sets = sets
    self._max_length = config.max_length
    used = ('beam_size', 'length_norm_alpha', 'decode_ratio', 'decode_extra')
    settings = {**{name: getattr(config, name) for name in used}, 'text': _fingerprint(sets)}
    self.results = Results(root, 'scores.json', '.hyp', settings, checkpoints, overwrite)

  def run(self, step: int, translator: Translator, quiet: bool = False) -> Translations:
    """Translates with the weights that the translator has; `quiet` without a progress bar."""
    texts, truncated = {}, {}
    with _progress(step, self._sets, quiet) as bar:
      # Sets share batches: what a sentence is translated to does not depend on its neighbours.
      for tag, sets in _by_tag(self._sets):
        translated = translator.translate(_lines(sets, 'sources'), tag, bar.update)
        best = [hypotheses[0].text for hypotheses in translated.hypotheses]
        texts |= _split(sets, best)
        truncated |= _count_by_set(sets, translated.truncated)
    return Translations(texts, truncated)

  def finish(self, step: int, found: Translations) -> dict:
    """Scores what `run` found and writes it all; returns the summary."""
    texts, truncated = found
    _warn_of_cuts(truncated, 'translated', self._max_length)
    scores = {}
    for s in self._sets:
      self.results.write_lines(step, s.name, texts[s.name])
      scores[s.name] = self._references[s.name].score(texts[s.name], truncated[s.name])
    mean = scoring.mean_scores(scores)
    self._event(step, scores, mean)
    pairs = {name: dataclasses.asdict(s) for name, s in scores.items()}
    return self.results.finish(step, {'pairs': pairs, 'mean': mean})

  def report(self, summary: Mapping) -> str:
    """The summary for people."""
    return scoring.table({name: scoring.PairScores(**s) for name, s in summary['pairs'].items()})

  @functools.cached_property
  def _references(self) -> dict[str, scoring.References]:
    return {s.name: scoring.References(s.sources, s.targets, s.target) for s in self._sets}

  def _event(self, step, scores, mean):
    values = {f'{metric}/{name}': getattr(s, metric) for metric in ('bleu', 'chrf') for name, s in scores.items()}
    self.results.event(step, {**values, 'bleu/mean': mean['bleu'], 'chrf/mean': mean['chrf']})


class ScoreJob:
  """Gives the log-probability of every target: <pair>.scores, a number a line, in nats, and perplexity.json."""

  def __init__(
    self, root: str, config: MtConfig, sets: Sequence[HeldOut], checkpoints: Checkpoints, overwrite: bool = False
  ):
    self._sets = sets
    self._max_length = config.max_length
    self.results = Results(root, 'perplexity.json', '.scores', {'text': _fingerprint(sets)}, checkpoints, overwrite)

  def run(self, step: int, translator: Translator, quiet: bool = False) -> LogProbs:
    """Scores with the weights that the translator has; `quiet` without a progress bar."""
    log_probs, tokens, truncated = {}, {}, {}
    with _progress(step, self._sets, quiet) as bar:
      for tag, sets in _by_tag(self._sets):
        scored = translator.score(_lines(sets, 'sources'), _lines(sets, 'targets'), tag, bar.update)
        log_probs |= _split(sets, scored.log_probs)
        tokens |= _split(sets, scored.target_tokens)
        truncated |= _count_by_set(sets, scored.truncated)
    return LogProbs(log_probs, tokens, truncated)

  def finish(self, step: int, found: LogProbs) -> dict:
    """Writes what `run` found; returns the summary."""
    log_probs, tokens, truncated = found
    _warn_of_cuts(truncated, 'scored', self._max_length)
    pairs = {}
    for s in self._sets:
      self.results.write_lines(step, s.name, (f'{x:.6f}' for x in log_probs[s.name]))
      pairs[s.name] = {
        'sentences': len(s.sources),
        'truncated': truncated[s.name],
        **_perplexity(log_probs[s.name], tokens[s.name]),
      }
    everything = _perplexity(*(np.concatenate([x[s.name] for s in self._sets]) for x in (log_probs, tokens)))
    self.results.event(step, {f'perplexity/{name}': s['perplexity'] for name, s in pairs.items()})
    return self.results.finish(step, {'pairs': pairs, 'all': everything})

  def report(self, summary: Mapping) -> str:
    """The summary for people."""
    width = max(len('pair'), *map(len, summary['pairs']))
    lines = [f'{"pair":{width}}  sentences  target tokens  cross-entropy  perplexity']
    for name, s in sorted(summary['pairs'].items()):
      lines.append(
        f'{name:{width}}  {s["sentences"]:9d}  {s["target_tokens"]:13d}  {s["cross_entropy"]:13.4f}  '
        f'{s["perplexity"]:10.4g}'
      )
    total = summary['all']
    lines.append(
      f'cross-entropy {total["cross_entropy"]:.4f} nats a target token over {len(summary["pairs"])} languages '
      f'(perplexity {total["perplexity"]:.4g})'
    )
    return '\n'.join(lines)


def _perplexity(log_probs: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
  """Of the lines whose source is not empty."""
  real = tokens > 0
  total = int(tokens.sum())
  cross_entropy = -float(log_probs[real].sum()) / max(total, 1)
  perplexity = math.exp(min(cross_entropy, 700.0))
  return {'target_tokens': total, 'cross_entropy': cross_entropy, 'perplexity': perplexity}


def _by_tag(sets: Sequence[HeldOut]) -> Iterable[tuple[str | None, list[HeldOut]]]:
  groups = collections.defaultdict(list)
  for s in sets:
    groups[s.tag].append(s)
  return groups.items()


def _lines(sets: Sequence[HeldOut], side: str) -> list[str]:
  return [line for s in sets for line in getattr(s, side)]


def _split(sets: Sequence[HeldOut], lines) -> dict[str, Any]:
  """Cuts what there is for the lines of all sets into that of each."""
  ends = np.cumsum([len(s.sources) for s in sets])
  return {s.name: lines[end - len(s.sources) : end] for s, end in zip(sets, ends, strict=True)}


def _count_by_set(sets: Sequence[HeldOut], indices: Iterable[int]) -> dict[str, int]:
  marked = np.zeros(sum(len(s.sources) for s in sets), np.int64)
  marked[list(indices)] = 1
  return {name: int(part.sum()) for name, part in _split(sets, marked).items()}


def _fingerprint(sets: Sequence[HeldOut]) -> str:
  text = repr([(s.name, s.tag, s.sources, s.targets) for s in sets])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _progress(step: int, sets: Sequence[HeldOut], quiet: bool) -> tqdm.tqdm:
  name = sets[0].name if len(sets) == 1 else f'{len(sets)} pairs'
  interval = 0.5 if sys.stderr.isatty() else 30
  return tqdm.tqdm(
    total=sum(len(s.sources) for s in sets),
    desc=f'step {step}, {name}',
    unit='sentence',
    mininterval=interval,
    file=sys.stderr,
    disable=quiet,
  )


def _warn_of_cuts(truncated: Mapping[str, int], what: str, max_length: int) -> None:
  if total := sum(truncated.values()):
    worst = sorted((name for name in truncated if truncated[name]), key=lambda name: -truncated[name])
    where = ', '.join([f'{name} {truncated[name]}' for name in worst[:5]] + ['...'] * (len(worst) > 5))
    print(
      f'warning: {total} lines are over max_length={max_length} tokens and were {what} in part ({where})',
      file=sys.stderr,
    )


def _write(path: str, text: str) -> None:
  """Writes a file whole or not at all."""
  with open(path + '.partial', 'w', encoding='utf-8', newline='\n') as f:
    f.write(text)
  os.replace(path + '.partial', path)
