"""Minimum Bayes risk: chrF between samples is sacreBLEU's, and the sample that agrees most is the best."""

import numpy as np
import pytest
from sacrebleu.metrics import CHRF

from lingvo_moe.search import minimum_bayes_risk
from lingvo_moe.text.translator import Hypothesis


def test_chrf_is_that_of_sacrebleu():
  texts = [
    'A dog is running.',
    'a',
    '',
    'Two cats  sleep on a mat.',
    'A dog runs',
    '日本語',
    'abcdef',
    'abcde',
    'aaaaaaa',
  ]
  expected = [[CHRF().sentence_score(text, [reference]).score for reference in texts] for text in texts]
  np.testing.assert_allclose(minimum_bayes_risk.chrf(texts), expected, atol=1e-10)


def test_the_sample_that_agrees_most_with_all_is_the_best():
  samples = [Hypothesis(text, -1.0, float(-i)) for i, text in enumerate(['ab', 'cd', 'ab', 'ef', 'ab', 'cd'])]
  first, second, third = minimum_bayes_risk.best(samples, 9)
  assert [h.text for h in (first, second, third)] == ['ab', 'cd', 'ef']
  # Texts have nothing in common, so each agrees with its copies alone.
  assert [h.score for h in (first, second, third)] == pytest.approx([100 * 3 / 6, 100 * 2 / 6, 100 / 6])
  assert (first.log_prob, second.log_prob) == (0.0, -1.0)
  assert minimum_bayes_risk.best(samples, 1) == [first]
