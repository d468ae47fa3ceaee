"""Flat beam search against an ordinary one, against exhaustive search, and against sums by hand."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.search import beam_search as bs
from lingvo_moe.search import flat_sequence

PAD, BOS, EOS = 0, 1, 2


class Toy:
  """Logits that depend on the source, on every symbol of the prefix and on where each stands.

  In the flat search all it knows of a prefix comes through a cache of values at flat positions, so
  a wrong bit of the mask, a value out of place or a late write changes the logits.
  """

  def __init__(self, seed, *, num_sources=3, vocab_size=9, features=6, max_steps=12, eos_bias=0.0):
    rng = np.random.default_rng(seed)
    self.vocab_size, self.max_steps = vocab_size, max_steps
    self.embedding_VM = rng.normal(size=[vocab_size, features])
    self.weight_TT = rng.normal(size=[max_steps, max_steps])  # of position j, for step i
    self.readout_BMV = 1.5 * rng.normal(size=[num_sources, features, vocab_size])
    self.readout_bias_V = eos_bias * (np.arange(vocab_size) == EOS)

  def log_probs(self, source, prefix):
    """log P(next symbol | source, prefix): plain numpy, from the whole prefix."""
    weights = self.weight_TT[len(prefix) - 1, : len(prefix)]
    context = np.tanh(weights @ self.embedding_VM[list(prefix)])
    logits = context @ self.readout_BMV[source] + self.readout_bias_V
    return logits - np.logaddexp.reduce(logits)

  def cache(self, batch_size, num_slots):
    """Values, and when each was written. Positions not yet written hold what would be noticed."""
    values_BUM = tf.fill([batch_size, num_slots, self.embedding_VM.shape[1]], 1e3)
    return values_BUM, tf.zeros([batch_size, num_slots], tf.int32)

  @staticmethod
  def keep(cache, positions_BU):
    *flat, readout_BMV = cache
    return *(tf.gather(x, positions_BU, batch_dims=1) for x in flat), readout_BMV

  def step(self, ids_BW, now, cache):
    """Equal logits, computed through flat caches."""
    values_BUM, when_BU, readout_BMV = cache
    own_WU = tf.one_hot(now.start + tf.range(ids_BW.shape[1]), tf.shape(when_BU)[1])
    new_U = tf.reduce_any(own_WU > 0, axis=0)
    new_BWM = tf.gather(tf.constant(self.embedding_VM, tf.float32), ids_BW)
    values_BUM = tf.where(new_U[:, tf.newaxis], tf.einsum('WU,BWM->BUM', own_WU, new_BWM), values_BUM)
    when_BU = tf.where(new_U, now.time, when_BU)
    weight_BU = tf.gather(tf.constant(self.weight_TT, tf.float32)[now.time], when_BU)
    context_BWM = tf.tanh(tf.einsum('BWU,BU,BUM->BWM', now.mask_BWU, weight_BU, values_BUM))
    logits_BWV = tf.einsum('BWM,BMV->BWV', context_BWM, readout_BMV)
    return logits_BWV + tf.constant(self.readout_bias_V, tf.float32), (values_BUM, when_BU, readout_BMV)

  def search(self, max_lengths, beam_size, alpha, *, sources=None, max_steps=None, **kwargs):
    """Flat beam search over this model."""
    readout_BMV = self.readout_BMV if sources is None else self.readout_BMV[sources]
    readout_BMV = tf.constant(readout_BMV, tf.float32)
    max_steps = self.max_steps if max_steps is None else max_steps
    cache = self.cache(len(max_lengths), 1 if 'keep' in kwargs else max_steps * beam_size)
    return bs.beam_search(
      kwargs.pop('step_fn', self.step),
      (*cache, readout_BMV),
      batch_size=len(max_lengths),
      beam_size=beam_size,
      max_steps=max_steps,
      max_lengths_B=max_lengths,
      bos_id=BOS,
      eos_id=EOS,
      vocab_size=self.vocab_size,
      length_norm_alpha=alpha,
      **kwargs,
    )


def penalty(length, alpha):
  return ((5 + length) / 6) ** alpha


def ordinary_search(toy, source, max_length, beam_size, alpha, *, n_best, early_stopping, min_length=1):
  """An ordinary beam search for one sentence, on lists: returns [(score, log_prob, Y)], steps."""
  live, finished, steps, ended = [(0.0, (BOS,))], [], 0, 0
  while live and steps < max_length:
    steps += 1
    ranked = sorted(
      (
        (log_prob + p, prefix + (y,))
        for log_prob, prefix in live
        for y, p in enumerate(toy.log_probs(source, prefix))
        if y not in (PAD, BOS) and (steps >= min(min_length, max_length) if y == EOS else steps < max_length)
      ),
      reverse=True,
    )
    best = ranked[: 2 * beam_size]
    may_end = best[:beam_size] if early_stopping == 'first' else best
    ends = [(log_prob / penalty(steps, alpha), log_prob, y[1:]) for log_prob, y in may_end if y[-1] == EOS]
    finished, ended = finished + ends, ended + len(ends)
    finished = sorted(finished, reverse=True)[:n_best]
    live = [(log_prob, y) for log_prob, y in best if y[-1] != EOS][:beam_size]
    if early_stopping == 'first' and ended >= beam_size:
      break
    if early_stopping in ('exact', 'heuristic') and live and len(finished) == n_best:
      longest = min(steps + 4, max_length) if early_stopping == 'heuristic' else max_length
      if live[0][0] / penalty(longest, alpha) <= finished[-1][0]:
        break
  return finished, steps


def every_translation(toy, source, max_length, alpha):
  """Every possible translation, best first."""
  symbols = [y for y in range(toy.vocab_size) if y not in (PAD, BOS, EOS)]
  found = []
  for length in range(1, max_length + 1):
    for body in itertools.product(symbols, repeat=length - 1):
      y = body + (EOS,)
      log_prob = sum(toy.log_probs(source, (BOS,) + y[:i])[y[i]] for i in range(length))
      found.append((log_prob / penalty(length, alpha), log_prob, y))
  return sorted(found, reverse=True)


def assert_found(found, row, expected):
  """Row `row` of Hypotheses holds exactly `expected`, a list of (score, log_prob, Y)."""
  n_best, max_steps = found.ids_BWT.shape[1:]
  for w in range(n_best):
    score, log_prob, y = expected[w] if w < len(expected) else (-np.inf, -np.inf, ())
    want = list(y) + [PAD] * (max_steps - len(y))
    assert found.ids_BWT[row, w].numpy().tolist() == want
    assert found.lengths_BW[row, w] == len(y)
    np.testing.assert_allclose(found.scores_BW[row, w], score, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.log_probs_BW[row, w], log_prob, rtol=1e-4, atol=1e-5)


def assert_same(a, b):
  for name in ('ids_BWT', 'lengths_BW'):
    np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
  for name in ('log_probs_BW', 'scores_BW'):
    np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize('keeps', [{}, {'keep': Toy.keep}])
@pytest.mark.parametrize('early_stopping', ['exact', 'heuristic', 'first', None])
@pytest.mark.parametrize('alpha', [0.0, 0.6])
@pytest.mark.parametrize('beam_size', [1, 2, 5])
def test_equals_an_ordinary_reordering_beam_search(beam_size, alpha, early_stopping, keeps, monkeypatch):
  monkeypatch.setattr(flat_sequence, 'ROOM', 3)
  max_lengths = [8, 5, 7, 1, 8, 6, 2, 8]
  n_best = (beam_size + 1) // 2 if early_stopping else beam_size
  toy = Toy(beam_size, num_sources=8, max_steps=8, eos_bias=1.0)
  found = toy.search(max_lengths, beam_size, alpha, n_best=n_best, early_stopping=early_stopping, **keeps)
  all_steps = []
  for source, max_length in enumerate(max_lengths):
    values = {'n_best': n_best, 'early_stopping': early_stopping}
    expected, steps = ordinary_search(toy, source, max_length, beam_size, alpha, **values)
    assert_found(found, source, expected)
    all_steps.append(steps)
  assert found.steps == max(all_steps)


def test_no_translation_is_shorter_than_asked_for_where_its_limit_allows():
  toy = Toy(2, num_sources=4, max_steps=8, eos_bias=2.0)
  max_lengths, shortest = [8, 6, 4, 1], []
  for min_length in (1, 5):
    found = toy.search(max_lengths, 3, 0.6, min_length=min_length)
    for source, max_length in enumerate(max_lengths):
      values = {'n_best': 3, 'early_stopping': 'exact', 'min_length': min_length}
      expected, _ = ordinary_search(toy, source, max_length, 3, 0.6, **values)
      assert_found(found, source, expected)
    shortest.append(found.lengths_BW[:, 0].numpy().tolist())
  assert max(shortest[0]) < 5 and shortest[1][2:] == [4, 1] and min(shortest[1][:2]) >= 5


def test_the_toy_has_hypotheses_that_cross():
  # Otherwise the test above would not notice a beam that forgets to gather its masks.
  toy, crossings = Toy(0), []

  def step(ids_BW, now, cache):
    mask_BWTW = now.mask_BWU.numpy().reshape([3, 4, 12, 4])
    crossings.append((mask_BWTW[:, :, : now.time, :] * (1 - np.eye(4)[:, np.newaxis])).sum())
    return toy.step(ids_BW, now, cache)

  toy.search([12, 12, 12], 4, 1.0, step_fn=step)
  assert sum(crossings) > 50


def test_a_mask_has_one_position_of_each_time_and_its_own():
  toy = Toy(1)

  def step(ids_BW, now, cache):
    mask_BWTW = now.mask_BWU.numpy().reshape([3, 4, 12, 4])
    past_T = np.arange(12) <= now.time
    np.testing.assert_array_equal(mask_BWTW.sum(-1), np.broadcast_to(past_T, [3, 4, 12]))
    np.testing.assert_array_equal(mask_BWTW[:, :, now.time], np.broadcast_to(np.eye(4), [3, 4, 4]))
    return toy.step(ids_BW, now, cache)

  toy.search([12, 3, 7], 4, 0.6, step_fn=step)


@pytest.mark.parametrize('alpha', [0.0, 0.6, 1.0])
@pytest.mark.parametrize('vocab_size', [4, 5, 6])
def test_a_beam_of_all_prefixes_finds_every_translation_in_order(vocab_size, alpha):
  beam_size = (vocab_size - 3) ** 3  # prefixes of 3 symbols; a fourth must be eos
  toy = Toy(vocab_size, vocab_size=vocab_size, max_steps=4)
  expected = [every_translation(toy, source, 4, alpha) for source in range(3)]
  for n_best in (1, len(expected[0])):
    found = toy.search([4, 4, 4], beam_size, alpha, n_best=n_best)
    for source in range(3):
      assert_found(found, source, expected[source][:n_best])


def test_more_hypotheses_asked_for_than_exist_leaves_rows_without():
  toy = Toy(0, vocab_size=4, max_steps=4)  # one symbol: at most 4 translations
  found = toy.search([4, 2, 0], 6, 0.6)
  assert found.lengths_BW.numpy().astype(bool).sum(axis=1).tolist() == [4, 2, 0]
  assert_found(found, 0, every_translation(toy, 0, 4, 0.6))
  assert_found(found, 1, every_translation(toy, 1, 2, 0.6))
  assert_found(found, 2, [])


def test_a_sentence_of_length_zero_gets_nothing_and_costs_no_step():
  found = Toy(0).search([0, 0], 3, 1.0, sources=[0, 1])
  assert found.steps == 0
  assert_found(found, 0, [])
  assert_found(found, 1, [])


@pytest.mark.parametrize('early_stopping', ['exact', 'heuristic', 'first', None])
def test_a_sentence_gets_the_same_alone_and_among_others(early_stopping):
  toy, max_lengths = Toy(3, num_sources=4, eos_bias=1.0), [3, 12, 1, 8]
  together = toy.search(max_lengths, 4, 0.8, early_stopping=early_stopping)
  for source, max_length in enumerate(max_lengths):
    alone = toy.search([max_length], 4, 0.8, sources=[source], max_steps=max_length, early_stopping=early_stopping)
    for w in range(4):
      length = alone.lengths_BW[0, w]
      assert together.lengths_BW[source, w] == length
      np.testing.assert_array_equal(together.ids_BWT[source, w, :max_length], alone.ids_BWT[0, w])
      np.testing.assert_allclose(together.scores_BW[source, w], alone.scores_BW[0, w], rtol=1e-5)


def test_max_lengths_beyond_max_steps_are_cut_to_it():
  toy = Toy(4)
  cut, plain = (toy.search([n, n, n], 3, 1.0, max_steps=7) for n in (50, 7))
  assert_same(cut, plain)


def fixed_step(*probs_TV):
  """A model that ignores its input: probs_TV[t] at time t."""
  logits_TV = tf.math.log(tf.constant(probs_TV))

  def step(ids_BW, now, cache):
    return tf.zeros([*ids_BW.shape, 1]) + logits_TV[now.time], cache

  return step


def small_search(step_fn, max_steps, beam_size, alpha, vocab_size=5, **kwargs):
  return bs.beam_search(
    step_fn,
    (),
    batch_size=1,
    beam_size=beam_size,
    max_steps=max_steps,
    max_lengths_B=[max_steps],
    bos_id=BOS,
    eos_id=EOS,
    vocab_size=vocab_size,
    length_norm_alpha=alpha,
    **kwargs,
  )


def test_length_penalty_counts_eos():
  # 'eos' has probability .4 and |Y| = 1: penalty (6/6)^1. 'a eos' has .5 * .7 and |Y| = 2: (7/6)^1.
  step_fn = fixed_step([0.0, 0.0, 0.4, 0.5, 0.1], [0.0, 0.0, 0.7, 0.2, 0.1])
  score_eos, score_a = math.log(0.4) / 1, math.log(0.5 * 0.7) / (7 / 6)
  assert score_eos < score_a and 0.4 > 0.5 * 0.7

  normalised = small_search(step_fn, 2, 2, 1.0)
  np.testing.assert_array_equal(normalised.ids_BWT[0], [[3, EOS], [EOS, PAD]])
  np.testing.assert_array_equal(normalised.lengths_BW[0], [2, 1])
  np.testing.assert_allclose(normalised.scores_BW[0], [score_a, score_eos], rtol=1e-5)
  np.testing.assert_allclose(normalised.log_probs_BW[0], np.log([0.5 * 0.7, 0.4]), rtol=1e-5)

  plain = small_search(step_fn, 2, 2, 0.0)
  np.testing.assert_array_equal(plain.ids_BWT[0], [[EOS, PAD], [3, EOS]])
  np.testing.assert_allclose(plain.scores_BW[0], np.log([0.4, 0.5 * 0.7]), rtol=1e-5)


def test_at_its_limit_a_hypothesis_ends_and_pays_for_eos():
  step_fn = fixed_step([0.0, 0.0, 0.01, 0.9, 0.09], [0.0, 0.0, 0.001, 0.9, 0.099])
  found = small_search(step_fn, 2, 1, 0.0)
  np.testing.assert_array_equal(found.ids_BWT[0], [[3, EOS]])
  np.testing.assert_allclose(found.log_probs_BW[0], [math.log(0.9 * 0.001)], rtol=1e-5)


def test_an_eos_below_the_2W_best_is_not_taken():
  # W = 1: eos is third, behind two others. It scores .2, better than .5 * .35 with alpha 0.
  found = small_search(fixed_step([0.0, 0.0, 0.2, 0.5, 0.3], [0.0, 0.0, 0.35, 0.33, 0.32]), 2, 1, 0.0)
  np.testing.assert_array_equal(found.ids_BWT[0], [[3, EOS]])


def test_pad_and_bos_are_never_produced_and_keep_their_probability():
  found = small_search(fixed_step([0.4, 0.3, 0.1, 0.2, 0.0], [0.3, 0.3, 0.3, 0.1, 0.0]), 2, 1, 0.0)
  np.testing.assert_array_equal(found.ids_BWT[0], [[EOS, PAD]])
  np.testing.assert_allclose(found.log_probs_BW[0], [math.log(0.1)], rtol=1e-5)


def test_equal_scores_go_to_the_smaller_symbol_and_to_what_finished_first():
  found = small_search(fixed_step([0.0, 0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.25, 0.25]), 2, 2, 0.0)
  np.testing.assert_array_equal(found.ids_BWT[0], [[3, EOS], [4, EOS]])
  found = small_search(fixed_step([0.0, 0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]), 2, 2, 0.0)
  np.testing.assert_array_equal(found.ids_BWT[0], [[EOS, PAD], [3, EOS]])


def test_a_log_probability_never_rises_where_a_softmax_rounds_above_one(monkeypatch):
  # Early stopping relies on it: what is live can only get worse.
  softmax = tf.nn.softmax
  monkeypatch.setattr(tf.nn, 'softmax', lambda x: softmax(x) * (1 + 2**-20))
  certain = [[0.0, 0.0, 0.0, 1.0, 0.0]] * 3 + [[0.0, 0.0, 1.0, 0.0, 0.0]]
  found = small_search(fixed_step(*certain), 4, 1, 0.0)
  np.testing.assert_array_equal(found.ids_BWT[0], [[3, 3, 3, EOS]])
  np.testing.assert_array_equal(found.log_probs_BW, [[0.0]])


@pytest.mark.parametrize('alpha', [0.0, 0.6, 1.0])
def test_early_stopping_saves_steps_and_changes_nothing(alpha):
  saved = 0
  for n_best in (1, 4):
    toy = Toy(1, eos_bias=3.0)
    early = toy.search([12, 8, 10], 4, alpha, n_best=n_best)
    full = toy.search([12, 8, 10], 4, alpha, n_best=n_best, early_stopping=None)
    assert_same(early, full)
    assert full.steps == 12
    saved += int(full.steps - early.steps)
  assert saved > 0


def test_a_sentence_stops_where_what_is_live_can_only_tie():
  # 'eos' has probability .5, and 'a' too: no continuation of 'a' comes before 'eos', which finished earlier.
  found = small_search(fixed_step([0.0, 0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]), 2, 1, 0.0)
  np.testing.assert_array_equal(found.ids_BWT[0], [[EOS, PAD]])
  assert int(found.steps) == 1


def test_the_best_hypothesis_does_not_depend_on_how_many_are_asked_for():
  toy = Toy(0, num_sources=8, eos_bias=2.0)
  one, four = (toy.search([12] * 8, 4, 0.8, n_best=n) for n in (1, 4))
  np.testing.assert_array_equal(one.ids_BWT[:, 0], four.ids_BWT[:, 0])
  assert one.steps <= four.steps


def test_a_beam_of_one_scores_no_less_than_greedy_search():
  toy = Toy(0, num_sources=8, eos_bias=1.0)
  found = toy.search([12] * 8, 1, 0.6)
  for source in range(8):
    prefix, log_prob = (BOS,), 0.0
    while prefix[-1] != EOS:
      log_probs_V = toy.log_probs(source, prefix)
      log_probs_V[[PAD, BOS]] = -np.inf
      y = EOS if len(prefix) == 12 else int(np.argmax(log_probs_V))
      prefix, log_prob = prefix + (y,), log_prob + log_probs_V[y]
    assert found.scores_BW[source, 0] >= log_prob / penalty(len(prefix) - 1, 0.6) - 1e-4


@pytest.mark.parametrize('jit_compile', [False, True])
def test_eager_graph_and_xla_agree(jit_compile):
  toy = Toy(5, eos_bias=1.0)
  search = tf.function(lambda: toy.search([12, 5, 9], 4, 0.8), jit_compile=jit_compile, autograph=False)
  compiled, eager = search(), toy.search([12, 5, 9], 4, 0.8)
  assert_same(compiled, eager)
  assert compiled.steps == eager.steps


@pytest.mark.parametrize('keep', [None, Toy.keep])
def test_batch_and_steps_may_be_unknown_while_tracing(keep, monkeypatch):
  monkeypatch.setattr(flat_sequence, 'ROOM', 2)
  toy = Toy(6, eos_bias=1.0)

  @tf.function(input_signature=[tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)], autograph=False)
  def search(max_lengths_B, max_steps):
    batch_size = tf.shape(max_lengths_B)[0]
    readout_BMV = tf.constant(toy.readout_BMV, tf.float32)[:batch_size]
    return bs.beam_search(
      toy.step,
      (*toy.cache(batch_size, 1 if keep else max_steps * 4), readout_BMV),
      batch_size=batch_size,
      beam_size=4,
      max_steps=max_steps,
      max_lengths_B=max_lengths_B,
      bos_id=BOS,
      eos_id=EOS,
      vocab_size=toy.vocab_size,
      length_norm_alpha=0.8,
      keep=keep,
    )

  for max_lengths, max_steps in [([12, 5, 9], 12), ([7, 4], 8)]:
    found = search(tf.constant(max_lengths), tf.constant(max_steps))
    expected = toy.search(max_lengths, 4, 0.8, sources=range(len(max_lengths)), max_steps=max_steps)
    assert_same(found, expected)


@pytest.mark.parametrize('jit_compile', [False, True])
def test_nonsense_from_rows_without_a_hypothesis_is_not_used(jit_compile):
  toy = Toy(7)
  empty_B11 = tf.constant([False, True, False])[:, tf.newaxis, tf.newaxis]

  def step(ids_BW, now, cache):
    logits_BWV, cache = toy.step(ids_BW, now, cache)
    not_first_W1 = (tf.range(3) > 0)[:, tf.newaxis]
    return tf.where(empty_B11 | (now.time == 0) & not_first_W1, np.nan, logits_BWV), cache

  search = tf.function(lambda: toy.search([6, 0, 6], 3, 0.6, step_fn=step), jit_compile=jit_compile, autograph=False)
  found, expected = search(), toy.search([6, 0, 6], 3, 0.6)
  assert_same(found, expected)
  assert found.steps == expected.steps


@pytest.mark.parametrize('vocab_size', [1500, 2048, 2049])
def test_top_k_by_blocks_is_top_k_with_ties(vocab_size):
  rng = np.random.default_rng(vocab_size)
  logits_BWV = rng.geometric(0.3, size=[3, 4, vocab_size]).astype(np.float32)
  logits_BWV[0, 0, 5:] = -np.inf
  for k in (1, 5, 11):
    values, indices = bs._top_k(tf.constant(logits_BWV), k)
    expected_values, expected_indices = tf.math.top_k(logits_BWV, k)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(indices, expected_indices)


@pytest.mark.parametrize(
  'kwargs, message',
  [
    ({'beam_size': 0}, 'beam_size=0 and n_best=0 must both be at least 1'),
    ({'n_best': 0}, 'beam_size=2 and n_best=0 must both be at least 1'),
    ({'alpha': -0.5}, 'length_norm_alpha=-0.5 must not be negative'),
    ({'pad_id': 5}, 'pad_id=5 is not in a vocabulary of 5 symbols: use 0 to 4'),
  ],
)
def test_impossible_settings_are_answered(kwargs, message):
  with pytest.raises(UserError, match=message):
    small_search(None, 2, **{'beam_size': 2, 'alpha': 1.0, **kwargs})
