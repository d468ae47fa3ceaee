"""Constrained beam search: what exhaustive search over a tiny vocabulary finds, in TensorFlow and in NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.addons.engine.numpy_beam import Beam, BeamValues, NextSymbols
from lingvo_moe.search import beam_search
from lingvo_moe.search.constraints import Constraints
from lingvo_moe.search.length_norm import LengthNorm

PAD, BOS, EOS, SYMBOLS = 0, 1, 2, 7
MOST, ALPHA = 5, 0.6
LOG_P = np.log(np.random.default_rng(3).dirichlet(np.full(SYMBOLS, 0.4), [MOST, SYMBOLS])).astype(
  np.float32
)  # by time and last symbol


def log_prob(ids):
  return sum(LOG_P[time, last, symbol] for time, (last, symbol) in enumerate(itertools.pairwise([BOS, *ids])))


def has(ids, term):
  return any(ids[i : i + len(term)] == term for i in range(len(ids)))


def automaton(prefix, banned):
  """The one that ids with a prefix, and without a pair, go through; its states are the prefix, and the last symbol."""
  table = np.full([len(prefix) + SYMBOLS, SYMBOLS], -1, np.int32)
  for state, symbol in enumerate(prefix):
    table[state, symbol] = state + 1 if state + 1 < len(prefix) else len(prefix) + symbol
  for last, symbol in itertools.product(range(SYMBOLS), repeat=2):
    table[len(prefix) + last, symbol] = -1 if (last, symbol) in banned else len(prefix) + symbol
  return table, 0 if prefix else BOS


def exhaustive(prefix, banned, terms):
  """The translations that are allowed, best first: (score, ids)."""
  texts = ((*ids, EOS) for n in range(MOST) for ids in itertools.product(range(3, SYMBOLS), repeat=n))
  allowed = [
    ids
    for ids in texts
    if ids[: len(prefix)] == prefix
    and all(has(ids, term) for term in terms)
    and not any(pair in banned for pair in itertools.pairwise(ids[max(len(prefix) - 1, 0) :]))
  ]
  score = lambda ids: log_prob(ids) / ((5 + len(ids)) / 6) ** ALPHA
  return sorted(((score(ids), ids) for ids in allowed), reverse=True)


CASES = [
  ((), set(), []),
  ((3, 4), set(), []),
  ((), {(3, 3), (4, EOS), (BOS, 5)}, []),
  ((), set(), [(5, 6)]),
  ((), set(), [(6,), (3, 4)]),
  ((4,), {(4, 4), (4, 3)}, [(3,)]),
  ((), {(3, 3)}, [(3, 5), (3, 6)]),
]


def constraints(rows):
  tables = [automaton(prefix, banned) for prefix, banned, _ in rows]
  terms = np.zeros([len(rows), 2, 3], np.int32)
  for row, (_, _, own) in enumerate(rows):
    for c, term in enumerate(own):
      terms[row, c, : len(term)] = term
  return Constraints(tables[0][0], np.int32(tables[0][1]), terms)


def in_tensorflow(rows, width, n_best=2):
  found = beam_search.beam_search(
    lambda ids_BW, now, cache: (tf.gather(tf.constant(LOG_P)[now.time], ids_BW), cache),
    tf.zeros([len(rows)]),
    batch_size=len(rows),
    beam_size=width,
    max_steps=MOST,
    max_lengths_B=[MOST] * len(rows),
    bos_id=BOS,
    eos_id=EOS,
    vocab_size=SYMBOLS,
    length_norm_alpha=ALPHA,
    n_best=n_best,
    constraints=constraints(rows),
  )
  return read(found.scores_BW.numpy(), found.ids_BWT.numpy(), found.lengths_BW.numpy())


def in_numpy(rows, width, n_best=2):
  values = BeamValues(width, n_best, LengthNorm(ALPHA), 'exact')
  beam = Beam.begin(np.full(len(rows), MOST, np.int32), values, constraints(rows))
  for time in range(MOST):
    logits_BWV = LOG_P[time, beam.live.last_BW]
    symbols_BWJ = np.argsort(-logits_BWV, axis=2, kind='stable')
    best_BWJ = np.take_along_axis(logits_BWV, symbols_BWJ, axis=2)
    log_z_BW = np.zeros([len(rows), width], np.float32)
    beam.advance(NextSymbols(best_BWJ, symbols_BWJ, logits_BWV[..., EOS], log_z_BW, logits_BWV), time)
  return read(beam.finished.scores_BW, beam.finished.ids_BWT, beam.finished.lengths_BW)


def read(*results):
  return [[(float(s), tuple(map(int, ids[:n]))) for s, ids, n in zip(*of_row)] for of_row in zip(*results)]


ENGINES = pytest.mark.parametrize('search', [in_tensorflow, in_numpy])


@ENGINES
@pytest.mark.parametrize('case', CASES, ids=str)
def test_a_wide_beam_finds_what_exhaustive_search_finds(search, case):
  wanted = exhaustive(*case)[:2]
  for found in search([case] * 2, 64):
    assert [ids for _, ids in found] == [ids for _, ids in wanted]
    assert [s for s, _ in found] == pytest.approx([s for s, _ in wanted], abs=1e-5)


@ENGINES
def test_terms_come_in_a_narrow_beam_and_change_no_other_row(search):
  none, one, two = ((), set(), []), ((), set(), [(6, 3)]), ((), set(), [(6,), (3, 4)])
  for width in (1, 4):
    found = search([none, one, none, two], width, 1)
    assert found[0] == found[2] == search([none], width, 1)[0]
    assert has(found[1][0][1], (6, 3)) and has(found[3][0][1], (6,)) and has(found[3][0][1], (3, 4))
