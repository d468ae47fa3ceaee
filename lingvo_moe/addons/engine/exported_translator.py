"""Exported translation model: sentences in, translations and scores out."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.addons.engine import search
from lingvo_moe.addons.engine.exported import ExportedModel
from lingvo_moe.addons.engine.numpy_beam import BeamValues
from lingvo_moe.addons.engine.numpy_sampling import draw
from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.core.visible_text import is_empty
from lingvo_moe.search import minimum_bayes_risk
from lingvo_moe.search.continuations import Request, Sampling
from lingvo_moe.search.length_norm import LengthNorm
from lingvo_moe.search.repetition import FIELDS, Repetition
from lingvo_moe.search.request import NOTHING, TranslationRequest
from lingvo_moe.search.text_constraints import TextConstraints
from lingvo_moe.text import translator
from lingvo_moe.text.sentences import TrainingLines
from lingvo_moe.text.translator import Answers, Hypothesis, Scored
from lingvo_moe.vocab import language_tags
from lingvo_moe.vocab.vocab import EOS, Vocab

_LIMITS = ('decode_ratio', 'decode_extra')


class TranslationModel(ExportedModel):
  continues_text = False
  beside = 'encoder'

  def __init__(self, path: str, threads: int | None = None) -> None:
    super().__init__(path, threads)
    self.tag_sides = self.settings['tag_sides']
    self.training_lines = TrainingLines(*map(self.settings.get, ('several_sentences', 'long_line')))
    self.source, self.target = (Vocab(os.path.join(path, f'{side}.model')) for side in ('source', 'target'))
    symbols = self.settings['begin'], *self.settings['tags'].values()
    if max(symbols) >= min(self.source.size, self.target.size):
      raise UserError(
        f'begin and tags of {path} must be symbols of its vocabularies; saw {max(symbols)} of '
        f'{min(self.source.size, self.target.size)}: export the run again'
      )

  @property
  def symbols(self) -> int:
    return self.target.size

  def choose_search(self, values: Mapping[str, Any]) -> None:
    """Puts values in place of those that it was exported with."""
    of_requests = {name: value for name, value in values.items() if name != 'mbr_samples'}
    TranslationRequest.of(**of_requests).sampling(self.settings.__getitem__)  # refuses what is out of its range
    if not isinstance(count := values.get('mbr_samples', 1), int) or count < 1:
      raise UserError(f'mbr_samples must be a whole number from 1 on; saw {shown(count)}')
    self.settings |= values

  def translator(self, n_best: int = 1) -> ExportedTranslator:
    return ExportedTranslator(self, n_best)

  def choose_target(self, requested: str | None, source: str | None = None) -> language_tags.Languages:
    tags = sorted(self.settings['tags']) if self.settings['tagged'] else None
    languages = language_tags.choose_target(tags, requested, source, both=self.tag_sides != 'source')
    return language_tags.check_pair(languages, self.settings['gate_pairs'])

  def pairs(self) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in self.settings['pairs']]

  def targets(self) -> list[str]:
    return sorted(self.settings['tags'])


class ExportedTranslator(translator.Translator):
  """Translates and scores sentences with an exported model, in batches by length."""

  able = tuple(field.name for field in dataclasses.fields(TranslationRequest) if field.name != 'alignments')
  unable = 'an export does not do it, but its log directory does'

  def __init__(self, model: TranslationModel, n_best: int = 1) -> None:
    self._model, self.n_best = model, n_best
    self.target_vocab = model.target
    self._begin = model.settings['begin']

  def configured(self, name: str) -> Any:
    return self._model.settings[name]

  def sampling(self, request: TranslationRequest) -> tuple[str, Sampling | None]:
    self._model.check_width(request.value('beam_size', self.configured))
    return super().sampling(request)

  def translate(
    self,
    texts: Sequence[str],
    target: language_tags.Languages = None,
    progress: Callable[[int], object] = lambda count: None,
    known: Collection[int] = (),
    keep: Callable[[int, list[Hypothesis]], object] = lambda sentence, hypotheses: None,
    request: TranslationRequest = NOTHING,
  ) -> Answers:
    """Translates sentences; one without tokens is translated to an empty line."""
    model, (search_name, sampling) = self._model, self.sampling(request)
    value = lambda name: request.value(name, self.configured)
    limits, repetition = [value(name) for name in _LIMITS], Repetition.of(*map(value, FIELDS))
    norm = LengthNorm(value('length_norm_alpha'), model.settings['length_norm_k'])
    of_beam = BeamValues(value('beam_size'), self.n_best, norm, value('early_stopping'))
    of_source, of_target = self._around(target)
    sources, truncated = _rows(model.source, texts, of_source, model.max_length)
    of_texts = [[Hypothesis('', 0.0, 0.0)] for _ in texts]
    sources = [[] if i in known else ids for i, ids in enumerate(sources)]
    progress(sum(not ids and i not in known for i, ids in enumerate(sources)))
    constrained = None
    if request.is_constrained:
      sizes = model.target.size, model.max_length, len(of_target.before)
      constrained = TextConstraints(request, model.target, *sizes)

    def search_for(batch, decoder, encoder):
      limits_B, constraints = np.array([self._max_length(len(sources[i]), *limits) for i in batch], np.int32), None
      if constrained:
        constraints, room_B = constrained.of([texts[i] for i in batch], len(batch))
        limits_B = np.minimum(limits_B + room_B, model.max_length)
      memory, begins = search.encode(encoder, [sources[i] for i in batch]), (self._begin, of_target.before)
      if sampling:
        requests = [Request.of_text(texts[i], sampling) for i in batch]
        return draw(decoder, memory, requests, samples, limits_B, model.graph_width, *begins, repetition)
      return search.search(decoder, memory, limits_B, of_beam, None, *begins, constraints, repetition)

    read = lambda ids, *values: Hypothesis(model.target.decode(ids), *values)
    samples = self.configured('mbr_samples') if search_name == 'mbr' else self.n_best
    width = max(samples, model.graph_width) if sampling else of_beam.width
    for batch, of_batch in self._run(search_for, sources, width):
      for row, i in enumerate(batch):
        of_texts[i] = translator.of_finite_probability(read, *(values[row] for values in of_batch))
        if search_name == 'mbr':
          of_texts[i] = minimum_bayes_risk.best(of_texts[i], self.n_best)
        keep(i, of_texts[i])
      progress(len(batch))
    return Answers(of_texts, truncated)

  def too_long(self, texts: Sequence[str], target: language_tags.Languages = None) -> list[int]:
    return _rows(self._model.source, texts, self._around(target)[0], self._model.max_length)[1]

  def score(
    self,
    sources: Sequence[str],
    targets: Sequence[str],
    target: language_tags.Languages = None,
    progress: Callable[[int], object] = lambda count: None,
  ) -> Scored:
    model = self._model
    of_source, of_target = self._around(target)
    source_ids, source_cut = _rows(model.source, sources, of_source, model.max_length)
    labels, target_cut = _rows(model.target, targets, of_target, model.max_length, keep_empty=True)
    given = len(of_target.before)
    log_probs = np.array([0.0 if is_empty(line) else -np.inf for line in targets])
    tokens = np.zeros(len(targets), np.int64)
    progress(sum(not ids for ids in source_ids))

    def score(batch, decoder, encoder):
      memory = search.encode(encoder, [source_ids[i] for i in batch])
      return search.score(decoder, memory, [labels[i] for i in batch], self._begin, given)

    for batch, scores in self._run(score, source_ids, 1):
      log_probs[batch], tokens[batch] = scores, [len(labels[i]) - given for i in batch]
      progress(len(batch))
    return Scored(log_probs, tokens, sorted({*source_cut, *(i for i in target_cut if source_ids[i])}))

  def _around(self, languages: language_tags.Languages) -> tuple[language_tags.Around, language_tags.Around]:
    """Symbols around (sources, targets)."""
    return language_tags.around(self._model.tag_sides, self._model.settings['tags'].__getitem__, EOS, languages)

  def _run(
    self, function: Callable[..., Any], sources: Sequence[Sequence[int]], width: int
  ) -> Iterator[tuple[Sequence[int], Any]]:
    """Batches of the sources that have tokens, each with the result of a function of it and of a lane's graphs.

    Rows have `width` hypotheses: more than those of a beam take the room of several rows.
    """
    model = self._model
    tokens = model.settings['batch_tokens'] * model.graph_width // max(width, model.graph_width)
    batches = model.lanes.batches(list(map(len, sources)), tokens)
    return model.lanes.run(function, batches, model.graphs(width))

  def _max_length(self, source_length: int, ratio: float, extra: int) -> int:
    """Length limit of a translation in symbols, with the end."""
    limit = math.floor(np.float32(ratio) * np.float32(source_length)) + extra
    return min(max(limit, 1 if self._model.tag_sides == 'source' else 2), self._model.max_length)


def _rows(
  vocab: Vocab, texts: Sequence[str], around: language_tags.Around, most: int, keep_empty: bool = False
) -> tuple[list[list[int]], list[int]]:
  """(at most `most` ids with those around, or none of a text without tokens; numbers of texts that were cut)."""
  rows = vocab.encode(texts)
  cut = [i for i, ids in enumerate(rows) if len(ids) + around.count > most]
  return [around.put(ids, most) if ids or keep_empty else [] for ids in rows], cut
