"""Held-out evaluation of translation: BLEU and chrF of translations, or log-probabilities of the references."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.core import log_directory
from lingvo_moe.core.errors import counted
from lingvo_moe.core.progress import Progress
from lingvo_moe.corpora import text
from lingvo_moe.tasks.mt import dev_lines
from lingvo_moe.tasks.mt import scoring
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.mt.decoding import SentenceTranslator
from lingvo_moe.tasks.task import HeldOutJob
from lingvo_moe.tasks.task import Outcome
from lingvo_moe.tasks.vocab import Vocab

_SAMPLES = 3  # translations printed with the scores
_SAMPLE_LENGTH = 200  # characters of one


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """One pair's held-out lines."""

  name: str
  source: str  # the languages
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
  for pair in dev_lines.find_pairs(config, split) if config.tag_target else ():
    source_vocab.tag_id(pair.target)  # refuses a language the model does not know, before any work
  for pair, sources, targets in dev_lines.read_pairs(config, split):
    count = max_sentences or len(sources)
    sets.append(
      HeldOut(
        pair.name,
        pair.source,
        pair.target,
        pair.target if config.tag_target else None,
        sources[:count],
        targets[:count],
      )
    )
  return sets


def other_targets(sets: Iterable[HeldOut], pairs: Sequence[tuple[str, str]]) -> str:
  """Says which languages a model is to be scored against that it was not trained to write; '' where there are none.

  Args:
    sets: to be translated.
    pairs: of the run; without tags its model writes the one target language of its pairs, whatever it is given.
  """
  written, names = {target for _, target in pairs}, ['-'.join(pair) for pair in pairs]
  of_a_pair = lambda target: any(name.endswith(f'-{target}') for name in names)  # where the cut of a name is a guess
  other = {s.target for s in sets if s.tag is None and not of_a_pair(s.target)}
  if not written or not other:
    return ''
  return (
    f'the model writes {", ".join(sorted(written))} and takes no tag, so its translations are scored against another '
    f'language: {", ".join(sorted(other))}'
  )


class Translations(NamedTuple):
  """Translations of every pair, by its name."""

  texts: dict[str, list[str]]
  truncated: dict[str, int]  # lines that were translated in part


class LogProbs(NamedTuple):
  """Log-probabilities of every pair's targets, by its name."""

  log_probs: dict[str, np.ndarray]  # of each line, in nats
  tokens: dict[str, np.ndarray]  # symbols of each target
  truncated: dict[str, int]  # lines that were scored in part


class TranslateJob(HeldOutJob):
  """Translates every set and scores the translations: <pair>.hyp, .src and .ref, and scores.json."""

  summary_file = log_directory.SCORES
  suffix = log_directory.HYPOTHESES

  def __init__(self, config: MtConfig, sets: Sequence[HeldOut], translator: SentenceTranslator, warning: str = ''):
    self.warning = warning
    self._sets = sets
    self._translator = translator
    self._max_length = config.max_length
    used = ('beam_size', 'length_norm_alpha', 'decode_ratio', 'decode_extra')
    self.settings = {**{name: getattr(config, name) for name in used}, 'text': _fingerprint(sets)}
    self.texts = {s.name: _fingerprint([s]) for s in sets}

  def run(self, label: str, quiet: bool = False, unfinished: MutableMapping[str, str] | None = None) -> Translations:
    """Translates with the weights that the runtime holds.

    Args:
      label: heads the progress bar.
      quiet: no progress bar.
      unfinished: translations so far, by pair and line: 'de-en:17'.
    """
    unfinished = {} if unfinished is None else unfinished
    texts, truncated = {}, {}
    with _progress(label, self._sets, quiet, done=len(unfinished)) as bar:
      # Sets share batches: what a sentence is translated to does not depend on its neighbours.
      for tag, sets in _by_tag(self._sets):
        names = [f'{s.name}:{line}' for s in sets for line, _ in enumerate(s.sources, start=1)]
        known = {i for i, name in enumerate(names) if name in unfinished}
        keep = lambda i, hypotheses, names=names: unfinished.__setitem__(names[i], hypotheses[0].text)
        translated = self._translator.translate(_lines(sets, 'sources'), tag, bar.update, known, keep)
        best = [unfinished.get(name, '') for name in names]  # a sentence without tokens has none
        texts |= _split(sets, best)
        truncated |= _count_by_set(sets, translated.truncated)
    return Translations(texts, truncated)

  def finish(self, found: Translations) -> Outcome:
    """Scores the translations."""
    texts, truncated = found
    _warn_of_cuts(truncated, 'translated', self._max_length)
    for notice in scoring.notices({s.name: (s.target, s.targets, texts[s.name]) for s in self._sets}):
      print(f'warning: {notice}', file=sys.stderr)
    scores = {s.name: self._references[s.name].score(texts[s.name], truncated[s.name]) for s in self._sets}
    mean = scoring.mean_scores(scores)
    scalars = {f'{metric}/{name}': getattr(s, metric) for metric in ('bleu', 'chrf') for name, s in scores.items()}
    scalars |= {'bleu/mean': mean['bleu'], 'chrf/mean': mean['chrf']}
    pairs = {name: dataclasses.asdict(s) for name, s in scores.items()}
    languages = {s.name: [s.source, s.target] for s in self._sets}
    summary = {'pairs': pairs, 'languages': languages, 'mean': mean, 'samples': _samples(self._sets, texts)}
    other_files = {s.name + log_directory.SOURCES: s.sources for s in self._sets}
    other_files |= {s.name + log_directory.REFERENCES: s.targets for s in self._sets}
    return Outcome(texts, scalars, summary, other_files)

  def report(self, summary: Mapping) -> str:
    """The summary for people: a few translations, then the table of scores."""
    table = scoring.table({name: scoring.PairScores(**s) for name, s in summary['pairs'].items()})
    sets = {s.name: s for s in self._sets}
    blocks = []
    for name, line, translation in summary.get('samples', ()):  # an earlier version kept none
      source, reference = sets[name].sources[line - 1], sets[name].targets[line - 1]
      said = {'source': source, 'reference': reference, 'translation': translation}
      rows = (f'  {what:11} {text.shortened(own, _SAMPLE_LENGTH)}' for what, own in said.items())
      blocks.append('\n'.join([f'{name}, line {line}', *rows]))
    return '\n\n'.join(blocks + [table])

  @functools.cached_property
  def _references(self) -> dict[str, scoring.References]:
    written = self._translator.target_vocab.written
    return {s.name: scoring.References(s.sources, s.targets, s.target, written(s.targets)) for s in self._sets}


def _samples(sets: Sequence[HeldOut], texts: Mapping[str, Sequence[str]]) -> list[tuple[str, int, str]]:
  """Pair, number of the line from 1, and translation of a few lines, evenly spaced over all that are not empty."""
  lines = [(s, i) for s in sets for i, source in enumerate(s.sources) if not text.is_empty(source)]
  count = min(_SAMPLES, len(lines))
  chosen = [lines[(2 * k + 1) * len(lines) // (2 * count)] for k in range(count)]
  return [(s.name, i + 1, texts[s.name][i]) for s, i in chosen]


class ScoreJob(HeldOutJob):
  """Gives the log-probability of every target: <pair>.scores, a number a line, in nats, and perplexity.json."""

  summary_file = log_directory.PERPLEXITY
  suffix = log_directory.LOG_PROBS

  def __init__(self, config: MtConfig, sets: Sequence[HeldOut], translator: SentenceTranslator, warning: str = ''):
    self.warning = warning
    self._sets = sets
    self._translator = translator
    self._max_length = config.max_length
    self.settings = {'text': _fingerprint(sets)}
    self.texts = {s.name: _fingerprint([s]) for s in sets}

  def run(self, label: str, quiet: bool = False, unfinished: MutableMapping[str, str] | None = None) -> LogProbs:
    """Scores with the weights that the runtime holds; `quiet` without a progress bar."""
    del unfinished  # one pass over the text is short
    log_probs, tokens, truncated = {}, {}, {}
    with _progress(label, self._sets, quiet) as bar:
      for tag, sets in _by_tag(self._sets):
        scored = self._translator.score(_lines(sets, 'sources'), _lines(sets, 'targets'), tag, bar.update)
        log_probs |= _split(sets, scored.log_probs)
        tokens |= _split(sets, scored.target_tokens)
        truncated |= _count_by_set(sets, scored.truncated)
    return LogProbs(log_probs, tokens, truncated)

  def finish(self, found: LogProbs) -> Outcome:
    """Works out cross-entropy and perplexity."""
    log_probs, tokens, truncated = found
    _warn_of_cuts(truncated, 'scored', self._max_length)
    pairs = {}
    for s in self._sets:
      pairs[s.name] = {
        'sentences': len(s.sources),
        'truncated': truncated[s.name],
        **_perplexity(log_probs[s.name], tokens[s.name]),
      }
    everything = _perplexity(*(np.concatenate([x[s.name] for s in self._sets]) for x in (log_probs, tokens)))
    lines = {name: [f'{x:.6f}' for x in log_probs[name]] for name in pairs}
    scalars = {f'perplexity/{name}': s['perplexity'] for name, s in pairs.items()}
    return Outcome(lines, scalars, {'pairs': pairs, 'all': everything})

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
      f'cross-entropy {total["cross_entropy"]:.4f} nats a target token over {counted(len(summary["pairs"]), "pair")} '
      f'(perplexity {total["perplexity"]:.4g})'
    )
    return '\n'.join(lines)


def _perplexity(log_probs: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
  """Cross-entropy and perplexity over the lines whose source is not empty."""
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


def _progress(label: str, sets: Sequence[HeldOut], quiet: bool, done: int = 0) -> Progress:
  name = sets[0].name if len(sets) == 1 else f'{len(sets)} pairs'
  total = sum(len(s.sources) for s in sets)
  return Progress(total, 'sentence', initial=done, label=f'{label}, {name}', quiet=quiet)


def _warn_of_cuts(truncated: Mapping[str, int], what: str, max_length: int) -> None:
  if total := sum(truncated.values()):
    worst = sorted((name for name in truncated if truncated[name]), key=lambda name: -truncated[name])
    where = ', '.join([f'{name} {truncated[name]}' for name in worst[:5]] + ['...'] * (len(worst) > 5))
    print(
      f'warning: {counted(total, "line")} over max_length={max_length} tokens, {what} in part ({where})',
      file=sys.stderr,
    )
