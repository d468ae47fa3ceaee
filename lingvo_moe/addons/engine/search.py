"""Beam search and scoring with the decoder's graph, step by step. Finished rows leave the batch."""

from collections.abc import Sequence

import numpy as np

from lingvo_moe.addons.engine.flat_cache import FlatCache, Prompt
from lingvo_moe.addons.engine.numpy_beam import Beam, BeamValues, NextSymbols, likeliest
from lingvo_moe.addons.engine.stages import CONTINUATIONS, OF_BEAM, StagedGraph
from lingvo_moe.search.beam import Continuations, Finished
from lingvo_moe.search.constraints import NEG_INF, Constraints
from lingvo_moe.search.repetition import Repetition
from lingvo_moe.vocab.vocab import BOS, EOS, PAD

# Tokens that a graph reads in one run: its memory grows with them, and its speed no longer does.
_TOKENS = 256
_FEW = 64  # of fewer tokens lengths are multiples of 16, as new sizes of graphs take longer than they


def encode(encoder: StagedGraph, sources: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
  """What the decoder reads of sources: keys and values by name, [B, N, U, K], and `segments` [B, U].

  An encoder whose decoder has a gate by task gives segments of its own.
  """
  ids_BT = padded(sources)
  if ids_BT.size < _FEW:
    ids_BT = np.pad(ids_BT, [(0, 0), (0, -ids_BT.shape[1] % 16)], constant_values=PAD)
  return {'segments': (ids_BT != PAD).astype(np.int32), **run_on_ids(encoder, ids_BT)}


def run_on_ids(graph: StagedGraph, ids_BT: np.ndarray) -> dict[str, np.ndarray]:
  """Results by name of a graph whose one input is `ids`, computed some rows at a time."""
  rows, length = ids_BT.shape
  by_name = {}
  for begin in range(0, rows, step := max(1, _TOKENS // length)):
    part = slice(begin, begin + step)
    graph.resize({'ids': ids_BT[part].shape})
    graph.write('ids', ids_BT[part])
    graph.run()
    for name in graph.outputs:
      result = graph.output(name)
      by_name.setdefault(name, np.empty([rows, *result.shape[1:]], result.dtype))[part] = result
      del result  # a view of a buffer of the graph, of which none may be held by the next run
  graph.release()
  return by_name


def search(
  decoder: StagedGraph,
  memory: dict[str, np.ndarray],
  max_lengths_B: np.ndarray,
  values: BeamValues,
  prompt: Prompt | None = None,
  begin: int = BOS,
  given: Sequence[int] = (),
  constraints: Constraints | None = None,
  repetition: Repetition | None = None,
) -> Finished:
  """Beam search for the best translations of each row.

  Args:
    decoder: graph of a step, of as many hypotheses as the beam has, or more.
    memory: from `encode`.
    max_lengths_B: the largest |Y| of each row, counting eos, at least 1.
    values: of the beam.
    prompt: what the hypotheses continue; None: `begin`.
    given: the first symbols of all, whose probabilities do not count.
    constraints: what translations must and must not have; None: nothing.
    repetition: limits on the repetition of symbols; None: none.
  """
  if values.is_greedy and not (constraints or repetition):
    return _greedy(decoder, memory, max_lengths_B, values, prompt, begin, given)
  before_BP = prompt.symbols_BP if prompt else np.full([len(max_lengths_B), 1], begin)
  beam = Beam.begin(max_lengths_B, values, constraints, repetition, before_BP)
  beam.live.last_BW[:] = begin
  if prompt:
    memory, beam.live.last_BW[:] = {'lengths': prompt.lengths_B}, prompt.last_B[:, np.newaxis]
  found, numbers, time = Beam.begin(max_lengths_B, values).finished, np.arange(len(max_lengths_B)), 0
  cache = FlatCache(decoder, memory, values.width, int(max_lengths_B.max()), prompt)

  def note_results():
    for of_all, of_beam in zip(found, beam.finished, strict=True):
      of_all[numbers] = of_beam

  live_BW = beam.live_BW
  while (live_B := live_BW.any(axis=1)).any():
    if cache.is_due(live_B):
      note_results()
      rows = np.flatnonzero(live_B)
      cache.keep(rows)
      beam, numbers, live_BW = beam.take(rows), numbers[rows], live_BW[rows]
    cache.run(beam.live.last_BW, time, live_BW, beam.live.log_probs_BW)
    if time < len(given) or beam.reads_scores(time) or CONTINUATIONS[0] not in decoder.outputs:
      parents_BW = beam.advance(_next_symbols(decoder, values.width, *given[time : time + 1]), time)
    else:
      parents_BW = beam.advance(_continuations(decoder, values.width), time)
    live_BW = beam.live_BW
    cache.follow(parents_BW, live_BW)
    time += 1
  note_results()
  return found


def _greedy(decoder, memory, max_lengths_B, values, prompt, begin, given) -> Finished:
  """Greedy search: the likeliest symbol at each step; see `search`."""
  rows, most = len(max_lengths_B), int(max_lengths_B.max(initial=0))
  ids_BT, log_probs_B, numbers = np.full([rows, most], PAD, np.int32), np.zeros(rows, np.float32), np.arange(rows)
  last_B, live_B = np.full(rows, begin, np.int32), max_lengths_B > 0
  if prompt:
    memory, last_B = {'lengths': prompt.lengths_B}, prompt.last_B
  cache = FlatCache(decoder, memory, 1, most, prompt)
  for time in range(most):
    if cache.is_due(live_B):
      kept = np.flatnonzero(live_B)
      cache.keep(kept)
      numbers, last_B, live_B = numbers[kept], last_B[kept], live_B[kept]
    cache.run(last_B[:, np.newaxis], time, live_B[:, np.newaxis])
    if time < len(given):
      last_B, costs_B = np.full_like(last_B, given[time]), np.float32(0)
    else:
      logits_BV, log_z_B = results(decoder, 'logits', 1)[:, 0], log_z(decoder, 1)[:, 0]
      logits_BV[:, PAD] = logits_BV[:, BOS] = NEG_INF
      must_end_B = time + 1 >= max_lengths_B[numbers]
      last_B = np.where(must_end_B, EOS, logits_BV.argmax(axis=1).astype(np.int32))
      costs_B = logits_BV[np.arange(len(numbers)), last_B] - log_z_B
      del logits_BV  # a view, which may not be held by the next step
    ids_BT[numbers[live_B], time] = last_B[live_B]
    log_probs_B[numbers[live_B]] += np.minimum(costs_B, 0)[live_B] if time >= len(given) else 0
    live_B = live_B & (last_B != EOS)
    if not live_B.any():
      break
    cache.follow(np.zeros([len(numbers), 1], np.intp), live_B[:, np.newaxis])
  lengths_B = np.count_nonzero(ids_BT != PAD, axis=1).astype(np.int32)
  log_probs_B[lengths_B == 0] = NEG_INF
  scores_B = log_probs_B / values.norm.penalty(np.maximum(lengths_B, 1).astype(np.float32))
  return Finished(ids_BT[:, np.newaxis], *(x_B[:, np.newaxis] for x_B in (lengths_B, log_probs_B, scores_B)))


def score(
  decoder: StagedGraph,
  memory: dict[str, np.ndarray],
  targets: Sequence[Sequence[int]],
  begin: int = BOS,
  given: int = 0,
) -> np.ndarray:
  """Log-probabilities of targets, each with its end, float64 [B]: one hypothesis of each row is led along one.

  The decoder begins with `begin`; the first `given` symbols do not count.
  """
  labels_BT = padded(targets)
  lengths_B, numbers = np.array(list(map(len, targets))), np.arange(len(targets))
  log_probs_B = np.zeros(len(targets))
  cache = FlatCache(decoder, memory, 1, labels_BT.shape[1])
  for time in range(labels_BT.shape[1]):
    live_B1 = (time < lengths_B[numbers])[:, np.newaxis]
    if cache.is_due(live_B1[:, 0]):
      rows = np.flatnonzero(live_B1[:, 0])
      cache.keep(rows)
      numbers, live_B1 = numbers[rows], live_B1[rows]
    last_B = labels_BT[numbers, time - 1] if time else np.full(len(numbers), begin)
    cache.run(last_B[:, np.newaxis], time, live_B1)
    logit_B = results(decoder, 'logits', 1)[np.arange(len(numbers)), 0, labels_BT[numbers, time]]
    if time >= given:
      log_probs_B[numbers] += (logit_B - log_z(decoder, 1)[:, 0]) * live_B1[:, 0]
    cache.follow(np.zeros([len(numbers), 1], np.intp), live_B1)
  return log_probs_B


def results(decoder: StagedGraph, name: str, width: int) -> np.ndarray:
  """Results of the first `width` hypotheses of each row, [B, W, ...]; a view, not to be held by the next step."""
  result = decoder.output(name)
  return result.reshape(-1, decoder.shapes['ids'][1], *result.shape[1:])[:, :width]


def log_z(decoder: StagedGraph, width: int) -> np.ndarray:
  """Logarithm of the sum of exp of all logits of the first `width` hypotheses of each row, [B, W]."""
  if 'log_z' in decoder.outputs:
    return results(decoder, 'log_z', width).copy()
  logits_FV = decoder.output('logits')  # of one hypothesis a row
  best = np.arange(len(logits_FV)), logits_FV.argmax(axis=1)  # whose probability is not too small for a float
  return (logits_FV[best] - np.log(decoder.output('probs')[best]))[:, np.newaxis]


def _continuations(decoder: StagedGraph, width: int) -> Continuations:
  """The 2 W best continuations of each row, of its first W hypotheses; views, not to be held by the next step."""
  log_probs_BJ, symbols_BJ, parents_BJ = (decoder.output(name)[:, : 2 * width] for name in CONTINUATIONS)
  return Continuations(log_probs_BJ, symbols_BJ, parents_BJ, log_probs_BJ)


def _next_symbols(decoder: StagedGraph, width: int, given: int | None = None) -> NextSymbols:
  """Scores of the next symbols of `width` hypotheses, as `results`. A symbol that is given has probability 1."""
  if OF_BEAM[0] in decoder.outputs:
    best_BWJ, symbols_BWJ, log_z_BW, logits_BWV = (results(decoder, name, width) for name in OF_BEAM)
  else:
    logits_BWV, log_z_BW = results(decoder, 'logits', width), log_z(decoder, width)
    symbols_BWJ = likeliest(logits_BWV, 2 * width + 3)
    best_BWJ = np.take_along_axis(logits_BWV, symbols_BWJ, axis=2)
  next_symbols = NextSymbols(best_BWJ, symbols_BWJ, logits_BWV[:, :, EOS], log_z_BW, logits_BWV)
  return next_symbols if given is None else next_symbols.forced(given)


def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
  """Rows of ids as an int32 array, padded at their ends."""
  ids_BT = np.full([len(rows), max(map(len, rows))], PAD, np.int32)
  for i, row in enumerate(rows):
    ids_BT[i, : len(row)] = row
  return ids_BT
