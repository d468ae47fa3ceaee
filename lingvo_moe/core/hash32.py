"""Hash 'lowbias32' of Python ints and of NumPy arrays of uint32; prng.py has the same in TensorFlow.

A bijection of 32 bits in which each input bit flips each output bit about half the time (Chris Wellons, public domain,
https://nullprogram.com/blog/2018/07/31/).
"""

import zlib
from typing import TypeVar

import numpy as np

Word = TypeVar('Word', int, np.ndarray)

GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive numbers over the whole range
OFFSET = 0x85EBCA6B


def mix(x: Word) -> Word:
  x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
  x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
  return x ^ (x >> 16)


def fold(key: Word, data: str | Word) -> Word:
  """Key from a key and a name or number, as prng.fold."""
  data = zlib.crc32(data.encode()) if isinstance(data, str) else data
  if isinstance(data, int) and data >= 2**32:  # a long seed
    key = fold(fold(key, 'high bits'), data >> 32)
  return mix(key ^ (data * GOLDEN + OFFSET & 0xFFFFFFFF))
