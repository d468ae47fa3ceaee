"""Input of a denoising model: corrupted windows of a text, the same for any number of processes and after any restart.

The text of a split is its files one after the other. In training a row is a window of it, every token is in a window
once an epoch, and windows begin at another offset in every epoch; noise depends on the seed and the number of the
window since training began. In evaluation windows follow each other from the beginning of each file, the last one
shorter, and noise depends on the number of the window in its file alone.

A batch is a dict of int32 arrays by batches.BATCH_KEYS, inputs of [B, inputs_length] and targets of [B, T], all of
which are full in training. Evaluation adds 'files' [B, P], 1 at the file of a row, for losses by file.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.temperature_sampling import fold
from lingvo_moe.inputs import feed as feed_lib
from lingvo_moe.inputs import token_cache, windows
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.models.batches import BATCH_KEYS, ArrayBatch, padded
from lingvo_moe.tasks.denoising import spans
from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
from lingvo_moe.vocab.sentinel_vocab import SentinelVocab


class TrainInput(feed_lib.TrainInput):
  """Training input: corrupted windows of the text; see feed.TrainInput."""

  keys = BATCH_KEYS

  def __init__(self, config: DenoisingConfig, vocab: SentinelVocab, cache_dir: str, feed: Feed):
    super().__init__(config, feed)
    self._first_sentinel = vocab.first_sentinel
    texts = windows.open_text(config.data_dir, 'train', 'file', vocab.text, cache_dir, feed.quiet)
    self._text = token_cache.joined(texts)
    window, inputs, targets = config.lengths
    self._windows = windows.Windows(config, feed, self._text.total, window)
    epochs = f'{config.rows_of_batch() * window / self._text.total:.3g} epochs a step'
    self.stats = f'{self._text.total:,} tokens, {epochs}; windows of {window} make {inputs} inputs, {targets} targets'

  def batch(self, step: int) -> ArrayBatch:
    config, window = self._config, self._config.lengths.window
    numbers, _, starts = self._windows.of_step(step)
    ids_BT = self._text.take((starts[:, np.newaxis] + np.arange(window)) % self._text.total)
    noise = spans.counts(window, config.noise_density, config.mean_span)
    mask_BT = spans.random_mask(window, noise, fold(config.seed, 'noise', numbers))
    inputs, targets = spans.corrupt(ids_BT, mask_BT, self._first_sentinel)
    source = padded(inputs, len(inputs), config.inputs_length)
    return source.as_source() | padded(targets, *targets.shape).as_target()


class HeldOutInput(windows.HeldOutInput):
  """Batches of held-out text, the same at every call and for every seed; each token is in one window."""

  def __init__(
    self, config: DenoisingConfig, vocab: SentinelVocab, cache_dir: str, feed: Feed, split: str = 'dev', first: int = 0
  ):
    super().__init__(config, vocab.text, cache_dir, feed, split)
    hashes = [hashlib.sha256(text.tokens.tobytes()).hexdigest()[:16] for text in self._texts]
    self.fingerprints = dict(zip(self.subsets, hashes, strict=True))  # of the tokens of each file, by its name
    self.examples = [  # (file, inputs, targets) of each window
      (file, *example)
      for file, text in enumerate(self._texts)
      for example in _examples(config, vocab, text.tokens, first)
    ]
    layout = repr((self.fingerprints, len(self.examples), self._rows))
    self.content_hash = hashlib.sha256(layout.encode()).hexdigest()[:16]
    total = sum(text.total for text in self._texts)
    if not self.examples:
      raise UserError(
        f'held-out text needs 2 tokens or more to corrupt; {self._paths[0]} has {total}: give a longer one'
      )
    self.stats = f'{len(self._paths)} files, {total:,} tokens, {len(self.examples):,} windows'

  def arrays(self, examples: Sequence[tuple[int, np.ndarray, np.ndarray]], rows: int) -> ArrayBatch:
    source = padded([inputs for _, inputs, _ in examples], rows, self._config.inputs_length)
    target = padded([targets for *_, targets in examples], rows, self._config.lengths.targets)
    return source.as_source() | target.as_target()


def _examples(
  config: DenoisingConfig, vocab: SentinelVocab, tokens: np.ndarray, first: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """(inputs, targets) of the windows of a file, or of its `first`; a last token alone is left out."""
  window = config.lengths.window
  starts = range(0, len(tokens) - 1, window)
  for number, start in enumerate(starts[: first or None]):
    ids_1T = tokens[start : start + window][np.newaxis]
    noise = spans.counts(ids_1T.shape[1], config.noise_density, config.mean_span)
    mask_1T = spans.random_mask(ids_1T.shape[1], noise, fold('held out', np.array([number])))
    inputs, targets = spans.corrupt(ids_1T, mask_1T, vocab.first_sentinel)
    yield inputs[0], targets[0]
