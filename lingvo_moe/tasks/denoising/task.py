"""Denoising as a task of the jobs."""

from __future__ import annotations

import functools

import numpy as np

from lingvo_moe.tasks import inference, task
from lingvo_moe.tasks.batches import BATCH_KEYS, SOURCE_KEYS, padded, shapes
from lingvo_moe.tasks.denoising.config import DenoisingConfig
from lingvo_moe.tasks.denoising.filling import Filler
from lingvo_moe.tasks.denoising.held_out import PerplexityJob
from lingvo_moe.tasks.denoising.input import HeldOutInput, TrainInput
from lingvo_moe.tasks.denoising.vocab import SentinelVocab
from lingvo_moe.tasks.plain_text import vocab as vocab_lib
from lingvo_moe.tasks.plain_text.task import PlainTextTask
from lingvo_moe.tasks.vocab import EOS


class DenoisingTask(PlainTextTask):
  """Denoising: perplexity of what spans stand for, and texts with their spans filled in."""

  config: DenoisingConfig
  token_counts = ('source_tokens', 'target_tokens')
  train_input_class = TrainInput
  dev_input_class = HeldOutInput
  held_out_job_class = PerplexityJob
  translator_class = Filler

  @property
  def max_length(self) -> int:
    return self.config.inputs_length

  @functools.cached_property
  def vocabs(self) -> SentinelVocab:
    return SentinelVocab(vocab_lib.load(self.config), self.config.sentinels)

  def random_batch(self, seed: int = 0, full: bool = True) -> task.Batch:
    """Batch of random ids: full rows, or rows of 1 or more tokens with padding after them."""
    rng, rows = np.random.default_rng(seed), self.config.rows_of_batch()
    size = self.config.model().target_embedding.vocab_size
    one = lambda length: np.append(rng.integers(4, size, length - 1), EOS)
    some = lambda most: [one(most if full else rng.integers(1, most + 1)) for _ in range(rows)]
    inputs, targets = self.config.inputs_length, self.config.lengths.targets
    source = padded(some(inputs), rows, inputs)
    return source.source() | padded(some(targets), rows, targets).target()

  def batch_shapes(self, training: bool = True) -> task.Batch:
    rows = self.config.rows_of_batch(training)
    length = lambda key: self.config.inputs_length if key in SOURCE_KEYS else self.config.lengths.targets
    return {key: shapes(rows, length(key)) for key in BATCH_KEYS}

  def inference_programs(self) -> dict[str, task.InferenceProgram]:
    batch = self.batch_shapes(training=False)
    return inference.programs(batch, batch, self.config)

  def probe_search(self) -> task.InferenceProgram:
    return inference.probe(self.random_batch(full=False), self.config)
