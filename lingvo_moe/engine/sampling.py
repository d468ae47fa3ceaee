"""Sampling in NumPy: continuations drawn symbol by symbol, by temperature, top-k and top-p, or greedily.

Draws are those of search/sampling.py, with the random numbers of core/prng.py, which describe them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lingvo_moe.core import hash32
from lingvo_moe.core.hash32 import GOLDEN
from lingvo_moe.core.vocab import BOS, EOS, PAD
from lingvo_moe.engine import search
from lingvo_moe.engine.flat_cache import FlatCache, Prompt
from lingvo_moe.engine.stages import StagedGraph


class Sampler(NamedTuple):
  """Choice of the next symbol, by values for each row; a temperature of 0 takes the likeliest symbol."""

  temperature_B: np.ndarray
  top_k_B: np.ndarray
  top_p_B: np.ndarray

  def take(self, rows: np.ndarray) -> Sampler:
    """The sampler of some of the rows."""
    return Sampler(*(values_B[rows] for values_B in self))

  def __call__(self, logits_BV: np.ndarray, keys_B: np.ndarray) -> np.ndarray:
    """The next symbols, int32 [B]."""
    logits_BV = np.where(np.isin(np.arange(logits_BV.shape[1]), (PAD, BOS)), np.float32(-np.inf), logits_BV)
    likeliest_B = logits_BV.argmax(axis=1).astype(np.int32)
    if not self.temperature_B.any():
      return likeliest_B
    noise_BV = -np.log(-np.log(np.maximum(_uniform(keys_B, logits_BV.shape[1]), np.float32(2.0**-25))))
    drawn_B = (self._restricted(logits_BV) + noise_BV).argmax(axis=1).astype(np.int32)
    return np.where(self.temperature_B > 0, drawn_B, likeliest_B)

  def _restricted(self, logits_BV: np.ndarray) -> np.ndarray:
    """Logits at the temperature, -inf for the symbols that are never drawn."""
    temperature_B1, top_k_B1, top_p_B1 = (values_B[:, np.newaxis] for values_B in self)
    logits_BV = logits_BV / np.where(temperature_B1 > 0, temperature_B1, 1).astype(np.float32)
    if not top_k_B1.any() and (top_p_B1 == 1).all():
      return logits_BV
    sorted_BV = -np.sort(-logits_BV, axis=1)
    smallest = lambda chosen_BV: np.where(chosen_BV, sorted_BV, np.inf).min(axis=1, keepdims=True)
    of_k_B1 = smallest((np.arange(sorted_BV.shape[1]) < top_k_B1) | (top_k_B1 == 0))
    weights_BV = np.where(sorted_BV < of_k_B1, np.float32(0), np.exp(sorted_BV - sorted_BV[:, :1]))
    probs_BV = weights_BV / weights_BV.sum(axis=1, keepdims=True)
    of_p_B1 = smallest((probs_BV.cumsum(axis=1) - probs_BV < top_p_B1) | (top_p_B1 == 1))
    return np.where(logits_BV < np.maximum(of_k_B1, of_p_B1), np.float32(-np.inf), logits_BV)


def sample(
  decoder: StagedGraph,
  prompt: Prompt,
  sampler: Sampler,
  keys_B: np.ndarray,
  limits_B: np.ndarray,
  watch: Callable[[np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Draws a continuation of each row, with its end, of at most limits_B symbols: ids [B, T], lengths, log p.

  `watch` is called at every step with the symbols drawn, [B], pad where a row has ended; it returns which rows go on.
  """
  rows, most = len(keys_B), int(limits_B.max())
  ids_BT, lengths_B = np.full([rows, most], PAD, np.int32), np.zeros(rows, np.int32)
  log_probs_B, last_B, numbers, live_B = np.zeros(rows, np.float32), prompt.last_B, np.arange(rows), np.ones(rows, bool)
  cache = FlatCache(decoder, {'lengths': prompt.lengths_B}, 1, most, prompt)
  for time in range(most):
    if cache.is_full:
      cache.keep(np.flatnonzero(live_B), live_B[:, np.newaxis])
      numbers, last_B, live_B = numbers[live_B], last_B[live_B], live_B[live_B]
    cache.run(last_B[:, np.newaxis], time, live_B[:, np.newaxis])
    logits_BV = search.logits(decoder)[:, 0]
    last_B = sampler.take(numbers)(logits_BV, hash32.fold(keys_B[numbers], time))
    step_B = logits_BV[np.arange(len(last_B)), last_B] - decoder.output('log_z')[:, 0]
    del logits_BV  # a view, which may not be held by the next step
    ids_BT[numbers[live_B], time] = last_B[live_B]
    log_probs_B[numbers] += np.where(live_B, step_B, 0)
    lengths_B[numbers] += live_B
    live_B = live_B & (last_B != EOS) & (time + 1 < limits_B[numbers]) & watch(ids_BT[:, time])[numbers]
    if not live_B.any():
      break
  return ids_BT, lengths_B, log_probs_B


def _uniform(keys_B: np.ndarray, count: int) -> np.ndarray:
  """Uniform float32 [B, count] in [0, 1), as prng.uniform."""
  spread = np.arange(count, dtype=np.uint32) * np.uint32(GOLDEN) + np.uint32(1)
  return (hash32.mix(keys_B[:, np.newaxis] ^ spread) >> 8).astype(np.float32) * np.float32(2.0**-24)
