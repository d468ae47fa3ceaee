"""Metrics of translations by name: their titles, direction and signature, and how sacreBLEU computes them.

The decoder, its log, reports, model cards and comparisons read this table: a metric is a line here, and one in
addons/analysis/significance.py where runs are to be compared by it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Metric(NamedTuple):
  """Metric of a corpus of translations."""

  title: str  # in tables
  signature: str  # with the parameters that its name leaves open, before those that sacreBLEU states
  scorer: Callable[[Sequence[str], str], Any]  # sacreBLEU's, of references and the tokeniser of their language
  # Such a metric goes from 0 to 100: charts show it, checkpoints may be ranked by it, and it is computed also of the
  # sources as translations ('copy_<name>') and of the references as the target vocabulary writes them ('best_<name>').
  larger_is_better: bool = True


def _bleu(references: Sequence[str], tokenizer: str) -> Any:
  from sacrebleu.metrics import BLEU  # a second of imports

  # `force` turns off a warning of every call that text looks tokenised, and changes no score; see scoring.notices.
  return BLEU(tokenize=tokenizer, force=True, references=[list(references)])


def _chrf(references: Sequence[str], tokenizer: str) -> Any:
  from sacrebleu.metrics import CHRF

  return CHRF(references=[list(references)])


def _ter(references: Sequence[str], tokenizer: str) -> Any:
  from sacrebleu.metrics import TER

  by_character = tokenizer in ('zh', 'ja-mecab', 'char')  # text without spaces between words
  return TER(asian_support=by_character, normalized=by_character, references=[list(references)])


METRICS = {
  'bleu': Metric('BLEU', 'BLEU', _bleu),
  'chrf': Metric('chrF', 'chrF2', _chrf),
  'ter': Metric('TER', 'TER', _ter, larger_is_better=False),
}
BOUNDED = {name: metric for name, metric in METRICS.items() if metric.larger_is_better}
