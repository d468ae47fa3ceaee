"""Automaton over the symbols of a vocabulary: text that begins with a prefix and contains no banned word.

It reads the bytes that symbols write, and so holds whatever symbols a model spells a word with.
"""

import collections
import functools
import itertools
import re
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np
import regex

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.visible_text import INVISIBLE

BARRED = -1
_BOUNDARY = regex.compile(r'(?w)(?<=.)\b(?=.)')  # of words of Unicode's annex 29, within a text
_INVISIBLE = re.compile(f'[{INVISIBLE}]')
_TURKIC = {'İ': 'i', 'ı': 'i'}  # of which one is the other in capitals
_PART = 256  # code of byte 128 of a part of a character
_LONGEST = 3  # characters of a plain letter, but for Hangul, whose forms are its own
_MOST_PLACES = 1 << 26  # of the table; an int32 each


def make(prefix: bytes, banned: Sequence[str], written: Sequence[bytes], eos: int) -> tuple[np.ndarray, int]:
  """(the state after each symbol in each state, or BARRED: int32 [S, V]; the state in which text begins).

  Args:
    prefix: with which the text begins; its last word may go on.
    banned: words, or phrases, in any case and composition of their letters. No symbol may end where one of them does,
      as a model that has written it would go on with what is no word; so a longer word may come, but not by the same
      symbols.
    written: bytes that each symbol writes; b'' of a symbol that is no text, which may come after the prefix alone.
    eos: symbol that ends a text.

  Raises:
    UserError: the table would take too much memory.
  """

  def check(states):
    size, most = len(prefix) + states, _MOST_PLACES // len(written)
    if size > most:
      raise UserError(
        f'prefix and banned words have at most {most} bytes in all for this vocabulary; saw {size}: ban fewer'
      )

  words = [_bounded(word) for word in banned]
  check(sum(map(len, words)) + 1)
  goto, *ends = _trie(words)
  symbol_codes = [[ord(' ')] if symbol == eos else _codes(text) for symbol, text in enumerate(written)]
  if any(code >= _PART for codes in symbol_codes for code in codes):
    goto = _with_parts(banned, goto, ends[0], check)
  matched, stopped = (np.pad(ended, (0, len(goto) - len(ended))) for ended in ends)
  length_V = np.array(list(map(len, symbol_codes)))
  codes_VJ = np.zeros([len(symbol_codes), max(length_V)], np.int16)
  for symbol, codes in enumerate(symbol_codes):
    codes_VJ[symbol, : len(codes)] = codes

  def read(states, begin=0):
    """States after the codes of each symbol, from the code `begin` on."""
    state_JV = np.repeat(np.array(states, np.int32)[:, np.newaxis], len(symbol_codes), axis=1)
    barred_JV = np.zeros(state_JV.shape, bool)
    for j, code_V in enumerate(codes_VJ.T):
      read_V = np.flatnonzero((begin <= j) & (j < length_V))
      after_JV = goto[state_JV[:, read_V], code_V[read_V]]
      state_JV[:, read_V] = after_JV
      barred_JV[:, read_V] |= matched[after_JV]
    state_JV[barred_JV | ((begin < length_V) & stopped[state_JV])] = BARRED
    return state_JV

  states = len(goto)
  free_JV = read(range(states))
  at = goto[0, ord(' ')]
  if not prefix:
    return free_JV, int(at)
  for code in _codes(prefix):
    at = goto[at, code]
  written_V = np.array(list(map(len, written)))
  table_JV = np.concatenate([free_JV, np.full([len(prefix), len(symbol_codes)], BARRED, np.int32)])
  for place in range(len(prefix)):  # in state `states + place`, so many bytes of it are written
    rest = prefix[place:]
    inside_V = np.array([b'' != text != rest and rest.startswith(text) for text in written])
    beyond_V = np.array([text.startswith(rest) for text in written])
    after_V = np.where(beyond_V, read([at], len(_codes(rest)))[0], BARRED)
    table_JV[states + place] = np.where(inside_V, states + place + written_V, after_V)
    table_JV[states + place, eos] = BARRED
  return table_JV, states


def occurs(word: str, text: str) -> bool:
  """Whether a text has a word, in any case and composition of its letters: between boundaries of words (UAX 29).

  An apostrophe divides words too, as in "l'homme".
  """
  word, text = (' '.join(''.join(map(_plain, unicodedata.normalize('NFC', of))).split()) for of in (word, text))
  return regex.search(rf"(?w)(?:\b|(?<=['’])){regex.escape(word)}(?:\b|(?=['’]))", text) is not None


def is_barred(word: str, text: str) -> bool:
  """Whether a text has a word that is banned, as the automaton reads it."""
  return _bounded(word) in b' %s ' % bytes(_codes(text.encode()))


def goes_on(c: str) -> bool:
  """Whether words that begin with this letter are written without spaces between them, as in Chinese or Thai."""
  return c.isalpha() and not _joins(c)


@functools.lru_cache(1 << 16)
def _joins(c: str) -> bool:
  """Whether a character is of one word with letters beside it: a letter, digit or mark, of most scripts."""
  return _BOUNDARY.search(f'a{c}{c}a') is None


@functools.lru_cache(1 << 16)
def _plain(c: str) -> str:
  """Character casefolded and decomposed: '' of one that cannot be seen, a space of white space."""
  if c.isspace() or _INVISIBLE.match(c):
    return ' ' * c.isspace()
  c = unicodedata.normalize('NFD', _TURKIC.get(c, c))
  return unicodedata.normalize('NFD', c.casefold())


@functools.lru_cache(1 << 16)
def _fold(c: str) -> str:
  """Plain character, with spaces around one that is no part of a longer word: of punctuation, or in Chinese or Thai."""
  plain = _plain(c)
  return plain if plain in ('', ' ') or _joins(c) else f' {plain} '


@functools.cache
def _letters() -> dict[str, str]:
  """Letters by what they are when plain, where that is another: 'Éé' of 'e' with its accent."""
  letters = collections.defaultdict(str)
  for c in map(chr, itertools.chain(range(0x80, 0x3400), range(0xA000, 0xAC00), range(0xF900, 0x1F000))):
    if (plain := _plain(c)) not in (c, '', ' '):
      letters[plain] += c
  return letters


def _codes(text: bytes) -> list[int]:
  """Bytes of folded text, whose words are between spaces; from _PART on, those of parts of a character as they are."""
  codes: list[int] = []
  for c in unicodedata.normalize('NFC', text.decode(errors='surrogateescape')):
    codes += [_PART - 0xDC80 + ord(c)] if '\udc80' <= c <= '\udcff' else _fold(c).encode()
  return codes


def _bounded(word: str) -> bytes:
  """Folded word, with a space on each side."""
  folded = bytes(_codes(word.encode()))
  return b' ' * (folded[:1] != b' ') + folded + b' ' * (folded[-1:] != b' ')


def _with_parts(
  banned: Sequence[str], goto: np.ndarray, matched: np.ndarray, check: Callable[[int], None]
) -> np.ndarray:
  """An automaton that reads letters, in each case and composition, also where their bytes come one by one.

  What has read a part of a letter is a state, behind those given; that of state 0 is of all from which a letter leads
  to the same. `check` refuses too many states.
  """
  written = {*itertools.chain(*(unicodedata.normalize(form, word) for word in banned for form in ('NFC', 'NFD')))}
  for plain in (''.join(map(_plain, word)) for word in banned):
    slices = (plain[i : i + length] for i in range(len(plain)) for length in range(1, 1 + _LONGEST))
    written.update(*(_letters().get(some, '') for some in slices))
  letters = [c for c in sorted(written) if not c.isascii()]
  table = goto.copy()
  rows, parts = [*table], {}  # parts: number by the state before a letter, and its bytes so far
  for is_own in (False, True):
    for c in letters:
      to_J, raw = np.arange(len(goto)), c.encode()
      for byte in _fold(c).encode():
        to_J = goto[to_J, byte]
      for begin in np.flatnonzero((to_J != to_J[0]) & ~matched).tolist() if is_own else [0]:
        at = begin
        for i, byte in enumerate(raw[:-1], start=1):
          if (begin, raw[:i]) not in parts:
            check(len(rows))
            parts[begin, raw[:i]] = len(rows)
            rows.append(rows[rows[at][_PART - 128 + byte]].copy())
            rows[at][_PART - 128 + byte] = parts[begin, raw[:i]]
          at = parts[begin, raw[:i]]
        rows[at][_PART - 128 + raw[-1]] = to_J[begin]
    if not is_own:
      table[:, _PART:] = table[0, _PART:]
  return np.array(rows)


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
  goto, fail = np.zeros([len(children), _PART + 128], np.int32), np.zeros(len(children), np.int32)
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
