"""SentencePiece vocabulary: text to ids, and ids to text. Special ids are those of every model."""

import difflib
import functools
import itertools
from collections.abc import Collection, Iterable, Sequence

import sentencepiece

from lingvo_moe.core.alignment import Token
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

  @functools.cached_property
  def writes(self) -> list[bytes]:
    """What each symbol writes, in UTF-8 with spaces between words; b'' of a symbol that is no text.

    A byte piece of a space is none, as it would make two of one.
    """
    processor, written = self._processor, []
    for i in range(processor.get_piece_size()):
      piece = processor.id_to_piece(i)
      is_text = not (processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i) or piece == '<0x20>')
      byte = bytes([int(piece[1:-1], 16)]) if processor.is_byte(i) else piece.replace('\u2581', ' ').encode()
      written.append(byte if is_text else b'')
    return written

  def tokens(self, ids: Sequence[int], text: str) -> list[Token]:
    """Tokens of a text that was encoded to these ids, or was decoded from them."""
    writes = [self.writes[i] for i in ids]
    characters = lambda written: sum(byte & 0xC0 != 0x80 for byte in written)
    ends = itertools.accumulate(map(characters, writes))
    at = _places(b''.join(writes).decode(errors='replace'), text)
    begins = lambda written, end: end - characters(written.lstrip(b' '))
    return [
      Token(self._processor.id_to_piece(i), at[begins(written, end)], at[end])
      for i, written, end in zip(ids, writes, ends)
    ]

  def written(self, lines: Sequence[str]) -> list[str]:
    """Each line as a model that learns it would write it: encoded and decoded.

    SentencePiece makes one space of several (U+0020), and none of those at the edges; identity keeps all others.
    """
    return [self.decode(ids) for ids in self._processor.encode(list(lines))]

  def decode(self, ids: Iterable[int]) -> str:
    """Text of ids up to the end; pad, bos and ids beyond the vocabulary are skipped."""
    # Byte pieces can form a line break, which would shift all later lines of a file.
    return self._processor.decode(text_ids(ids, self.size)).replace('\n', ' ').replace('\r', ' ')


def _places(normalized: str, text: str) -> list[int]:
  """The place in a text of each place in what it is normalised to."""
  places = [0] * (len(normalized) + 1)
  for _, begin, end, at, at_end in difflib.SequenceMatcher(None, normalized, text, autojunk=False).get_opcodes():
    places[begin : end + 1] = [min(at + i, at_end) for i in range(end - begin + 1)]
  return places
