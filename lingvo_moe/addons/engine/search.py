"""Beam search and scoring with the decoder's graph, step by step. Finished rows leave the batch."""

from collections.abc import Sequence

import numpy as np

from lingvo_moe.addons.engine.flat_cache import FlatCache, Prompt
from lingvo_moe.addons.engine.numpy_beam import Beam, NextSymbols
from lingvo_moe.addons.engine.stages import StagedGraph
from lingvo_moe.core.length_norm import LengthNorm
from lingvo_moe.text.beam import Finished
from lingvo_moe.text.constraints import Constraints
from lingvo_moe.text.repetition import Repetition
from lingvo_moe.text.vocab import BOS, EOS, PAD

# Tokens that a graph reads in one run: its memory grows with them, and its speed no longer does.
_TOKENS = 256


def encode(encoder: StagedGraph, sources: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
  """What the decoder reads of sources: keys and values by name, [B, N, U, K], and `segments` [B, U].

  An encoder whose decoder has a gate by task gives segments of its own.
  """
  ids_BT = padded(sources)
  return {'segments': (ids_BT != PAD).astype(np.int32), **run_on_ids(encoder, ids_BT)}


def run_on_ids(graph: StagedGraph, ids_BT: np.ndarray) -> dict[str, np.ndarray]:
  """Results by name of a graph whose one input is `ids`, computed some rows at a time."""
  rows, length = ids_BT.shape
  results = {}
  for begin in range(0, rows, step := max(1, _TOKENS // length)):
    part = slice(begin, begin + step)
    graph.resize({'ids': ids_BT[part].shape})
    graph.write('ids', ids_BT[part])
    graph.run()
    for name in graph.outputs:
      result = graph.output(name)
      results.setdefault(name, np.empty([rows, *result.shape[1:]], result.dtype))[part] = result
      del result  # a view of a buffer of the graph, of which none may be held by the next run
  graph.release()
  return results


def search(
  decoder: StagedGraph,
  memory: dict[str, np.ndarray],
  max_lengths_B: np.ndarray,
  width: int,
  norm: LengthNorm,
  early_stopping: str,
  n_best: int,
  prompt: Prompt | None = None,
  begin: int = BOS,
  given: Sequence[int] = (),
  constraints: Constraints | None = None,
  repetition: Repetition | None = None,
) -> Finished:
  """Beam search for the n_best translations of each row.

  Args:
    decoder: graph of a step.
    memory: from `encode`.
    max_lengths_B: the largest |Y| of each row, counting eos, at least 1.
    width: W, the live hypotheses of a row.
    norm: length normalisation.
    n_best: number of translations, at most W.
    prompt: what the hypotheses continue; None: `begin`.
    given: the first symbols of all, whose probabilities do not count.
    constraints: what translations must and must not have; None: nothing.
    repetition: limits on the repetition of symbols; None: none.
  """
  before_BP = prompt.symbols_BP if prompt else np.full([len(max_lengths_B), 1], begin)
  beam = Beam.begin(max_lengths_B, width, n_best, constraints, repetition, before_BP)
  beam.live.last_BW[:] = begin
  if prompt:
    memory, beam.live.last_BW[:] = {'lengths': prompt.lengths_B}, prompt.last_B[:, np.newaxis]
  results, numbers, time = Beam.begin(max_lengths_B, width, n_best).finished, np.arange(len(max_lengths_B)), 0
  cache = FlatCache(decoder, memory, width, int(max_lengths_B.max()), prompt)

  def note_results():
    for of_all, of_beam in zip(results, beam.finished, strict=True):
      of_all[numbers] = of_beam

  while beam.live_BW.any():
    if cache.is_full:
      note_results()
      rows = np.flatnonzero(beam.live_BW.any(axis=1))
      cache.keep(rows, beam.live_BW)
      beam, numbers = beam.take(rows), numbers[rows]
    cache.run(beam.live.last_BW, time, beam.live_BW)
    cache.follow(beam.advance(_next_symbols(decoder, *given[time : time + 1]), time, norm, early_stopping))
    time += 1
  note_results()
  return results


def score(
  decoder: StagedGraph,
  memory: dict[str, np.ndarray],
  targets: Sequence[Sequence[int]],
  width: int,
  begin: int = BOS,
  given: int = 0,
) -> np.ndarray:
  """Log-probabilities of targets, each with its end, float64 [B]: the first hypothesis of each row is led along one.

  The decoder begins with `begin`; the first `given` symbols do not count.
  """
  labels_BT = padded(targets)
  lengths_B, numbers = np.array(list(map(len, targets))), np.arange(len(targets))
  log_probs_B = np.zeros(len(targets))
  cache = FlatCache(decoder, memory, width, labels_BT.shape[1])
  for time in range(labels_BT.shape[1]):
    live_BW = (time < lengths_B[numbers])[:, np.newaxis] & (np.arange(width) == 0)
    if cache.is_full:
      rows = np.flatnonzero(live_BW[:, 0])
      cache.keep(rows, live_BW)
      numbers, live_BW = numbers[rows], live_BW[rows]
    last_B = labels_BT[numbers, time - 1] if time else np.full(len(numbers), begin)
    cache.run(np.repeat(last_B[:, np.newaxis], width, axis=1), time, live_BW)
    logit_B = logits(decoder)[np.arange(len(numbers)), 0, labels_BT[numbers, time]]
    if time >= given:
      log_probs_B[numbers] += (logit_B - decoder.output('log_z')[:, 0]) * live_BW[:, 0]
  return log_probs_B


def logits(decoder: StagedGraph) -> np.ndarray:
  """Logits [B, W, V], a view of the decoder's, which have an axis of parts of the vocabulary."""
  logits_BWDP = decoder.output('logits')
  return logits_BWDP.reshape(*logits_BWDP.shape[:2], -1)


def _next_symbols(decoder: StagedGraph, given: int | None = None) -> NextSymbols:
  """Scores of the next symbols; views of the decoder's outputs, of which none may be held by the next step.

  A symbol that is given has probability 1.
  """
  best_BWJ, symbols_BWJ, log_z_BW = (decoder.output(name) for name in ('best', 'symbols', 'log_z'))
  logits_BWV = logits(decoder)
  next_symbols = NextSymbols(best_BWJ, symbols_BWJ, logits_BWV[:, :, EOS], log_z_BW, logits_BWV)
  return next_symbols if given is None else next_symbols.forced(given)


def padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
  """Rows of ids as an int32 array, padded at their ends."""
  ids_BT = np.full([len(rows), max(map(len, rows))], PAD, np.int32)
  for i, row in enumerate(rows):
    ids_BT[i, : len(row)] = row
  return ids_BT
