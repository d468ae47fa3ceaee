"""Sentences of paragraphs: texts are split for translation, and the translations joined as the texts stood.

Models that learnt from lines of one sentence each often lose the second sentence of a line. Sentences are found by
sentencex, by rules for each language; it takes a language that it does not know as English.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from lingvo_moe.core.alignment import Alignment
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.visible_text import is_empty
from lingvo_moe.search.request import NOTHING, TranslationRequest
from lingvo_moe.text import placeholders

MODES = ('auto', 'always', 'never')
ABOUT = (
  'Whether a line is translated sentence by sentence; auto: yes, but where a tenth of the training lines had several '
  'sentences, only a line that is longer than 99% of these.'
)
_FEW = 0.1  # share of training lines with several sentences, below which every such line is split
_ISO_639_1 = dict(  # by ISO 639-3, which corpora and NLLB use
  pair.split(':')
  for pair in (
    'amh:am arb:ar ara:ar ben:bn bul:bg cat:ca ces:cs dan:da deu:de ell:el eng:en est:et fas:fa pes:fa fin:fi fra:fr '
    'guj:gu heb:he hin:hi hun:hu hye:hy ita:it jpn:ja kan:kn kaz:kk mal:ml mar:mr mya:my nld:nl nob:no nor:no pan:pa '
    'pol:pl por:pt ron:ro rus:ru slk:sk slv:sl spa:es srp:sr swe:sv tam:ta tel:te tur:tr ukr:uk urd:ur vie:vi zho:zh'
  ).split()
)
# What models of several tasks read before each text: T5 of the public class, and MADLAD-400.
_TASK = re.compile(r'translate [A-Z]\w+ to [A-Z]\w+: |<2[\w-]+> ')
_LINES = re.compile(r'[^\r\n]+[\r\n]*|[\r\n]+')
_BREAK = re.compile(r'[\r\n]')
_SENTENCE_ENDS = re.compile(r'(?<=[.!?…])\s+|(?<=[。！？])')
_CLAUSE_ENDS = re.compile(r'(?<=[,;:،؛–—)])\s+|(?<=[、，；：])')
_WORD_ENDS = re.compile(r'\s+')
_WIDE_SPACE = re.compile(r'[^\S\0-\x7f]')
_UNSPACED = re.compile(r'[\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff60]')  # of Chinese and Japanese


class TrainingLines(NamedTuple):
  """Source lines that a model was trained on, which tell whether it can translate several sentences at once."""

  several: float | None = None  # share of lines with more than one sentence; None: not known
  long: float | None = None  # characters of a line, the 99th percentile

  @classmethod
  def of(cls, lines: Iterable[tuple[str, str]]) -> Self:
    """Those of lines, (language, line) each."""
    measured = np.array([[len(sentences(line, language)) > 1, len(line)] for language, line in lines])
    if not measured.size:
      return cls()
    return cls(float(np.mean(measured[:, 0])), float(np.percentile(measured[:, 1], 99)))


def sentences(line: str, language: str) -> list[str]:
  """Sentences of a line, which together are the line."""
  import sentencex  # in Rust, 4 MB

  code = re.split('[-_]', language)[0].lower()
  plain = _WIDE_SPACE.sub(' ', line)  # it panics at 'C.' with a space of several bytes within
  sentence_texts = [s.strip() for s in sentencex.segment(_ISO_639_1.get(code, code) or 'en', plain) if not is_empty(s)]
  starts, end = [], 0
  for sentence in sentence_texts:
    starts.append(plain.index(sentence, end))
    end = starts[-1] + len(sentence)
  within = {at for begin, end in placeholders.find(line) for at in range(begin + 1, end)}
  starts = [at for at in starts[1:] if at not in within]
  return [line[a:b] for a, b in zip([0, *starts], [*starts, len(line)], strict=True)]


def _halves(text: str) -> list[str]:
  """A text cut in two near its middle: where a sentence ends, else a clause, else a word, else anywhere."""
  middle = len(text) / 2
  for ends in (_SENTENCE_ENDS, _CLAUSE_ENDS, _WORD_ENDS):
    places = [match.end() for match in ends.finditer(text) if abs(match.end() - middle) <= middle / 2]
    if places:
      break
  at = min(places or [len(text) // 2], key=lambda place: abs(place - middle))
  return [text[:at], text[at:]]


def _glued(left: str, space: str, right: str) -> str:
  """Two translations with the space between their sources, or that of their own language in its place."""
  return left + _between(left[-1:], space, right) + right


def _between(last: str, space: str, right: str) -> str:
  """Space between translations, given the last letter of the left one."""
  if _BREAK.search(space):
    return space
  if not last or not right or _UNSPACED.match(last) or _UNSPACED.match(right[0]):
    return ''
  return space or ' '


class _Arranged(NamedTuple):
  """Parts of a text that are translated, and the spaces before, between and after these."""

  parts: list[str]
  spaces: list[str]
  task: str = ''  # that the text begins with, and each part with it

  @classmethod
  def of(cls, text: str, pieces: Sequence[str], task: str = '') -> Self:
    """Pieces of a text, which together are the text, without outer spaces; a single line is translated as it is."""
    parts, spaces = [], ['']
    for piece in pieces if len(pieces) > 1 or _BREAK.search(text) else ():
      part = '' if is_empty(piece) else piece.strip()
      before, after = piece.split(part, 1) if part else (piece, '')
      spaces[-1] += before
      if part:
        parts.append(task + part)
        spaces.append(after)
    return cls(parts, spaces, task) if parts else cls([task + text], ['', ''], task)

  def joined(self, hypotheses: Sequence[Sequence[Any]], are_samples: bool = False) -> list[Any]:
    """Hypotheses of the text, given those of its parts: the combinations of the largest sums of scores, best first.

    There are as many as the parts have. Score and log-probability are sums over the parts. Samples are joined by their
    numbers, as combinations by scores are no samples.
    """
    # A combination is (score, (combination of the parts before, hypothesis of the last)): no text is copied before its
    # combination is among the last.
    most = max(map(len, hypotheses))
    combinations = [(h.score, (None, h)) for h in hypotheses[0]]
    for of_part in hypotheses[1:]:
      if are_samples:
        combinations = [(score + b.score, (a, b)) for (score, a), b in zip(combinations, of_part)]
      else:
        longer = [(score + b.score, (a, b)) for score, a in combinations for b in of_part]
        combinations = sorted(longer, key=lambda combination: -combination[0])[:most]
    return [self._hypothesis(score, combination) for score, combination in combinations]

  def _hypothesis(self, score: float, combination: tuple) -> Any:
    """Hypothesis of the text, given the combination of those of its parts."""
    parts = []
    while combination:
      combination, part_hypothesis = combination
      parts.append(part_hypothesis)
    parts.reverse()
    texts, last, begin, length, log_prob, alignments = [], '', len(self.task), 0, 0.0, []
    for part_hypothesis, part, space in zip(parts, self.parts, self.spaces):
      begin += len(space)
      between = _between(last, space, part_hypothesis.text)
      length += len(between)
      if alignment := getattr(part_hypothesis, 'alignment', None):
        alignments.append((alignment.behind(len(self.task) if alignments else 0), begin - len(self.task), length))
      texts += [between, part_hypothesis.text]
      last = (part_hypothesis.text or between or last)[-1:]
      begin, length, log_prob = (
        begin + len(part) - len(self.task),
        length + len(part_hypothesis.text),
        log_prob + part_hypothesis.log_prob,
      )
    values = {'alignment': Alignment.joined(alignments)} if alignments else {}
    text = _glued(''.join(texts), self.spaces[-1], '')
    return parts[-1]._replace(text=text, score=score, log_prob=log_prob, **values)


class Plan(NamedTuple):
  """Parts of texts, which may be translated at any time and beside others, and how their translations are joined."""

  arranged: Sequence[_Arranged]  # by text
  cut: Collection[int] = ()  # texts with a sentence that was cut
  are_samples: bool = False

  @classmethod
  def of_whole(cls, texts: Iterable[str]) -> Self:
    """Each text as one part, as it is."""
    return cls([_Arranged([text], ['', '']) for text in texts])

  @property
  def parts(self) -> list[str]:
    return [part for text_parts in self.arranged for part in text_parts.parts]

  @property
  def ends(self) -> list[int]:
    """Number of the parts of all texts up to each one."""
    return list(itertools.accumulate(len(text_parts.parts) for text_parts in self.arranged))

  def joined(self, answers: Any) -> Any:
    """Answers of the texts, given those of their parts."""
    ends = self.ends
    hypotheses = [
      text_parts.joined(answers.hypotheses[end - len(text_parts.parts) : end], self.are_samples)
      for text_parts, end in zip(self.arranged, ends, strict=True)
    ]
    truncated = sorted({bisect.bisect_right(ends, part) for part in answers.truncated})
    lost = [bisect.bisect_right(ends, part) for part in answers.lost]
    return answers._replace(hypotheses=hypotheses, truncated=truncated, cut=sorted(self.cut), lost=lost)


class Paragraphs:
  """Translator of texts of several sentences, which uses a translator of sentences.

  Args:
    translator: a translator.Translator of a translation model.
    mode: one of MODES. 'auto' splits texts at line breaks; a line of several sentences too, but where a tenth of the
      training lines had several, only one that is longer than 99% of these.
    lines: the training lines; where they are not known, 'auto' splits every line of several sentences.
    max_length: tokens that the model reads; a longer sentence is cut in two where a clause ends, until its parts fit.
  """

  def __init__(self, translator: Any, mode: str, lines: TrainingLines, max_length: int) -> None:
    if mode not in MODES:
      raise UserError(f'split_sentences must be one of {", ".join(MODES)}; saw {mode!r}')
    self._translator, self._mode, self._lines, self._max_length = translator, mode, lines, max_length

  def translate(
    self,
    texts: Sequence[str],
    target: Any,
    languages: Sequence[str],
    progress: Callable[[int], object] = lambda count: None,
    known: Collection[int] = (),
    keep: Callable[[int, list[Any]], object] = lambda text, hypotheses: None,
    request: TranslationRequest = NOTHING,
  ) -> Any:
    """Answers of texts, of which `cut` has the numbers of those with a sentence that was cut.

    Arguments are those of the translator, with the numbers of texts; and the language of each text, '' where it is not
    known. A text whose translation has a prefix is not split.
    """
    asked = {'request': request} if request.asked else {}
    plan = self.plan(texts, target, languages, request)
    arranged, ends = plan.arranged, plan.ends
    of_text = [i for i, text_parts in enumerate(arranged) for _ in text_parts.parts]  # by part
    answers_of_texts: list[list[Any]] = [[None] * len(text_parts.parts) for text_parts in arranged]
    done = 0

    def keep_part(part: int, hypotheses: list[Any]) -> None:
      nonlocal done
      i = of_text[part]
      answers_of_texts[i][part - ends[i]] = hypotheses  # counted from the last
      if None not in answers_of_texts[i]:
        keep(i, arranged[i].joined(answers_of_texts[i], plan.are_samples))
        progress(1)
        done += 1

    known_parts = {part for part, i in enumerate(of_text) if i in known}
    answers = self._translator.translate(plan.parts, target, known=known_parts, keep=keep_part, **asked)
    progress(len(set(range(len(texts))) - set(known)) - done)  # those without tokens
    joined = plan.joined(answers)
    for i, text_parts in enumerate(answers_of_texts):
      if None in text_parts and any(text_parts):  # a part has no tokens
        keep(i, joined.hypotheses[i])
    return joined

  def plan(
    self, texts: Sequence[str], target: Any, languages: Sequence[str], request: TranslationRequest = NOTHING
  ) -> Plan:
    """Parts of texts, each translated alone; arguments as of `translate`."""
    if self._mode == 'never' or request.prefix:
      return Plan.of_whole(texts)
    tasks = [found[0] if (found := _TASK.match(text)) else '' for text in texts]
    texts = [text[len(task) :] for text, task in zip(texts, tasks, strict=True)]
    pieces = [self._split(text, language) for text, language in zip(texts, languages, strict=True)]
    cut = self._cut(pieces, target, tasks)
    arranged = [_Arranged.of(*of_text) for of_text in zip(texts, pieces, tasks, strict=True)]
    return Plan(arranged, cut, self._translator.sampling(request)[0] == 'sample')

  def _split(self, text: str, language: str) -> list[str]:
    """Pieces of a text, which together are the text."""
    pieces = []
    for line in _LINES.findall(text):
      is_split = self._mode == 'always' or (self._lines.several or 0.0) < _FEW or len(line) > (self._lines.long or 0.0)
      pieces += sentences(line, language) if is_split else [line]
    return pieces

  def _cut(self, pieces: list[list[str]], target: Any, tasks: Sequence[str]) -> set[int]:
    """Cuts pieces over the length with their tasks, until all fit; returns the numbers of their texts."""
    cut, fitting = set(), set()
    task = max(tasks, key=len, default='')
    while True:
      unsure = {piece for text_pieces in pieces for piece in text_pieces if len(piece) > 1} - fitting
      long = sorted(
        piece for piece in unsure if len((task + piece).encode()) + 4 > self._max_length
      )  # a token has a byte
      over = {long[k] for k in self._translator.too_long([task + piece for piece in long], target)} if long else set()
      if not over:
        return cut
      fitting |= {*long} - over
      for i, text_pieces in enumerate(pieces):
        if not over.isdisjoint(text_pieces):
          pieces[i] = [part for piece in text_pieces for part in (_halves(piece) if piece in over else [piece])]
          cut.add(i)
