"""Constrained beam search: which continuations of hypotheses are kept, for arrays of NumPy or of TensorFlow.

An automaton bars symbols; see automaton.py. Terms, sequences of symbols, must come: continuations that have written as
many symbols of terms form a bank, and the beam takes the best of each bank in turn (dynamic beam allocation: Post and
Vilar, 2018, arXiv 1804.06609, after Hokamp and Liu, 2017, arXiv 1704.07138). So one that writes more is always kept.

`xp` is numpy or tensorflow.experimental.numpy, whose functions have the same names.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any  # of NumPy, or a tensor
NEG_INF = np.float32(-np.inf)
_LAST = np.int32(2**30)  # in the order of continuations that there are none of
_BANKS = 1 << 14  # more than there are


class Constraints(NamedTuple):
  """Constraints of the rows of a batch."""

  automaton_JV: Array  # int32: state after each symbol; below 0 where it is barred
  begin: Array  # int32 scalar: the state in which a text begins
  terms_BYT: Array  # int32: symbols of each term, then pad, which is 0, once at least; a term of pads is none


class ConstraintProgress(NamedTuple):
  """How far each hypothesis is."""

  state_BW: Array  # of the automaton
  done_BWY: Array  # symbols of each term that it ends with; all of a term that came


def begin(xp: Any, constraints: Constraints, width: int) -> ConstraintProgress:
  """Progress before the first symbol."""
  done_BWY = xp.repeat(constraints.terms_BYT[:, np.newaxis, :, 0], width, axis=1) * 0
  return ConstraintProgress(done_BWY[:, :, 0] + constraints.begin, done_BWY)


def follow(
  xp: Any,
  constraints: Constraints,
  progress: ConstraintProgress,
  parents_BJ: Array,
  symbols_BJ: Array,
  num_symbols: int,
) -> ConstraintProgress:
  """Progress of continuations, which are not barred."""
  state_BJ = xp.take_along_axis(progress.state_BW, parents_BJ, axis=1)
  places_BJ = xp.maximum(state_BJ, 0) * num_symbols + symbols_BJ
  done_BJY = xp.take_along_axis(progress.done_BWY, parents_BJ[:, :, np.newaxis], axis=1)
  wanted_BJY, symbols_BJ1 = _wanted(xp, constraints, done_BJY), symbols_BJ[:, :, np.newaxis]
  # A term that breaks off begins again with its first symbol; that it may with several is not seen.
  first_BJY = xp.where(symbols_BJ1 == constraints.terms_BYT[:, np.newaxis, :, 0], xp.ones_like(done_BJY), done_BJY * 0)
  done_BJY = xp.where(wanted_BJY == 0, done_BJY, xp.where(symbols_BJ1 == wanted_BJY, done_BJY + 1, first_BJY))
  return ConstraintProgress(xp.take(xp.reshape(constraints.automaton_JV, [-1]), places_BJ), done_BJY)


def continuations(
  xp: Any,
  top_k: Callable[[Array, int], Array],
  constraints: Constraints,
  progress: ConstraintProgress,
  live_BW: Array,
  log_probs_BWV: Array,
  may_end_B: Array | None,
  must_end_B: Array,
  specials: tuple[int, int, int],
  repeats_BWV: Array | None = None,
) -> tuple[Array, Array, Array]:
  """The 2 W continuations to keep, in their order: log-probabilities (-inf: none), symbols, parents, [B, J] each.

  Args:
    top_k: (values, k) -> indices of the k largest on the last axis.
    constraints: of the rows.
    progress: of the live hypotheses.
    live_BW: their log-probabilities; -inf where there is none.
    log_probs_BWV: of the next symbols.
    may_end_B, must_end_B: whether eos may come (None: always), and whether no other symbol may.
    specials: pad and bos, which are barred, and eos, which is until all terms came.
    repeats_BWV: symbols that would repeat an n-gram, which come where no other symbol may; None: none would.
  """
  width, num_symbols = log_probs_BWV.shape[1:]
  pad, bos, eos = specials
  symbol_V = np.arange(num_symbols)
  wanted_BWY = _wanted(xp, constraints, progress.done_BWY)
  ends_BW1 = xp.all(wanted_BWY == 0, axis=2, keepdims=True)
  if may_end_B is not None:
    ends_BW1 = ends_BW1 & may_end_B[:, np.newaxis, np.newaxis]
  allowed_BWV = xp.take(constraints.automaton_JV, xp.maximum(progress.state_BW, 0), axis=0) >= 0
  allowed_BWV = allowed_BWV & (symbol_V != pad) & (symbol_V != bos)
  allowed_BWV = allowed_BWV & xp.where(symbol_V == eos, ends_BW1, ~must_end_B[:, np.newaxis, np.newaxis])
  if repeats_BWV is not None:
    is_wanted_BWV = xp.any(symbol_V == wanted_BWY[..., np.newaxis], axis=2)
    new_BWV = allowed_BWV & (is_wanted_BWV | ~repeats_BWV)
    allowed_BWV = xp.where(xp.any(new_BWV, axis=2, keepdims=True), new_BWV, allowed_BWV)
  log_probs_BWV = xp.where(allowed_BWV, log_probs_BWV, NEG_INF)

  # Of each hypothesis eos, the symbols that terms want, and the 2 W best; none twice.
  eos_BW1 = wanted_BWY[:, :, :1] * 0 + eos
  symbols_BWJ = xp.concatenate([eos_BW1, wanted_BWY, top_k(log_probs_BWV, 2 * width)], axis=2)
  is_equal_BWJJ = symbols_BWJ[..., np.newaxis] == symbols_BWJ[:, :, np.newaxis]
  twice_BWJ = xp.any(is_equal_BWJJ & _earlier(xp, symbols_BWJ[:1, 0]), axis=3)
  log_probs_BWJ = live_BW[:, :, np.newaxis] + xp.take_along_axis(log_probs_BWV, symbols_BWJ, axis=2)
  log_probs_BWJ = xp.where(twice_BWJ, NEG_INF, log_probs_BWJ)

  parents_BWJ = symbols_BWJ * 0 + np.arange(width, dtype=np.int32)[:, np.newaxis]
  flat = lambda x_BWJ: xp.concatenate([x_BWJ[:, w] for w in range(width)], axis=1)  # of sizes not known in a graph
  log_probs_BJ, symbols_BJ, parents_BJ = map(flat, (log_probs_BWJ, symbols_BWJ, parents_BWJ))
  bank_BJ = _bank(xp, constraints, follow(xp, constraints, progress, parents_BJ, symbols_BJ, num_symbols))
  order_BJ = xp.argsort(_order(xp, log_probs_BJ, bank_BJ), axis=1, kind='stable')[:, : 2 * width]
  return tuple(xp.take_along_axis(x_BJ, order_BJ, axis=1) for x_BJ in (log_probs_BJ, symbols_BJ, parents_BJ))


def _wanted(xp, constraints, done_BJY):
  """The next symbol of each term; pad where it came."""
  done_BYJ = xp.swapaxes(done_BJY, 1, 2)
  return xp.swapaxes(xp.take_along_axis(constraints.terms_BYT, done_BYJ, axis=2), 1, 2)


def _bank(xp, constraints, progress):
  """Symbols of terms that came, and of that which is furthest among the others."""
  done_BJY, none_BJY = progress.done_BWY, progress.done_BWY * 0
  came_BJY = _wanted(xp, constraints, done_BJY) == 0
  of_came_BJ = xp.sum(xp.where(came_BJY, done_BJY, none_BJY), axis=2, dtype=np.int32)
  return of_came_BJ + xp.max(xp.where(came_BJY, none_BJY, done_BJY), axis=2)


def _order(xp, log_probs_BJ, bank_BJ):
  """Numbers in the order of the beam: the best of each bank, high banks first, then the second of each, and so on."""
  pairs = lambda x_BJ: (x_BJ[:, np.newaxis], x_BJ[:, :, np.newaxis])  # each with that of another before it
  (other, this), (other_bank, own_bank) = pairs(log_probs_BJ), pairs(bank_BJ)
  is_better_BJJ = (other > this) | ((other == this) & _earlier(xp, bank_BJ[:1]))
  is_before_BJJ = is_better_BJJ & (other_bank == own_bank)
  rank_BJ = xp.sum(is_before_BJJ, axis=2, dtype=np.int32)
  return xp.where(log_probs_BJ > NEG_INF, rank_BJ * _BANKS - bank_BJ, rank_BJ * 0 + _LAST)


def _earlier(xp, x_1J):
  """Whether place J' comes before place J: [1, J, J']."""
  place_1J = xp.cumsum(x_1J * 0 + 1, axis=1)
  return place_1J[:, np.newaxis] < place_1J[:, :, np.newaxis]
