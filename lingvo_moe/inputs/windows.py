"""Windows of a text: its tokens on disk, and their order in training, the same after any restart."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_moe.core.progress import Advance
from lingvo_moe.corpora import documents
from lingvo_moe.corpora import text as text_lib
from lingvo_moe.corpora.temperature_sampling import fold, permute
from lingvo_moe.inputs import feed as feed_lib
from lingvo_moe.inputs import token_cache
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.plain_text_config import PlainTextConfig
from lingvo_moe.inputs.token_cache import TokenCache
from lingvo_moe.models.batches import ArrayBatch
from lingvo_moe.storage import files
from lingvo_moe.vocab.plain_text_vocab import TextVocab


def open_text(
  data_dir: str, split: str, kind: str, vocab: TextVocab, cache_dir: str, quiet: bool = False
) -> list[TokenCache]:
  """Tokens of each file of a split, by documents of a kind of documents.DOCUMENTS; UserError where there is no text."""
  files_of_split = documents.find_files(data_dir, split)

  def tokenise(parts: Iterator[text_lib.FilePart], progress: Advance) -> Iterator:
    for part in parts:
      encoded = map(vocab.encode, documents.documents(part.path, kind))
      for ids in itertools.islice((ids for ids in encoded if len(ids)), part.first, part.last):
        yield ids, np.array([len(ids)], np.int64)
      progress(files.size(part.path))
      yield np.zeros(0, np.int32), np.zeros(0, np.int64)

  entry = lambda path: token_cache.CacheEntry(
    f'{documents.name_of(path)}.{kind}', [path], vocab, tokenise, by_line=False
  )
  texts = token_cache.open_entries(list(map(entry, files_of_split)), cache_dir, quiet=quiet)
  for path, text in zip(files_of_split, texts, strict=True):
    if not text.total:
      raise documents.no_text(path)
  return texts


class Windows:
  """Windows of a text in the order of training: `count` an epoch, shuffled, from another offset in every epoch."""

  def __init__(self, config: PlainTextConfig, feed: Feed, total: int, length: int):
    self.count = max(1, total // length)
    self._length = length
    self._seed = config.seed
    self._rows = config.rows_of_batch()
    self._feed = feed

  def of_step(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(number, epoch, first token) of the windows that this process feeds; they may pass the end of the text.

    Windows are numbered since training began.
    """
    rows_of_process = self._rows // self._feed.process_count
    numbers = step * self._rows + self._feed.process_index * rows_of_process + np.arange(rows_of_process)
    epochs = numbers // self.count
    starts = np.empty_like(numbers)
    for epoch in np.unique(epochs).tolist():
      of_epoch = epochs == epoch
      place = permute(numbers[of_epoch] % self.count, self.count, fold(self._seed, 'windows', epoch))
      offset = int(fold(self._seed, 'offset', epoch) % np.uint64(self._length))
      starts[of_epoch] = offset + place * self._length
    return numbers, epochs, starts


class HeldOutInput(feed_lib.DevInput):
  """Batches of held-out text, in order; a row is a window of a file.

  A batch has 'files' [B, P], 1 at the file of a row, for losses by file.
  """

  examples: list[tuple]  # the windows; each begins with the number of its file

  def __init__(
    self, config: PlainTextConfig, vocab: TextVocab, cache_dir: str, feed: Feed, split: str, kind: str = 'file'
  ):
    self._config, self._feed = config, feed
    self._rows = config.rows_of_batch(training=False)
    self._paths = documents.find_files(config.data_dir, split)
    self._texts = open_text(config.data_dir, split, kind, vocab, cache_dir, feed.quiet)
    self.subsets = list(map(documents.name_of, self._paths))

  def arrays(self, examples: Sequence[tuple], rows: int) -> ArrayBatch:
    """Arrays of a batch with some windows in its first rows."""
    raise NotImplementedError

  def __len__(self) -> int:
    return -(-len(self.examples) // self._rows)

  def __iter__(self) -> Iterator[ArrayBatch]:
    rows_of_process = self._rows // self._feed.process_count
    for number in range(len(self)):
      start = number * self._rows + self._feed.process_index * rows_of_process
      examples = self.examples[start : start + rows_of_process]
      files_BP = np.zeros([rows_of_process, len(self.subsets)], np.int32)
      for row, (file, *_) in enumerate(examples):
        files_BP[row, file] = 1
      yield self.arrays(examples, rows_of_process) | {'files': files_BP}
