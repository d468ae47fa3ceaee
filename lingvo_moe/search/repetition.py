"""Repetition in a text while it is searched: symbols that came are penalised, and n-grams that came do not come again.

Both are those of transformers (RepetitionPenaltyLogitsProcessor after Keskar et al., 2019, arXiv 1909.05858, and
NoRepeatNGramLogitsProcessor), for arrays of NumPy or of TensorFlow. They change logarithms of probabilities in beam
search; with a beam of one, and where symbols are drawn, logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lingvo_moe.search.beam import Array, Library
from lingvo_moe.search.constraints import NEG_INF
from lingvo_moe.vocab.vocab import EOS, PAD

FIELDS = ('repetition_penalty', 'no_repeat_ngram_size')  # of a configuration
MOST = 1e6, 100  # their largest values
OFF = 1.0, 0


class Repetition(NamedTuple):
  """Limits on the repetition of symbols; at least one of them is on."""

  penalty: float  # a score of a symbol that came is divided by it where it is positive, else multiplied
  ngram_size: int  # n of the n-grams that come once; 0: any may come again

  @classmethod
  def of(cls, penalty: float, ngram_size: int) -> Repetition | None:
    """Limits of these values; None where both are off."""
    return None if (penalty, ngram_size) == OFF else cls(penalty, ngram_size)

  def scores(
    self, library: Library, scores_BWV: Array, before_BP: Array, ids_BWT: Array, time: Array
  ) -> tuple[Array, Array]:
    """Scores of the next symbols, penalised; and the same with -inf for those that repeat an n-gram, but for the end.

    Pad, which never comes, may get any score.

    Args:
      library: functions of the arrays.
      scores_BWV: logits, or logarithms of probabilities.
      before_BP: symbols before those of the hypotheses, such as bos, or a prompt; pad comes first.
      ids_BWT: `time` symbols of each hypothesis, then pad.
    """
    xp, context = library.xp, max(self.ngram_size - 1, 0)
    before_BP = xp.pad(before_BP, [[0, 0], [context, 0]], 'constant')
    history_BWU = xp.concatenate([xp.repeat(before_BP[:, np.newaxis], ids_BWT.shape[1], axis=1), ids_BWT], axis=2)
    if self.penalty != OFF[0]:
      came_BWU, penalty = xp.take_along_axis(scores_BWV, history_BWU, axis=2), np.float32(self.penalty)
      scores_BWV = library.put(scores_BWV, history_BWU, xp.where(came_BWU < 0, came_BWU * penalty, came_BWU / penalty))
    if not self.ngram_size:
      return scores_BWV, scores_BWV
    next_BWJ = history_BWU[:, :, context:]
    last_BWJ = xp.take(history_BWU, xp.size(before_BP[:1]) + time + np.arange(-context, 0, dtype=np.int32), axis=2)
    for k in range(context):
      is_same_BWJ = history_BWU[:, :, k : k - context] == last_BWJ[:, :, k : k + 1]
      next_BWJ = xp.where(is_same_BWJ, next_BWJ, PAD)
    next_BWJ = xp.where(next_BWJ == EOS, PAD, next_BWJ)
    return scores_BWV, library.put(scores_BWV, next_BWJ, xp.full_like(next_BWJ, NEG_INF, dtype=np.float32))
