"""Beam of hypotheses in NumPy: ranks continuations, keeps the best, and says when a row has stopped.

The algorithm and its ties are those of search/beam_search.py, which describes them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from lingvo_moe.core.length_norm import LengthNorm
from lingvo_moe.text import constraints as constraints_lib
from lingvo_moe.text.constraints import Constraints, Progress
from lingvo_moe.text.vocab import BOS, EOS, PAD

NEG_INF = np.float32(-np.inf)


class NextSymbols(NamedTuple):
  """Scores of the next symbol of each hypothesis, as the decoder gives them."""

  best_BWJ: np.ndarray  # the largest logits: 2 W or more besides pad, bos and eos
  symbols_BWJ: np.ndarray  # their symbols
  eos_BW: np.ndarray  # logit of eos
  log_z_BW: np.ndarray  # logarithm of the sum of exp of all logits
  logits_BWV: np.ndarray  # all logits

  def forced(self, symbol: int) -> NextSymbols:
    """The symbol alone, of probability 1."""
    best_BWJ = np.full_like(self.best_BWJ, NEG_INF)
    best_BWJ[..., 0] = 0
    eos_BW = np.full_like(self.eos_BW, NEG_INF)
    logits_BWV = np.where(np.arange(self.logits_BWV.shape[2]) == symbol, self.log_z_BW[..., np.newaxis] * 0, NEG_INF)
    symbols_BWJ = np.full_like(self.symbols_BWJ, symbol)
    return NextSymbols(best_BWJ, symbols_BWJ, eos_BW, np.zeros_like(self.log_z_BW), logits_BWV)


class Found(NamedTuple):
  """Finished hypotheses, best first; W = n_best."""

  ids_BWT: np.ndarray
  lengths_BW: np.ndarray  # with the end; 0 where there is none
  log_probs_BW: np.ndarray  # -inf where there is none
  scores_BW: np.ndarray


@dataclasses.dataclass
class Beam:
  """Live and finished hypotheses of some rows."""

  max_lengths_B: np.ndarray  # the largest |Y| of each row, counting eos; 0 in a row without a source
  last_BW: np.ndarray  # last symbol of each live hypothesis
  ids_BWT: np.ndarray  # symbols so far of each live hypothesis
  log_probs_BW: np.ndarray  # -inf where there is no live hypothesis
  found: Found  # finished hypotheses
  constraints: Constraints | None = None  # what hypotheses must and must not have; None: nothing
  progress: Progress | None = None  # how far the live ones are

  @classmethod
  def begin(cls, max_lengths_B: np.ndarray, width: int, n_best: int, constraints: Constraints | None = None) -> Beam:
    """One live hypothesis, bos alone, in each row whose max_length is not 0."""
    rows, most = len(max_lengths_B), int(max_lengths_B.max(initial=0))
    log_probs_BW = np.full([rows, width], NEG_INF)
    log_probs_BW[max_lengths_B > 0, 0] = 0
    return cls(
      max_lengths_B=max_lengths_B,
      last_BW=np.full([rows, width], BOS, np.int32),
      ids_BWT=np.full([rows, width, most], PAD, np.int32),
      log_probs_BW=log_probs_BW,
      found=Found(
        np.full([rows, n_best, most], PAD, np.int32),
        np.zeros([rows, n_best], np.int32),
        *np.full([2, rows, n_best], NEG_INF),
      ),
      constraints=constraints,
      progress=constraints and constraints_lib.begin(np, constraints, width),
    )

  @property
  def live_BW(self) -> np.ndarray:
    """Whether there is a live hypothesis."""
    return self.log_probs_BW > NEG_INF

  def take(self, rows: np.ndarray) -> Beam:
    of_rows = lambda values: values[rows]
    return Beam(
      *map(of_rows, (self.max_lengths_B, self.last_BW, self.ids_BWT, self.log_probs_BW)),
      Found(*map(of_rows, self.found)),
      self.constraints and self.constraints._replace(terms_BCK=self.constraints.terms_BCK[rows]),
      self.progress and Progress(*map(of_rows, self.progress)),
    )

  def advance(self, next_symbols: NextSymbols, time: int, norm: LengthNorm) -> np.ndarray:
    """Continues the hypotheses by one symbol, `time` steps after the first; returns the parent of each live one."""
    length, width = time + 1, self.last_BW.shape[1]
    continued = self._continue if self.constraints is None else self._constrained
    log_probs_BJ, symbols_BJ, parents_BJ = continued(next_symbols, length)
    ends_BJ = symbols_BJ == EOS
    self._finish(np.where(ends_BJ, log_probs_BJ, NEG_INF), parents_BJ, length, norm)
    log_probs_BJ = np.where(ends_BJ, NEG_INF, log_probs_BJ)
    # Under constraints continuations come in the order in which they are kept.
    order_BJ = log_probs_BJ if self.constraints is None else np.where(log_probs_BJ > NEG_INF, 1, 0)
    chosen_BW = _best(order_BJ, width)
    self.log_probs_BW = _at(log_probs_BJ, chosen_BW)
    parents_BW, self.last_BW = _at(parents_BJ, chosen_BW), _at(symbols_BJ, chosen_BW)
    if self.constraints is not None:
      size = self.constraints.automaton_SV.shape[1]
      self.progress = constraints_lib.follow(np, self.constraints, self.progress, parents_BW, self.last_BW, size)
    self.ids_BWT = _at(self.ids_BWT, parents_BW)
    self.ids_BWT[:, :, time] = self.last_BW
    # A row stops when no live hypothesis can enter the n best: its log-probability can only fall, and no length penalty
    # is larger than that of the longest.
    best_attainable_B = self.log_probs_BW.max(axis=1) / norm.penalty(self.max_lengths_B.astype(np.float32))
    self.log_probs_BW[best_attainable_B <= self.found.scores_BW[:, -1]] = NEG_INF
    return parents_BW

  def _continue(self, next_symbols, length):
    """The 2 W best continuations of each row: log-probabilities, symbols and parents."""
    best_BWJ, symbols_BWJ, eos_BW, log_z_BW, _ = next_symbols
    must_end_B11 = (length >= self.max_lengths_B)[:, np.newaxis, np.newaxis]
    barred_BWJ = (symbols_BWJ <= max(PAD, BOS, EOS)) | must_end_B11
    logits_BWJ = np.concatenate([eos_BW[..., np.newaxis], np.where(barred_BWJ, NEG_INF, best_BWJ)], axis=2)
    symbols_BWJ = np.concatenate([np.full_like(symbols_BWJ[..., :1], EOS), symbols_BWJ], axis=2)
    log_probs_BWJ = np.minimum(logits_BWJ - log_z_BW[..., np.newaxis], 0)  # rounding must not raise a log-probability
    live_BW1 = self.log_probs_BW[..., np.newaxis]
    log_probs_BWJ = np.where(live_BW1 > NEG_INF, live_BW1 + log_probs_BWJ, NEG_INF)
    rows, width, per_row = log_probs_BWJ.shape
    chosen_BJ = _best(log_probs_BWJ.reshape(rows, -1), 2 * width)
    take = lambda x_BWJ: _at(x_BWJ.reshape(rows, -1), chosen_BJ)
    return take(log_probs_BWJ), take(symbols_BWJ), chosen_BJ // per_row

  def _constrained(self, next_symbols, length):
    """The 2 W continuations of each row under constraints, in the order in which they are kept; as `_continue`."""
    logits_BWV = next_symbols.logits_BWV[:, :, : self.constraints.automaton_SV.shape[1]]  # others are no text
    log_probs_BWV = np.minimum(logits_BWV - next_symbols.log_z_BW[..., np.newaxis], 0)
    may_end_B, must_end_B = np.ones(len(self.last_BW), bool), length >= self.max_lengths_B
    return constraints_lib.continuations(
      *(np, _top_k, self.constraints, self.progress, self.log_probs_BW, log_probs_BWV, may_end_B, must_end_B),
      (PAD, BOS, EOS),
    )

  def _finish(self, ended_BJ, parents_BJ, length, norm):
    """Adds the continuations that end, `length` symbols long, to the finished hypotheses; keeps the best."""
    if not np.any(ended_BJ > NEG_INF):
      return
    found, n_best = self.found, self.found.scores_BW.shape[1]
    ended_ids_BWT = self.ids_BWT.copy()
    ended_ids_BWT[:, :, length - 1] = EOS
    lengths_BJ = np.full_like(parents_BJ, length, dtype=np.int32)
    ended = n_best + parents_BJ, lengths_BJ, ended_BJ, ended_BJ / norm.penalty(np.float32(length))
    numbers_BW = np.broadcast_to(np.arange(n_best), found.scores_BW.shape)
    source_BJ, *of_both = (np.concatenate(x, axis=1) for x in zip((numbers_BW, *found[1:]), ended, strict=True))
    chosen_BW = _best(of_both[-1], n_best)
    ids_BJT = np.concatenate([found.ids_BWT, ended_ids_BWT], axis=1)
    self.found = Found(_at(ids_BJT, _at(source_BJ, chosen_BW)), *(_at(x_BJ, chosen_BW) for x_BJ in of_both))


def _best(values_BJ: np.ndarray, count: int) -> np.ndarray:
  """Indices of the largest values of each row, largest first; of equal ones the first."""
  return np.argsort(-values_BJ, axis=1, kind='stable')[:, :count]


def _top_k(values_BWV: np.ndarray, count: int) -> np.ndarray:
  """Symbols of the largest values, largest first; of equal ones the first."""
  count = min(count, values_BWV.shape[2])
  symbols_BWJ = np.sort(np.argpartition(-values_BWV, count - 1, axis=2)[..., :count], axis=2).astype(np.int32)
  order_BWJ = np.argsort(-np.take_along_axis(values_BWV, symbols_BWJ, axis=2), axis=2, kind='stable')
  return np.take_along_axis(symbols_BWJ, order_BWJ, axis=2)


def _at(values_BJ: np.ndarray, index_BW: np.ndarray) -> np.ndarray:
  """Values at these indices of axis 1; np.take_along_axis takes four times as long."""
  return values_BJ[np.arange(len(values_BJ))[:, np.newaxis], index_BW]
