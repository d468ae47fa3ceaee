"""Translation quality: sacreBLEU's BLEU and chrF, with the signatures that state how they were computed."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping, Sequence

from sacrebleu.metrics import BLEU
from sacrebleu.metrics import CHRF

# Languages written without spaces between words, or with particles joined to them, by two- and three-letter codes:
# sacreBLEU's tokeniser, and the module it needs.
_TOKENIZERS = {
  **dict.fromkeys(('zh', 'zho', 'chi', 'cmn', 'yue', 'lzh', 'wuu', 'nan', 'hak'), ('zh', None)),
  **dict.fromkeys(('my', 'mya', 'bur', 'th', 'tha', 'km', 'khm', 'lo', 'lao'), ('char', None)),
  **dict.fromkeys(('bo', 'bod', 'tib', 'dz', 'dzo'), ('char', None)),
  **dict.fromkeys(('ja', 'jpn'), ('ja-mecab', 'MeCab')),
  **dict.fromkeys(('ko', 'kor'), ('ko-mecab', 'mecab_ko')),
}


def bleu_tokenizer(language: str) -> str:
  """sacreBLEU's tokeniser for a target language: 13a, or what Chinese, Japanese and Korean ask for, or 'char' for
  other scripts without spaces between words.

  'char' stands in for MeCab's where they are not installed (sacrebleu[ja], sacrebleu[ko]); the signature tells.
  """
  name, module = _TOKENIZERS.get(re.split('[-_]', language)[0].lower(), ('13a', None))
  return 'char' if module and importlib.util.find_spec(module) is None else name


@dataclasses.dataclass(frozen=True)
class PairScores:
  """Scores of the translations of one held-out set. `copy_*` are the scores of the sources as translations."""

  sentences: int
  bleu: float
  chrf: float
  copy_bleu: float
  copy_chrf: float
  bleu_signature: str
  chrf_signature: str
  truncated: int = 0  # sentences over the length limit


class References:
  """Sources and references of one pair, with the statistics that do not depend on translations computed once."""

  def __init__(self, sources: Sequence[str], references: Sequence[str], target_language: str):
    # `force` only turns off a warning that the text looks tokenised; it changes no score.
    self._bleu = BLEU(tokenize=bleu_tokenizer(target_language), force=True, references=[list(references)])
    self._chrf = CHRF(references=[list(references)])
    self._copy = self._scores(sources)

  def score(self, translations: Sequence[str], truncated: int = 0) -> PairScores:
    """Scores as many translations as there are references, in the same order."""
    bleu, chrf = self._scores(translations)
    return PairScores(
      sentences=len(translations),
      bleu=bleu,
      chrf=chrf,
      copy_bleu=self._copy[0],
      copy_chrf=self._copy[1],
      bleu_signature=f'BLEU|{self._bleu.get_signature().format()}',
      chrf_signature=f'chrF2|{self._chrf.get_signature().format()}',
      truncated=truncated,
    )

  def _scores(self, translations):
    lines = list(translations)
    return self._bleu.corpus_score(lines, None).score, self._chrf.corpus_score(lines, None).score


def mean_scores(scores: Mapping[str, PairScores]) -> dict[str, float]:
  """Unweighted mean of each score over the pairs."""
  names = ('bleu', 'chrf', 'copy_bleu', 'copy_chrf')
  return {name: sum(getattr(s, name) for s in scores.values()) / len(scores) for name in names}


def table(scores: Mapping[str, PairScores], most: int = 20) -> str:
  """Table of the scores by pair, with the signatures, and the mean as the last line.

  Args:
    scores: scores by name of the pair.
    most: with more pairs than this, only the best, the worst and a few between are shown.
  """
  names = sorted(scores)
  if len(names) > most:
    names = _best_worst_and_between(sorted(names, key=lambda name: -scores[name].bleu))
  width = max(len('pair'), *map(len, names))
  lines = [f'{"pair":{width}}  sentences   BLEU   chrF  copy BLEU']
  for name in names:
    s = scores[name]
    lines.append(f'{name:{width}}  {s.sentences:9d}  {s.bleu:5.1f}  {s.chrf:5.1f}  {s.copy_bleu:9.1f}')
  if len(names) < len(scores):
    lines.append(f'({len(names)} of {len(scores)} pairs: the 5 best, the 5 worst and some between, by BLEU)')
  lines += sorted({s.bleu_signature for s in scores.values()} | {s.chrf_signature for s in scores.values()})
  mean = mean_scores(scores)
  lines.append(f'mean BLEU {mean["bleu"]:.1f} over {len(scores)} pairs (copying the source: {mean["copy_bleu"]:.1f})')
  return '\n'.join(lines)


def _best_worst_and_between(ranked: Sequence[str]) -> list[str]:
  between = range(5, len(ranked) - 5)
  return [*ranked[:5], *(ranked[between[len(between) * i // 5]] for i in range(1, 5)), *ranked[-5:]]
