"""Exported language model: prompts in, continuations out; samples, greedy ones, or those of beam search."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_moe.addons.engine import numpy_sampling, search
from lingvo_moe.addons.engine.exported import ExportedModel
from lingvo_moe.addons.engine.flat_cache import Prompt
from lingvo_moe.addons.engine.numpy_beam import BeamValues
from lingvo_moe.addons.engine.stages import StagedGraph
from lingvo_moe.search.continuations import Listeners, Request, by_row
from lingvo_moe.text import translator
from lingvo_moe.text.translator import Answers, Hypothesis
from lingvo_moe.vocab import language_tags, text_vocab
from lingvo_moe.vocab.vocab import BOS

_ROWS = 16  # prompts of a batch


class ExportedLanguageModel(ExportedModel):
  """Exported language model."""

  continues_text = True
  beside = 'reader'

  def __init__(self, path: str, threads: int | None = None) -> None:
    super().__init__(path, threads)
    name = self.settings['vocab']
    self.vocab = text_vocab.read(name if name == 'byte' else os.path.join(path, name))
    self.graph_width = self.beam_size if self.settings['search'] == 'beam' else 1

  @property
  def symbols(self) -> int:
    return self.vocab.size

  def translator(self, n_best: int = 1) -> ExportedContinuer:
    return ExportedContinuer(self, n_best)

  def choose_target(self, requested: str | None, source: str | None = None) -> language_tags.Languages:
    return language_tags.choose_target(None, requested, source)

  def configured(self, name: str) -> Any:
    return self.settings[name]


class ExportedContinuer(translator.Generator):
  """Continues prompts with an exported model. A continuation depends on its prompt, the number of it and the seed."""

  def __init__(self, model: ExportedLanguageModel, n_best: int = 1) -> None:
    translator.check_continuations(n_best, model.settings['search'], model.beam_size)
    self._model, self._n_best = model, n_best

  def translate(self, texts: Sequence[str], target: str | None = None, first: int = 0) -> Answers:
    """Continuations of each prompt; an empty prompt gives a text from its beginning."""
    del target
    values = self._model.sampling()
    return Answers(self.complete([Request(text, values, number) for number, text in enumerate(texts, first)]), [])

  def complete(self, requests: Sequence[Request]) -> list[list[Hypothesis]]:
    batches = [requests[start : start + _ROWS] for start in range(0, len(requests), _ROWS)]
    model = self._model
    graphs = model.graphs(min(model.beam_size, model.graph_width))
    return [texts for _, of_batch in model.lanes.run(self._continue, batches, graphs) for texts in of_batch]

  def _continue(self, requests: Sequence[Request], decoder: StagedGraph, reader: StagedGraph) -> list[list[Hypothesis]]:
    settings, vocab, copies = self._model.settings, self._model.vocab, self._n_best
    prompts = [[BOS, *vocab.encode(request.prompt).tolist()] for request in requests]
    values, listeners = by_row(requests, copies), Listeners(requests, vocab.decode)
    if settings['search'] == 'beam':
      of_beam = BeamValues(self._model.beam_size, copies, self._model.length_norm, settings['early_stopping'])
      prompt, repetition = read(reader, prompts, 1), self._model.repetition
      results = search.search(decoder, {}, values['limits'], of_beam, prompt, repetition=repetition)
    else:
      by_prompt = lambda x: x.reshape(len(requests), copies, *x.shape[2:])
      watch = lambda symbols_B1: np.repeat(listeners(range(len(requests)), by_prompt(symbols_B1)), copies)
      sampler, prompt = numpy_sampling.NumpySampler.of_rows(values, copies), read(reader, prompts, copies)
      keys_B1, limits_B1 = values['keys'].reshape(-1, 1), np.repeat(values['limits'], copies)[:, np.newaxis]
      memory = {'lengths': prompt.lengths_B}
      rows = keys_B1, limits_B1, prompt.last_B, prompt
      limits = {'watch': watch, 'repetition': self._model.repetition}
      drawn = numpy_sampling.sample(decoder, memory, sampler, *rows, **limits)
      ids, lengths, log_probs = map(by_prompt, drawn)
      results = ids, lengths, log_probs, log_probs
    answer = lambda ids, *values: Hypothesis(vocab.decode(ids), *values)
    answers = [translator.of_finite_probability(answer, *of_row) for of_row in zip(*results, strict=True)]
    listeners.finish([best.text for best, *_ in answers])
    return answers


def read(reader: StagedGraph, prompts: Sequence[Sequence[int]], copies: int) -> Prompt:
  """Keys and values of all symbols but the last of each prompt, in `copies` rows each."""
  ids_BP = search.padded([prompt[:-1] for prompt in prompts])
  caches = {}
  if ids_BP.size:
    new = search.run_on_ids(reader, ids_BP)
    caches = {name.replace('new_', 'cache_', 1): np.repeat(cache, copies, axis=0) for name, cache in new.items()}
  lengths_B = np.repeat([len(prompt) - 1 for prompt in prompts], copies).astype(np.int32)
  last_B = np.repeat([prompt[-1] for prompt in prompts], copies).astype(np.int32)
  symbols_BP = np.repeat(search.padded([prompt[::-1] for prompt in prompts])[:, ::-1], copies, axis=0)
  return Prompt(last_B, lengths_B, np.arange(ids_BP.shape[1]) < lengths_B[:, np.newaxis], caches, symbols_BP)
