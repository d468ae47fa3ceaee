"""Vocabularies of running text: bytes, characters, or SentencePiece pieces, in which line breaks are symbols too."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files, json_files
from lingvo_moe.vocab.vocab import UNK, Vocab, text_ids

_FIRST = UNK + 1
_SPECIAL_IDS = range(_FIRST)
_ASCENDING = json_files.Kind(
  'characters in ascending order',
  lambda value: isinstance(value, str) and value != '' and list(value) == sorted(set(value)),
)


class Bytes:
  """Bytes of UTF-8: 256 ids after the special ones."""

  size = _FIRST + 256
  fingerprint = 'bytes'

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + _FIRST

  def decode(self, ids: Sequence[int]) -> str:
    return bytes(i - _FIRST for i in text_ids(ids, self.size, _SPECIAL_IDS)).decode(errors='replace')


class Characters:
  """Characters of a training text, in the order of their code points; another character is UNK."""

  def __init__(self, characters: str):
    self.characters = characters
    self.size = _FIRST + len(characters)
    self.fingerprint = hashlib.sha256(characters.encode()).hexdigest()
    self._codes = np.array([ord(c) for c in characters], np.int32)

  @classmethod
  def of(cls, texts: Iterable[str]) -> Self:
    """The characters that occur in texts."""
    return cls(''.join(sorted(set().union(*map(set, texts)))))

  @classmethod
  def load(cls, path: str) -> Self:
    """Characters from a file that `save` wrote."""
    what, way_out = 'a vocabulary of characters', 'give one that the trainer wrote'
    try:
      return cls(json_files.read(path, what, way_out, characters=_ASCENDING)['characters'])
    except FileNotFoundError:
      raise UserError(f'no vocabulary file {path!r}: restore it, or train a new run') from None

  def save(self, path: str) -> None:
    """Writes a file, whole or not at all."""
    files.write(path, json_files.dump({'characters': self.characters}))

  def encode(self, text: str) -> np.ndarray:
    codes = np.frombuffer(text.encode('utf-32-le'), np.int32)
    at = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
    return np.where(self._codes[at] == codes, at + _FIRST, UNK).astype(np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    return ''.join(self.characters[i - _FIRST] for i in text_ids(ids, self.size, _SPECIAL_IDS))


class Pieces(Vocab):
  """SentencePiece pieces. Lines are tokenised alone, and the byte piece of a line break ends each but the last."""

  def __init__(self, path: str) -> None:
    super().__init__(path)
    self.line_break = self._processor.piece_to_id('<0x0A>')  # UNK, and lost, where there is no such piece

  def encode(self, text: str) -> np.ndarray:
    rows = self._processor.encode(text.split('\n'))
    return np.array([i for row in rows for i in [*row, self.line_break]][:-1], np.int32)

  def decode(self, ids: Sequence[int]) -> str:
    lines: list[list[int]] = [[]]
    for i in text_ids(ids, self.size, _SPECIAL_IDS):
      if i == self.line_break:
        lines.append([])
      else:
        lines[-1].append(i)
    return '\n'.join(self._processor.decode(line) for line in lines)


def read(path: str, pieces: Callable[[str], Pieces] = Pieces) -> Bytes | Characters | Pieces:
  """The vocabulary at a path, or 'byte'; `pieces` reads a SentencePiece model."""
  if path == 'byte':
    return Bytes()
  return Characters.load(path) if path.endswith('.json') else pieces(path)
