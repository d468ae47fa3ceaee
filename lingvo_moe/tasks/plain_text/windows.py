"""Windows of a text: its tokens on disk, and their order in training, the same after any restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core import files
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import documents
from lingvo_moe.corpora.sampling import fold
from lingvo_moe.corpora.sampling import permute
from lingvo_moe.tasks import token_cache
from lingvo_moe.tasks.plain_text.vocab import TextVocab
from lingvo_moe.tasks.task import Feed
from lingvo_moe.tasks.token_cache import TokenCache
from lingvo_moe.tasks.transformer_config import BatchConfig

Batch = dict[str, np.ndarray]


def open_text(
  data_dir: str, split: str, kind: str, vocab: TextVocab, cache_dir: str, quiet: bool = False
) -> list[TokenCache]:
  """Tokens of each file of a split, by documents of a kind of documents.DOCUMENTS; UserError where there is no text."""
  found = documents.find_files(data_dir, split)

  def tokenise(paths: Sequence[str], vocab: TextVocab, progress: Callable[[int], None]) -> Iterator:
    for path in paths:
      for document in documents.documents(path, kind):
        ids = vocab.encode(document)
        if len(ids):
          yield ids, np.array([len(ids)], np.int64)
      progress(files.size(path))
      yield np.zeros(0, np.int32), np.zeros(0, np.int64)

  entries = [token_cache.Entry(f'{documents.name_of(path)}.{kind}', [path], vocab) for path in found]
  texts = token_cache.open_entries(entries, tokenise, cache_dir, quiet=quiet)
  for path, text in zip(found, texts, strict=True):
    if not len(text.tokens):
      raise documents.no_text(path)
  return texts


def joined(texts: Sequence[TokenCache]) -> TokenCache:
  """All files as one."""
  if len(texts) == 1:
    return texts[0]
  return _Joined(texts)


class _Joined:
  """Several token caches, one after the other, as one."""

  def __init__(self, texts: Sequence[TokenCache]):
    self.tokens = np.concatenate([text.tokens for text in texts])
    begins = np.cumsum([0] + [len(text.tokens) for text in texts[:-1]])
    parts = [text.offsets[:-1] + begin for text, begin in zip(texts, begins, strict=True)]
    self.offsets = np.concatenate([*parts, [len(self.tokens)]])

  def __len__(self) -> int:
    return len(self.offsets) - 1

  lengths = TokenCache.lengths


def check_feed(config: BatchConfig, feed: Feed) -> None:
  """Raises UserError unless every process can take as many rows of each batch."""
  if config.num_groups % feed.process_count:
    raise UserError(
      f'every process takes as many rows of each batch; saw num_groups={config.num_groups} for {feed.process_count} '
      f'processes: use a multiple of {feed.process_count}'
    )


class Windows:
  """Windows of a text in the order of training: each once an epoch, shuffled, from another offset in every epoch.

  Attributes:
    count: number of windows in an epoch.
  """

  def __init__(self, total: int, length: int, seed: int):
    self.count = max(1, total // length)
    self._length = length
    self._seed = seed

  def __call__(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(epoch, first token) of windows by their numbers since training began; they may pass the end of the text."""
    epochs = drawn // self.count
    starts = np.empty_like(drawn)
    for epoch in np.unique(epochs).tolist():
      mine = epochs == epoch
      number = permute(drawn[mine] % self.count, self.count, fold(self._seed, 'windows', epoch))
      offset = int(fold(self._seed, 'offset', epoch) % np.uint64(self._length))
      starts[mine] = offset + number * self._length
    return epochs, starts


def dataset(batch: Callable[[int], Batch], keys: Sequence[str], start_step: int, prefetch: int) -> tf.data.Dataset:
  """Dataset of batch(step) from `start_step` on, made in the background while earlier ones are used."""

  def one(step):
    values = tf.numpy_function(
      lambda step: list(map(batch(int(step)).__getitem__, keys)), [step], [tf.int32] * len(keys)
    )
    return {key: tf.ensure_shape(value, [None, None]) for key, value in zip(keys, values, strict=True)}

  return tf.data.Dataset.range(start_step, 2**62).map(one).prefetch(prefetch)
