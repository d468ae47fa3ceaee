"""Examples of a split: the tokenised sentence pairs of all language pairs, their lengths, and batches of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.corpora import parallel
from lingvo_moe.inputs import dev_lines, pair_caches
from lingvo_moe.inputs.batching import BatchPlan
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.inputs.mixture import Corpus
from lingvo_moe.inputs.token_cache import TokenCache, groups
from lingvo_moe.models import batches
from lingvo_moe.vocab import language_tags
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

_CHUNK = 1 << 20  # lines scanned at a time
_COUNTED = 1 << 22  # lines up to which statistics are counted; those of more are estimated from about as many
_RUNS = 64  # runs of lines of a pair, evenly spaced, from which they are estimated


@dataclasses.dataclass(frozen=True)
class PairStats:
  """Statistics of a pair: its lines, those left out, and the tokens (with eos and tag) of the kept ones."""

  name: str
  lines: int
  too_long: int
  empty: int
  source_tokens: int
  target_tokens: int
  held_out: int = 0  # lines of dev text that was taken from train, and their like

  @property
  def kept(self) -> int:
    return self.lines - self.too_long - self.empty - self.held_out


@dataclasses.dataclass(frozen=True)
class Stats:
  """Statistics of every pair; estimates where there are too many lines to count in."""

  pairs: tuple[PairStats, ...]
  is_estimate: bool = False
  shares: str = ''  # of several corpora

  def total(self, field: str) -> int:
    """Sum of a field or property of PairStats over the pairs."""
    return sum(getattr(p, field) for p in self.pairs)

  def __str__(self) -> str:
    none = ', '.join(sorted({p.name for p in self.pairs} - {p.name for p in self.pairs if p.kept}))
    reasons = {'too_long': 'too long', 'empty': 'empty', 'held_out': 'for dev'}
    dropped = ', '.join(f'{self.total(field):,} {reason}' for field, reason in reasons.items() if self.total(field))
    pairs, about = plural(len({p.name for p in self.pairs}), 'pair'), 'about ' * self.is_estimate
    return (
      f'{pairs}, {about}{plural(self.total("kept"), "example")}, '
      f'{self.total("source_tokens"):,} source and {self.total("target_tokens"):,} target tokens'
      + (f'; left out: {dropped}' if dropped else '')
      + (f'; without an example: {none}' if none else '')
      + (f'; corpora: {self.shares}' if self.shares else '')
    )


def symbols_around(config: DataConfig, pairs: list[parallel.Pair], source_vocab: TaggedVocab) -> list[SymbolsAround]:
  """Symbols around the (sources, targets) of each pair.

  Sources are tagged if the training corpus has several target languages, for all splits alike.
  """
  targets = {pair.target for pair in pairs}
  if config.tag_target is None:
    with contextlib.suppress(parallel.MissingFilesError):  # there may be held-out sets alone
      targets |= {pair.target for pair in dev_lines.trained_pairs(config)}
  tagged = config.tags(targets)
  languages = [language_tags.of_pair(tagged, config.tag_sides, pair.source, pair.target) for pair in pairs]
  of_pairs = [config.tags_around(source_vocab, of_pair) for of_pair in languages]
  return [SymbolsAround(*(np.array(column, np.int32) for column in zip(*side))) for side in zip(*of_pairs)]


class SymbolsAround(NamedTuple):
  """Ids before and after the tokens of one side, by pair: int32 [pairs, their number]."""

  before: np.ndarray
  after: np.ndarray

  @property
  def count(self) -> int:
    return self.before.shape[1] + self.after.shape[1]


class Examples:
  """Examples of one split, at least one; an example is (number of its pair, line)."""

  def __init__(
    self, config: DataConfig, split: str, cache_dir: str, vocabs: tuple[TaggedVocab, TaggedVocab], quiet: bool = False
  ):
    source_vocab, target_vocab = vocabs
    # Pairs are sorted by name; one of several corpora is there for each.
    self.pairs = dev_lines.trained_pairs(config) if split == 'train' else dev_lines.find_pairs(config, split)
    by_prefix = {corpus.prefix: corpus for corpus in config.mixture} if split == 'train' else {}
    self.corpora = [by_prefix.get(pair.split, Corpus(split)) for pair in self.pairs]  # the corpus of each pair
    tags = [source_vocab.corpus_tag_id(corpus.tag) if corpus.tag else 0 for corpus in self.corpora]
    self._tag, self._factor = np.array(tags, np.int32), np.array([corpus.loss for corpus in self.corpora], np.int32)
    self._max_length = config.max_length
    self._around, self._begin = symbols_around(config, self.pairs, source_vocab), config.begin_id
    self._caches = pair_caches.open_pairs(self.pairs, vocabs, cache_dir, quiet=quiet)
    self._alignments = []
    if config.guided_by and split == 'train':
      self._alignments = pair_caches.open_alignments(self.pairs, config.guided_by, cache_dir, quiet=quiet)
    self._left_out: list[np.ndarray] = []  # with dev text from train, for each pair: whether a line is left out for it
    sizes = [len(source) for source, _ in self._caches]
    chosen = dev_lines.choose(config, self.pairs, sizes) if split in ('train', 'dev') else {}
    if split == 'train' and chosen:
      caches = pair_caches.open_keys(self.pairs, cache_dir, quiet=quiet)
      keys = [tuple(side.tokens.view(np.uint64) for side in sides) for sides in caches]
      self._left_out = dev_lines.left_out(self._caches, keys, chosen, shared_vocab=source_vocab is target_vocab)
    elif split == 'dev':
      for number, lines in chosen.items():
        self._caches[number] = tuple(side.subset(lines) for side in self._caches[number])
    self.sizes = [len(source) for source, _ in self._caches]  # number of lines of each pair
    for pair, size, alignments in zip(self.pairs, self.sizes, self._alignments):
      if len(alignments) != size:
        raise UserError(
          f'{pair.name}.{pair.split}.align must have a line for each of {size:,}; saw {len(alignments):,}'
        )
    for number in range(len(self._alignments)):
      self._check_alignments(number, os.path.join(config.guided_by, ''))
    share = min(1.0, _COUNTED / sum(self.sizes))
    self.stats = Stats(tuple(self._scan(p, share) for p in range(len(self.pairs))), share < 1)
    if not self.stats.total('kept'):
      raise UserError(
        f'split {split!r} needs sentences of at most max_length={config.max_length} tokens; none of '
        f'{self.stats.total("lines")} pairs is: raise max_length, or look at the corpus and its vocabulary'
      )
    folders = [side.folder.rpartition('-')[2] for sides in self._caches for side in sides]
    tagged = config.tag_sides if config.tags_both else self._around[0].count > 1
    key = repr((folders, tagged, self._max_length))
    if chosen:
      key += repr(('by key', config.dev_lines, config.seed, [self.pairs[number].name for number in chosen]))
    if any(tags):
      key += repr(tags)
    self.fingerprint = hashlib.sha256(key.encode()).hexdigest()  # of all that examples and lengths depend on

  def _check_alignments(self, pair: int, folder: str) -> None:
    """UserError for the first example of a pair whose alignments are of more pieces than it has."""
    for start in range(0, self.sizes[pair], _CHUNK):
      lines = np.arange(start, min(start + _CHUNK, self.sizes[pair]))
      source, target = (side.lengths(lines) for side in self._caches[pair])
      places, counts = self._alignments[pair].gather(lines)
      largest = np.maximum.reduceat(np.append(places, 0), np.cumsum(counts) - counts) * (counts > 0)
      bad = np.flatnonzero(((largest > source) | (counts > target)) & (self._pair_lengths(pair, lines)[0] > 0))
      if bad.size:
        first, name = bad[0], f'{self.pairs[pair].name}.{self.pairs[pair].split}.align'
        raise UserError(
          'alignments are of the pieces of both vocabularies; those of line '
          f'{lines[first] + 1} of {folder}{name} are of {largest[first]} source and {counts[first]} target pieces, '
          f'where there are {source[first]} and {target[first]}: make them again'
        )

  def _scan(self, pair: int, share: float) -> PairStats:
    """Statistics of a pair, estimated from a share of its lines if that is below 1."""
    size = self.sizes[pair]
    runs, length = (-(-size // _CHUNK), _CHUNK) if share == 1 else (_RUNS, max(int(size * share) // _RUNS, 1))
    counts, seen = np.zeros(5, np.int64), 0
    for run in range(runs):
      start = run * _CHUNK if share == 1 else run * size // runs
      lines = np.arange(start, min(start + length, size))
      source, target, empty = self._pair_lengths(pair, lines)
      held_out = self._is_left_out(pair, lines) & ~empty
      too_long = (source == 0) & ~empty & ~held_out
      counts += [too_long.sum(), empty.sum(), source.sum(), target.sum(), held_out.sum()]
      seen += len(lines)
    return PairStats(self.pairs[pair].name, size, *(int(count) * size // seen for count in counts))

  def _pair_lengths(self, pair: int, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    source, target = (side.lengths(lines) for side in self._caches[pair])
    empty = (source == 0) | (target == 0)
    source, target = source + self._around[0].count + bool(self._tag[pair]), target + self._around[1].count
    kept = ~empty & ~self._is_left_out(pair, lines) & (source <= self._max_length) & (target <= self._max_length)
    return source * kept, target * kept, empty

  def _is_left_out(self, pair: int, lines: np.ndarray) -> np.ndarray | bool:
    return self._left_out[pair][lines] if self._left_out else np.bool_(False)

  def lengths(self, pair: np.ndarray, line: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lengths (source, target) with eos and tag; both are 0 for an example that is empty or too long."""
    source, target = np.empty(len(pair), np.int64), np.empty(len(pair), np.int64)
    for p, where in groups(pair):
      source[where], target[where], _ = self._pair_lengths(p, line[where])
    return source, target

  @property
  def most_ids(self) -> list[int]:
    """Most ids of a source, and of a target, without the symbols around."""
    return [self._max_length - around.count - bool(tag) for around, tag in zip(self._around, (self._tag.any(), 0))]

  def rows(self, pair: np.ndarray, line: np.ndarray) -> list[list[np.ndarray]]:
    """Ids of each source, and of each target, without the symbols around."""
    order = np.argsort(pair, kind='stable')
    gathered = [self._gather(self._caches_of(side), pair[order], line[order]) for side in (0, 1)]
    rows = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in gathered]
    return [[side[place] for place in np.argsort(order)] for side in rows]

  def batch(
    self, plan: BatchPlan, pair: np.ndarray, line: np.ndarray, rows: Sequence[Sequence[np.ndarray]] | None = None
  ) -> batches.ArrayBatch:
    """Arrays of a planned batch; `pair` and `line` are those of the examples that plan.example indexes.

    `rows` are their sources and targets where these are other ids than `rows` gives.
    """
    order = np.argsort(pair[plan.example], kind='stable')
    plan = BatchPlan(plan.rows, plan.length, *(column[order] for column in plan[2:]))
    pair, line = pair[plan.example], line[plan.example]
    read = lambda side: (
      batches.flat([rows[side][i] for i in plan.example]) if rows else self._gather(self._caches_of(side), pair, line)
    )
    sides = self._with_tags(pair, *read(0)), read(1)
    source, target = (
      _side(plan, start, *sides[side], self._around[side].before[pair], self._around[side].after[pair])
      for side, start in enumerate((plan.source_start, plan.target_start))
    )
    batch = source.as_source() | target.as_target(self._begin)
    if (self._factor != 1000).any():
      of_segments = np.zeros([plan.rows, int(plan.segment.max(initial=0)) + 1], np.int32)
      of_segments[plan.row, plan.segment] = self._factor[pair]
      batch[batches.LOSS_FACTORS] = np.take_along_axis(of_segments, target.segments_BT, axis=1)
    if self._alignments:
      batch[batches.ALIGNED] = self._aligned(plan, pair, line, sides[1][1])
    return batch

  def _aligned(self, plan: BatchPlan, pair: np.ndarray, line: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Array ALIGNED of a batch, given the numbers of ids of its targets, without the symbols around."""
    places, counts = self._gather(self._alignments, pair, line)
    tags = (self._tag[pair] > 0).astype(np.int32)
    before = [around.before[pair] for around in self._around]
    offset = plan.source_start + before[0].shape[1] + tags
    of_tokens = np.zeros(int(lengths.sum()), np.int32)
    starts = np.cumsum(lengths) - lengths - (np.cumsum(counts) - counts)
    of_tokens[np.arange(len(places)) + np.repeat(starts, counts)] = places + np.repeat(offset, counts) * (places > 0)
    return _side(plan, plan.target_start, of_tokens, lengths, before[1] * 0, self._around[1].after[pair] * 0).ids_BT

  def _caches_of(self, side: int) -> list[TokenCache]:
    return [sides[side] for sides in self._caches]

  def _gather(self, caches: Sequence[TokenCache], pair: np.ndarray, line: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    parts = [caches[p].gather(line[where]) for p, where in groups(pair)]
    if not parts:
      return np.zeros(0, np.int32), np.zeros(0, np.int64)
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

  def _with_tags(self, pair: np.ndarray, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sources with the symbols of their corpora."""
    tags = self._tag[pair]
    ids = np.insert(ids, (np.cumsum(lengths) - lengths)[tags > 0], tags[tags > 0])
    return ids, lengths + (tags > 0)


def _side(
  plan: BatchPlan, start: np.ndarray, ids: np.ndarray, lengths: np.ndarray, before: np.ndarray, after: np.ndarray
) -> batches.Side:
  """One side of a planned batch, filled for all examples at once.

  Args:
    plan: row and segment of each example.
    start: position in its row at which each begins.
    ids: ids of all examples, one after the other.
    lengths: number of ids of each.
    before, after: ids that are put before and after each, [examples, their number].
  """
  counts = lengths + before.shape[1] + after.shape[1]
  first = np.cumsum(counts) - counts  # place of each example's first token, among those of all
  first_id = np.cumsum(lengths) - lengths
  first_after = first + counts - after.shape[1]
  tokens = np.empty(int(counts.sum()), np.int32)
  tokens[np.arange(len(ids)) + np.repeat(first - first_id + before.shape[1], lengths)] = ids
  for places, around in ((first, before), (first_after, after)):
    tokens[places[:, np.newaxis] + np.arange(around.shape[1])] = around
  positions = np.arange(len(tokens)) - np.repeat(first, counts)
  place = np.repeat(plan.row * plan.length + start, counts) + positions
  side = batches.Side(*(np.zeros((plan.rows, plan.length), np.int32) for _ in range(3)))
  for array_BT, values in zip(side, (tokens, np.repeat(plan.segment, counts), positions), strict=True):
    array_BT.flat[place] = values
  return side
