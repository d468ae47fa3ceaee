"""The vocabularies of a run: named, made or found, copied into the run's folder, and loaded from it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from lingvo_moe.core import files
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel
from lingvo_moe.tasks.mt import unwritten
from lingvo_moe.tasks.mt import vocab_training
from lingvo_moe.tasks.mt.vocab import Vocab

if TYPE_CHECKING:
  from lingvo_moe.tasks.mt.config import MtConfig


def prepare(config: MtConfig, folder: str, begun: bool) -> MtConfig:
  """Settles vocabularies and tags of a run; the configuration that is returned names the run's own vocabularies.

  Args:
    config: its source_vocab and target_vocab may be empty.
    folder: where the run keeps its vocabularies.
    begun: whether the run was begun before; then its vocabularies cannot change.
  """
  config = _with_vocabs(_with_tag(config), folder, begun)
  if not begun:
    load(config)  # refuses what does not fit before it is copied
  return dataclasses.replace(
    config,
    source_vocab=_adopt(config.source_vocab, 'source', folder, begun),
    target_vocab=_adopt(config.target_vocab, 'source' if config.shared_vocab else 'target', folder, begun),
  )


def with_files(config: MtConfig, rename: Callable[[str], str]) -> MtConfig:
  """The configuration with other paths of its vocabularies."""
  return dataclasses.replace(config, source_vocab=rename(config.source_vocab), target_vocab=rename(config.target_vocab))


def load(config: MtConfig) -> tuple[Vocab, Vocab]:
  """The source and target vocabularies, which must have as many pieces as the model has embeddings."""
  source = Vocab(config.source_vocab)
  target = source if config.target_vocab == config.source_vocab else Vocab(config.target_vocab)
  target_size = config.source_vocab_size if config.shared_vocab else config.target_vocab_size
  for field, vocab, size, path in (
    ('source_vocab_size', source, config.source_vocab_size, config.source_vocab),
    ('target_vocab_size', target, target_size, config.target_vocab),
  ):
    if vocab.size != size:
      raise UserError(
        f'a model has as many embeddings as its vocabulary has pieces; saw {field}={size}, but '
        f'{path} has {vocab.size}: bind {field} = {vocab.size}, or give another vocabulary'
      )
  return source, target


def _with_tag(config: MtConfig) -> MtConfig:
  """Settles whether sources are tagged, which decoder and translate could not tell without the training corpus."""
  if config.tag_target is not None:
    return config
  pairs = parallel.find_pairs(config.data_dir, config.pairs, 'train', config.split_files)
  return dataclasses.replace(config, tag_target=config.tags({pair.target for pair in pairs}))


def _with_vocabs(config: MtConfig, folder: str, begun: bool) -> MtConfig:
  """Names the vocabularies: those given, those the run began with, or new ones.

  A new one has as many pieces as were asked for, or as many as the corpus gives; one that is given has as many as it has,
  and the model as many embeddings.
  """
  sides = ('shared',) if config.shared_vocab else ('source', 'target')
  made = lambda side: vocab_training.settings_of(os.path.join(folder, side)) is not None
  given = {'source': config.source_vocab, 'target': config.target_vocab}
  given['shared'] = config.source_vocab or config.target_vocab
  if begun:
    given = {side: given[side] or ('' if made(side) else _own(side, folder)) for side in sides}
  named = dict(zip(('source_vocab', 'target_vocab'), [given[side] for side in sides] * 2, strict=False))
  paths = vocab_training.ensure_vocabs(dataclasses.replace(config, **named), folder)
  settled = {}
  for side, path in zip(sides, paths, strict=False):
    field = 'source_vocab_size' if side == 'shared' else f'{side}_vocab_size'
    vocab = Vocab(path)
    settled |= _normalization(config, side, vocab)
    if given[side] and not begun and side != 'source':
      pairs = parallel.find_pairs(config.data_dir, config.pairs, 'train', config.split_files)
      if said := unwritten.remark(vocab, pairs):
        print(said, file=sys.stderr)
    size = vocab.size
    if size == getattr(config, field):
      continue
    if given[side]:
      print(f'{field}={size}, as {path} has; the configuration has {getattr(config, field)}', file=sys.stderr)
    else:
      print(f'{field}={getattr(config, field)} is more than the corpus gives; this run has {size}', file=sys.stderr)
    settled[field] = size
  return dataclasses.replace(config, source_vocab=paths[0], target_vocab=paths[1], **settled)


def _normalization(config: MtConfig, side: str, vocab: Vocab) -> dict[str, str]:
  """Fields of the rule that a vocabulary has; of one that is given, its rule counts."""
  names = [f'{s}_normalization' for s in (('source', 'target') if side == 'shared' else (side,))]
  for name in names:
    if getattr(config, name) not in (None, vocab.normalization):
      print(
        f'{name}={vocab.normalization}, as {vocab.path} has; the configuration has {getattr(config, name)}',
        file=sys.stderr,
      )
  return dict.fromkeys(names, vocab.normalization)


def _adopt(path: str, side: str, folder: str, begun: bool) -> str:
  """The run's own copy of a vocabulary; one made in its folder is that already."""
  own = _own(side, folder)
  if os.path.abspath(path) == os.path.abspath(own):
    return own
  if begun and Vocab(path).fingerprint != Vocab(own).fingerprint:
    raise UserError(
      f'{side}_vocab={path} is not the vocabulary that the run in {os.path.dirname(folder)} began with ({own}): '
      'leave it out, or choose another --logdir'
    )
  os.makedirs(folder, exist_ok=True)
  files.write(own, files.read(path))
  return own


def _own(side: str, folder: str) -> str:
  return os.path.join(folder, ('source' if side == 'shared' else side) + '.model')
