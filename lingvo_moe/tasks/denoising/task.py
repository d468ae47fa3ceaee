"""Denoising as a task of the jobs: implements the protocol of tasks/task.py for DenoisingConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import documents
from lingvo_moe.tasks import metrics as metrics_lib
from lingvo_moe.tasks.batch_keys import BATCH_KEYS
from lingvo_moe.tasks.batch_keys import SOURCE_KEYS
from lingvo_moe.tasks.denoising.vocab import SentinelVocab
from lingvo_moe.tasks.plain_text import run_vocab
from lingvo_moe.tasks.task import Feed
from lingvo_moe.tasks.task import HeldOutJob
from lingvo_moe.tasks.task import HeldOutOptions
from lingvo_moe.tasks.task import InferenceProgram
from lingvo_moe.tasks.task import Runner
from lingvo_moe.tasks.vocab import EOS

if TYPE_CHECKING:
  from lingvo_moe.tasks.denoising.config import DenoisingConfig
  from lingvo_moe.tasks.denoising.filling import Filler
  from lingvo_moe.tasks.denoising.input import HeldOutInput
  from lingvo_moe.tasks.denoising.input import TrainInput


class DenoisingTask:
  """The methods of a DenoisingConfig that jobs and tools use; see TaskConfig, Translates and Measurable.

  Modules that import DenoisingConfig, or are slow to import, are imported where they are used.
  """

  token_counts = ('source_tokens', 'target_tokens')
  subset = 'file'

  @property
  def max_length(self: DenoisingConfig) -> int:
    """Tokens of a line that is filled in, with its end."""
    return self.inputs_length

  def check_corpus(self: DenoisingConfig) -> None:
    for split in ('train', 'dev'):
      documents.find_files(self.data_dir, split)

  def corpus_files(self: DenoisingConfig) -> dict[str, list[str]]:
    return {split: documents.find_files(self.data_dir, split) for split in ('train', 'dev')}

  def prepare(self: DenoisingConfig, folder: str, begun: bool) -> DenoisingConfig:
    return run_vocab.prepare(self, folder, begun)

  def with_files(self: DenoisingConfig, rename: Callable[[str], str]) -> DenoisingConfig:
    return run_vocab.with_files(self, rename)

  def vocabs(self: DenoisingConfig) -> SentinelVocab:
    return SentinelVocab(run_vocab.load(self), self.sentinels)

  def foreign_weights(self: DenoisingConfig, vocabs: SentinelVocab, other: Any) -> set[str]:
    """The embedding, whose vocabulary may be another there."""
    same = isinstance(other, DenoisingTask) and other.vocabs().fingerprint == vocabs.fingerprint
    return set() if same else {'target_embedding'}

  def train_input(self: DenoisingConfig, vocabs: SentinelVocab, cache_dir: str, feed: Feed) -> TrainInput:
    from lingvo_moe.tasks.denoising.input import TrainInput

    return TrainInput(self, vocabs, cache_dir, feed)

  def dev_input(self: DenoisingConfig, vocabs: SentinelVocab, cache_dir: str, feed: Feed) -> HeldOutInput:
    from lingvo_moe.tasks.denoising.input import HeldOutInput

    return HeldOutInput(self, vocabs, cache_dir, feed)

  def scalars(self, metrics: Mapping[str, Any]) -> dict[str, float]:
    return metrics_lib.scalars(metrics)

  def held_out_job(self: DenoisingConfig, vocabs: SentinelVocab, runner: Runner, options: HeldOutOptions) -> HeldOutJob:
    """Perplexity of the targets of held-out text, and but for options.score windows filled in."""
    from lingvo_moe.tasks.denoising.held_out import DenoisingJob

    return DenoisingJob(self, vocabs, runner, options)

  def translator(self: DenoisingConfig, vocabs: SentinelVocab, runner: Runner, n_best: int = 1) -> Filler:
    """Fills in the sentinels of lines."""
    from lingvo_moe.tasks.denoising.filling import Filler

    return Filler(self, vocabs, runner, n_best)

  def choose_target(self: DenoisingConfig, vocabs: SentinelVocab, asked: str | None) -> None:
    if asked:
      raise UserError(f'this model fills in text and has no target language; saw --target={asked}: leave it out')

  # What tools that compile or compare programs use; see task.Measurable.

  def random_batch(self: DenoisingConfig, seed: int = 0, full: bool = True) -> dict[str, np.ndarray]:
    """Batch of random ids: full rows, or rows of 1 or more tokens with padding after them."""
    from lingvo_moe.tasks.denoising.input import source_arrays
    from lingvo_moe.tasks.denoising.input import target_arrays

    rng, rows, size = np.random.default_rng(seed), self.rows_of_batch(), self.model().target_embedding.vocab_size
    one = lambda length: np.append(rng.integers(4, size, length - 1), EOS)
    some = lambda most: [one(most if full else rng.integers(1, most + 1)) for _ in range(rows)]
    of_inputs, of_targets = self.inputs_length, self.lengths.targets
    batch = source_arrays(some(of_inputs), rows, of_inputs)
    return batch | target_arrays(some(of_targets), rows, of_targets)

  def batch_shapes(self: DenoisingConfig, training: bool = True) -> dict[str, np.ndarray]:
    """Batch with the shapes of a real one: zeros that take no memory."""
    rows = self.rows_of_batch(training)
    length = lambda key: self.inputs_length if key in SOURCE_KEYS else self.lengths.targets
    return {key: np.broadcast_to(np.zeros([], np.int32), [rows, length(key)]) for key in BATCH_KEYS}

  def inference_programs(self: DenoisingConfig) -> dict[str, InferenceProgram]:
    """'eval': dev loss; 'score': log-probabilities of given targets; 'encode': the encoder; 'decode': beam search."""
    from lingvo_moe.tasks.denoising import filling

    batch = self.batch_shapes(training=False)
    sources = {name: batch[name] for name in SOURCE_KEYS}
    return {
      'eval': InferenceProgram(lambda model, theta, batch: model.loss(theta, batch)[1], batch),
      'score': InferenceProgram(lambda model, theta, batch: model.score(theta, batch), batch),
      'encode': InferenceProgram(lambda model, theta, batch: model.encode(theta, batch)[0], sources, by_rows=True),
      'decode': InferenceProgram(lambda model, theta, batch: filling.search(model, theta, batch, self), sources),
    }

  def probe_search(self: DenoisingConfig) -> InferenceProgram:
    """Beam search for the first sources of a random batch, with all hypotheses."""
    from lingvo_moe.tasks.denoising import filling

    batch = self.random_batch(full=False)
    rows = self.num_groups  # a multiple of the parts into which any mesh splits rows
    return InferenceProgram(
      lambda model, theta, batch: filling.search(model, theta, batch, self, self.beam_size),
      {name: batch[name][:rows] for name in SOURCE_KEYS},
    )
