"""Sampling: exact shares, every example once an epoch, and a stream that depends on (seed, number) alone."""

import collections

import numpy as np
import pytest

from lingvo_moe.corpora import temperature_sampling


def sampler(names, sizes, temperature, seed, window_size, weights=()):
  stages = [temperature_sampling.shares(sizes, temperature, weights)]
  return temperature_sampling.ExampleSampler(names, sizes, stages=stages, seed=seed, window_size=window_size)


@pytest.mark.parametrize('size', [1, 2, 3, 7, 64, 1000, 4097])
def test_permute_is_a_permutation(size):
  for key in (0, 12345, 2**63):
    image = temperature_sampling.permute(np.arange(size), size, key)
    assert sorted(image) == list(range(size))


def test_permutations_of_different_keys_differ_and_look_random():
  n = 4000
  a, b = (temperature_sampling.permute(np.arange(n), n, temperature_sampling.fold(key)) for key in (1, 2))
  assert (a == b).sum() < 10  # 1 is expected
  assert abs(np.corrcoef(a, np.arange(n))[0, 1]) < 0.06
  # Neighbours land as far from each other as random numbers: a third of n on average.
  assert abs(np.abs(np.diff(a)).mean() / n - 1 / 3) < 0.02


def test_permute_needs_no_memory_for_huge_sizes():
  n = 2**40 + 123
  image = temperature_sampling.permute(np.arange(n - 100, n), n, 5)
  assert len(set(image.tolist())) == 100 and (image >= 0).all() and (image < n).all()


def test_temperature_one_keeps_natural_shares_and_large_ones_level_them():
  np.testing.assert_allclose(temperature_sampling.shares([900, 90, 10], 1), [0.9, 0.09, 0.01])
  np.testing.assert_allclose(temperature_sampling.shares([16, 1], 4), [2 / 3, 1 / 3])
  np.testing.assert_allclose(temperature_sampling.shares([900, 10], 1e9), [0.5, 0.5], atol=1e-6)


def test_weights_multiply_shares():
  np.testing.assert_allclose(temperature_sampling.shares([300, 100], 1, [1, 3]), [0.5, 0.5])
  np.testing.assert_allclose(temperature_sampling.shares([16, 1], 4, [1, 4]), [1 / 3, 2 / 3])  # 2 : 1 by temperature
  np.testing.assert_allclose(temperature_sampling.shares([1, 1], 1, [1e-300, 1e308]), [0, 1])  # none overflows
  assert temperature_sampling.quotas(temperature_sampling.shares([300, 100], 1, [1, 3]), 100) == [50, 50]
  even = sampler(['a', 'b'], [300, 100], 1, 3, 100, [1, 3])
  assert np.bincount(even.window(0)[0]).tolist() == [50, 50]
  alike, without = (sampler(['a', 'b'], [300, 100], 2, 3, 99, w) for w in ([7, 7], []))
  for a, b in zip(alike.window(5), without.window(5), strict=True):
    np.testing.assert_array_equal(a, b)


def test_quotas_sum_exactly_and_leave_nobody_out():
  assert temperature_sampling.quotas(temperature_sampling.shares([2, 1], 1), 100) == [67, 33]
  assert temperature_sampling.quotas(temperature_sampling.shares([10**9, 1, 1], 1), 1000) == [998, 1, 1]
  for sizes in ([5, 3, 7, 11], [1] * 7):
    assert sum(temperature_sampling.quotas(temperature_sampling.shares(sizes, 2.5))) == 2**32


def test_what_is_left_of_equal_shares_goes_to_the_first():
  # 3.53 and 5.89 each; of the 57 that are left, 40 go to the larger remainders.
  assert temperature_sampling.quotas(temperature_sampling.shares([3, 5] * 40, 1), 377) == [4, 6] * 17 + [3, 6] * 23


def make(sizes=(500, 60, 7), temperature=1.0, seed=3, window=100):
  return sampler(['a', 'b', 'c'], sizes, temperature, seed, window)


@pytest.mark.parametrize('temperature', [1, 5])
def test_draws_stay_within_one_of_the_exact_share(temperature):
  sizes = (500, 60, 7)
  sampler = make(sizes, temperature)
  drawn = np.zeros(3)
  for w in range(50):
    language, _ = sampler.window(w)
    drawn += np.bincount(language, minlength=3)
    exact = temperature_sampling.shares(sizes, temperature) * 100 * (w + 1)
    assert (drawn <= exact + 1e-6 * (w + 1)).all() and (drawn > exact - 1 - 1e-4).all()


def test_every_epoch_of_a_language_visits_each_example_once():
  sizes = (500, 60, 7)
  sampler = make(sizes, temperature=5)
  seen = [[], [], []]
  for w in range(40):
    # The order within a window is shuffled, so an epoch that ends in it is cut there: compare as counts.
    for language, line in zip(*sampler.window(w), strict=True):
      seen[language].append(line)
    for lines, size, n in zip(seen, sizes, sampler.drawn(w + 1), strict=True):
      assert len(lines) == n
      counts = collections.Counter(lines)
      assert max(counts.values(), default=0) <= -(-n // size)
      assert n < size or min(counts[i] for i in range(size)) >= n // size


def test_a_window_depends_on_seed_and_number_only():
  first, second = make().window(7), make().window(7)
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a, b)
  assert not np.array_equal(make(seed=4).window(7)[1], first[1])
  assert not np.array_equal(make().window(8)[1], first[1])


def test_another_language_does_not_change_the_order_of_the_first():
  alone = sampler(['a'], [50], 1, 1, 50).window(0)[1]
  both = sampler(['b', 'a'], [50, 50], 1, 1, 100).window(0)
  assert set(both[1][both[0] == 1]) == set(alone)


def test_counts_do_not_overflow_after_very_many_windows():
  sampler = make()
  late = sampler.drawn(10**12)
  assert (late >= 0).all() and abs(int(late.sum()) - 10**14) < 10**14 * 1e-6


def test_the_stream_is_the_same_for_ever():
  # A change here breaks the resuming of runs that were begun before it.
  language, line = make().window(1)
  assert language[:8].tolist() == [0, 0, 1, 0, 1, 0, 0, 0]
  assert line[:8].tolist() == [339, 222, 3, 50, 9, 494, 321, 429]


def test_a_stage_goes_on_with_the_draws_of_the_stages_before():
  stages = [np.array([0.5, 0.5, 0]), np.array([0, 0.25, 0.75])]
  staged = temperature_sampling.ExampleSampler(['a', 'b', 'c'], [40, 40, 75], stages=stages, seed=1, window_size=100)
  windows = [staged.window(0), staged.window(1, [0, 1]), staged.window(2, [0, 1])]
  assert [np.bincount(pair, minlength=3).tolist() for pair, _ in windows] == [[50, 50, 0], [0, 25, 75], [0, 25, 75]]
  lines = np.concatenate([line[pair == 1] for pair, line in windows])
  counts = np.bincount(lines, minlength=40)  # 100 draws of 40 lines: each twice, and 20 of them once more
  assert counts.min() == 2 and counts.max() == 3
  assert np.bincount(windows[1][1][windows[1][0] == 2]).tolist() == [1] * 75  # each line once an epoch


@pytest.mark.parametrize('size', [5, 16, 64, 1000, 1029])
def test_consecutive_lines_may_stay_together(size):
  stages = [np.ones(1)]
  together = temperature_sampling.ExampleSampler(['a'], [size], stages=stages, seed=1, window_size=size, run=16)
  for epoch in (0, 1):
    _, line = together.window(epoch)
    assert sorted(line) == list(range(size))
  first = temperature_sampling.ExampleSampler(
    ['a'], [size * 1000], stages=stages, seed=1, window_size=160, run=16
  ).window(0)[1]
  assert len(set(first // 16)) == 10
