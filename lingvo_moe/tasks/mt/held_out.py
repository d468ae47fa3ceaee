"""Held-out evaluation of translation: BLEU and chrF of translations, or log-probabilities of the references."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
import types
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.core.progress import Advance, Progress
from lingvo_moe.core.quality import METRICS
from lingvo_moe.corpora import text
from lingvo_moe.inputs import dev_lines
from lingvo_moe.search import repetition
from lingvo_moe.search.request import SEARCH, TranslationRequest
from lingvo_moe.storage import log_directory
from lingvo_moe.tasks import metrics, task
from lingvo_moe.tasks.mt import scoring
from lingvo_moe.text.sentences import Paragraphs, TrainingLines
from lingvo_moe.vocab import language_tags
from lingvo_moe.vocab.vocab import EOS

if TYPE_CHECKING:  # exports are evaluated without TensorFlow
  from lingvo_moe.addons.engine.exported_model import ExportedModel
  from lingvo_moe.tasks.mt.decoding import SentenceTranslator
  from lingvo_moe.tasks.mt.mt_config import MtConfig
  from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

_SAMPLES = 3  # translations printed with the scores
_SAMPLE_LENGTH = 200  # characters of one


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """One pair's held-out lines."""

  name: str
  source: str  # the languages
  target: str
  tag: language_tags.Languages  # whose tags sentences get
  sources: list[str]
  targets: list[str]


def read(config: MtConfig, split: str, max_sentences: int, source_vocab: TaggedVocab) -> list[HeldOut]:
  """Every pair that has the split, or its first lines.

  Args:
    config: its data_dir, pairs, split_files, tag_target and tag_sides are used.
    split: test, dev, or any file prefix.
    max_sentences: of each pair; 0: all.
    source_vocab: must know the tags.
  """
  languages = lambda pair: language_tags.of_pair(config.tag_target, config.tag_sides, pair.source, pair.target)
  for pair in dev_lines.find_pairs(config, split) if config.tag_target else ():
    # Refuses a language the model does not know, before any work.
    language_tags.around(config.tag_sides, source_vocab.tag_id, EOS, languages(pair))
    if not config.has_task(pair.source, pair.target):
      known = ', '.join(name for name, _ in config.gate_tasks)
      raise UserError(f'gate={config.gate!r} was trained with {known}; saw {pair.name}: leave it out of pairs')
  first = slice(max_sentences or None)
  return [
    HeldOut(pair.name, pair.source, pair.target, languages(pair), sources[first], targets[first])
    for pair, sources, targets in dev_lines.read_pairs(config, split)
  ]


def other_targets(sets: Iterable[HeldOut], pairs: Sequence[tuple[str, str]]) -> str:
  """Sentence on the languages to be scored that a model was not trained to write; '' where there are none.

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


class PairResults(NamedTuple):
  """Results of a job for every pair, by name."""

  results: dict[str, list[Any]]  # sequences with a value for each line
  truncated: dict[str, int]  # lines of which a part was used


class _PairsJob(task.HeldOutJob):
  """Base of the jobs, which compute a value or several for each line of each set."""

  _fields: ClassVar[tuple[str, ...]] = ()  # of the configuration, on which results depend
  _verb: ClassVar[str]

  def __init__(self, config: MtConfig, sets: Sequence[HeldOut], translator: SentenceTranslator, warning: str = ''):
    self.warning = warning
    self._sets = sets
    self._translator = translator
    self._max_length = config.max_length
    self.settings = {**{name: getattr(config, name) for name in self._fields}, 'text': _fingerprint(sets)}
    self.texts = {s.name: _fingerprint([s]) for s in sets}

  def run(self, label: str, quiet: bool = False, unfinished: MutableMapping[str, str] | None = None) -> PairResults:
    """See HeldOutJob.run; `unfinished` has the translations so far, by pair and line: 'de-en:17'."""
    unfinished = {} if unfinished is None else unfinished
    computed = PairResults({}, {})
    name = self._sets[0].name if len(self._sets) == 1 else f'{len(self._sets)} pairs'
    total = sum(len(s.sources) for s in self._sets)
    with Progress(total, 'sentence', initial=len(unfinished), label=f'{label}, {name}', quiet=quiet) as bar:
      # Sets of a tag share batches: a result does not depend on neighbours.
      for tag in dict.fromkeys(s.tag for s in self._sets):
        sets = [s for s in self._sets if s.tag == tag]
        values, truncated = self._compute(sets, tag, bar.update, unfinished)
        end = 0
        for s in sets:
          start, end = end, end + len(s.sources)
          computed.results[s.name] = [of_lines[start:end] for of_lines in values]
          computed.truncated[s.name] = sum(start <= i < end for i in truncated)
    return computed

  def _compute(
    self,
    sets: Sequence[HeldOut],
    tag: language_tags.Languages,
    progress: Advance,
    unfinished: MutableMapping[str, str],
  ) -> tuple[list[Any], list[int]]:
    """Sequences of values for the lines of all sets, and numbers of lines of which a part was used."""
    raise NotImplementedError

  def _warn_of_cuts(self, truncated: Mapping[str, int]) -> None:
    if total := sum(truncated.values()):
      worst = sorted(filter(truncated.get, truncated), key=lambda name: -truncated[name])
      where = scoring.some(f'{name} {truncated[name]}' for name in worst)
      over = f'{plural(total, "line")} over max_length={self._max_length} tokens'
      print(f'warning: {over}, {self._verb} in part ({where})', file=sys.stderr)


class TranslateJob(_PairsJob):
  """Translates every set and scores the translations: <pair>.hyp, .src and .ref, and scores.json."""

  summary_file = log_directory.SCORES
  suffix = log_directory.HYPOTHESES
  _fields = ('beam_size', 'length_norm_alpha', 'length_norm_k', 'early_stopping', 'decode_ratio', 'decode_extra')
  _verb = 'translated'
  _cut = 0  # lines with a sentence that was cut

  def __init__(
    self,
    config: MtConfig,
    sets: Sequence[HeldOut],
    translator: SentenceTranslator,
    warning: str,
    split: str,
    request: TranslationRequest,
  ) -> None:
    translator.check(request)
    super().__init__(config, sets, translator, warning)
    asked = {name: getattr(request, name) for name in request.asked}
    for names, is_default in ((SEARCH, config.search == 'beam'), (repetition.FIELDS, config.repetition is None)):
      self.settings |= {} if is_default else {name: getattr(config, name) for name in names}
    self.settings |= json.loads(json.dumps(asked))  # lists, as they are read again
    self._request = request
    self._paragraphs = Paragraphs(
      translator, split, TrainingLines(config.several_sentences, config.long_line), config.max_length
    )
    if split != 'never':
      self.settings['split_sentences'] = split

  def _compute(self, sets, tag, progress, unfinished):
    names = [f'{s.name}:{line}' for s in sets for line, _ in enumerate(s.sources, start=1)]
    known = {i for i, name in enumerate(names) if name in unfinished}
    keep = lambda i, hypotheses: unfinished.__setitem__(names[i], hypotheses[0].text)
    sources, languages = _lines(sets, 'sources'), [s.source for s in sets for _ in s.sources]
    request = dataclasses.replace(self._request, alignments=False)  # those of known translations are made too
    answers = self._paragraphs.translate(sources, tag, languages, progress, known, keep, request)
    self._cut += len(answers.cut)
    texts = [unfinished.get(name, '') for name in names]  # a sentence without tokens has none
    if not self._request.alignments:
      return [texts], answers.truncated
    alignments = self._translator.align(sources, texts, tag)
    return [texts, ['\t'.join(alignment.columns) for alignment in alignments]], answers.truncated

  def finish(self, computed: PairResults) -> task.Outcome:
    texts, truncated = {name: texts for name, [texts, *_] in computed.results.items()}, computed.truncated
    self._warn_of_cuts(truncated)
    if self._cut:
      over = f'{plural(self._cut, "line")} with a sentence over max_length={self._max_length} tokens'
      print(f'warning: {over}, cut where a clause ends', file=sys.stderr)
    for notice in scoring.notices({s.name: (s.target, s.targets, texts[s.name]) for s in self._sets}):
      print(f'warning: {notice}', file=sys.stderr)
    scores = {s.name: self._references[s.name].score(texts[s.name], truncated[s.name]) for s in self._sets}
    mean = scoring.mean_scores(scores)
    scalars = {f'{metric}/{name}': s[metric] for metric in METRICS for name, s in scores.items()}
    scalars |= {f'{metric}/mean': mean[metric] for metric in METRICS}
    languages = {s.name: [s.source, s.target] for s in self._sets}
    summary = {'pairs': scores, 'languages': languages, 'mean': mean, 'samples': _samples(self._sets, texts)}
    other_files = {s.name + log_directory.SOURCES: s.sources for s in self._sets}
    other_files |= {s.name + log_directory.REFERENCES: s.targets for s in self._sets}
    if self._request.alignments:
      other_files |= {
        name + log_directory.ALIGNMENTS: alignment_lines for name, [_, alignment_lines] in computed.results.items()
      }
    return task.Outcome(texts, scalars, summary, other_files)

  def report(self, summary: Mapping) -> str:
    """The summary for people: a few translations, then the table of scores."""
    table = scoring.table(summary['pairs'])
    sets = {s.name: s for s in self._sets}
    blocks = []
    for name, line, translation in summary.get('samples', ()):  # an earlier version has none
      source, reference = sets[name].sources[line - 1], sets[name].targets[line - 1]
      said = {'source': source, 'reference': reference, 'translation': translation}
      rows = (f'  {what:11} {text.shortened(sample_text, _SAMPLE_LENGTH)}' for what, sample_text in said.items())
      blocks.append('\n'.join([f'{name}, line {line}', *rows]))
    return '\n\n'.join([*blocks, table])

  @functools.cached_property
  def _references(self) -> dict[str, scoring.References]:
    written = self._translator.target_vocab.written
    return {s.name: scoring.References(s.sources, s.targets, s.target, written(s.targets)) for s in self._sets}


class ScoreJob(_PairsJob):
  """Gives the log-probability of every target: <pair>.scores, a number a line, in nats, and perplexity.json."""

  summary_file = log_directory.PERPLEXITY
  suffix = log_directory.LOG_PROBS
  _verb = 'scored'
  _columns = (
    metrics.Column('sentences', 'sentences', '9d'),
    metrics.Column('target tokens', 'target_tokens', '13d'),
    metrics.Column('cross-entropy', 'cross_entropy', '13.4f'),
    metrics.Column('perplexity', 'perplexity', '10.4g'),
  )

  def _compute(self, sets, tag, progress, unfinished):
    scored = self._translator.score(_lines(sets, 'sources'), _lines(sets, 'targets'), tag, progress)
    return [scored.log_probs, scored.target_tokens], scored.truncated

  def finish(self, computed: PairResults) -> task.Outcome:
    self._warn_of_cuts(computed.truncated)
    pairs = {}
    for s in self._sets:
      counts = {'sentences': len(s.sources), 'truncated': computed.truncated[s.name]}
      pairs[s.name] = {**counts, **_perplexity(*computed.results[s.name])}
    everything = _perplexity(*map(np.concatenate, zip(*(computed.results[s.name] for s in self._sets), strict=True)))
    lines = {name: [f'{x:.6f}' for x in log_probs] for name, (log_probs, _) in computed.results.items()}
    scalars = {f'perplexity/{name}': s['perplexity'] for name, s in pairs.items()}
    return task.Outcome(lines, scalars, {'pairs': pairs, 'all': everything})

  def report(self, summary: Mapping) -> str:
    pairs, total = summary['pairs'], summary['all']
    return metrics.table('pair', {name: pairs[name] for name in sorted(pairs)}, self._columns) + (
      f'\ncross-entropy {total["cross_entropy"]:.4f} nats a target token over {plural(len(pairs), "pair")} '
      f'(perplexity {total["perplexity"]:.4g})'
    )


def job(
  config: MtConfig,
  source_vocab: TaggedVocab,
  translator: SentenceTranslator,
  pairs: Sequence[tuple[str, str]],
  options: task.HeldOutOptions,
) -> task.HeldOutJob:
  """Job that translates every pair and scores the translations, or gives the log-probability of every target.

  `source_vocab` must know the tags; `pairs` are those that the model was trained on.
  """
  sets = read(config, options.split, options.max_sentences, source_vocab)
  warning = other_targets(sets, pairs)
  if options.score:
    return ScoreJob(config, sets, translator, warning)
  return TranslateJob(config, sets, translator, warning, options.split_sentences, options.request)


def job_of_export(
  model: ExportedModel, options: task.HeldOutOptions, data_dir: str | None, pairs: str | None
) -> task.HeldOutJob:
  """The decoder's job for an export, on the text of `data_dir`; `pairs`: as of the field, None for those of the run."""
  if not data_dir:
    raise UserError(f'an export has no corpus; saw {model.path}: give its folder as --data_dir')
  settings = model.settings
  known_pairs = ','.join('-'.join(pair) for pair in model.pairs())
  names = 'max_length', 'beam_size', 'length_norm_alpha', 'length_norm_k', 'early_stopping', 'decode_ratio'
  names = *names, 'decode_extra', *SEARCH, *repetition.FIELDS
  config = types.SimpleNamespace(
    **{name: settings[name] for name in names},
    repetition=model.repetition,
    data_dir=data_dir,
    pairs=known_pairs if pairs is None else pairs,
    split_files=(),
    dev_lines=0,
    tag_target=settings['tagged'],
    several_sentences=model.training_lines.several,
    long_line=model.training_lines.long,
    tag_sides=settings['tag_sides'],
  )
  tags = types.SimpleNamespace(
    tag_id=lambda language: settings['tags'][language_tags.choose_target(sorted(settings['tags']), language)]
  )
  return job(config, tags, model.translator(), model.pairs(), options)


def _samples(sets: Sequence[HeldOut], texts: Mapping[str, Sequence[str]]) -> list[tuple[str, int, str]]:
  """Pair, number of the line from 1, and translation of a few lines, evenly spaced over all that are not empty."""
  lines = [(s, i) for s in sets for i, source in enumerate(s.sources) if not text.is_empty(source)]
  count = min(_SAMPLES, len(lines))
  chosen = [lines[(2 * k + 1) * len(lines) // (2 * count)] for k in range(count)]
  return [(s.name, i + 1, texts[s.name][i]) for s, i in chosen]


def _perplexity(log_probs: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
  """Cross-entropy and perplexity over the lines whose source is not empty."""
  numbers = metrics.perplexity(-float(log_probs[tokens > 0].sum()), tokens.sum())
  return {'target_tokens': numbers.pop('tokens'), **numbers}


def _lines(sets: Sequence[HeldOut], side: str) -> list[str]:
  return [line for s in sets for line in getattr(s, side)]


def _fingerprint(sets: Sequence[HeldOut]) -> str:
  text = repr([(s.name, s.tag, s.sources, s.targets) for s in sets])
  return hashlib.sha256(text.encode()).hexdigest()[:16]
