"""Vocabulary of a translation model: SentencePiece, with tags.

The target language of a sentence is chosen by a tag, `<2xx>`, a symbol of the source vocabulary whose id is put before
the ids of the sentence. A sentence that has these characters has them as text.
"""

from __future__ import annotations

import re

from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.vocab import UNK
from lingvo_moe.tasks.vocab import SentencePieceVocab

_TAG = re.compile(r'<2(\S+)>')


def tag(language: str) -> str:
  """Tag of a target language: '<2de>'."""
  return f'<2{language}>'


class Vocab(SentencePieceVocab):
  """SentencePiece vocabulary that may have tags."""

  def _adapted(self, model: bytes) -> bytes:
    """The model with tags that no text is encoded to: SentencePiece finds user-defined symbols, but not control symbols."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    found = [p for p in proto.pieces if p.type == kinds.USER_DEFINED and _TAG.fullmatch(p.piece)]
    for piece in found:
      piece.type = kinds.CONTROL
    return proto.SerializeToString() if found else model

  def tags(self) -> list[str]:
    """Languages with a tag in the vocabulary, sorted."""
    matches = (_TAG.fullmatch(self._processor.id_to_piece(i)) for i in range(self.size))
    return sorted(m[1] for m in matches if m)

  def tag_id(self, language: str) -> int:
    """Id of the tag of a target language; UserError if the vocabulary lacks it."""
    i = self._processor.piece_to_id(tag(language))
    if i == UNK:
      raise UserError(
        f'with several target languages (or tag_target) the source vocabulary needs the symbol {tag(language)}; '
        f'{self.path} lacks it: train it with lingvo-moe vocab --tags'
      )
    return i
