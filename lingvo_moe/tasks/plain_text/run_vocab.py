"""The vocabulary of a run: made or found, put into the run's folder, and loaded from it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.files import lock
from lingvo_moe.corpora import documents
from lingvo_moe.corpora import text
from lingvo_moe.tasks import sentencepiece_training
from lingvo_moe.tasks.plain_text.vocab import Bytes
from lingvo_moe.tasks.plain_text.vocab import Characters
from lingvo_moe.tasks.plain_text.vocab import Pieces
from lingvo_moe.tasks.plain_text.vocab import TextVocab
from lingvo_moe.tasks.vocab import check_size
from lingvo_moe.tasks.vocab import own_copy

if TYPE_CHECKING:
  from lingvo_moe.tasks.plain_text.config import PlainTextConfig

_Config = TypeVar('_Config', bound='PlainTextConfig')
_PIECES = 8000  # pieces of a vocabulary whose size is not given
_MOST_LINES = 1_000_000  # of those that train pieces
_MOST_LINE_BYTES = 16 << 20  # a line may be a whole document


def prepare(config: _Config, folder: str, begun: bool) -> _Config:
  """Settles the vocabulary of a run and its size; the configuration that is returned names the run's own file."""
  path = config.vocab
  if config.vocab in ('char', 'pieces'):
    path = _made(config, folder, begun)
  elif config.vocab != 'byte':
    name = 'characters.json' if path.endswith('.json') else 'pieces.model'
    path = own_copy(path, os.path.join(folder, name), begun, _read if begun else _read_new, 'vocab')
  size = _read(path).size
  if config.vocab_size and size > config.vocab_size:
    raise UserError(
      f'a model has as many embeddings as its vocabulary has symbols; saw vocab_size={config.vocab_size}, and the text '
      f'or {path} gives {size}: bind vocab_size = {size}, or 0'
    )
  if config.vocab_size > size:
    print(f'vocab_size={config.vocab_size} is more than there are; this run has {size}', file=sys.stderr)
  return dataclasses.replace(config, vocab=path, vocab_size=size)


def with_files(config: _Config, rename: Callable[[str], str]) -> _Config:
  """The configuration with another path of its vocabulary; bytes have none."""
  return config if config.vocab == 'byte' else dataclasses.replace(config, vocab=rename(config.vocab))


def load(config: PlainTextConfig) -> TextVocab:
  """The vocabulary, which must have as many symbols as the model has embeddings."""
  vocab = _read(config.vocab)
  check_size(vocab, 'vocab_size', config.vocab_size, config.vocab)
  return vocab


def _read(path: str) -> TextVocab:
  if path == 'byte':
    return Bytes()
  return Characters.load(path) if path.endswith('.json') else Pieces(path)


def _read_new(path: str) -> TextVocab:
  """A vocabulary to begin a run with."""
  vocab = _read(path)
  if isinstance(vocab, Pieces) and not vocab.breaks_lines:
    raise UserError(
      f'pieces for running text need one for a line break, <0x0A>, which {path} does not have: train it with '
      '--byte_fallback=true of SentencePiece, or bind vocab = "pieces"'
    )
  return vocab


def _made(config: PlainTextConfig, folder: str, begun: bool) -> str:
  """The vocabulary of characters or pieces in the folder, made from the training text if it is not there.

  One that is damaged is made again, unless the run was begun with it.
  """
  path = os.path.join(folder, {'char': 'characters.json', 'pieces': 'pieces.model'}[config.vocab])
  with lock(folder):
    if os.path.exists(path) and (begun or _is_whole(path)):
      return path
    files = documents.find_files(config.data_dir, 'train')
    if config.vocab == 'char':
      characters = Characters.of(map(documents.read, files))
      if not characters.characters:
        raise documents.no_text(files[0])
      characters.save(path)
    else:
      output = path.removesuffix('.model')
      sentencepiece_training.train(
        itertools.islice((line.encode() for line in text.lines(files)), _MOST_LINES),
        output,
        config.vocab_size or _PIECES,
        normalization='identity',
        exact_size=False,
        max_line_bytes=_MOST_LINE_BYTES,
      )
  return path


def _is_whole(path: str) -> bool:
  try:
    _read(path)
    return True
  except UserError as e:
    print(f'{e}; it is made again', file=sys.stderr)
    return False
