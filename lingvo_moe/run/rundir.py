"""A log directory: everything a run leaves, and all that decoder and translate need to go on from it.

config.json        the model's name and every resolved value
vocab/             the SentencePiece models
checkpoints/       see checkpoint.py
cache/             tokenised text (may be deleted)
train.jsonl        the scalars of every logged step; the event files beside it hold the same
decode/            translations and scores
finished.json      written when training has ended
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import sys
from typing import IO, Any

from lingvo_moe.core import configuration
from lingvo_moe.core import fields
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.checkpoint import Checkpoints
from lingvo_moe.tasks.mt import corpus
from lingvo_moe.tasks.mt.vocab import Vocab
from lingvo_moe.tasks.mt.vocab_training import ensure_vocabs


@dataclasses.dataclass(frozen=True)
class RunDir:
  """Paths of a log directory."""

  path: str

  def file(self, *parts: str) -> str:
    return os.path.join(self.path, *parts)

  @property
  def config_file(self) -> str:
    return self.file('config.json')

  @property
  def vocab_dir(self) -> str:
    return self.file('vocab')

  def checkpoints(self, keep: int = 3, keep_every: int = 0) -> Checkpoints:
    return Checkpoints(self.file('checkpoints'), keep, keep_every)

  @property
  def exists(self) -> bool:
    """Whether a run was begun here."""
    return os.path.exists(self.config_file)

  def lock(self) -> IO:
    """Keeps other trainers out until the file that is returned is closed, or the process ends."""
    self._make_writable()
    held = open(self.file('.lock'), 'w')
    try:
      fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise UserError(
        f'one trainer at a time works in a log directory; another has {self.path}: wait for it, or choose another'
      ) from None
    return held

  def begin(self, name: str, config: Any) -> Any:
    """Makes the directory this run's: checks that it may go on here, copies the vocabularies, writes config.json.

    Returns the configuration, which names the copied vocabularies.
    """
    config = self._with_tag(self._with_vocabs(config))
    if self.exists:
      self._check_same_run(name, config)
    self.vocabs(config)  # refuses what does not fit before it is copied
    config = dataclasses.replace(
      config,
      source_vocab=self._adopt(config.source_vocab, 'source'),
      target_vocab=self._adopt(config.target_vocab, 'source' if config.shared_vocab else 'target'),
    )
    relative = lambda path: os.path.relpath(path, self.path)
    stored = dataclasses.replace(
      config, source_vocab=relative(config.source_vocab), target_vocab=relative(config.target_vocab)
    )
    configuration.save(name, stored, self.config_file)
    return config

  def load(self) -> tuple[str, Any]:
    """(model name, configuration) of the run that is here, vocabularies with their full paths."""
    if not os.path.isdir(self.path):
      raise UserError(f'--logdir={self.path}: there is no such directory')
    name, config = configuration.load(self.config_file)
    return name, dataclasses.replace(
      config, source_vocab=self.file(config.source_vocab), target_vocab=self.file(config.target_vocab)
    )

  def vocabs(self, config: Any) -> tuple[Vocab, Vocab]:
    """The source and target vocabularies, which must be of the sizes that the model has."""
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

  def finish(self, step: int, reason: str) -> None:
    with open(self.file('finished.json'), 'w', encoding='utf-8') as f:
      json.dump({'step': step, 'reason': reason}, f)

  def unfinish(self) -> None:
    if self.finished:
      os.remove(self.file('finished.json'))

  @property
  def finished(self) -> bool:
    return os.path.exists(self.file('finished.json'))

  def _make_writable(self):
    try:
      os.makedirs(self.path, exist_ok=True)
      probe = self.file('.writable')
      with open(probe, 'w'):
        pass
      os.remove(probe)
    except OSError as e:
      raise UserError(
        f'--logdir={self.path} must be a directory that can be written to ({e.strerror}): '
        'choose another, or change its owner or mode'
      ) from None

  def _check_same_run(self, name, config):
    old_name, old = configuration.load(self.config_file)
    if old_name != name:
      raise UserError(f'{self.path} holds a run of {old_name}, not of {name}: choose another --logdir')
    changed = configuration.differences(old, config, fields.may_change(type(config)))
    if changed:
      raise UserError(
        f'{self.path} holds a run with {"; ".join(changed)}: a run goes on as it began; '
        'set it back, or choose another --logdir'
      )

  def _with_vocabs(self, config):
    """Names the vocabularies: those given, those this run began with, or new ones.

    One that is made here has as many pieces as were asked for, or as many as the corpus gives.
    """
    sides = ('shared',) if config.shared_vocab else ('source', 'target')
    made = lambda side: os.path.exists(self.file('vocab', side + '.json'))
    given = {'source': config.source_vocab, 'target': config.target_vocab}
    given['shared'] = config.source_vocab or config.target_vocab
    if self.exists:
      given = {side: given[side] or ('' if made(side) else self._own_vocab(side)) for side in sides}
    named = dict(zip(('source_vocab', 'target_vocab'), [given[side] for side in sides] * 2, strict=False))
    paths = ensure_vocabs(dataclasses.replace(config, **named), self.vocab_dir)
    sizes = {}
    for side, path in zip(sides, paths, strict=False):
      field = 'source_vocab_size' if side == 'shared' else f'{side}_vocab_size'
      size = Vocab(path).size
      if not given[side] and size < getattr(config, field):
        print(f'{field}={getattr(config, field)} is more than the corpus gives; this run has {size}', file=sys.stderr)
        sizes[field] = size
    return dataclasses.replace(config, source_vocab=paths[0], target_vocab=paths[1], **sizes)

  def _own_vocab(self, side: str) -> str:
    return self.file('vocab', ('source' if side == 'shared' else side) + '.model')

  def _with_tag(self, config):
    """Settles whether sources are tagged, which decoder and translate could not tell without the training corpus."""
    if config.tag_target is not None:
      return config
    pairs = corpus.find_pairs(config.data_dir, config.pairs, 'train', config.split_files)
    return dataclasses.replace(config, tag_target=config.tags({pair.target for pair in pairs}))

  def _adopt(self, path: str, side: str) -> str:
    """The run's own copy of a vocabulary; one made here is that already."""
    own = self._own_vocab(side)
    if os.path.abspath(path) == os.path.abspath(own):
      return own
    if self.exists and Vocab(path).fingerprint != Vocab(own).fingerprint:
      raise UserError(
        f'{side}_vocab={path} is not the vocabulary that the run in {self.path} began with ({own}): '
        'leave it out, or choose another --logdir'
      )
    os.makedirs(self.vocab_dir, exist_ok=True)
    shutil.copyfile(path, own + '.partial')
    os.replace(own + '.partial', own)
    return own
