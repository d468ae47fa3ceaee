"""Vocabularies of running text: characters, bytes, or SentencePiece pieces; made, or found, for a run."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import documents
from lingvo_moe.corpora import text as text_lib
from lingvo_moe.storage.files import lock
from lingvo_moe.vocab import sentencepiece_training, text_vocab
from lingvo_moe.vocab.sentencepiece_vocab import UNK, SentencePieceVocab, check_size, own_copy
from lingvo_moe.vocab.text_vocab import Characters
from lingvo_moe.vocab.tokeniser import Tokeniser


class TextValues(Protocol):
  """Values of a configuration that say which vocabulary it has; see inputs/plain_text_config.py."""

  data_dir: str
  vocab: str
  vocab_size: int


_Config = TypeVar('_Config', bound=TextValues)
_PIECES = 8000  # pieces of a vocabulary whose size is not given
_MOST_LINES = 1_000_000  # of those that train pieces
_MOST_LINE_BYTES = 16 << 20  # a line may be a whole document


class TextVocab(Tokeniser, Protocol):
  """Text to ids and back; line breaks are symbols too."""

  def encode(self, text: str) -> np.ndarray:
    """Ids (int32) of a text, without bos and eos."""

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, up to eos; other special ids are skipped."""


class Pieces(text_vocab.Pieces, SentencePieceVocab):
  """SentencePiece pieces of a run."""


def prepare(config: _Config, folder: str, resumed: bool) -> _Config:
  """Settles the vocabulary of a run and its size; the configuration that is returned names the run's own file."""
  path = config.vocab
  if config.vocab in ('char', 'pieces'):
    path = _made(config, folder, resumed)
  elif config.vocab != 'byte':
    name = 'characters.json' if path.endswith('.json') else 'pieces.model'
    path = own_copy(path, os.path.join(folder, name), resumed, _read if resumed else _read_new, 'vocab')
  size = _read(path).size
  if config.vocab_size and size > config.vocab_size:
    raise UserError(
      f'a model has as many embeddings as its vocabulary has symbols; saw vocab_size={config.vocab_size}, and the text '
      f'or {path} gives {size}: bind vocab_size = {size}, or 0'
    )
  if config.vocab_size > size:
    print(f'vocab_size={config.vocab_size} is more than there are; this run has {size}', file=sys.stderr)
  return dataclasses.replace(config, vocab=path, vocab_size=size)


def load(config: TextValues) -> TextVocab:
  """The vocabulary, which must have as many symbols as the model has embeddings."""
  vocab = _read(config.vocab)
  check_size(vocab, 'vocab_size', config.vocab_size, config.vocab)
  return vocab


def _read(path: str) -> TextVocab:
  return text_vocab.read(path, Pieces)


def _read_new(path: str) -> TextVocab:
  """A vocabulary to begin a run with."""
  vocab = _read(path)
  if isinstance(vocab, Pieces) and vocab.line_break == UNK:
    raise UserError(
      f'pieces for running text need one for a line break, <0x0A>, which {path} does not have: train it with '
      '--byte_fallback=true of SentencePiece, or bind vocab = "pieces"'
    )
  return vocab


def _made(config: TextValues, folder: str, resumed: bool) -> str:
  """The vocabulary of characters or pieces in the folder; made, or made again if damaged, unless the run goes on."""
  path = os.path.join(folder, {'char': 'characters.json', 'pieces': 'pieces.model'}[config.vocab])
  with lock(folder):
    if os.path.exists(path) and (resumed or _is_whole(path)):
      return path
    paths = documents.find_files(config.data_dir, 'train')
    if config.vocab == 'char':
      characters = Characters.of(map(documents.read, paths))
      if not characters.characters:
        raise documents.no_text(paths[0])
      characters.save(path)
    else:
      output = path.removesuffix('.model')
      sentencepiece_training.train(
        itertools.islice((line.encode() for line in text_lib.lines(paths)), _MOST_LINES),
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
