"""Automaton over the symbols of a vocabulary: text that begins with a prefix and contains no banned word.

It reads the bytes that symbols write, and so holds whatever symbols a model spells a word with.
"""

import collections
import unicodedata
from collections.abc import Sequence

import numpy as np

from lingvo_moe.core.errors import UserError

BARRED = -1
_MOST_PLACES = 1 << 26  # of the table; an int32 each


def make(prefix: bytes, banned: Sequence[str], written: Sequence[bytes], eos: int) -> tuple[np.ndarray, int]:
  """(the state after each symbol in each state, or BARRED: int32 [S, V]; the state in which text begins).

  Args:
    prefix: with which the text begins; its last word may go on.
    banned: words, or phrases, in any case of their letters. No symbol may end where one of them does, as a model that
      has written it would go on with what is no word; so a longer word may come, but not by the same symbols.
    written: bytes that each symbol writes; b'' of a symbol that is no text, which may come after the prefix alone.
    eos: symbol that ends a text.

  Raises:
    UserError: the table would take too much memory.
  """
  size = len(prefix) + sum(len(word.encode()) + 2 for word in banned) + 1
  if size * len(written) > _MOST_PLACES:
    most = _MOST_PLACES // len(written)
    raise UserError(
      f'prefix and banned words have at most {most} bytes in all for this vocabulary; saw {size}: ban fewer'
    )
  goto, matched, stopped = _trie([_bounded(word) for word in banned])
  symbol_bytes = [b' ' if symbol == eos else _folded(text) for symbol, text in enumerate(written)]
  bytes_VJ = np.zeros([len(symbol_bytes), max(map(len, symbol_bytes))], np.uint8)
  length_V = np.array(list(map(len, symbol_bytes)))
  for symbol, text in enumerate(symbol_bytes):
    bytes_VJ[symbol, : len(text)] = np.frombuffer(text, np.uint8)

  def read(states, begin=0):
    """States after the bytes of each symbol, from so many on."""
    state_JV = np.repeat(np.array(states, np.int32)[:, np.newaxis], len(symbol_bytes), axis=1)
    barred_JV = np.zeros(state_JV.shape, bool)
    for j, byte_V in enumerate(bytes_VJ.T):
      read_V = np.flatnonzero((begin <= j) & (j < length_V))
      after_JV = goto[state_JV[:, read_V], byte_V[read_V]]
      state_JV[:, read_V] = after_JV
      barred_JV[:, read_V] |= matched[after_JV]
    state_JV[barred_JV | ((begin < length_V) & stopped[state_JV])] = BARRED
    return state_JV

  states = len(goto)
  free_JV = read(range(states))
  at = goto[0, ord(' ')]
  if not prefix:
    return free_JV, int(at)
  for byte in _folded(prefix):
    at = goto[at, byte]
  written_V = np.array(list(map(len, written)))
  table_JV = np.concatenate([free_JV, np.full([len(prefix), len(symbol_bytes)], BARRED, np.int32)])
  for place in range(len(prefix)):  # in state `states + place`, so many bytes of it are written
    rest = prefix[place:]
    inside_V = np.array([b'' != text != rest and rest.startswith(text) for text in written])
    beyond_V = np.array([text.startswith(rest) for text in written])
    after_V = np.where(beyond_V, read([at], len(_folded(rest)))[0], BARRED)
    table_JV[states + place] = np.where(inside_V, states + place + written_V, after_V)
    table_JV[states + place, eos] = BARRED
  return table_JV, states


def occurs(word: str, text: str) -> bool:
  """Whether a word is one of a text's, in any case of its letters."""
  return _bounded(word) in b' ' + _folded(text.encode()) + b' '


def goes_on(c: str) -> bool:
  """Whether a word that begins or ends with this letter may be a part of others: one without case, as in Chinese."""
  return unicodedata.category(c) == 'Lo'


def _folded(text: bytes) -> bytes:
  """Text in lower case, with spaces for what is no letter, mark or digit. A part of a character stays as it is."""
  is_kept = lambda c: c.isalnum() or unicodedata.category(c)[0] == 'M' or '\udc80' <= c <= '\udcff'
  fold = lambda c: c.lower() if is_kept(c) else ' '
  return ''.join(map(fold, text.decode(errors='surrogateescape'))).encode(errors='surrogateescape')


def _bounded(word: str) -> bytes:
  """Folded word, with a space on each side where it does not go on."""
  before, after = (b'' if goes_on(word[i]) else b' ' for i in (0, -1))
  return before + _folded(word.encode()) + after


def _trie(words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Aho-Corasick automaton: the next state by state and byte; whether a word ends in a state; and without its space."""
  children, ends = [{}], (set(), set())
  for word in words:
    path = [0]
    for byte in word:
      if byte not in children[path[-1]]:
        children[path[-1]][byte] = len(children)
        children.append({})
      path.append(children[path[-1]][byte])
    for word_ends, length in zip(ends, (len(word), len(word.rstrip(b' ')))):
      word_ends.add(path[length])
  goto, fail = np.zeros([len(children), 256], np.int32), np.zeros(len(children), np.int32)
  ended, queue = np.zeros([2, len(children)], bool), collections.deque([0])
  while queue:
    state = queue.popleft()
    ended[:, state] = [state in word_ends for word_ends in ends]
    if state:
      ended[:, state] |= ended[:, fail[state]]
    goto[state] = goto[fail[state]]
    for byte, child in children[state].items():
      fail[child], goto[state, byte] = goto[state, byte], child
      queue.append(child)
  return goto, *ended
