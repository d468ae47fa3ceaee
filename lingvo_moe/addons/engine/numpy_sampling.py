"""Sampling in NumPy: continuations drawn symbol by symbol, by temperature, top-k and top-p, or greedily.

Draws are those of search/sampling.py, with the random numbers of core/prng.py, which describe them. Here rows that have
ended leave the batch, and the first symbols may be given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lingvo_moe.addons.engine import search
from lingvo_moe.addons.engine.flat_cache import FlatCache, Prompt
from lingvo_moe.addons.engine.numpy_beam import ARRAYS
from lingvo_moe.addons.engine.stages import StagedGraph
from lingvo_moe.core import hash32
from lingvo_moe.core.hash32 import GOLDEN
from lingvo_moe.search.continuations import LEAST_TEMPERATURE, Request, by_row
from lingvo_moe.search.repetition import Repetition
from lingvo_moe.vocab.vocab import BOS, EOS, PAD


class NumpySampler(NamedTuple):
  """Choice of the next symbol, by values for each row; a temperature of 0 takes the likeliest symbol."""

  temperature_B: np.ndarray
  top_k_B: np.ndarray
  top_p_B: np.ndarray

  @classmethod
  def of_rows(cls, values: Mapping[str, np.ndarray], copies: int) -> NumpySampler:
    """Sampler with the values of `by_row`, for `copies` rows of each of its rows."""
    return cls(*(np.repeat(values[name], copies) for name in ('temperature', 'top_k', 'top_p')))

  def take(self, rows: np.ndarray) -> NumpySampler:
    return NumpySampler(*(values_B[rows] for values_B in self))

  def __call__(self, logits_BWV: np.ndarray, keys_BW: np.ndarray) -> np.ndarray:
    """The next symbols, int32 [B, W]."""
    logits_BWV = np.where(np.isin(np.arange(logits_BWV.shape[2]), (PAD, BOS)), np.float32(-np.inf), logits_BWV)
    likeliest_BW = logits_BWV.argmax(axis=2).astype(np.int32)
    if not self.temperature_B.any():
      return likeliest_BW
    noise_BWV = -np.log(-np.log(np.maximum(_uniform(keys_BW, logits_BWV.shape[2]), np.float32(2.0**-25))))
    drawn_BW = (self._restricted(logits_BWV) + noise_BWV).argmax(axis=2).astype(np.int32)
    return np.where(self.temperature_B[:, np.newaxis] > 0, drawn_BW, likeliest_BW)

  def _restricted(self, logits_BWV: np.ndarray) -> np.ndarray:
    """Logits at the temperature, -inf for the symbols that are never drawn."""
    temperature_B11, top_k_B11, top_p_B11 = (values_B[:, np.newaxis, np.newaxis] for values_B in self)
    logits_BWV = logits_BWV - logits_BWV.max(axis=2, keepdims=True)  # the largest is 0 at any temperature
    with np.errstate(over='ignore'):
      logits_BWV /= np.maximum(np.where(temperature_B11 > 0, temperature_B11, 1), LEAST_TEMPERATURE).astype(np.float32)
    if not top_k_B11.any() and (top_p_B11 == 1).all():
      return logits_BWV
    sorted_BWV = -np.sort(-logits_BWV, axis=2)
    smallest = lambda chosen_BWV: np.where(chosen_BWV, sorted_BWV, np.inf).min(axis=2, keepdims=True)
    of_k_BW1 = smallest((np.arange(sorted_BWV.shape[2]) < top_k_B11) | (top_k_B11 == 0))
    weights_BWV = np.where(sorted_BWV < of_k_BW1, np.float32(0), np.exp(sorted_BWV - sorted_BWV[:, :, :1]))
    probs_BWV = weights_BWV / weights_BWV.sum(axis=2, keepdims=True)
    of_p_BW1 = smallest((probs_BWV.cumsum(axis=2) - probs_BWV < top_p_B11) | (top_p_B11 == 1))
    return np.where(logits_BWV < np.maximum(of_k_BW1, of_p_BW1), np.float32(-np.inf), logits_BWV)


def sample(
  decoder: StagedGraph,
  memory: dict[str, np.ndarray],
  sampler: NumpySampler,
  keys_BW: np.ndarray,
  limits_BW: np.ndarray,
  last_B: np.ndarray,
  prompt: Prompt | None = None,
  given: Sequence[int] = (),
  watch: Callable[[np.ndarray], np.ndarray] | None = None,
  repetition: Repetition | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Draws W samples of each row, with their ends: ids [B, W, T], lengths [B, W], log p [B, W].

  Args:
    decoder, memory, prompt, given: as in search.search.
    sampler: choice of the next symbol.
    keys_BW: random key of each sample.
    limits_BW: most symbols of each; 0: it is not drawn.
    last_B: symbol before the first.
    watch: called at every step with the symbols drawn, [B, W], pad where there is none; returns which rows go on.
    repetition: limits on the repetition of symbols, which change logits before the temperature; None: none.
  """
  most = int(limits_BW.max())
  ids_BWT, lengths_BW = np.full([*keys_BW.shape, most], PAD, np.int32), np.zeros_like(limits_BW)
  log_probs_BW, numbers, live_BW = np.zeros(keys_BW.shape, np.float32), np.arange(len(keys_BW)), limits_BW > 0
  last_BW = np.repeat(last_B[:, np.newaxis], keys_BW.shape[1], axis=1).astype(np.int32)
  before_BP = prompt.symbols_BP if prompt else last_B[:, np.newaxis]
  cache = FlatCache(decoder, memory, keys_BW.shape[1], most, prompt)
  for time in range(most):
    if cache.is_due(live_B := live_BW.any(axis=1)):
      rows = np.flatnonzero(live_B)
      cache.keep(rows)
      numbers, last_BW, live_BW = numbers[rows], last_BW[rows], live_BW[rows]
    cache.run(last_BW, time, live_BW)
    if time < len(given):
      last_BW = np.full_like(last_BW, given[time])
    else:
      scores_BWV = logits_BWV = search.results(decoder, 'logits', keys_BW.shape[1])
      if repetition is not None:
        _, scores_BWV = repetition.scores(ARRAYS, logits_BWV, before_BP[numbers], ids_BWT[numbers], time)
      last_BW = sampler.take(numbers)(scores_BWV, hash32.fold(keys_BW[numbers], time))
      logits_BW = np.take_along_axis(logits_BWV, last_BW[:, :, np.newaxis], axis=2)[:, :, 0]
      del logits_BWV, scores_BWV  # a view, which may not be held by the next step
      log_probs_BW[numbers] += np.where(live_BW, logits_BW - search.log_z(decoder, keys_BW.shape[1]), 0)
    ids_BWT[numbers, :, time] = np.where(live_BW, last_BW, PAD)
    lengths_BW[numbers] += live_BW
    live_BW = live_BW & (last_BW != EOS) & (time + 1 < limits_BW[numbers])
    if watch:
      live_BW &= watch(ids_BWT[:, :, time])[numbers, np.newaxis]
    if not live_BW.any():
      break
    cache.follow(np.broadcast_to(np.arange(live_BW.shape[1]), live_BW.shape), live_BW)
  return ids_BWT, lengths_BW, log_probs_BW


def draw(
  decoder: StagedGraph,
  memory: dict[str, np.ndarray],
  requests: Sequence[Request],
  samples: int,
  limits_B: np.ndarray,
  width: int,
  begin: int,
  given: Sequence[int],
  repetition: Repetition | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Draws `samples` samples of each row of a decoder of `width` hypotheses: ids [B, W, T], lengths, log p, scores.

  Other arguments are those of `sample`.
  """
  values, copies = by_row(requests, samples), -(-samples // width)
  room = [(0, 0), (0, copies * width - samples)]
  keys_BW = np.pad(values['keys'], room).reshape(-1, width)
  limits_BW = np.pad(np.repeat(limits_B[:, np.newaxis], samples, axis=1), room).reshape(-1, width)
  repeated = {name: np.repeat(array, copies, axis=0) for name, array in memory.items()}
  last_B = np.full(len(keys_BW), begin)
  samples_of_rows = sample(
    *(decoder, repeated, NumpySampler.of_rows(values, copies), keys_BW, limits_BW, last_B),
    given=given,
    repetition=repetition,
  )
  ids, lengths, log_probs = (x.reshape(len(requests), -1, *x.shape[2:])[:, :samples] for x in samples_of_rows)
  return ids, lengths, log_probs, log_probs


def _uniform(keys_BW: np.ndarray, count: int) -> np.ndarray:
  """Uniform float32 [B, W, count] in [0, 1), as prng.uniform."""
  spread = np.arange(count, dtype=np.uint32) * np.uint32(GOLDEN) + np.uint32(1)
  return (hash32.mix(keys_BW[..., np.newaxis] ^ spread) >> 8).astype(np.float32) * np.float32(2.0**-24)
