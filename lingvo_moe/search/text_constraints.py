"""Constraints of a request as symbols of a vocabulary: a prefix, banned words, and terms of sentences."""

from collections.abc import Sequence

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.search import automaton
from lingvo_moe.search.constraints import Constraints
from lingvo_moe.search.request import TranslationRequest
from lingvo_moe.vocab.vocab import EOS, PAD, UNK, Vocab


class TextConstraints:
  """Constraints of a request.

  Args:
    request: its prefix, ban and terms.
    vocab: of the target.
    num_symbols: symbols of the model, which may be more than the vocabulary's.
    most: symbols of the longest translation.
    given: symbols before the text, 0 or 1: the tag of a language.
  """

  def __init__(self, request: TranslationRequest, vocab: Vocab, num_symbols: int, most: int, given: int) -> None:
    self._vocab, self._most = vocab, most
    prefix = self._ids(request.prefix) if request.prefix else []
    written = [*vocab.writes, *[b''] * (num_symbols - len(vocab.writes))]
    text = b''.join(written[i] for i in prefix) + b' ' * request.prefix[-1:].isspace()
    self._automaton_JV, self._begin = automaton.make(text, request.ban, written, EOS)
    if given:  # it leads from a state before to the first
      before_1V = np.full([1, num_symbols], self._begin, np.int32)
      self._begin, self._automaton_JV = len(self._automaton_JV), np.concatenate([self._automaton_JV, before_1V])
    self._prefix, self._terms = len(prefix) + given, [(source, self._ids(target)) for source, target in request.terms]

  def of(self, sources: Sequence[str], rows: int) -> tuple[Constraints, np.ndarray]:
    """Constraints of translations of sentences in the first of `rows` rows, and the room they need: int32 [B]."""
    terms = [[ids for term, ids in self._terms if automaton.occurs(term, source)] for source in sources]
    longest = max((len(ids) for row_terms in terms for ids in row_terms), default=0)
    terms_BYT = np.full([rows, max(1, *map(len, terms)), longest + 1], PAD, np.int32)
    for row, row_terms in enumerate(terms):
      for c, ids in enumerate(row_terms):
        terms_BYT[row, c, : len(ids)] = ids
    room_B = np.count_nonzero(terms_BYT, axis=(1, 2)).astype(np.int32) + self._prefix
    for row, source in enumerate(sources):
      if room_B[row] >= self._most - 1:
        raise UserError(
          f'prefix and terms must leave room in a translation of {self._most} symbols; saw up to {room_B[row]} for '
          f'{source!r:.60}: ask for less'
        )
    return Constraints(self._automaton_JV, np.int32(self._begin), terms_BYT), room_B

  def _ids(self, text: str) -> list[int]:
    [ids] = self._vocab.encode([text])
    if not ids or UNK in ids:
      raise UserError(f'the vocabulary of the model cannot write {text!r}: ask for other text')
    is_space = len(ids) > 1 and self._vocab.writes[ids[0]] == b' '
    return ids[1:] if is_space and automaton.goes_on(text[0]) else ids  # Chinese words have no space between them
