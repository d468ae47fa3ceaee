"""Translator: what turns texts into texts with one set of weights, and its answers; engine/ and tasks/ have some."""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from lingvo_moe.core.alignment import Alignment
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.search.continuations import Request, Sampling
from lingvo_moe.search.request import TranslationRequest
from lingvo_moe.vocab.language_tags import Languages

T = TypeVar('T')


class Hypothesis(NamedTuple):
  """Translation of a sentence, continuation of a prompt, or text whose spans are filled in."""

  text: str
  score: float  # by which hypotheses are ranked: in beam search log_prob over the length penalty
  log_prob: float  # natural logarithm, summed over its tokens and the end
  alignment: Alignment | None = None  # of a translation, where it was asked


class Answers(NamedTuple):
  """Hypotheses of some texts."""

  hypotheses: list[list[Hypothesis]]  # of each text in the order given, best first
  truncated: list[int]  # texts over the model's max_length, of which only the beginning was read
  cut: Sequence[int] = ()  # texts with a sentence over it that was cut, of which all parts were read
  lost: Sequence[int] = ()  # text of each placeholder that has no place in a translation, and is at its end

  def notices(self, over_the_length: str) -> Iterator[tuple[int, str]]:
    """Number of each text that is over the length, and what was done with it, in words."""
    yield from ((i, f'is {over_the_length} and was translated in part') for i in self.truncated)
    yield from ((i, f'has a sentence {over_the_length}, which was cut where a clause ends') for i in self.cut)
    for i, count in collections.Counter(self.lost).items():
      yield i, f'lost {plural(count, "placeholder")}, put back at the end of its translation'


class Scored(NamedTuple):
  """Log-probabilities of given translations."""

  log_probs: np.ndarray  # float64, for each sentence in the order given
  target_tokens: np.ndarray  # int64, symbols of each target with its end; 0 where the source is empty
  truncated: list[int]  # sentences with a side over the model's max_length, which was cut


class Translator:
  """Text to text, with one set of weights: translations, continuations, or spans filled in."""

  n_best: int  # hypotheses of each text
  able: ClassVar[tuple[str, ...]] = ()  # names of what may be asked, fields of a TranslationRequest
  unable: ClassVar[str] = 'only models of translation do it'  # why other things may not

  def check(self, request: TranslationRequest) -> None:
    """Raises UserError where something is asked that this translator does not do."""
    for name in request.asked:
      if name not in self.able:
        raise UserError(f'{name} cannot be asked here, as {self.unable}: leave it out')
    self.sampling(request)

  def sampling(self, request: TranslationRequest) -> tuple[str, Sampling | None]:
    """(search, values of samples; None of beam search) of a request; UserError where that has too few hypotheses."""
    search, values = request.sampling(self.configured) if 'search' in self.able else ('', None)
    if search in ('beam', 'greedy'):
      check_n_best(self.n_best, request.value('beam_size', self.configured))
    elif search == 'mbr' and self.n_best > (most := self.configured('mbr_samples')):
      raise UserError(f'the best of mbr_samples={most} samples are at most as many; saw n_best={self.n_best}')
    return search, values

  def configured(self, name: str) -> Any:
    """A model's own value for decoding."""
    raise NotImplementedError

  def translate(self, texts: Sequence[str], target: Languages = None) -> Answers:
    """Answers texts; `target` is from Task.choose_target. Translators of sentences also take:

    progress: called with the number of sentences done since the last call; those that are known do not count.
    known: numbers of sentences whose translations the caller has; what is returned for them is as of an empty line.
    keep: called with the number and the translations of each further sentence, when its batch is done.
    request: what is asked of each, of what it is `able` to do.
    """
    raise NotImplementedError

  def translate_lines(self, lines: Sequence[str], target: Languages = None) -> Answers:
    """Answers lines; where texts may have line breaks, each is written as a backslash and an n, here and in answers."""
    return self.translate(lines, target)

  def too_long(self, texts: Sequence[str], target: Languages = None) -> list[int]:
    """Numbers of the texts that are over the length, of which `translate` reads only the beginning."""
    return []

  def score(self, sources: Sequence[str], targets: Sequence[str], target: Languages = None) -> Scored:
    """Log p of each target given its source, summed over its symbols and the end; a function `progress` may be given.

    An empty source is always translated to an empty line: log p is 0 where the target is empty too, else -inf.
    """
    raise UserError('this model scores no pairs: use lingvo-moe decode with --score')

  def align(self, sources: Sequence[str], targets: Sequence[str], target: Languages = None) -> list[Alignment]:
    """Alignments of sources and their translations, by a translator that is able."""
    raise NotImplementedError

  def _aligned(self, texts: Sequence[str], answers: Answers, target: Languages) -> Answers:
    flat = [(text, h) for text, of_text in zip(texts, answers.hypotheses, strict=True) for h in of_text]
    alignments = iter(self.align([text for text, _ in flat], [h.text for _, h in flat], target))
    hypotheses = [[h._replace(alignment=next(alignments)) for h in of_text] for of_text in answers.hypotheses]
    return answers._replace(hypotheses=hypotheses)


class Generator(Translator):
  """Translator whose texts may have line breaks, and whose answers may depend on the number of a text, as samples do.

  Texts are numbered in each call, and lines from one call to the next.
  """

  _lines = 0

  def translate(self, texts: Sequence[str], target: str | None = None, first: int = 0) -> Answers:
    """Answers texts, of which `first` is the number of the first."""
    raise NotImplementedError

  def complete(self, requests: Sequence[Request]) -> list[list[Hypothesis]]:
    """Continuations of each prompt, of a language model."""
    raise NotImplementedError

  def translate_lines(self, lines: Sequence[str], target: str | None = None) -> Answers:
    """Answers lines, in which a line break is written as a backslash and an n, and so it is in the results."""
    answers = self.translate([_unescaped(line) for line in lines], target, self._lines)
    self._lines += len(lines)
    shown = [[h._replace(text=_escaped(h.text)) for h in of_line] for of_line in answers.hypotheses]
    return Answers(shown, answers.truncated)


def _escaped(text: str) -> str:
  r"""A text on one line: 'a<line break>b' is a\nb."""
  return text.replace('\\', '\\\\').replace('\n', '\\n').replace('\r', '\\r')


def _unescaped(line: str) -> str:
  """The text of a line that `_escaped` made. A backslash before another character stands for itself."""
  return '\\'.join(part.replace('\\n', '\n').replace('\\r', '\r') for part in line.split('\\\\'))


def check_n_best(n_best: int, beam_size: int) -> None:
  """Raises UserError where a beam has fewer hypotheses."""
  if n_best > beam_size:
    raise UserError(
      f'a beam of {beam_size} has no {n_best} hypotheses to choose from: use n_best={beam_size}, or a larger beam_size='
    )


def of_finite_probability(
  make: Callable[[list[int], float, float], T],
  ids_WT: np.ndarray,
  lengths_W: np.ndarray,
  log_probs_W: np.ndarray,
  scores_W: np.ndarray,
) -> list[T]:
  """make(ids, score, log p) of each hypothesis of a text that has a probability above 0; there must be one."""
  answers = [
    make(ids_T[:length].tolist(), float(score), float(log_prob))
    for ids_T, length, log_prob, score in zip(ids_WT, lengths_W, log_probs_W, scores_W, strict=True)
    if length and np.isfinite(log_prob)
  ]
  if not answers:
    raise UserError(
      'a text has no answer of finite probability: weights must be finite; use an earlier checkpoint, or ask less '
      'by prefix, ban and terms'
    )
  return answers


def check_continuations(n_best: int, search: str, beam_size: int) -> None:
  """Raises UserError where a search of a language model has fewer continuations of a prompt."""
  if search == 'greedy' and n_best > 1:
    raise UserError(f'a prompt has one greedy continuation; saw {n_best} wanted: search=sample or beam has several')
  if search == 'beam':
    check_n_best(n_best, beam_size)
