"""Input pipelines: batches for training, for evaluation and for decoding.

A batch is a dict of int32 arrays [B, T], named by batches.BATCH_KEYS. Segments number the examples in a row from 1
and are 0 at padding; positions count from 0 in each segment; sources and labels end with eos, inputs begin with bos,
unless the configuration has tags behind sources, or another begin.
Evaluation adds 'pairs' [B, P], which is 1 at the language pair of a row and 0 elsewhere (an empty row has only zeros),
for losses by pair.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import temperature_sampling, text
from lingvo_moe.corpora.temperature_sampling import shuffled
from lingvo_moe.inputs import feed as feed_lib
from lingvo_moe.inputs import mixture
from lingvo_moe.inputs.augmentation import Augmentation, Rows
from lingvo_moe.inputs.batching import BatchPlan
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.inputs.examples import Examples
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.models import batches
from lingvo_moe.models.batches import ArrayBatch
from lingvo_moe.storage import files, json_files
from lingvo_moe.vocab.language_tags import Languages
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

_PLAN_VERSION = 1
_SAVE_EVERY = 64  # windows


class _Window(NamedTuple):
  """Window of examples, with the plans of its batches in the order of training."""

  pair: np.ndarray
  line: np.ndarray
  plans: list[BatchPlan]
  rows: list[Rows] | None = None  # of augmented examples: their sources and targets


class TrainInput(feed_lib.TrainInput):
  """Training input: batches of sentence pairs; see feed.TrainInput."""

  keys = batches.BATCH_KEYS

  def __init__(self, config: DataConfig, vocabs: tuple[TaggedVocab, TaggedVocab], cache_dir: str, feed: Feed):
    super().__init__(config, feed)
    self._examples = Examples(config, 'train', cache_dir, vocabs, feed.quiet)
    self.stats = self._examples.stats
    self._batcher = config.batcher()
    pairs, sizes = [pair.name for pair in self._examples.pairs], self._examples.sizes
    weights = config.weights_of(pairs)
    drawn = stages = [temperature_sampling.shares(sizes, config.temperature, weights)]
    if config.corpora:
      kept = [pair.kept for pair in self.stats.pairs]
      of_pairs = self._examples.corpora, pairs, kept, config.temperature, weights
      stages = [mixture.shares(*of_pairs, step) for step in mixture.stages(config.mixture)]
      self.stats = dataclasses.replace(self.stats, shares=mixture.summary(self._examples.corpora, stages))
      drawn = [mixture.drawn(of_stage, kept, sizes) for of_stage in stages]
    labels = zip(pairs, self._examples.corpora, strict=True)
    names = [name if corpus.prefix == 'train' else f'{name}/{corpus.prefix}' for name, corpus in labels]  # 'de-en/bt'
    self._stages = mixture.stages(config.mixture)
    self._sampler = temperature_sampling.ExampleSampler(
      names, sizes, stages=drawn, seed=config.seed, window_size=config.window_size, run=config.shuffle_lines
    )
    self.shares = dict(zip(names, map(float, stages[0]), strict=True))  # as training begins
    self.examples = collections.Counter()  # by name of a pair: their number
    for name, size in zip(pairs, sizes, strict=True):
      self.examples[name] += int(size)
    if any(corpus.loss != 1000 for corpus in config.mixture):
      self.keys = (*self.keys, batches.LOSS_FACTORS)
    if config.guided_by:
      self.keys = (*self.keys, batches.ALIGNED)
    self._augmentation = Augmentation(config, vocabs)
    self._lock = threading.Lock()
    self._window = functools.lru_cache(2)(self._window_of)
    settings = (
      config.temperature,
      config.seed,
      config.window_size,
      config.corpora,
      config.shuffle_lines,
      *weights,
      *self._augmentation.settings,
      *(of_stage.tolist() for of_stage in drawn if config.corpora),
    )
    key = repr((_PLAN_VERSION, self._examples.fingerprint, names, self._batcher, *settings))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    self._ends_file = os.path.join(cache_dir, f'batches-{digest}.json')
    self._starts = [0, *_read_ends(self._ends_file)]  # first step of each window, and of the next one

  @property
  def steps_per_epoch(self) -> float:
    """Steps, about, in which as many lines are read as all pairs have; estimated from the first window."""
    with self._lock:
      first = self._window(0)
    return sum(self._examples.sizes) * len(first.plans) / max(len(first.pair), 1)

  def batch(self, step: int) -> ArrayBatch:
    window, number = self._locate(step)
    plan = window.plans[number].rows_of(self._feed)
    return self._examples.batch(plan, window.pair, window.line, window.rows)

  def _locate(self, step: int) -> tuple[_Window, int]:
    """Window of a step, and the number of its batch in the window."""
    with self._lock:
      while step >= self._starts[-1]:
        windows = len(self._starts)
        end = self._starts[-1] + len(self._window(windows - 1).plans)
        self._starts.append(min([end, *(step for step in self._stages if step > self._starts[-1])]))
        if windows % _SAVE_EVERY == 0 or self._augmentation.settings:  # to plan such a window takes seconds
          with contextlib.suppress(OSError):  # on a full disk the next start only takes longer
            files.write(self._ends_file, json_files.dump({'ends': self._starts[1:]}))
      number = bisect.bisect_right(self._starts, step) - 1
      return self._window(number), step - self._starts[number]

  def _window_of(self, number: int) -> _Window:
    # A stage begins with a window; what is left of the one before is left out.
    begins = [bisect.bisect_left(self._starts, step) for step in self._stages if step <= self._starts[number]]
    pair, line = self._sampler.window(number, begins)
    lengths, rows = self._examples.lengths(pair, line), None
    if self._augmentation.settings:
      before, most = self._examples.rows(pair, line), self._examples.most_ids
      languages = [(of_line.source, of_line.target) for of_line in map(self._examples.pairs.__getitem__, pair)]
      rows = self._augmentation(number, before, most, languages)
      grown = [np.array([len(b) - len(a) for a, b in zip(*sides)]) for sides in zip(before, rows)]
      lengths = [(line_lengths + more) * (line_lengths > 0) for line_lengths, more in zip(lengths, grown)]
    plans = self._batcher.plan(*lengths)
    order = shuffled(len(plans), self._config.seed, 'batches', number)
    return _Window(pair, line, [plans[i] for i in order], rows)


def _read_ends(path: str) -> list[int]:
  """The steps at which windows end, from a file of an earlier start that saves counting their batches."""
  try:
    ends = json_files.list_of(json_files.INTEGER)
    return json_files.read(path, 'a list of counts', 'windows are counted again', ends=ends)['ends']
  except (OSError, UserError):
    return []


class HeldOutInput(feed_lib.DevInput):
  """Batches of dev text for the dev loss: one pass, in a fixed order, with one sentence pair a row.

  Args:
    max_sentences: number of sentences of each pair, evenly spaced over its lines; 0 for all.
  """

  def __init__(
    self,
    config: DataConfig,
    vocabs: tuple[TaggedVocab, TaggedVocab],
    cache_dir: str,
    feed: Feed,
    max_sentences: int = 0,
  ):
    self._examples = Examples(config, 'dev', cache_dir, vocabs, feed.quiet)
    self._feed = feed
    self.stats = self._examples.stats  # sentences over max_length are left out here too, and counted
    self.subsets = [pair.name for pair in self._examples.pairs]  # by number
    counts = [min(n, max_sentences or n) for n in self._examples.sizes]
    self._pair = np.repeat(np.arange(len(counts)), counts)
    evenly = [np.arange(k) * n // max(k, 1) for n, k in zip(self._examples.sizes, counts, strict=True)]
    self._line = np.concatenate(evenly)
    self._plans = config.batcher(training=False).plan(*self._examples.lengths(self._pair, self._line))
    self.positions = sum(plan.rows * plan.length for plan in self._plans)

  @functools.cached_property
  def content_hash(self) -> str:
    """Hash of the pairs and of every batch, as all processes together feed it."""
    digest = hashlib.sha256(repr(self.subsets).encode())
    for plan in self._plans:
      arrays = self._examples.batch(plan, self._pair, self._line).values()
      for array in (self._pair[plan.example], plan.row, *arrays):
        digest.update(repr(array.shape).encode() + array.tobytes())
    return digest.hexdigest()[:16]

  def __iter__(self) -> Iterator[ArrayBatch]:
    for plan in self._plans:
      own_rows = plan.rows_of(self._feed)
      pairs_BP = np.zeros((own_rows.rows, len(self.subsets)), np.int32)
      pairs_BP[own_rows.row, self._pair[own_rows.example]] = 1
      yield {**self._examples.batch(own_rows, self._pair, self._line), 'pairs': pairs_BP}


class TextInput:
  """Input of given sentences, for decoding, or with targets for scoring.

  A byte order mark before a sentence is left out, and a sentence that text.is_empty has no tokens.

  Iterating yields (index_B, batch): index_B is the index of the sentence in each row, -1 for an empty row. Without
  targets the batch has only the source arrays. A sentence over max_length is cut to its first tokens and eos. The last
  batch has only as many rows as it needs.

  Args:
    config: configuration, of which max_length, boundaries, num_groups and eval_batch_tokens are used.
    vocabs: (source, target) vocabularies.
    sources: the sentences.
    languages: languages whose tags there are; None for no tag.
    targets: as many sentences, or None.
  """

  def __init__(
    self,
    config: DataConfig,
    vocabs: tuple[TaggedVocab, TaggedVocab],
    sources: Sequence[str],
    languages: Languages = None,
    targets: Sequence[str] | None = None,
  ):
    if targets is not None and len(targets) != len(sources):
      raise UserError(
        f'every source needs its target; saw {len(sources)} sources and {len(targets)} targets: align them'
      )
    around = config.tags_around(vocabs[0], languages)
    too_long, self._sides = set(), []
    for lines, vocab, around_side in zip((sources, targets), vocabs, around):
      if lines is not None:
        rows = vocab.encode(['' if text.is_empty(line) else line.removeprefix('\ufeff') for line in lines])
        too_long |= {i for i, ids in enumerate(rows) if len(ids) + around_side.count > config.max_length}
        self._sides.append([around_side.put(ids, config.max_length) for ids in rows])
    lengths = [np.array([len(ids) for ids in rows], np.int64) for rows in self._sides]
    # Indices of sources without a token, in no batch.
    self.empty = np.flatnonzero(lengths[0] == around[0].count).tolist()
    lengths[0][self.empty] = 0
    self.truncated = sorted(too_long - set(self.empty))  # indices of the sentences of which a side was cut
    self._plans = config.batcher(training=False).plan(lengths[0], lengths[-1])
    self._groups = config.num_groups
    self._begin, self._first = config.begin_id, np.array(around[1].before, np.int32)

  def __iter__(self) -> Iterator[tuple[np.ndarray, ArrayBatch]]:
    for plan in self._plans:
      rows = -(-len(plan.example) // self._groups) * self._groups
      index_B = np.full(rows, -1, np.int64)  # as evaluation never packs, the examples are the first rows
      index_B[: len(plan.example)] = plan.example
      source, *targets = [batches.padded([side[i] for i in plan.example], rows, plan.length) for side in self._sides]
      answers = {batches.FIRST: np.tile(self._first, [rows, 1])} if self._first.size else {}
      yield index_B, source.as_source() | (targets[0].as_target(self._begin) if targets else answers)
