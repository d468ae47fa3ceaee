"""Near-duplicates by MinHash (Broder 1997): keys that texts of similar character 5-grams have in common."""

import math
from collections.abc import Sequence

import numpy as np

from lingvo_moe.corpora import temperature_sampling

BANDS = 8
_N = 5
_FOUND = 0.8  # share of the pairs of the similarity asked for that are found
_POWERS = np.uint64(0x100000001B3) ** np.arange(_N, dtype=np.uint64)


def keys(texts: Sequence[str], similarity: float) -> np.ndarray:
  """Keys of each text, uint64 [texts, BANDS]; texts are taken as alike if any of these is equal.

  Four of five pairs of this Jaccard similarity are. With 0.9, so are 20% of those of 0.8, and 3% of those of 0.7.
  """
  rows = max(1, round(math.log(1 - (1 - _FOUND) ** (1 / BANDS)) / math.log(similarity)))
  codes = [np.frombuffer((text + ' ' * _N).encode('utf-32-le'), np.uint32).astype(np.uint64) for text in texts]
  grams = [np.convolve(text_codes, _POWERS, 'valid') for text_codes in codes]
  starts = np.cumsum([0, *map(len, grams)])
  grams = temperature_sampling.mix(np.concatenate(grams))
  factors = temperature_sampling.fold('MinHash', np.arange(BANDS * rows)) | np.uint64(1)
  least = np.array([np.minimum.reduceat(grams * factor, starts[:-1]) for factor in factors])
  return np.stack([temperature_sampling.fold(*band) for band in least.reshape(BANDS, rows, len(texts))], axis=1)
