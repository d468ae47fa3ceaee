"""Task of a model of plain text: its corpus and its one vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lingvo_moe.corpora import documents
from lingvo_moe.tasks import task
from lingvo_moe.tasks.plain_text import vocab as vocab_lib
from lingvo_moe.tasks.plain_text.config import PlainTextConfig
from lingvo_moe.tasks.task import Task


class PlainTextTask(Task):
  """Base of language modelling and denoising.

  Attributes:
    train_input_class: its TrainInput, of (config, vocabs, cache_dir, feed).
    dev_input_class: its DevInput, of the same.
    held_out_job_class: its HeldOutJob, of (config, vocabs, runner, options).
    translator_class: its Translator, of (config, vocabs, runner, n_best).
  """

  config: PlainTextConfig
  train_input_class: type[task.TrainInput]
  dev_input_class: type[task.DevInput]
  held_out_job_class: type[task.HeldOutJob]
  translator_class: type[task.Translator]

  @functools.cached_property
  def vocabs(self) -> Any:
    """The vocabulary."""
    return vocab_lib.load(self.config)

  def check_corpus(self) -> None:
    self.corpus_files()

  def corpus_files(self) -> dict[str, list[str]]:
    return {split: documents.find_files(self.config.data_dir, split) for split in ('train', 'dev')}

  def prepare(self, folder: str, begun: bool) -> PlainTextConfig:
    return vocab_lib.prepare(self.config, folder, begun)

  def with_files(self, rename: Callable[[str], str]) -> PlainTextConfig:
    return vocab_lib.with_files(self.config, rename)

  def train_input(self, cache_dir: str, feed: task.Feed) -> task.TrainInput:
    return self.train_input_class(self.config, self.vocabs, cache_dir, feed)

  def dev_input(self, cache_dir: str, feed: task.Feed) -> task.DevInput:
    return self.dev_input_class(self.config, self.vocabs, cache_dir, feed)

  def held_out_job(self, runner: task.Runner, options: task.HeldOutOptions) -> task.HeldOutJob:
    """Perplexity of held-out text, and but for options.score some samples."""
    return self.held_out_job_class(self.config, self.vocabs, runner, options)

  def translator(self, runner: task.Runner, n_best: int = 1) -> task.Translator:
    return self.translator_class(self.config, self.vocabs, runner, n_best)

  def foreign_weights(self, other: Task) -> set[str]:
    """The embeddings, whose vocabulary may be another there."""
    same = isinstance(other, PlainTextTask) and other.vocabs.fingerprint == self.vocabs.fingerprint
    return set() if same else {'target_embedding', 'output_embedding'}
