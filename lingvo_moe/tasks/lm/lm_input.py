"""Input of a language model: windows of a stream of tokens, the same for any number of processes and after any restart.

The stream of a split is its documents one after the other, each followed by eos. A row of a batch is a window of it:
the labels are `window` tokens of the stream, and the inputs the tokens before them, bos at the beginning of a document.
Every token is a label once an epoch. A row is one segment, whatever documents are in it, and windows begin at another
offset in every epoch. With `packing` documents are shuffled in every epoch, and no position attends to another document
(segments, from 1 in each row; 0 is padding).

A batch is a dict of int32 arrays [B, T], named by BATCH_KEYS. Evaluation adds 'loss_mask', 1 at the tokens that count,
and 'files' [B, P], 1 at the file of a row, for losses by file.
"""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from lingvo_moe.corpora import documents
from lingvo_moe.corpora.temperature_sampling import shuffled
from lingvo_moe.inputs import feed as feed_lib
from lingvo_moe.inputs import token_cache, windows
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.token_cache import TokenCache
from lingvo_moe.models.batches import ArrayBatch
from lingvo_moe.tasks.lm.lm_config import LanguageConfig
from lingvo_moe.vocab.plain_text_vocab import TextVocab
from lingvo_moe.vocab.sentencepiece_vocab import BOS, EOS

BATCH_KEYS = ('inputs', 'labels', 'segments')


class Stream:
  """Documents one after the other, each followed by eos, in a given order: `total` tokens."""

  def __init__(self, text: TokenCache, order: np.ndarray):
    self._text = text
    self._order = order
    self._ends = np.cumsum(text.lengths(order) + 1)
    self.total = int(self._ends[-1]) if len(order) else 0

  def rows(self, starts: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inputs, labels, segments) of windows; past the end the stream begins anew, and segments count documents."""
    position_BT = starts[:, np.newaxis] + np.arange(window)
    at_BT = position_BT % self.total
    document_BT = np.searchsorted(self._ends, at_BT, side='right')
    length_BT = self._text.lengths(self._order[document_BT.ravel()]).reshape(at_BT.shape)
    begin_BT = self._ends[document_BT] - length_BT - 1
    first_BT = self._text.spans(self._order[document_BT.ravel()])[0].reshape(at_BT.shape)
    token = lambda within_BT: self._text.take(np.minimum(first_BT + within_BT, self._text.total - 1))
    within_BT = at_BT - begin_BT
    labels_BT = np.where(within_BT == length_BT, EOS, token(within_BT))
    inputs_BT = np.where(within_BT == 0, BOS, token(np.maximum(within_BT - 1, 0)))
    starts_BT = within_BT == 0
    starts_BT[:, 0] = True
    segments_BT = np.cumsum(starts_BT, axis=1)
    return tuple(x.astype(np.int32) for x in (inputs_BT, labels_BT, segments_BT))


class TrainInput(feed_lib.TrainInput):
  """Training input: windows of the stream of documents; see feed.TrainInput."""

  keys = BATCH_KEYS

  def __init__(self, config: LanguageConfig, vocab: TextVocab, cache_dir: str, feed: Feed):
    super().__init__(config, feed)
    texts = windows.open_text(config.data_dir, 'train', config.documents, vocab, cache_dir, feed.quiet)
    self._text = token_cache.joined(texts)
    self._stream = functools.lru_cache(2)(self._stream_of)
    total = self._stream(0).total
    self._windows = windows.Windows(config, feed, total, config.window)
    epochs = f'{config.rows_of_batch() * config.window / total:.3g} epochs a step'
    self.stats = f'{len(self._text):,} documents, {total:,} tokens with eos, {epochs}'

  @property
  def steps_per_epoch(self) -> float:
    """Steps in which every token is a label once."""
    return self._windows.count / self._config.rows_of_batch()

  def batch(self, step: int) -> ArrayBatch:
    _, epochs, starts = self._windows.of_step(step)
    arrays = [np.zeros([len(starts), self._config.window], np.int32) for _ in BATCH_KEYS]
    for epoch in np.unique(epochs).tolist():
      of_epoch = epochs == epoch
      stream = self._stream(epoch if self._config.packing else 0)
      for array, values in zip(arrays, stream.rows(starts[of_epoch], self._config.window), strict=True):
        array[of_epoch] = values
    batch = dict(zip(BATCH_KEYS, arrays, strict=True))
    return batch if self._config.packing else batch | {'segments': np.ones_like(batch['segments'])}

  def _stream_of(self, epoch: int) -> Stream:
    order = np.arange(len(self._text))
    if self._config.packing:
      order = shuffled(len(order), self._config.seed, 'documents', epoch)
    return Stream(self._text, order)


class HeldOutInput(windows.HeldOutInput):
  """Batches of held-out text: each token counts once, given the up to `window` - 1 before it.

  Windows begin every eval_stride tokens. In each but the first of a file, the last eval_stride tokens count.
  """

  def __init__(
    self, config: LanguageConfig, vocab: TextVocab, cache_dir: str, feed: Feed, split: str = 'dev', first: int = 0
  ):
    super().__init__(config, vocab, cache_dir, feed, split, config.documents)
    texts, paths = self._texts, self._paths
    orders = [np.arange(min(len(text), first or len(text))) for text in texts]
    self._streams = [Stream(text, order) for text, order in zip(texts, orders, strict=True)]
    # (words, bytes, documents) of each file; and the totals by which the loss is reported too.
    self.files = [_units(path, config.documents, len(order)) for path, order in zip(paths, orders, strict=True)]
    self.units = {'words': sum(f[0] for f in self.files), 'bytes': sum(f[1] for f in self.files)}
    stride = config.eval_stride or config.window
    self.fingerprint = hashlib.sha256(b''.join(text.tokens.tobytes() for text in texts)).hexdigest()  # of the tokens
    self.examples = []  # (file, start, the first position that counts)
    for file, stream in enumerate(self._streams):
      count = 1 + max(0, -(-(stream.total - config.window) // stride))
      starts = (np.arange(count) * stride).tolist()
      self.examples += [(file, s, s + config.window - stride if s else 0) for s in starts]
    layout = repr((self.subsets, self.examples, self._rows, self.fingerprint))
    offsets = b''.join(text.offsets.tobytes() for text in texts)
    self.content_hash = hashlib.sha256(layout.encode() + offsets).hexdigest()[:16]
    total = sum(stream.total for stream in self._streams)
    self.stats = f'{len(paths)} files, {sum(map(len, orders)):,} documents, {total:,} tokens with eos'

  def arrays(self, examples: Sequence[tuple[int, int, int]], rows: int) -> ArrayBatch:
    config = self._config
    batch = {key: np.zeros([rows, config.window], np.int32) for key in (*BATCH_KEYS, 'loss_mask')}
    for row, (file, start, first) in enumerate(examples):
      stream = self._streams[file]
      position_T = start + np.arange(config.window)
      real_T = position_T < stream.total
      for key, values in zip(BATCH_KEYS, stream.rows(np.array([start]), config.window), strict=True):
        batch[key][row] = values[0] * real_T
      if not config.packing:
        batch['segments'][row] = real_T
      batch['loss_mask'][row] = real_T & (position_T >= first)
    return batch


def _units(path: str, kind: str, count: int) -> tuple[int, int, int]:
  """Words (between spaces), bytes and number of the first documents of a file."""
  words = size = 0
  for number, document in enumerate(documents.documents(path, kind)):
    if number < count:
      words += len(document.split())
      size += len(document.encode())
  return words, size, count
