"""Metrics of translations by name: their titles and signatures, and how sacreBLEU computes them.

The decoder, its log, reports and model cards read this table. A metric here goes from 0 to 100, the larger the better,
and takes no longer than chrF: it is computed at every evaluation, also of the sources as translations, and of the
references as the target vocabulary writes them. TER takes 47 s for 1,000 lines of 25 words of a poor translation, where
chrF takes 0.4 s.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Metric(NamedTuple):
  """Metric of a corpus of translations."""

  title: str  # in tables
  signature: str  # with the parameters that its name leaves open, before those that sacreBLEU states
  scorer: Callable[[Sequence[str], str], Any]  # sacreBLEU's, of references and the tokeniser of their language


def _bleu(references: Sequence[str], tokenizer: str) -> Any:
  from sacrebleu.metrics import BLEU

  # `force` turns off a warning of every call that text looks tokenised, and changes no score; see scoring.notices.
  return BLEU(tokenize=tokenizer, force=True, references=[list(references)])


def _chrf(references: Sequence[str], tokenizer: str) -> Any:
  from sacrebleu.metrics import CHRF

  return CHRF(references=[list(references)])


METRICS = {
  'bleu': Metric('BLEU', 'BLEU', _bleu),
  'chrf': Metric('chrF', 'chrF2', _chrf),
}
