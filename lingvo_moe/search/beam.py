"""Beams of hypotheses: which continuations are kept, the n best, and when a row stops, for NumPy or TensorFlow.

search/beam_search.py describes the algorithm and calls these functions on tensors, addons/engine/numpy_beam.py on
arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.search.constraints import NEG_INF
from lingvo_moe.search.length_norm import LengthNorm

# When a row stops; see `stop`.
EARLY_STOPPING = ('exact', 'heuristic', 'first')
MARGIN = 4  # symbols by which 'heuristic' lets hypotheses grow

Array = Any  # of NumPy, or a tensor


class Library(NamedTuple):
  """Functions of an array library."""

  xp: Any  # numpy or tensorflow.experimental.numpy, whose functions have the same names
  best: Callable[
    [Array, int], Array
  ]  # (values_BJ, k) -> places of the k largest, largest first; of equal ones the first
  at: Callable[[Array, Array], Array]  # (values_BJ or values_BJT, places_BW) -> values at these places of axis 1
  # (x_BWV, symbols_BWJ, values_BWJ) -> x with these values at these symbols, of which equal ones have equal values
  put: Callable[[Array, Array, Array], Array]


class Live(NamedTuple):
  """Live hypotheses, which have no eos yet. A row that has stopped has none: all its log_probs are -inf."""

  last_BW: Array  # int32; the last symbol: bos, or the last of its ids
  ids_BWT: Array  # int32; the symbols so far, then pad
  log_probs_BW: Array  # float32; -inf where there is no hypothesis
  ended_B1: Array  # int32; hypotheses that ended


class Finished(NamedTuple):
  """Finished hypotheses, which end in eos, best first; W = n_best."""

  ids_BWT: Array  # int32; eos at lengths - 1, pad after it
  lengths_BW: Array  # int32; |Y| counting eos; 0 where there is none
  log_probs_BW: Array  # float32; sum of log-probabilities, including eos's; -inf where there is none
  scores_BW: Array  # float32; log_prob / length_penalty; -inf where there is none


class Continuations(NamedTuple):
  """Best continuations of the live hypotheses of a beam by one symbol, best first; under constraints in their order."""

  log_probs_BJ: Array
  symbols_BJ: Array  # int32
  parents_BJ: Array  # int32; the live hypothesis that each one continues
  order_BJ: Array  # largest first; -inf where there is none


class Specials(NamedTuple):
  """Symbols that are no text."""

  pad: int
  bos: int
  eos: int

  def among(self, symbols: Array) -> Array:
    """Whether symbols are these."""
    if {*self} == {0, 1, 2}:
      return symbols < 3  # a step of few hypotheses takes as long as it has operations
    return (symbols == self.pad) | (symbols == self.bos) | (symbols == self.eos)


def continuations(
  library: Library,
  live: Live,
  logits_BWJ: Array,
  symbols_BWJ: Array,
  eos_BW1: Array,
  log_z_BW1: Array,
  may_end_B: Array | None,
  must_end_B: Array | None,
  specials: Specials,
) -> Continuations:
  """The 2 W best continuations of each row.

  Args:
    logits_BWJ: the largest logits of each hypothesis: 2 W or more besides pad, bos and eos.
    symbols_BWJ: their symbols.
    eos_BW1: logit of eos, which is always a candidate, so that a hypothesis can be forced to end.
    log_z_BW1: logarithm of the sum of exp of all logits.
    may_end_B: whether eos may come; None: it always may.
    must_end_B: whether no other symbol may; None: another always may.
  """
  xp, barred_BWJ = library.xp, specials.among(symbols_BWJ)
  if must_end_B is not None:
    barred_BWJ = barred_BWJ | must_end_B[:, np.newaxis, np.newaxis]
  if may_end_B is not None:
    eos_BW1 = xp.where(may_end_B[:, np.newaxis, np.newaxis], eos_BW1, NEG_INF)
  logits_BWJ = xp.concatenate([eos_BW1, xp.where(barred_BWJ, NEG_INF, logits_BWJ)], axis=2)
  symbols_BWJ = xp.concatenate([symbols_BWJ[:, :, :1] * 0 + specials.eos, symbols_BWJ], axis=2)
  log_probs_BWJ = xp.minimum(logits_BWJ - log_z_BW1, np.float32(0))  # rounding must not raise a log-probability
  live_BW1 = live.log_probs_BW[:, :, np.newaxis]
  log_probs_BWJ = xp.where(live_BW1 > NEG_INF, live_BW1 + log_probs_BWJ, NEG_INF)
  width, per_row = symbols_BWJ.shape[1:]
  log_probs_BJ, symbols_BJ = (xp.reshape(x_BWJ, [-1, width * per_row]) for x_BWJ in (log_probs_BWJ, symbols_BWJ))
  log_probs_BJ, chosen_BJ = library.best(log_probs_BJ, 2 * width)
  symbols_BJ = library.at(symbols_BJ, chosen_BJ)
  return Continuations(log_probs_BJ, symbols_BJ, chosen_BJ // per_row, log_probs_BJ)


def in_order(library: Library, log_probs_BJ: Array, symbols_BJ: Array, parents_BJ: Array) -> Continuations:
  """Continuations that are kept in the order given, as constraints have them."""
  falling_BJ = library.xp.cumsum(library.xp.zeros_like(log_probs_BJ) - np.float32(1), axis=1)
  order_BJ = library.xp.where(log_probs_BJ > NEG_INF, falling_BJ, NEG_INF)
  return Continuations(log_probs_BJ, symbols_BJ, parents_BJ, order_BJ)


def ended(library: Library, best: Continuations, eos: int, early_stopping: str | None) -> Array:
  """Log-probabilities of the continuations that end, -inf for others.

  With 'first', and without constraints, those among the W best alone.
  """
  ends_BJ = best.symbols_BJ == eos
  if early_stopping == 'first' and best.order_BJ is best.log_probs_BJ:
    candidates = best.symbols_BJ.shape[1]
    ends_BJ = ends_BJ & (np.arange(candidates) < candidates // 2)
  return library.xp.where(ends_BJ, best.log_probs_BJ, NEG_INF)


def finish(
  library: Library,
  finished: Finished,
  live: Live,
  best: Continuations,
  ended_BJ: Array,
  places_T: Array,
  length: Array,
  penalty: Array,
  eos: int,
) -> Finished:
  """Adds the continuations that end (see `ended`), `length` symbols long, to the finished ones; keeps the best."""
  xp, n_best = library.xp, finished.scores_BW.shape[1]
  scores_BJ = xp.concatenate([finished.scores_BW, ended_BJ / penalty], axis=1)
  log_probs_BJ = xp.concatenate([finished.log_probs_BW, ended_BJ], axis=1)
  lengths_BJ = xp.concatenate([finished.lengths_BW, best.parents_BJ * 0 + length], axis=1)
  # Sources of ids: the hypotheses finished before, then the live ones with eos appended.
  old_BJ = finished.lengths_BW * 0 + np.arange(n_best, dtype=np.int32)
  source_BJ = xp.concatenate([old_BJ, n_best + best.parents_BJ], axis=1)
  ids_BJT = xp.concatenate([finished.ids_BWT, xp.where(places_T == length - 1, np.int32(eos), live.ids_BWT)], axis=1)
  scores_BW, chosen_BW = library.best(scores_BJ, n_best)
  lengths_BW, log_probs_BW = library.at(lengths_BJ, chosen_BW), library.at(log_probs_BJ, chosen_BW)
  return Finished(library.at(ids_BJT, library.at(source_BJ, chosen_BW)), lengths_BW, log_probs_BW, scores_BW)


def next_live(
  library: Library, live: Live, best: Continuations, ended_BJ: Array, places_T: Array, length: Array, eos: int
) -> tuple[Array, Live]:
  """Parents and live hypotheses of the next step: the W best continuations without eos, `length` symbols long."""
  xp, width = library.xp, live.last_BW.shape[1]
  order_BJ = xp.where(best.symbols_BJ == eos, NEG_INF, best.order_BJ)
  log_probs_BW, chosen_BW = library.best(order_BJ, width)
  if best.order_BJ is not best.log_probs_BJ:
    log_probs_BW = xp.where(log_probs_BW > NEG_INF, library.at(best.log_probs_BJ, chosen_BW), NEG_INF)
  parents_BW, symbols_BW = library.at(best.parents_BJ, chosen_BW), library.at(best.symbols_BJ, chosen_BW)
  ids_BWT = library.at(live.ids_BWT, parents_BW)
  ids_BWT = xp.where(places_T == length - 1, symbols_BW[:, :, np.newaxis], ids_BWT)
  ended_B1 = live.ended_B1 + xp.sum(ended_BJ > NEG_INF, axis=1, dtype=np.int32, keepdims=True)
  return parents_BW, Live(symbols_BW, ids_BWT, log_probs_BW, ended_B1)


def stop(
  library: Library,
  live: Live,
  finished: Finished,
  norm: LengthNorm,
  length: Array,
  max_lengths_B1: Array,
  early_stopping: str,
) -> Live:
  """Stops rows, `length` symbols after the first.

  'exact': those of which no live hypothesis can enter the n best: a log-probability can only fall, and no length
  penalty is larger than that of the longest. No tighter bound holds for all models, as a symbol may have probability 1.
  'heuristic': those of which none can with MARGIN more symbols. transformers' early_stopping=False is that with none.
  'first': those with W hypotheses that ended, each among the W best of its step; so do CTranslate2 and transformers'
  early_stopping=True. With W = 1 that is greedy search.

  Args:
    length: float32.
    max_lengths_B1: the largest length of each row, float32.
    early_stopping: one of EARLY_STOPPING.
  """
  xp = library.xp
  if early_stopping == 'first':
    stops_B1 = live.ended_B1 >= live.log_probs_BW.shape[1]
  else:
    longest_B1 = max_lengths_B1
    if early_stopping == 'heuristic':
      longest_B1 = xp.minimum(length + np.float32(MARGIN), longest_B1)
    best_attainable_B1 = xp.max(live.log_probs_BW, axis=1, keepdims=True) / norm.penalty(longest_B1)
    stops_B1 = best_attainable_B1 <= finished.scores_BW[:, -1:]
  return live._replace(log_probs_BW=xp.where(stops_B1, NEG_INF, live.log_probs_BW))
