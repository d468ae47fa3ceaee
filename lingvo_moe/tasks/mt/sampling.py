"""An endless stream of examples, mixed from several languages, as a pure function of (seed, number).

With temperature T, a language of n lines has the share n^(1/T) / sum of all of them (GShard, section 4.1, after
arXiv:1907.05019): 1 keeps the natural shares, and with growing T they become equal. Window w of W numbers takes from
each language its draws floor(w W share) up to floor((w+1) W share): no random choice of language, so that its share is
exact to one draw at the end of every window. Draw j of a language is line perm(j mod n) of its epoch j div n, where
perm is a keyed permutation that is computed, never stored: nothing grows with the corpus.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

_U64 = np.uint64
_ROUNDS = 4


def mix(x: np.ndarray) -> np.ndarray:
  """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of uint64 that leaves no visible pattern."""
  with np.errstate(over='ignore'):
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def fold(*parts) -> np.ndarray:
  """uint64 hash of integers, strings and integer arrays, which broadcast."""
  h = _U64(0x243F6A8885A308D3)
  with np.errstate(over='ignore'):
    for part in parts:
      if isinstance(part, str):
        part = zlib.crc32(part.encode())
      part = _U64(part & 0xFFFFFFFFFFFFFFFF) if isinstance(part, int) else np.asarray(part).astype(_U64)
      h = mix((h ^ part) * _U64(0x9E3779B97F4A7C15) + _U64(0x632BE59BD9B4E019))
  return h


def shuffled(n: int, *key) -> np.ndarray:
  """The numbers 0 to n-1 in an order given by the key."""
  return np.argsort(fold(*key, np.arange(n)), kind='stable')


def permute(position: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
  """Element-wise: the image of `position` under the permutation of [0, size) that belongs to `key`.

  A Feistel network over the smallest power of two that holds `size`, walked until it comes back into the range
  (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). O(1) memory an element, whatever the size.
  """
  position, size, key = np.broadcast_arrays(*(np.asarray(a).astype(_U64) for a in (position, size, key)))
  bits = np.ceil(np.log2(np.maximum(size, 2).astype(np.float64))).astype(_U64)
  bits += (_U64(1) << bits) < size  # log2 rounds for sizes beyond 2^52
  low = bits >> _U64(1)
  result = position.copy()
  todo = np.arange(result.size)
  while todo.size:
    y = _feistel(result.flat[todo], low.flat[todo], bits.flat[todo] - low.flat[todo], key.flat[todo])
    result.flat[todo] = y
    todo = todo[y >= size.flat[todo]]
  return result.astype(np.int64)


def _feistel(x, low, high, key):
  """Two halves, each xored in turn with a hash of the other: bijective whatever the hash."""
  one = _U64(1)
  low_mask, high_mask = (one << low) - one, (one << high) - one
  left, right = x >> low, x & low_mask
  with np.errstate(over='ignore'):
    for round_number in range(_ROUNDS):
      key = mix(key + _U64(0x9E3779B97F4A7C15) * _U64(round_number + 1))
      left = left ^ (mix(right ^ key) & high_mask)
      right = right ^ (mix(left + key) & low_mask)
  return (left << low) | right


def shares(sizes: Sequence[int], temperature: float) -> np.ndarray:
  """Each language's part of the stream; they sum to 1."""
  # Normalised by the largest first: no overflow at any temperature.
  p = (np.asarray(sizes, np.float64) / max(sizes)) ** (1.0 / temperature)
  return p / p.sum()


def quotas(sizes: Sequence[int], temperature: float, total: int = 2**32) -> list[int]:
  """The shares as integers that sum to `total`, by largest remainders, none below 1."""
  exact = shares(sizes, temperature) * total
  q = np.maximum(np.floor(exact).astype(np.int64), 1)
  short = total - int(q.sum())
  q[np.argsort(np.floor(exact) - exact, kind='stable')[: max(short, 0)]] += 1
  while short < 0:  # those lifted to 1 are paid for by the largest, which has enough where total is large
    largest = np.argmax(q)
    paid = min(-short, int(q[largest]) - 1) if q[largest] * 2 > total else 1
    q[largest] -= paid
    short += paid
  return [int(n) for n in q]


class Sampler:
  """The stream, in windows of about W examples.

  Attributes:
    window_size: W; the floors leave out up to one draw a language, so a window has W to within their number.
    shares: each language's part of the stream.
  """

  def __init__(self, names: Sequence[str], sizes: Sequence[int], *, temperature: float, seed: int, window_size: int):
    self.window_size = window_size
    self._seed = seed
    self.shares = [float(p) for p in shares(sizes, temperature)]
    self._quotas = quotas(sizes, temperature)
    self._sizes = np.asarray(sizes, np.int64)
    self._keys = np.asarray([fold(seed, 'language', name) for name in names], _U64)

  def drawn(self, window: int) -> np.ndarray:
    """int64: how many draws each language has given before this window (exact: Python's integers do not overflow)."""
    return np.asarray([(window * self.window_size * q) >> 32 for q in self._quotas], np.int64)

  def window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(language, line) of each example of a window, in a random order."""
    first, last = self.drawn(window), self.drawn(window + 1)
    counts = last - first
    language = np.repeat(np.arange(len(counts)), counts)
    draw = np.arange(len(language)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    size = self._sizes[language]
    epoch = draw // size
    line = permute(draw - epoch * size, size, fold(self._keys[language], epoch))
    order = shuffled(len(line), self._seed, 'window', window)
    return language[order], line[order]
