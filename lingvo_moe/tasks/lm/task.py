"""Language modelling as a task of the jobs: implements the protocol of tasks/task.py for LanguageConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import documents
from lingvo_moe.tasks import metrics as metrics_lib
from lingvo_moe.tasks.plain_text import run_vocab
from lingvo_moe.tasks.plain_text.vocab import TextVocab
from lingvo_moe.tasks.task import Feed
from lingvo_moe.tasks.task import HeldOutJob
from lingvo_moe.tasks.task import HeldOutOptions
from lingvo_moe.tasks.task import InferenceProgram
from lingvo_moe.tasks.task import Runner
from lingvo_moe.tasks.vocab import BOS

if TYPE_CHECKING:
  from lingvo_moe.tasks.lm.config import LanguageConfig
  from lingvo_moe.tasks.lm.generation import Continuer
  from lingvo_moe.tasks.lm.input import HeldOutInput
  from lingvo_moe.tasks.lm.input import TrainInput


class LanguageTask:
  """The methods of a LanguageConfig that jobs and tools use; see TaskConfig, Translates, Generates and Measurable.

  Modules that import LanguageConfig, or are slow to import, are imported where they are used.
  """

  token_counts = ('target_tokens',)
  subset = 'file'
  max_length = 0  # prompts of any length are continued

  def check_corpus(self: LanguageConfig) -> None:
    for split in ('train', 'dev'):
      documents.find_files(self.data_dir, split)

  def corpus_files(self: LanguageConfig) -> dict[str, list[str]]:
    return {split: documents.find_files(self.data_dir, split) for split in ('train', 'dev')}

  def prepare(self: LanguageConfig, folder: str, begun: bool) -> LanguageConfig:
    return run_vocab.prepare(self, folder, begun)

  def with_files(self: LanguageConfig, rename: Callable[[str], str]) -> LanguageConfig:
    return run_vocab.with_files(self, rename)

  def vocabs(self: LanguageConfig) -> TextVocab:
    return run_vocab.load(self)

  def foreign_weights(self: LanguageConfig, vocabs: TextVocab, other: Any) -> set[str]:
    """The embeddings, whose vocabulary may be another there."""
    same = isinstance(other, LanguageTask) and other.vocabs().fingerprint == vocabs.fingerprint
    return set() if same else {'target_embedding', 'output_embedding'}

  def train_input(self: LanguageConfig, vocabs: TextVocab, cache_dir: str, feed: Feed) -> TrainInput:
    from lingvo_moe.tasks.lm.input import TrainInput

    return TrainInput(self, vocabs, cache_dir, feed)

  def dev_input(self: LanguageConfig, vocabs: TextVocab, cache_dir: str, feed: Feed) -> HeldOutInput:
    from lingvo_moe.tasks.lm.input import HeldOutInput

    return HeldOutInput(self, vocabs, cache_dir, feed)

  def scalars(self, metrics: Mapping[str, Any]) -> dict[str, float]:
    return metrics_lib.scalars(metrics)

  def held_out_job(self: LanguageConfig, vocabs: TextVocab, runner: Runner, options: HeldOutOptions) -> HeldOutJob:
    """Perplexity of held-out text, and but for options.score continuations of the prompt."""
    from lingvo_moe.tasks.lm.held_out import PerplexityJob

    return PerplexityJob(self, vocabs, runner, options)

  def continuer(self: LanguageConfig, vocabs: TextVocab, runner: Runner, n_best: int = 1) -> Continuer:
    from lingvo_moe.tasks.lm.generation import Continuer

    return Continuer(self, vocabs, runner, n_best)

  def translator(self: LanguageConfig, vocabs: TextVocab, runner: Runner, n_best: int = 1) -> Continuer:
    """Continues lines as prompts."""
    return self.continuer(vocabs, runner, n_best)

  def choose_target(self: LanguageConfig, vocabs: TextVocab, asked: str | None) -> None:
    if asked:
      raise UserError(f'a language model continues text and has no target language; saw --target={asked}: leave it out')

  # What tools that compile or compare programs use; see task.Measurable.

  def random_batch(self: LanguageConfig, seed: int = 0, full: bool = True) -> dict[str, np.ndarray]:
    """Batch of random ids: rows of `window` tokens, or of 1 to `window` with padding after them."""
    rng = np.random.default_rng(seed)
    shape = self.rows_of_batch(), self.window
    lengths_B1 = np.full([shape[0], 1], self.window) if full else rng.integers(1, self.window + 1, [shape[0], 1])
    segments_BT = (np.arange(self.window) < lengths_B1).astype(np.int32)
    labels_BT = rng.integers(4, self.model().target_embedding.vocab_size, shape, np.int32) * segments_BT
    inputs_BT = np.concatenate([np.full([shape[0], 1], BOS, np.int32), labels_BT[:, :-1]], axis=1) * segments_BT
    return {'inputs': inputs_BT, 'labels': labels_BT, 'segments': segments_BT}

  def batch_shapes(self: LanguageConfig, training: bool = True) -> dict[str, np.ndarray]:
    """Batch with the shapes of a real one: zeros that take no memory."""
    zeros_BT = np.broadcast_to(np.zeros([], np.int32), [self.rows_of_batch(training), self.window])
    return dict.fromkeys(('inputs', 'labels', 'segments'), zeros_BT)

  def inference_programs(self: LanguageConfig) -> dict[str, InferenceProgram]:
    from lingvo_moe.tasks.lm import generation

    shapes = self.batch_shapes(training=False)
    prompts = generation.prompt_shapes(self, self.beam_size)
    search = lambda model, theta, batch: generation.go_on(model, theta, batch, self, self.beam_size)
    return {
      'eval': InferenceProgram(lambda model, theta, batch: model.loss(theta, batch)[1], shapes),
      'score': InferenceProgram(lambda model, theta, batch: model.token_scores(theta, batch), shapes),
      'decode': InferenceProgram(search, prompts),
    }

  def probe_search(self: LanguageConfig) -> InferenceProgram:
    """Beam search after the beginnings of the first rows of a random batch, with all hypotheses."""
    from lingvo_moe.tasks.lm import generation

    config = dataclasses.replace(self, search='beam')
    ids_BT = self.random_batch(full=True)['inputs'][: self.num_groups]
    prompts = [row[: 1 + i % (self.window // 2)] for i, row in enumerate(ids_BT)]
    batch = generation.prompt_arrays(prompts, config, self.beam_size)
    steps = min(self.max_new_tokens, self.window)
    config = dataclasses.replace(config, max_new_tokens=steps)
    search = lambda model, theta, batch: generation.go_on(model, theta, batch, config, self.beam_size)
    return InferenceProgram(search, batch)
