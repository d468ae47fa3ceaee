"""SentencePiece vocabulary of an export: text to ids, and ids to text. Special ids are those of every model."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import sentencepiece

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.visible_text import is_empty

PAD, BOS, EOS, UNK = 0, 1, 2, 3


def text_ids(ids: Iterable[int], size: int, skip: Collection[int] = (PAD, BOS)) -> list[int]:
  """Ids of text, up to the end; those to skip and those beyond a vocabulary of this size are left out."""
  until_eos = itertools.takewhile(lambda i: i != EOS, map(int, ids))
  return [i for i in until_eos if i not in skip and i < size]


class Vocab:
  """Vocabulary in a SentencePiece .model file, in which tags of languages are control symbols."""

  def __init__(self, path: str) -> None:
    self._processor = sentencepiece.SentencePieceProcessor()
    try:
      self._processor.Load(path)
    except (RuntimeError, OSError):
      raise UserError(f'{path} is not a SentencePiece model: export the run again') from None
    self.size = self._processor.get_piece_size()

  def encode(self, lines: Sequence[str]) -> list[list[int]]:
    """Ids of each line, without an end; none of a line of which nothing can be seen."""
    return self._processor.encode(['' if is_empty(line) else line.removeprefix('\ufeff') for line in lines])

  def written(self, lines: Sequence[str]) -> list[str]:
    """Each line as a model that learns it would write it: encoded and decoded.

    SentencePiece makes one space of several (U+0020), and none of those at the edges; identity keeps all others.
    """
    return [self.decode(ids) for ids in self._processor.encode(list(lines))]

  def decode(self, ids: Iterable[int]) -> str:
    """Text of ids up to the end; pad, bos and ids beyond the vocabulary are skipped."""
    # Byte pieces can form a line break, which would shift all later lines of a file.
    return self._processor.decode(text_ids(ids, self.size)).replace('\n', ' ').replace('\r', ' ')
