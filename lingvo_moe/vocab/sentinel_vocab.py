"""Vocabulary with sentinels: that of the text, and, as its last ids, <extra_id_0>, <extra_id_1>, ..."""

import re
from collections.abc import Sequence

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.vocab.plain_text_vocab import Pieces, TextVocab
from lingvo_moe.vocab.sentencepiece_vocab import EOS
from lingvo_moe.vocab.vocab import text_ids

_SENTINEL = re.compile(r'<extra_id_([0-9]{1,9})>')


class SentinelVocab:
  """Text with sentinels to ids and back. Sentinel k is id size - 1 - k, as in T5; `text` is the text's vocabulary."""

  def __init__(self, text: TextVocab, sentinels: int):
    self.text = text
    self.sentinels = sentinels
    self.size = text.size + sentinels
    self.fingerprint = f'{text.fingerprint}+{sentinels}'

  @property
  def first_sentinel(self) -> int:
    """Id of <extra_id_0>."""
    return self.size - 1

  def is_sentinel(self, id: int) -> bool:
    return self.text.size <= id < self.size

  def encode(self, text: str) -> np.ndarray:
    """Ids (int32) of a text in which sentinels are written <extra_id_0>, ...; UserError for one that there is not.

    Of pieces, one that begins a word has the space before it: the spaces around a sentinel belong to what it replaces,
    or to the piece after it.
    """
    parts = _SENTINEL.split(text)  # text, number, text, number, ..., text
    ids: list[int] = []
    for place, part in enumerate(parts):
      if place % 2:
        ids.append(self._sentinel(part))
        continue
      if isinstance(self.text, Pieces):
        part = part.lstrip(' ') if place else part
        part = part if place == len(parts) - 1 else part.rstrip(' ')
      ids += self.text.encode(part).tolist() if part else []
    return np.array(ids, np.int32)

  def _sentinel(self, number: str) -> int:
    if int(number) >= self.sentinels:
      raise UserError(
        f'this run has the sentinels <extra_id_0> to <extra_id_{self.sentinels - 1}>; saw <extra_id_{number}>: use '
        'smaller numbers, or a run with more sentinels'
      )
    return self.first_sentinel - int(number)

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, up to the end, with sentinels written out."""
    parts, plain, done = [], [], ''
    for i in (*text_ids(ids, self.size, skip=()), EOS):
      if i != EOS and not self.is_sentinel(i):
        plain.append(i)
        continue
      text = self.text.decode(plain)
      parts.append(text[len(done) :])
      if isinstance(self.text, Pieces):  # the first of which loses its space, so they are decoded from the beginning
        done = text
      else:
        plain = []
      if i != EOS:
        parts.append(f'<extra_id_{self.first_sentinel - i}>')
    return ''.join(parts)

  def spans(self, ids: Sequence[int]) -> dict[int, list[int]]:
    """Ids after each sentinel, by sentinel, up to the end; of a sentinel that comes twice, the first ones."""
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for i in text_ids(ids, self.size, skip=()):
      if self.is_sentinel(i):
        current = []
        spans.setdefault(i, current)
      else:
        current.append(i)
    return spans

  def fill(self, ids: Sequence[int], answer: Sequence[int]) -> str:
    """Text of a source with each sentinel replaced by its tokens in the answer; one without any stays written out."""
    spans, filled = self.spans(answer), []
    for i in map(int, ids):
      filled += spans.get(i) or [i] if self.is_sentinel(i) else [i]
    return self.decode(filled)
