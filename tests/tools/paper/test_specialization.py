"""What experts have learnt, by hand: information on language and token, distances between languages."""

import math

import numpy as np
import pytest

pytest.importorskip('scipy')

from lingvo_moe.tasks.task import LayerRouting, SentenceRouting
from paper import specialization


def sentence(pieces, experts, weights=None):
  """A sentence whose encoder and decoder choose the same experts; the encoder reads the same piece everywhere."""
  experts = np.array(experts, np.int32)
  routing = LayerRouting(experts, np.array(weights if weights is not None else experts == experts, np.float32))
  return SentenceRouting(['s'] * len(pieces), pieces, {'encoder/layer_01': routing, 'decoder/layer_01': routing})


def layer(languages, pieces, experts):
  """Tokens with one choice each."""
  experts = np.array(experts)[:, np.newaxis]
  return specialization.LayerChoices(experts, np.ones(experts.shape), np.array(languages), np.array(pieces))


def test_tokens_of_all_sentences_are_collected_with_weights_that_sum_to_one():
  routed = {
    'de': [sentence(['a', 'b'], [[0, 1], [2, 0]], [[0.6, 0.2], [0.5, 0.5]]), SentenceRouting([], [], {})],
    'fr': [sentence(['b', 'c'], [[1, 2], [0, 3]], [[1.0, 0.0], [0.0, 0.0]])],  # no expert took the last one
  }
  found = specialization.collect(routed)
  assert list(found) == ['encoder/layer_01', 'decoder/layer_01']
  choices = found['decoder/layer_01']
  np.testing.assert_array_equal(choices.languages, [0, 0, 1])
  np.testing.assert_array_equal(choices.pieces == choices.pieces[1], [False, True, True])
  assert len(set(found['encoder/layer_01'].pieces)) == 1
  np.testing.assert_allclose(choices.weights, [[0.75, 0.25], [0.5, 0.5], [1, 0]])
  by_language = specialization.counts(choices.languages, choices, 4)
  np.testing.assert_allclose(by_language, [[1.25, 0.25, 0.5, 0], [0, 1, 0, 0]])


def test_information_by_hand():
  assert specialization.mutual_information(np.array([[2.0, 0.0], [0.0, 2.0]])) == pytest.approx(math.log(2))
  assert specialization.mutual_information(np.array([[1.0, 1.0], [3.0, 3.0]])) == pytest.approx(0)
  assert specialization.entropy(np.array([1.0, 0.0, 1.0, 2.0])) == pytest.approx(1.5 * math.log(2))


def test_what_chance_gives_does_not_count():
  """4000 tokens of 40 languages and 1000 pieces: experts by language tell of it, those by dice tell of nothing."""
  random = np.random.default_rng(0)
  languages, pieces = random.integers(0, 40, 4000), random.integers(0, 1000, 4000)
  by_language = specialization.information(layer(languages, pieces, languages % 4), 4)
  assert by_language.entropy == pytest.approx(math.log(4), abs=0.01)
  assert by_language.language == pytest.approx(math.log(4), abs=0.05) and abs(by_language.token) < 0.05
  by_token = specialization.information(layer(languages, pieces, pieces % 4), 4)
  assert by_token.token == pytest.approx(by_token.entropy) and abs(by_token.language) < 0.02
  half = specialization.information(layer(languages, pieces, np.where(pieces % 2, 0, random.integers(0, 4, 4000))), 4)
  # H of (5/8, 1/8, 1/8, 1/8) less half of log 4.
  told = 0.625 * math.log(8 / 5) + 0.375 * math.log(8) - 0.5 * math.log(4)
  assert half.token == pytest.approx(told, abs=0.1)
  alone = specialization.information(layer(languages, pieces, languages * 0), 4)
  assert alone == (0.0, 0.0, 0.0)
  dice = layer(languages, pieces, random.integers(0, 4, 4000))
  joint = specialization.counts(pieces, dice, 4)
  assert specialization.mutual_information(joint) > 0.3  # by chance alone
  by_dice = specialization.information(dice, 4)
  assert abs(by_dice.token) < 0.05 and abs(by_dice.language) < 0.02


def test_distances_and_the_order_of_their_tree():
  halves = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
  # Beside the mean (1/4, 1/2, 1/4), half of each has 1 bit and half none: a divergence of 1/2.
  assert specialization.distances([halves])[0, 1] == pytest.approx(math.sqrt(0.5))
  apart = specialization.distances([np.eye(3), np.full((3, 3), 1 / 3)])
  np.testing.assert_allclose(apart, (1 - np.eye(3)) / 2)  # the mean of 1 and 0
  rounded = np.array([[0.001, 0.999], [0.001, np.nextafter(0.999, 0)]])  # for which SciPy takes the root of less than 0
  np.testing.assert_allclose(specialization.distances([rounded]), 0, atol=1e-6)
  at = np.array([0.0, 10.0, 1.0, 11.0])
  order = specialization.order(np.abs(at[:, np.newaxis] - at))
  assert order in ([0, 2, 1, 3], [3, 1, 2, 0])
  assert specialization.order(np.zeros((2, 2))) == [0, 1]


def test_neighbours_that_share_a_label():
  at = np.array([0.0, 1.0, 10.0, 11.5, 30.0])
  distances = np.abs(at[:, np.newaxis] - at)
  # The last one's label is its own: it counts as a neighbour alone.
  assert specialization.same_neighbour(distances, ['a', 'a', 'b', 'b', 'c']) == (1.0, 0.25, 4)
  assert specialization.same_neighbour(distances, ['a', 'b', 'a', 'b', 'c']) == (0.0, 0.25, 4)
  assert specialization.same_neighbour(distances, ['', 'a', '', 'a', '']) == (0.0, 0.25, 2)  # '' is not a label
  none = specialization.same_neighbour(distances, list('abcde'))
  assert math.isnan(none.same) and math.isnan(none.by_chance) and none.languages == 0


def test_neighbours_within_a_label():
  at = np.array([0.0, 1.0, 10.0, 11.5, 30.0])
  distances = np.abs(at[:, np.newaxis] - at)
  # Of script x are places 0, 2 and 4: the nearest of 0 and of 4 is 2, that of 2 is 0.
  found = specialization.same_neighbour(distances, ['a', 'b', 'b', 'b', 'a'], ['x', 'y', 'x', 'y', 'x'])
  assert found == (0.5, 0.75, 4)  # 0 and 4 are a pair but not nearest; 1 and 3 have no other choice
