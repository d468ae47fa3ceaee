"""Translation quality: sacreBLEU's metrics of core/quality.py, with signatures that state how they were computed."""

import collections
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lingvo_moe.core.errors import plural
from lingvo_moe.core.quality import METRICS
from lingvo_moe.tasks import metrics

_MECAB = {'ja': ('ja-mecab', 'MeCab'), 'ko': ('ko-mecab', 'mecab_ko')}  # tokeniser, and the module it needs

# Ways of splitting words other than 13a: by two- and three-letter codes, and by script. 'char' is for scripts without
# spaces between words.
_BY_CODE = {
  **dict.fromkeys(('zh', 'zho', 'chi', 'cmn', 'yue', 'lzh', 'wuu', 'nan', 'hak'), 'zh'),
  **dict.fromkeys(('my', 'mya', 'bur', 'th', 'tha', 'km', 'khm', 'lo', 'lao'), 'char'),
  **dict.fromkeys(('bo', 'bod', 'tib', 'dz', 'dzo'), 'char'),
  **dict.fromkeys(('ja', 'jpn'), 'ja'),
  **dict.fromkeys(('ko', 'kor'), 'ko'),
}
_BY_SCRIPT = {
  'zh': re.compile('[々\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]'),  # Han
  'ja': re.compile('[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f]'),  # kana
  'ko': re.compile('[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]'),  # Hangul
  # Thai, Lao, Tibetan, Myanmar, Khmer; Tai Le, New Tai Lue; Tai Tham; more of Myanmar; Tai Viet
  'char': re.compile('[\u0e00-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua9e0-\ua9ff\uaa60-\uaadf]'),
}
_WHOLE = 99.9  # BLEU below which a vocabulary's ceiling is worth a line
_COLUMNS = (
  metrics.Column('sentences', 'sentences', '9d'),
  *(metrics.Column(metric.title, name, '5.1f') for name, metric in METRICS.items()),
  metrics.Column('copy BLEU', 'copy_bleu', '9.1f'),
)
_MANY_TOKENIZED = 100  # lines of a set, as sacreBLEU has it


def tokenizer(language: str, references: Sequence[str]) -> str:
  """sacreBLEU's tokeniser for a target: by the code of its language where the script of the references agrees, else by
  that script, so that a code that is not known here gets what its text needs.

  It is 13a for words between spaces, 'zh', 'ja-mecab' and 'ko-mecab' for Chinese, Japanese and Korean, and 'char' for
  other scripts without spaces, and where MeCab is not installed (sacrebleu[ja], sacrebleu[ko]); signatures tell.
  """
  code, script = _by_code(language), _by_script(references)
  kind = code if _agree(code, script) else script
  name, module = _MECAB.get(kind, (kind or '13a', None))
  return 'char' if module and importlib.util.find_spec(module) is None else name


def notices(sets: Mapping[str, tuple[str, Sequence[str], Sequence[str]]]) -> list[str]:
  """Remarks on what makes BLEU of some sets other than a reader expects, a line each.

  Args:
    sets: by name of the pair, the target language, references, and translations.
  """
  other = {
    name: tokenizer(language, references)
    for name, (language, references, _) in sets.items()
    if (code := _by_code(language)) and not _agree(code, _by_script(references))
  }
  tokenized = [name for name, (_, *sides) in sets.items() if any(map(_look_tokenized, sides))]
  messages = []
  if other:
    messages.append(
      'references are not in the script that the code of their language stands for, so BLEU splits their words by '
      + some(f'{name} in {pair}' for pair, name in other.items())
    )
  if tokenized:
    messages.append(
      'lines end in a full stop after a space, as in tokenised text, of which BLEU is not comparable with others: '
      f'train and score plain text; {some(tokenized)}'
    )
  return messages


def some(names: Iterable[str]) -> str:
  """The first five names, with '...' for others."""
  names = list(names)
  return ', '.join(names[:5] + ['...'] * (len(names) > 5))


def _look_tokenized(lines: Sequence[str]) -> bool:
  """Whether 100 lines, or most of a small set, end in a full stop after a space."""
  return sum(line.endswith(' .') for line in lines) >= max(1, min(_MANY_TOKENIZED, len(lines) / 2))


def _by_code(language: str) -> str:
  return _BY_CODE.get(re.split('[-_]', language)[0].lower(), '')


def _by_script(lines: Sequence[str]) -> str | None:
  """The way of splitting words that most letters are written for; '': with spaces; None: there is no letter."""
  shares = collections.Counter()
  for c, count in collections.Counter(''.join(lines)).items():
    if c.isalpha():
      shares[next((kind for kind, script in _BY_SCRIPT.items() if script.match(c)), '')] += count
  if shares['ja'] * 10 > shares['zh']:  # Japanese is written in Han characters too; Chinese quotes a kana at times
    shares['ja'] += shares.pop('zh', 0)
  return shares.most_common(1)[0][0] if shares.total() else None


def _agree(code: str, script: str | None) -> bool:
  """Whether a language is written so; a short Japanese or Korean text may have Han characters alone."""
  return script in (None, code) or (script == 'zh' and code in _MECAB)


# Scores of the translations of a held-out set, as JSON: 'sentences'; by name of a metric its score, 'copy_<name>' of
# the sources as translations, 'best_<name>' of the references as the target vocabulary writes them, and
# '<name>_signature'; 'truncated', the sentences over the length limit. Those of an earlier version may lack metrics.
PairScores = Mapping[str, Any]


class References:
  """Sources and references of one pair, with the statistics that do not depend on translations computed once."""

  def __init__(
    self, sources: Sequence[str], references: Sequence[str], target_language: str, written: Sequence[str] | None = None
  ):
    """`written`: the references as the target vocabulary writes them."""
    words = tokenizer(target_language, references)
    self._scorers = {name: metric.scorer(references, words) for name, metric in METRICS.items()}
    self.copy = self._scores(sources)
    self._best = dict.fromkeys(METRICS) if written is None else self._scores(written)

  def score(self, translations: Sequence[str], truncated: int = 0) -> PairScores:
    """Scores as many translations as there are references, in the same order."""
    named = lambda prefix, scores, suffix='': {f'{prefix}{name}{suffix}': score for name, score in scores.items()}
    signatures = {
      name: f'{metric.signature}|{self._scorers[name].get_signature().format()}' for name, metric in METRICS.items()
    }
    return {
      'sentences': len(translations),
      **self._scores(translations),
      **named('copy_', self.copy),
      **named('', signatures, '_signature'),
      'truncated': truncated,
      **named('best_', self._best),
    }

  def _scores(self, translations: Iterable[str]) -> dict[str, float]:
    lines = list(translations)
    return {name: scorer.corpus_score(lines, None).score for name, scorer in self._scorers.items()}


def mean_scores(scores: Mapping[str, PairScores]) -> dict[str, float]:
  """Unweighted mean over the pairs of each score that all have."""
  names = [*METRICS, *(f'copy_{name}' for name in METRICS)]
  shared = [name for name in names if all(s.get(name) is not None for s in scores.values())]
  return {name: sum(s[name] for s in scores.values()) / len(scores) for name in shared}


def table(scores: Mapping[str, PairScores]) -> str:
  """Table of the scores by pair, with the signatures, and the mean as the last line.

  Of more than 20 pairs only the best, the worst and a few between are shown.
  """
  names = sorted(scores)
  if len(names) > 20:
    ranked = sorted(names, key=lambda name: -scores[name]['bleu'])
    between = range(5, len(ranked) - 5)
    names = [*ranked[:5], *(ranked[between[len(between) * i // 5]] for i in range(1, 5)), *ranked[-5:]]
  lines = [metrics.table('pair', {name: scores[name] for name in names}, _COLUMNS)]
  if len(names) < len(scores):
    lines.append(f'({len(names)} of {len(scores)} pairs: the 5 best, the 5 worst and some between, by BLEU)')
  bounded = {name: s for name, s in scores.items() if (s.get('best_bleu') or 100) < _WHOLE}
  if bounded:
    name, worst = min(bounded.items(), key=lambda item: item[1]['best_bleu'])
    lines.append(
      f'the target vocabulary cannot write all references of {plural(len(bounded), "pair")}; of {name} BLEU is at '
      f'most {worst["best_bleu"]:.1f}, chrF {worst["best_chrf"]:.1f}'
    )
  lines += sorted({s[key] for s in scores.values() for name in METRICS if (key := f'{name}_signature') in s})
  mean = mean_scores(scores)
  lines.append(
    f'mean BLEU {mean["bleu"]:.1f} over {plural(len(scores), "pair")} (copying the source: {mean["copy_bleu"]:.1f})'
  )
  return '\n'.join(lines)
