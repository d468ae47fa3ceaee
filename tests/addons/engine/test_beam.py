"""Beam of the engine: of equal values the first are best, as in TensorFlow's beam search."""

import numpy as np

from lingvo_moe.addons.engine import numpy_beam


def test_of_equal_values_the_first_are_the_best():
  values = np.tile([0.0, 1.0], [2, 64])  # more than an unstable sort leaves in order
  assert numpy_beam._best(values, 70)[1].tolist() == [[*range(1, 128, 2), *range(0, 12, 2)]] * 2
  assert numpy_beam._best(np.zeros([1, 100]), 9)[1].tolist() == [[*range(9)]]


def test_of_symbols_that_are_equally_likely_the_first_are_the_best():
  tied_BWV = np.zeros([1, 2, 100])
  tied_BWV[0, 1, [90, 40, 70]] = 1, 2, 2
  best_BWJ = numpy_beam._top_k(tied_BWV, 4)
  assert best_BWJ[0, 1, :3].tolist() == [40, 70, 90] and np.all(np.diff(best_BWJ[0, 0]) > 0)
  assert numpy_beam._top_k(tied_BWV[:, :, :3], 5).tolist() == [[[0, 1, 2]] * 2]
