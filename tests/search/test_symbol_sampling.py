"""Sampling: which symbols are drawn, how often, and that a sample depends on its key alone."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.addons.engine import numpy_sampling
from lingvo_moe.core import prng
from lingvo_moe.search.sampling import Sampler, sample

LOGITS = tf.math.log(tf.constant([[[0.5, 0.25, 0.15, 0.1]]]))


def drawn(sampler, count=2000):
  keys = prng.fold(prng.key(1), tf.range(count))[:, tf.newaxis]
  found = sampler(tf.tile(LOGITS, [count, 1, 1]), keys)
  return np.bincount(found[:, 0], minlength=4) / count


@pytest.mark.parametrize(
  'sampler, shares',
  [
    (Sampler(), [0.5, 0.25, 0.15, 0.1]),
    (Sampler(top_k=2), [2 / 3, 1 / 3, 0, 0]),
    (Sampler(top_p=0.74), [2 / 3, 1 / 3, 0, 0]),  # two symbols reach 0.75
    (Sampler(top_p=0.76), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
    (Sampler(top_k=3, top_p=0.5), [1, 0, 0, 0]),
    (Sampler(temperature=0.5), np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345),
    (Sampler(temperature=0.0), [1, 0, 0, 0]),
  ],
)
def test_symbols_are_drawn_in_their_shares(sampler, shares):
  np.testing.assert_allclose(drawn(sampler), shares, atol=0.03)
  assert np.all(drawn(sampler)[np.array(shares) == 0] == 0)


def test_no_random_number_draws_a_symbol_that_is_as_good_as_impossible(monkeypatch):
  lowest, highest = 0.0, 1 - 2**-24  # of prng.uniform: once in 2^24 numbers, so twice in a thousand draws from 32,000
  monkeypatch.setattr(prng, 'uniform', lambda key, shape: tf.constant([[[lowest, highest, highest]]]))
  found = Sampler()(tf.constant([[[0.0, -60.0, float('-inf')]]]), prng.key(0)[tf.newaxis, tf.newaxis])
  assert found.numpy().tolist() == [[0]]


@pytest.mark.parametrize('logits', [[-7.0, -5.0, -5.5, -9.0], [7.0, 9.0, 8.5, 1.0], [-np.inf, -1e30, -2e30, -3e30]])
@pytest.mark.parametrize('top_k, top_p', [(0, 1.0), (3, 1.0), (0, 0.9)])
@pytest.mark.parametrize('temperature', [1e-30, 1e-38, 1.2e-38, 1e-45, 0.0])
def test_a_temperature_near_0_draws_the_greatest_logit(temperature, top_k, top_p, logits):
  """Edges of numbers: logits that overflow when they are divided by a temperature; in both engines."""
  logits_BWV = np.float32([[[-np.inf, -np.inf, *logits]]])  # pad and bos first
  keys = tf.cast(prng.fold(prng.key(1), tf.range(1)), tf.uint32)[:, tf.newaxis]
  by_row = Sampler(*(tf.constant([value]) for value in (np.float32(temperature), top_k, np.float32(top_p))))
  values = np.float32([temperature]), np.array([top_k]), np.float32([top_p])
  found = [sampler(tf.constant(logits_BWV), keys) for sampler in (Sampler(temperature, top_k, top_p), by_row)]
  found.append(numpy_sampling.NumpySampler(*values)(logits_BWV, keys.numpy()))
  assert [int(symbol) for [[symbol]] in found] == [3] * 3


# A chain over pad 0, bos 1, eos 2 and two symbols: the next one depends on the last alone.
CHAIN = tf.constant(
  np.log([[0.2] * 5, [0.5, 0.1, 0.1, 0.2, 0.1], [0.2] * 5, [0.05, 0.05, 0.2, 0.3, 0.4], [0.1, 0.1, 0.3, 0.4, 0.1]]),
  tf.float32,
)


def run(keys, limits, sampler=None, steps=6):
  step_fn = lambda ids_BW, now, cache: (tf.gather(CHAIN, ids_BW), cache)
  rows = len(limits)
  return sample(
    step_fn,
    (),
    sampler or Sampler(),
    first_B=tf.fill([rows], 1),
    key_BW=keys,
    max_steps=steps,
    max_lengths_B=tf.constant(limits),
    bos_id=1,
    eos_id=2,
  )


def some_keys(rows, width):
  return prng.fold(prng.fold(prng.key(3), tf.range(rows))[:, tf.newaxis], tf.range(width)[tf.newaxis])


def test_a_sample_ends_with_eos_or_at_its_limit_and_has_the_models_log_probability():
  found = run(some_keys(3, 20), [6, 3, 0])
  ids, lengths = found.ids_BWT.numpy(), found.lengths_BW.numpy()
  assert np.all(lengths[2] == 0) and np.all(lengths[1] <= 3) and lengths[0].max() > 3
  for row, w in np.ndindex(3, 20):
    own = ids[row, w, : lengths[row, w]].tolist()
    assert set(own) <= {2, 3, 4} and 2 not in own[:-1] and not ids[row, w, len(own) :].any()
    assert not own or own[-1] == 2 or len(own) == (6, 3, 0)[row]
    log_p = sum(float(CHAIN[a, b]) for a, b in zip([1, *own], own))
    np.testing.assert_allclose(found.log_probs_BW[row, w], log_p, rtol=1e-4, atol=1e-5)


def test_a_sample_depends_on_its_key_and_not_on_its_batch():
  keys = some_keys(4, 3)
  together, alone = run(keys, [6] * 4), run(keys[2:3], [6])
  np.testing.assert_array_equal(together.ids_BWT[2], alone.ids_BWT[0])
  assert len({row.tobytes() for row in together.ids_BWT.numpy().reshape(12, -1)}) > 4


def test_two_steps_draw_independently(monkeypatch):
  flat = tf.fill([5, 5], 0.2)
  monkeypatch.setitem(globals(), 'CHAIN', tf.where(tf.range(5) == 2, -9.0, tf.math.log(flat)))  # rarely ends
  ids = run(some_keys(1, 400), [2], steps=2).ids_BWT[0].numpy()
  assert abs(np.mean(ids[:, 0] == ids[:, 1]) - 0.5) < 0.1  # of two symbols that are as likely


def test_greedy_takes_the_likeliest_symbol_that_is_neither_pad_nor_bos():
  found = run(some_keys(1, 1), [4], Sampler(temperature=0.0))
  assert found.ids_BWT[0, 0].numpy().tolist() == [3, 4, 3, 4, 0, 0]
