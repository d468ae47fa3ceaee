"""Limits on repetition: plain loops over lists, exhaustive search over a tiny vocabulary, and greedy search by hand."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.addons.engine.numpy_beam import ARRAYS, Beam, BeamValues, NextSymbols
from lingvo_moe.search import beam_search, sampling
from lingvo_moe.search.beam_search import TENSORS
from lingvo_moe.search.constraints import Constraints
from lingvo_moe.search.length_norm import LengthNorm
from lingvo_moe.search.repetition import Repetition

PAD, BOS, EOS, SYMBOLS, MOST = 0, 1, 2, 6, 5
LIMITS = [Repetition(1.7, 0), Repetition(0.6, 0), Repetition(1.0, 1), Repetition(1.0, 2), Repetition(1.3, 3)]


def limited(repetition, scores, history):
  """Scores of the next symbol after a history, as transformers' two processors have them; the end may always come."""
  scores = list(scores)
  if repetition.penalty != 1:
    for symbol in {*history}:
      scores[symbol] *= repetition.penalty if scores[symbol] < 0 else 1 / repetition.penalty
  size = repetition.ngram_size
  for ngram in zip(*(history[i:] for i in range(size))):
    if list(ngram[:-1]) == history[len(history) - size + 1 :] and ngram[-1] != EOS:
      scores[ngram[-1]] = -np.inf
  return scores


@pytest.mark.parametrize('library', ['numpy', 'tensorflow', 'xla'])
@pytest.mark.parametrize('repetition', [*LIMITS, Repetition(2.0, 4)])
def test_scores_are_those_of_plain_loops(repetition, library):
  rng, changed = np.random.default_rng(0), 0
  limit = lambda *arrays: repetition.scores(TENSORS, *arrays)[1]
  if library == 'xla':
    limit = tf.function(limit, jit_compile=True, autograph=False)
  for time, length in itertools.product((0, 1, 2, 6), (1, 4)):
    before_BP = rng.integers(EOS, SYMBOLS, [2, length]).astype(np.int32)
    before_BP[0, : length // 2] = PAD
    ids_BWT = rng.integers(EOS, SYMBOLS, [2, 3, 8]).astype(np.int32)
    ids_BWT[:, :, time:] = PAD
    scores_BWV = rng.normal(size=[2, 3, SYMBOLS]).astype(np.float32)
    arrays = scores_BWV, before_BP, ids_BWT
    if library == 'numpy':
      found = repetition.scores(ARRAYS, *arrays, time)[1]
    else:
      found = limit(*map(tf.constant, arrays), tf.constant(time))
    for row, w in itertools.product(range(2), range(3)):
      history = [*before_BP[row, (length // 2) * (row == 0) :], *ids_BWT[row, w, :time]]
      expected = limited(repetition, scores_BWV[row, w], history)
      np.testing.assert_allclose(np.array(found)[row, w, EOS:], expected[EOS:], rtol=1e-6)
      changed += expected[EOS:] != scores_BWV[row, w, EOS:].tolist()
  assert changed


LOGITS = np.random.default_rng(3).normal(size=[MOST, SYMBOLS, SYMBOLS]).astype(np.float32) * 2  # by time, last symbol
LOGITS[:, :, EOS] -= 1


def log_softmax(x):
  return x - np.log(np.exp(x).sum())


def in_tensorflow(width, repetition, constraints=None, jit_compile=False):
  def search():
    return beam_search.beam_search(
      lambda ids_BW, now, cache: (tf.gather(tf.gather(LOGITS, now.time), ids_BW), cache),
      tf.zeros([2]),
      batch_size=2,
      beam_size=width,
      max_steps=MOST,
      max_lengths_B=[MOST] * 2,
      bos_id=BOS,
      eos_id=EOS,
      vocab_size=SYMBOLS,
      length_norm_alpha=0.0,
      constraints=constraints,
      repetition=repetition,
    )

  found = tf.function(search, jit_compile=True, autograph=False)() if jit_compile else search()
  return read(found.log_probs_BW.numpy(), found.ids_BWT.numpy(), found.lengths_BW.numpy())


def in_numpy(width, repetition, constraints=None):
  first_BP = np.full([2, 1], BOS, np.int32)
  values = BeamValues(width, width, LengthNorm(0.0), 'exact')
  beam = Beam.begin(np.full(2, MOST, np.int32), values, constraints, repetition, first_BP)
  for time in range(MOST):
    logits_BWV = LOGITS[time][beam.live.last_BW]
    symbols_BWJ = np.argsort(-logits_BWV, axis=2, kind='stable')
    best_BWJ = np.take_along_axis(logits_BWV, symbols_BWJ, axis=2)
    log_z_BW = np.log(np.exp(logits_BWV).sum(axis=2))
    symbols = NextSymbols(best_BWJ, symbols_BWJ, logits_BWV[..., EOS], log_z_BW, logits_BWV)
    beam.advance(symbols, time)
  return read(beam.finished.log_probs_BW, beam.finished.ids_BWT, beam.finished.lengths_BW)


def read(*results):
  first, second = ([(float(p), list(map(int, ids[:n]))) for p, ids, n in zip(*of_row) if n] for of_row in zip(*results))
  assert first == second
  return first


def in_xla(*arguments):
  return in_tensorflow(*arguments, jit_compile=True)


def with_limits(limits):
  """Searches with limits; programs that XLA compiles, but that of the last limit, are slow."""
  slow = lambda search, i: [pytest.mark.slow] if search is in_xla and i != len(LIMITS) - 1 else []
  cases = itertools.product((in_tensorflow, in_xla, in_numpy), enumerate(limits))
  return pytest.mark.parametrize(
    ('search', 'repetition'), [pytest.param(search, limit, marks=slow(search, i)) for search, (i, limit) in cases]
  )


@with_limits([*LIMITS, None])
def test_a_wide_beam_finds_what_exhaustive_search_finds(search, repetition):
  def log_prob(ids):
    total = 0.0
    for time, symbol in enumerate(ids):
      scores, history = log_softmax(LOGITS[time, ([BOS, *ids])[time]]), [BOS, *ids[:time]]
      total += (limited(repetition, scores, history) if repetition else scores)[symbol]
    return total

  texts = ([*ids, EOS] for n in range(MOST) for ids in itertools.product(range(3, SYMBOLS), repeat=n))
  expected = sorted(((log_prob(ids), ids) for ids in texts), reverse=True)[:3]
  found = search(81, repetition)[:3]
  assert [ids for _, ids in found] == [ids for _, ids in expected]
  assert [p for p, _ in found] == pytest.approx([p for p, _ in expected], abs=1e-5)


@with_limits(LIMITS)
def test_a_beam_of_one_takes_the_largest_logits(search, repetition, monkeypatch):
  monkeypatch.setitem(globals(), 'LOGITS', np.where(np.arange(SYMBOLS) == EOS, np.float32(-9), LOGITS))
  history = [BOS]
  while len(history) < MOST and history[-1] != EOS:
    scores = limited(repetition, LOGITS[len(history) - 1, history[-1]], history)
    history.append(int(np.argmax([-np.inf, -np.inf, *scores[2:]])))
  [(_, found)] = search(1, repetition)
  assert found == [*history[1:], *[EOS] * (history[-1] != EOS)]  # at the limit
  drawn = sampling.sample(
    lambda ids_BW, now, cache: (tf.gather(tf.gather(LOGITS, now.time), ids_BW), cache),
    tf.zeros([1]),
    sampling.Sampler(0.0),
    first_B=tf.constant([BOS]),
    key_BW=tf.constant([[7]], tf.uint32),
    max_steps=MOST,
    max_lengths_B=[MOST],
    bos_id=BOS,
    eos_id=EOS,
    repetition=repetition,
  )
  assert drawn.ids_BWT.numpy()[0, 0, : len(history) - 1].tolist() == history[1:]


@pytest.mark.parametrize('search', [in_tensorflow, in_xla, in_numpy])
def test_a_prefix_and_terms_come_though_they_repeat(search):
  prefix, every = [3, 3, 3], np.tile(np.arange(SYMBOLS), [SYMBOLS, 1])
  table = np.full([3 + SYMBOLS, SYMBOLS], -1, np.int32)
  table[3:, 2:] = 3 + every[:, 2:]
  for state, symbol in enumerate(prefix):
    table[state, symbol] = state + 1 if state < 2 else 3 + symbol
  constraints = lambda begin, term: Constraints(table, np.int32(begin), np.array([[[*term, PAD]]] * 2, np.int32))
  repetition = Repetition(1.0, 2)
  found = search(4, repetition, constraints(0, [PAD]))
  assert [ids[:3] for _, ids in found] == [prefix] * len(found)
  assert all(ids[3] != 3 for _, ids in found)
  found = search(4, repetition, constraints(3, [4, 4, 4]))
  assert all([4, 4, 4] in [ids[i : i + 3] for i in range(3)] for _, ids in found)
