"""Temperature sampling: an endless stream of examples from several languages, as a pure function of (seed, number).

With a temperature t, a language of n lines has a share in proportion to n^(1/t) (Arivazhagan et al., 2019,
arXiv:1907.05019; GShard, which continues that work, does not say how it samples): t = 1 keeps the natural shares, and
with growing t they become equal. Weights multiply the shares, which are then scaled to sum to 1. The stream is divided
into windows of about window_size examples. Window i takes from each language the draws floor(i * window_size * share)
up to floor((i + 1) * window_size * share). Languages are not chosen at random, so at the end of every window the share
of each is exact to one draw. Draw j of a language is line permute(j mod n) of its epoch j div n, where permute is a
keyed permutation that is computed and not stored, so no memory grows with the corpus.
"""

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

_U64 = np.uint64
_ROUNDS = 4


def mix(x: np.ndarray) -> np.ndarray:
  """Finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of uint64 whose values look random."""
  with np.errstate(over='ignore'):
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def fold(*parts) -> np.ndarray:
  """Hash (uint64) of integers, strings and integer arrays, which broadcast."""
  h = _U64(0x243F6A8885A308D3)
  with np.errstate(over='ignore'):
    for part in parts:
      if isinstance(part, str):
        part = zlib.crc32(part.encode())
      part = _U64(part & 0xFFFFFFFFFFFFFFFF) if isinstance(part, int) else np.asarray(part).astype(_U64)
      h = mix((h ^ part) * _U64(0x9E3779B97F4A7C15) + _U64(0x632BE59BD9B4E019))
  return h


def shuffled(n: int, *key) -> np.ndarray:
  """Shuffled numbers 0 to n-1, in an order given by the key."""
  return np.argsort(fold(*key, np.arange(n)), kind='stable')


def permute(position: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
  """Permutes positions element by element: the image of `position` under the permutation of [0, size) given by `key`.

  A Feistel network on the smallest power of two that holds `size`, applied again until the result is below `size`
  (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Memory does not depend on `size`.
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
  """Feistel network: two halves, each XORed in turn with a hash of the other, which is bijective for any hash."""
  one = _U64(1)
  low_mask, high_mask = (one << low) - one, (one << high) - one
  left, right = x >> low, x & low_mask
  with np.errstate(over='ignore'):
    for round_number in range(_ROUNDS):
      key = mix(key + _U64(0x9E3779B97F4A7C15) * _U64(round_number + 1))
      left = left ^ (mix(right ^ key) & high_mask)
      right = right ^ (mix(left + key) & low_mask)
  return (left << low) | right


def shares(sizes: Sequence[int], temperature: float, weights: Sequence[float] = ()) -> np.ndarray:
  """Share of each language in the stream; shares sum to 1. Without weights they are all 1."""
  # Divided by the largest size and weight first, so that none overflows.
  p = (np.asarray(sizes, np.float64) / max(sizes)) ** (1.0 / temperature)
  if len(weights):
    p *= np.asarray(weights, np.float64) / max(weights)
  return p / p.sum()


def quotas(shares: np.ndarray, total: int = 2**32) -> list[int]:
  """Shares as integers that sum to `total`, of at least 1 if above 0, by the method of largest remainders."""
  exact = shares * total
  q = np.maximum(np.floor(exact).astype(np.int64), exact > 0)
  short = total - int(q.sum())
  q[np.argsort(np.floor(exact) - exact, kind='stable')[: max(short, 0)]] += 1
  while short < 0:  # quotas raised to 1 made the sum too large: the largest are reduced
    largest = np.argmax(q)
    paid = min(-short, int(q[largest]) - 1) if q[largest] * 2 > total else 1
    q[largest] -= paid
    short += paid
  return [int(n) for n in q]


@dataclasses.dataclass
class ExampleSampler:
  """Sampler of the stream, by windows of about window_size examples.

  By rounding, a window may differ from window_size by up to the number of languages. `stages` has the share of each
  language in the stream, for each stage of training. The first window is of the first stage; methods take in `begins`
  the windows with which the stages begin, as far as they have begun. `run` consecutive lines are drawn one after the
  other, so that a window reads few parts of a file.
  """

  names: Sequence[str]
  sizes: Sequence[int]
  _: dataclasses.KW_ONLY
  stages: Sequence[np.ndarray]
  seed: int
  window_size: int
  run: int = 1

  def __post_init__(self):
    self._quotas = [quotas(shares) for shares in self.stages]
    self._sizes = np.asarray(self.sizes, np.int64)
    self._keys = np.asarray([fold(self.seed, 'language', name) for name in self.names], _U64)

  def drawn(self, window: int, begins: Sequence[int] = (0,)) -> np.ndarray:
    """Draws (int64) of each language before this window, computed exactly with Python's integers."""
    drawn = np.zeros(len(self.names), np.int64)
    for of_stage, begin, end in zip(self._quotas, begins, [*begins[1:], window]):
      drawn += [((end - begin) * self.window_size * q) >> 32 for q in of_stage]
    return drawn

  def window(self, window: int, begins: Sequence[int] = (0,)) -> tuple[np.ndarray, np.ndarray]:
    """Examples of a window, as (language, line) arrays, in a random order."""
    first, last = self.drawn(window, begins), self.drawn(window + 1, begins)
    counts = last - first
    language = np.repeat(np.arange(len(counts)), counts)
    draw = np.arange(len(language)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    size = self._sizes[language]
    epoch = draw // size
    place = draw - epoch * size
    runs, run = np.maximum(size // self.run, 1), place // self.run  # lines after the whole runs stay in their places
    moved = permute(np.minimum(run, runs - 1), runs, fold(self._keys[language], epoch))
    line = np.where(run < size // self.run, moved * self.run + place % self.run, place)
    order = shuffled(len(line), self.seed, 'window', window)
    return language[order], line[order]
