"""Task of a model of plain text: its corpus and its one vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lingvo_moe.corpora import documents
from lingvo_moe.tasks.plain_text import vocab as vocab_lib
from lingvo_moe.tasks.plain_text.config import PlainTextConfig
from lingvo_moe.tasks.task import Task


class PlainTextTask(Task):
  """Base of language modelling and denoising."""

  config: PlainTextConfig

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

  def foreign_weights(self, other: Task) -> set[str]:
    """The embeddings, whose vocabulary may be another there."""
    same = isinstance(other, PlainTextTask) and other.vocabs.fingerprint == self.vocabs.fingerprint
    return set() if same else {'target_embedding', 'output_embedding'}
