"""What a translation model is trained on and how it is cut into batches."""

from __future__ import annotations

import dataclasses
import math

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.mt import batching


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The corpus, its vocabularies, and its batches.

  Attributes:
    data_dir: a folder laid out as corpus.py says.
    pairs: names and globs, 'deu-en,fra-en' or '*-en'; empty takes every pair folder.
    split_files: (split, file prefix) where they differ, e.g. (('dev', 'val'),).
    source_vocab: SentencePiece .model of the source side; empty: made in the run's own folder.
    target_vocab: the target side's; the same file for a shared vocabulary.
    source_vocab_size: pieces, where the vocabulary is to be made.
    target_vocab_size: likewise; unused when shared.
    shared_vocab: one vocabulary of source_vocab_size pieces for both sides.
    character_coverage: the part of all characters that get pieces of their own; the others are spelt in bytes.
    vocab_sentences: at most so many lines of either side are used to make a vocabulary.
    tag_target: whether a `<2xx>` symbol before the source names the target language; None: if there are several.
    temperature: of the sampling over pairs; 1 keeps their natural shares, 5 is the usual choice for many languages.
    batch_tokens: positions of a batch on the target side, padding included (and as many on the source side).
    max_length: the longest sentence, with eos (and tag); longer pairs are left out of training, and counted.
    packing: several pairs in rows of max_length, in place of one pair a row of about its length.
    boundaries: row lengths, ascending; empty: 8, 12, 16, 20, 24, 28, 32, 40, ... up to max_length.
    num_groups: G, in which a batch's tokens are routed to experts; each is whole rows, so it divides a batch's rows.
    window: examples that are shuffled and batched together; 0: at least 16384, and more for large batches.
    eval_batch_tokens: batch_tokens of evaluation and decoding; 0: as in training.
    seed: of the order of the examples.
  """

  data_dir: str = ''
  pairs: str = ''
  split_files: tuple[tuple[str, str], ...] = ()
  source_vocab: str = ''
  target_vocab: str = ''
  source_vocab_size: int = 8000
  target_vocab_size: int = 8000
  shared_vocab: bool = False
  character_coverage: float = 0.9995
  vocab_sentences: int = 1_000_000
  tag_target: bool | None = None
  temperature: float = 1.0
  batch_tokens: int = 4096
  max_length: int = 128
  packing: bool = False
  boundaries: tuple[int, ...] = ()
  num_groups: int = 1
  window: int = 0
  eval_batch_tokens: int = 0
  seed: int = 1

  def __post_init__(self):
    for field in dataclasses.fields(self):
      self._check_type(field)
    pairs = [tuple(p) for p in (self.split_files.items() if isinstance(self.split_files, dict) else self.split_files)]
    if not all(len(p) == 2 and all(isinstance(s, str) for s in p) for p in pairs):
      self._refuse('split_files', "(split, file prefix) pairs of strings, e.g. (('dev', 'val'),)")
    object.__setattr__(self, 'split_files', tuple(pairs))
    self._check_ranges()

  def _check_type(self, field) -> None:
    value = getattr(self, field.name)
    wanted = {'str': str, 'int': int, 'bool': bool, 'float': (int, float), 'bool | None': (bool, type(None))}.get(
      field.type, (tuple, list, dict)
    )
    is_bool = isinstance(value, bool)
    if not isinstance(value, wanted) or (is_bool and 'bool' not in field.type):
      self._refuse(field.name, {str: 'a string', int: 'an integer', bool: 'True or False'}.get(wanted, field.type))
    if isinstance(value, list):
      object.__setattr__(self, field.name, tuple(value))
    if field.type == 'float':
      object.__setattr__(self, field.name, float(value))

  def _refuse(self, name: str, rule: str, way_out: str = '') -> None:
    raise UserError(f'{name} must be {rule}; saw {getattr(self, name)!r}' + (f': {way_out}' if way_out else ''))

  def _check_ranges(self) -> None:
    for name in ('source_vocab_size', 'target_vocab_size', 'vocab_sentences', 'batch_tokens', 'num_groups'):
      if getattr(self, name) < 1:
        self._refuse(name, 'at least 1')
    if self.seed < 0:
      self._refuse('seed', 'at least 0')
    for name in ('window', 'eval_batch_tokens'):
      if getattr(self, name) < 0:
        self._refuse(name, 'at least 1, or 0 to have it chosen')
    if not (math.isfinite(self.temperature) and self.temperature > 0):
      self._refuse('temperature', 'a positive number', '1 keeps the natural shares, larger ones level them')
    if not 0.98 <= self.character_coverage <= 1:
      self._refuse('character_coverage', 'from 0.98 to 1', '0.9995 suits many scripts, 1 keeps every character')
    if self.max_length < 3:
      self._refuse('max_length', 'at least 3 (a tag, a word and eos)')
    if self.boundaries and (
      not all(isinstance(b, int) and b > 0 for b in self.boundaries)
      or list(self.boundaries) != sorted(set(self.boundaries))
      or self.boundaries[-1] != self.max_length
    ):
      self._refuse('boundaries', f'ascending integers that end with max_length={self.max_length}')
    for name in ('batch_tokens', 'eval_batch_tokens'):
      tokens = getattr(self, name)
      if tokens and tokens < self.max_length * self.num_groups:
        raise UserError(
          f'{name} must hold num_groups rows of max_length; saw {name}={tokens} with {self.num_groups} rows of '
          f'{self.max_length}: use at least {self.max_length * self.num_groups}, or shorter or fewer rows'
        )

  def batcher(self, *, training: bool = True) -> batching.Batcher:
    """How windows are cut; evaluation never packs."""
    tokens = self.batch_tokens if training else self.eval_batch_tokens or self.batch_tokens
    boundaries = self.boundaries or batching.default_boundaries(self.max_length)
    return batching.Batcher(tokens, boundaries, self.num_groups, self.packing and training)

  @property
  def window_size(self) -> int:
    """Examples in a window: enough for many batches, as each window ends with a partial one."""
    return self.window or max(16384, 2 * self.batch_tokens)

  def tags(self, targets: set[str]) -> bool:
    """Whether sources are tagged, given the target languages there are."""
    return len(targets) > 1 if self.tag_target is None else self.tag_target
