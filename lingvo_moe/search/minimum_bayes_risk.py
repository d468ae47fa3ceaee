"""Minimum Bayes risk: of samples of a translation, those that agree most with the others, by chrF.

Kumar and Byrne (2004); with samples and chrF, Eikema and Aziz (2020, arXiv 2005.10283).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

_ORDER, _BETA = 6, 2  # of chrF's character n-grams, and the weight of their recall


def best(samples: Sequence[Any], count: int) -> list[Any]:
  """The `count` hypotheses of the highest mean chrF against all samples, which is their score; each text once."""
  texts = list(dict.fromkeys(h.text for h in samples))
  numbers = [texts.index(h.text) for h in samples]
  shares = np.bincount(numbers) / len(samples)
  scores = chrf(texts) @ shares
  ranked = [samples[numbers.index(i)]._replace(score=float(scores[i])) for i in np.argsort(-scores, kind='stable')]
  return ranked[:count]


def chrf(texts: Sequence[str]) -> np.ndarray:
  """chrF2 in percent of each text against each as its reference [J, J], as sacreBLEU's for sentences."""
  texts = [''.join(text.split()) for text in texts]
  precision_JJ, recall_JJ = np.zeros([2, len(texts), len(texts)])
  for order in range(1, _ORDER + 1):
    grams = [[text[i : i + order] for i in range(len(text) - order + 1)] for text in texts]
    number = {gram: i for i, gram in enumerate(dict.fromkeys(gram for text_grams in grams for gram in text_grams))}
    counts_JK = np.zeros([len(texts), len(number)], np.int16)
    for own_K, text_grams in zip(counts_JK, grams):
      np.add.at(own_K, [number[gram] for gram in text_grams], 1)
    totals_J = counts_JK.sum(axis=1)
    common_JJ = np.array([np.minimum(own_K, counts_JK).sum(axis=1) for own_K in counts_JK])
    precision_JJ += common_JJ / np.maximum(totals_J[:, np.newaxis], 1)
    recall_JJ += common_JJ / np.maximum(totals_J, 1)
  # Both are means over the orders that both texts have.
  orders_J = np.clip([len(text) for text in texts], 1, _ORDER)
  orders_JJ = np.minimum(orders_J, orders_J[:, np.newaxis])
  both_JJ = _BETA**2 * precision_JJ + recall_JJ
  return 100 * (1 + _BETA**2) * precision_JJ * recall_JJ / np.maximum(both_JJ, 1e-30) / orders_JJ
