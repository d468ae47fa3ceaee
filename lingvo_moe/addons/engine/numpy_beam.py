"""Beam of the engine: the hypotheses of some rows in NumPy arrays, and a step of beam search on what a decoder gives.

The steps are those of search/beam.py. Unlike search/beam_search.py, rows that have stopped leave the batch, and
there is no least length.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from lingvo_moe.search import beam
from lingvo_moe.search import constraints as constraints_lib
from lingvo_moe.search.beam import NEG_INF, Continuations, Finished, Library, Live, Specials
from lingvo_moe.search.constraints import ConstraintProgress, Constraints
from lingvo_moe.search.length_norm import LengthNorm
from lingvo_moe.search.repetition import Repetition
from lingvo_moe.vocab.vocab import BOS, EOS, PAD

_SPECIALS = Specials(PAD, BOS, EOS)


class BeamValues(NamedTuple):
  """Values of a beam search."""

  width: int  # W, live hypotheses of a row
  n_best: int  # hypotheses that are returned, at most W
  norm: LengthNorm
  early_stopping: str  # one of beam.EARLY_STOPPING

  @property
  def is_greedy(self) -> bool:
    """Whether it is greedy search."""
    return self.width == 1 and self.early_stopping == 'first'


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


@dataclasses.dataclass
class Beam:
  """Live and finished hypotheses of some rows."""

  max_lengths_B: np.ndarray  # the largest |Y| of each row, counting eos; 0 in a row without a source
  values: BeamValues
  live: Live
  finished: Finished
  constraints: Constraints | None = None  # what hypotheses must and must not have; None: nothing
  progress: ConstraintProgress | None = None  # how far the live ones are
  repetition: Repetition | None = None  # limits on the repetition of symbols
  before_BP: np.ndarray | None = None  # symbols that count for these before those of the hypotheses, after pad

  @classmethod
  def begin(
    cls,
    max_lengths_B: np.ndarray,
    values: BeamValues,
    constraints: Constraints | None = None,
    repetition: Repetition | None = None,
    before_BP: np.ndarray | None = None,
  ) -> Beam:
    """One live hypothesis, bos alone, in each row whose max_length is not 0."""
    rows, most, (width, n_best, *_) = len(max_lengths_B), int(max_lengths_B.max(initial=0)), values
    padding = lambda width: np.full([rows, width, most], PAD, np.int32)
    log_probs_BW = np.full([rows, width], NEG_INF)
    log_probs_BW[max_lengths_B > 0, 0] = 0
    return cls(
      max_lengths_B=max_lengths_B,
      values=values,
      live=Live(np.full([rows, width], BOS, np.int32), padding(width), log_probs_BW, np.zeros([rows, 1], np.int32)),
      finished=Finished(padding(n_best), np.zeros([rows, n_best], np.int32), *np.full([2, rows, n_best], NEG_INF)),
      constraints=constraints,
      progress=constraints and constraints_lib.begin(np, constraints, width),
      repetition=repetition,
      before_BP=before_BP,
    )

  @property
  def live_BW(self) -> np.ndarray:
    """Whether there is a live hypothesis."""
    return self.live.log_probs_BW > NEG_INF

  def take(self, rows: np.ndarray) -> Beam:
    of_rows = lambda values: values[rows]
    return Beam(
      self.max_lengths_B[rows],
      self.values,
      Live(*map(of_rows, self.live)),
      Finished(*map(of_rows, self.finished)),
      self.constraints and self.constraints._replace(terms_BYT=self.constraints.terms_BYT[rows]),
      self.progress and ConstraintProgress(*map(of_rows, self.progress)),
      self.repetition,
      self.repetition and self.before_BP[rows],
    )

  def reads_scores(self, time: int) -> bool:
    """Whether the continuations `time` steps after the first are others than the best: limits change them."""
    is_limited = self.constraints is not None or self.repetition is not None
    return is_limited or bool((self.max_lengths_B <= time + 1).any())

  def advance(self, scored: NextSymbols | Continuations, time: int) -> np.ndarray:
    """Continues the hypotheses by one symbol, `time` steps after the first; returns the parent of each live one.

    scored: scores of the next symbols; or the best continuations, unless it `reads_scores`.
    """
    norm, early_stopping = self.values.norm, self.values.early_stopping
    length, places_T = time + 1, np.arange(self.live.ids_BWT.shape[2])
    best = scored if isinstance(scored, Continuations) else self._ranked(scored, time)
    ended_BJ = beam.ended(ARRAYS, best, EOS, early_stopping)
    if (ended_BJ > NEG_INF).any():
      penalty = norm.penalty(np.float32(length))
      self.finished = beam.finish(ARRAYS, self.finished, self.live, best, ended_BJ, places_T, length, penalty, EOS)
    parents_BW, self.live = beam.next_live(ARRAYS, self.live, best, ended_BJ, places_T, length, EOS)
    if self.constraints is not None:
      size = self.constraints.automaton_JV.shape[1]
      self.progress = constraints_lib.follow(np, self.constraints, self.progress, parents_BW, self.live.last_BW, size)
    most_B1 = self.max_lengths_B.astype(np.float32)[:, np.newaxis]
    self.live = beam.stop(ARRAYS, self.live, self.finished, norm, np.float32(length), most_B1, early_stopping)
    return parents_BW

  def _ranked(self, next_symbols, time):
    """The 2 W continuations of each row, from scores."""
    repeats_BWV = None
    if self.repetition is not None:
      next_symbols, repeats_BWV = self._limited(next_symbols, time)
    return self._continuations(next_symbols, repeats_BWV, time + 1)

  def _limited(self, next_symbols, time):
    """Scores under the limits on repetition, and symbols that would repeat an n-gram."""
    width, logits_BWV = self.live.ids_BWT.shape[1], next_symbols.logits_BWV
    if width > 1:
      logits_BWV = logits_BWV - next_symbols.log_z_BW[:, :, np.newaxis]
    history = self.before_BP, self.live.ids_BWT, time
    penalised_BWV, new_BWV = self.repetition.scores(ARRAYS, logits_BWV, *history)
    symbols_BWJ = _top_k(new_BWV, 2 * width + 3)
    best_BWJ = np.take_along_axis(new_BWV, symbols_BWJ, axis=2)
    log_z_BW = np.zeros_like(next_symbols.log_z_BW)
    if width == 1:
      log_z_BW = best_BWJ[:, :, 0] + np.log(np.exp(new_BWV - best_BWJ[:, :, :1]).sum(axis=2))
    symbols = NextSymbols(best_BWJ, symbols_BWJ, new_BWV[:, :, EOS], log_z_BW, penalised_BWV)
    return symbols, new_BWV == NEG_INF if self.constraints else None

  def _continuations(self, next_symbols, repeats_BWV, length):
    """The 2 W continuations of each row."""
    best_BWJ, symbols_BWJ, eos_BW, log_z_BW, logits_BWV = next_symbols
    log_z_BW1 = log_z_BW[:, :, np.newaxis]
    must_end_B = length >= self.max_lengths_B
    if self.constraints is None:
      return beam.continuations(
        *(ARRAYS, self.live, best_BWJ, symbols_BWJ, eos_BW[:, :, np.newaxis], log_z_BW1, None, must_end_B, _SPECIALS)
      )
    is_text = np.s_[:, :, : self.constraints.automaton_JV.shape[1]]
    logits_BWV, repeats_BWV = logits_BWV[is_text], None if repeats_BWV is None else repeats_BWV[is_text]
    log_probs_BWV = np.minimum(logits_BWV - log_z_BW1, 0)
    kept = constraints_lib.continuations(
      *(
        np,
        _top_k,
        self.constraints,
        self.progress,
        self.live.log_probs_BW,
        log_probs_BWV,
        None,
        must_end_B,
        _SPECIALS,
      ),
      repeats_BWV=repeats_BWV,
    )
    return beam.in_order(ARRAYS, *kept)


def _best(values_BJ: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
  """The largest values of each row, largest first, and their places; of equal ones the first."""
  places_BW = (-values_BJ).argsort(axis=1, kind='stable')[:, :count]
  return _at(values_BJ, places_BW), places_BW


def _top_k(values_BWV: np.ndarray, count: int) -> np.ndarray:
  """Symbols of the largest values, largest first; of equal ones the first."""
  count = min(count, values_BWV.shape[2])
  symbols_BWJ = np.sort(np.argpartition(-values_BWV, count - 1, axis=2)[..., :count], axis=2).astype(np.int32)
  order_BWJ = np.argsort(-np.take_along_axis(values_BWV, symbols_BWJ, axis=2), axis=2, kind='stable')
  return np.take_along_axis(symbols_BWJ, order_BWJ, axis=2)


def likeliest(logits_BWV: np.ndarray, count: int) -> np.ndarray:
  """Symbols of the largest of finite logits, as _top_k; faster for few symbols."""
  rest_BWV, symbols = logits_BWV.copy(), []
  for _ in range(min(count, logits_BWV.shape[2])):
    symbols.append(rest_BWV.argmax(axis=2).astype(np.int32))
    np.put_along_axis(rest_BWV, symbols[-1][:, :, np.newaxis], NEG_INF, axis=2)
  return np.stack(symbols, axis=2)


def _at(values_BJ: np.ndarray, index_BW: np.ndarray) -> np.ndarray:
  """Values at these indices of axis 1; np.take_along_axis takes four times as long."""
  return values_BJ[_numbers(len(values_BJ)), index_BW]


@functools.lru_cache
def _numbers(rows: int) -> np.ndarray:
  """Numbers of rows, [B, 1]."""
  return np.arange(rows)[:, np.newaxis]


def _put(x_BWV: np.ndarray, symbols_BWJ: np.ndarray, values_BWJ: np.ndarray) -> np.ndarray:
  copy_BWV = x_BWV.copy()
  np.put_along_axis(copy_BWV, symbols_BWJ, values_BWJ, axis=2)
  return copy_BWV


ARRAYS = Library(np, _best, _at, _put)
