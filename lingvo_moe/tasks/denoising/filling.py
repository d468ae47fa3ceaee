"""Filling in spans: the encoder over a text with sentinels, and flat beam search for what they stand for."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from lingvo_moe.core import text_model
from lingvo_moe.tasks import inference, task
from lingvo_moe.tasks.batches import padded
from lingvo_moe.tasks.denoising.config import DenoisingConfig
from lingvo_moe.tasks.denoising.vocab import SentinelVocab
from lingvo_moe.tasks.plain_text.generation import TextGenerator
from lingvo_moe.tasks.vocab import EOS

_ROUND = 16  # lengths of padded sources are multiples of it, so that few shapes are compiled


class Filler(TextGenerator):
  """Fills in spans with the current weights of a runtime.

  Args:
    config, vocab, runner: as of TextGenerator.
    n_best: hypotheses of each text.
  """

  def __init__(self, config: DenoisingConfig, vocab: SentinelVocab, runner: task.Runner, n_best: int = 1):
    text_model.check_n_best(n_best, config.beam_size)
    super().__init__(config, vocab, runner, functools.partial(inference.search, n_best=n_best))

  def _batch(self, texts: Sequence[np.ndarray], rows: int, first: int) -> task.Batch:
    del first
    length = -(-max(map(len, texts)) // _ROUND) * _ROUND
    return padded(texts, rows, length).as_source()

  def translate(self, texts: Sequence[str], target: str | None = None, first: int = 0) -> task.Answers:
    """Texts with their sentinels filled in; one without any stays as it is."""
    del target, first
    ids = [self._vocab.encode(text) for text in texts]
    answers = [[task.Hypothesis(text, 0.0, 0.0)] for text in texts]
    with_spans = [i for i, row in enumerate(ids) if any(map(self._vocab.is_sentinel, row))]
    room = self._config.inputs_length - 1
    sources = [np.append(ids[i][:room], EOS) for i in with_spans]
    for i, source, found in zip(with_spans, sources, self.decode(sources), strict=True):
      answers[i] = [task.Hypothesis(self._vocab.fill(source, h.ids), h.score, h.log_prob) for h in found]
    return task.Answers(answers, [i for i in with_spans if len(ids[i]) > room])
