"""Text model: what a program can ask of a model that answers text, whichever engine computes it.

run/loaded.py has a run's checkpoint in TensorFlow, engine/model.py an export without it.
"""

import abc
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, overload

import numpy as np

from lingvo_moe.core.alignment import Alignment
from lingvo_moe.core.continuations import Request, Sampling
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.core.language_tags import Languages as Languages
from lingvo_moe.core.request import NOTHING, TranslationRequest
from lingvo_moe.core.sentences import Paragraphs, TrainingLines

T = TypeVar('T')
Texts = Iterable[str]
Code = str | None  # of a language


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

  def notices(self, over_the_length: str) -> Iterator[tuple[int, str]]:
    """Number of each text that is over the length, and what was done with it, in words."""
    yield from ((i, f'is {over_the_length} and was translated in part') for i in self.truncated)
    yield from ((i, f'has a sentence {over_the_length}, which was cut where a clause ends') for i in self.cut)


class Scored(NamedTuple):
  """Log-probabilities of given translations."""

  log_probs: np.ndarray  # float64, for each sentence in the order given
  target_tokens: np.ndarray  # int64, symbols of each target with its end; 0 where the source is empty
  truncated: list[int]  # sentences with a side over the model's max_length, which was cut


class Translator:
  """Text to text, with one set of weights: translations, continuations, or spans filled in.

  Attributes:
    able: names of what may be asked, fields of a TranslationRequest.
    unable: why other things may not.
  """

  able: ClassVar[tuple[str, ...]] = ()
  unable: ClassVar[str] = 'only models of translation do it'

  def check(self, request: TranslationRequest) -> None:
    """Raises UserError where something is asked that this translator does not do."""
    for name in request.asked:
      if name not in self.able:
        raise UserError(f'{name} cannot be asked here, as {self.unable}: leave it out')

  def translate(self, texts: Sequence[str], target: Languages = None) -> Answers:
    """Answers texts; `target` is from Task.choose_target. One that is `able` takes a request too."""
    raise NotImplementedError

  def translate_lines(self, lines: Sequence[str], target: Languages = None) -> Answers:
    """Answers lines; where texts may have line breaks, each is written as a backslash and an n, here and in answers."""
    return self.translate(lines, target)

  def too_long(self, texts: Sequence[str], target: Languages = None) -> list[int]:
    """Numbers of the texts that are over the length, of which `translate` reads only the beginning."""
    return []

  def score(self, sources: Sequence[str], targets: Sequence[str], target: Languages = None) -> Scored:
    """Log-probabilities of given translations."""
    raise UserError('this model scores no pairs: use the decoder with --score')

  def align(self, sources: Sequence[str], targets: Sequence[str], target: Languages = None) -> list[Alignment]:
    """Alignments of sources and their translations, by a translator that is able."""
    raise NotImplementedError

  def _aligned(self, texts: Sequence[str], answers: Answers, target: Languages) -> Answers:
    """Answers of texts, with alignments."""
    flat = [(text, h) for text, found in zip(texts, answers.hypotheses, strict=True) for h in found]
    alignments = iter(self.align([text for text, _ in flat], [h.text for _, h in flat], target))
    hypotheses = [[h._replace(alignment=next(alignments)) for h in found] for found in answers.hypotheses]
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


class PairScore(NamedTuple):
  """Score of a given translation."""

  log_prob: float  # log p(target | source) in nats, summed over the target's tokens and the end
  tokens: int  # tokens of the target with the end; 0 where the source is empty


class TextModel(abc.ABC):
  """Model that translates, scores or continues text. Its methods may be called from several threads."""

  path: str  # where it was loaded from
  model: str  # name of the model
  step: int  # of the checkpoint
  checkpoint: str  # the checkpoint in words
  beam_size: int  # W, the most hypotheses of an answer
  max_length: int  # tokens of a text that is read; of a longer one only the beginning is
  continues_text: bool  # whether an answer continues its text, as a language model's, and does not take its place
  training_lines: TrainingLines | None = None  # by which paragraphs are split; None: texts are answered whole
  split_sentences: str = 'auto'  # one of sentences.MODES

  @abc.abstractmethod
  def translator(self, n_best: int = 1) -> Translator:
    """The translator, made at the first call and kept; UserError where the model does not translate."""

  @abc.abstractmethod
  def choose_target(self, requested: str | None, source: str | None = None) -> Languages:
    """Languages for `answer`, given those requested; UserError names the languages there are."""

  @abc.abstractmethod
  def pairs(self) -> list[tuple[str, str]]:
    """(source, target) languages of the model, sorted; empty where none is known."""

  @overload
  def translate(
    self,
    sentences: Texts,
    target: Code = None,
    n_best: None = None,
    scores: Literal[False] = False,
    source: Code = None,
    **asked: Any,
  ) -> list[str]: ...
  @overload
  def translate(
    self,
    sentences: Texts,
    target: Code = None,
    n_best: None = None,
    *,
    scores: Literal[True],
    source: Code = None,
    **asked: Any,
  ) -> list[Hypothesis]: ...
  @overload
  def translate(
    self,
    sentences: Texts,
    target: Code = None,
    *,
    n_best: int,
    scores: Literal[False] = False,
    source: Code = None,
    **asked: Any,
  ) -> list[list[str]]: ...
  @overload
  def translate(
    self,
    sentences: Texts,
    target: Code = None,
    *,
    n_best: int,
    scores: Literal[True],
    source: Code = None,
    **asked: Any,
  ) -> list[list[Hypothesis]]: ...

  def translate(self, sentences, target=None, n_best=None, scores=False, source=None, **asked):
    """Translates sentences, to the text that the job translate writes for them.

    Args:
      sentences: any number of them. One without tokens, such as '', is translated to ''. Paragraphs are translated
        sentence by sentence, as the attribute split_sentences says: 'auto', 'always' or 'never'.
      target: target language, for models of several.
      n_best: number of translations of each sentence, at most beam_size; None: one, not in a list.
      scores: True for Hypothesis with score and log-probability in place of text.
      source: source language, for models that read it.
      **asked: what else is asked, fields of a TranslationRequest. With alignments=True results are as with scores.

    Returns:
      For each sentence a translation, or with n_best a list of them, best first.
      Scores of a text of several sentences are sums over these.
    """
    sentences = self._checked('sentences', sentences)
    if self.continues_text:
      raise UserError(f'{self.path} holds a language model, which continues text: use generate')
    request = TranslationRequest.of(**asked)
    translator = self.translator_for(self._wanted(n_best), request)
    answers = self._translated(translator, sentences, self.choose_target(target, source), source, request)
    for i, what in answers.notices(self.over_the_length):
      warnings.warn(f'sentence {i} {what}', stacklevel=2)
    return _shaped(answers, n_best, scores or request.alignments)

  def score(
    self, pairs: Iterable[tuple[str, str]], target: str | None = None, source: str | None = None
  ) -> list[PairScore]:
    """Scores translations: log p(target | source) of each (source, target).

    An empty source is always translated to an empty line: log p is 0 where the target is empty too, else -inf.

    Args:
      pairs: (source, target) each. A side over the length limit is cut, with a warning.
      target: target language, for models of several.
      source: source language, for models that read it.
    """
    pairs = list(pairs)
    if any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
      raise UserError("pairs are (source, target) each, such as [('Ein Hund.', 'A dog.')]")
    sources, targets = [source for source, _ in pairs], [translation for _, translation in pairs]
    sources, targets = self._checked('sources', sources), self._checked('targets', targets)
    translator, languages = self.translator(), self.choose_target(target, source)
    with self.named_in_refusals():
      scored = translator.score(sources, targets, languages)
    for i in scored.truncated:
      warnings.warn(f'pair {i} has a side {self.over_the_length} and was scored in part', stacklevel=2)
    return [PairScore(float(log_prob), int(n)) for log_prob, n in zip(scored.log_probs, scored.target_tokens)]

  @overload
  def generate(
    self, prompts: Texts, n_best: None = None, scores: Literal[False] = False, **sampling: float
  ) -> list[str]: ...
  @overload
  def generate(
    self, prompts: Texts, n_best: None = None, *, scores: Literal[True], **sampling: float
  ) -> list[Hypothesis]: ...
  @overload
  def generate(
    self, prompts: Texts, *, n_best: int, scores: Literal[False] = False, **sampling: float
  ) -> list[list[str]]: ...
  @overload
  def generate(
    self, prompts: Texts, *, n_best: int, scores: Literal[True], **sampling: float
  ) -> list[list[Hypothesis]]: ...

  def generate(self, prompts, n_best=None, scores=False, **sampling):
    """Continues prompts by a language model, as `search`, `top_p` and other values for decoding say.

    A sample depends on its prompt, on the prompt's place in the call and on `sample_seed`, so that the same call gives
    the same texts.

    Args:
      prompts: any number of texts; '' gives a text from its beginning.
      n_best: number of continuations of each prompt; None: one, not in a list.
      scores: True for Hypothesis with score and log-probability in place of text.
      **sampling: values for this call: sample_temperature (0: greedy), top_k, top_p, sample_seed, max_new_tokens.
    """
    prompts = self._checked('prompts', prompts)
    if not self.continues_text:
      raise UserError(f'{self.path} holds a run of {self.model}, which does not continue text: use translate')
    generator = self.translator(self._wanted(n_best))
    if not sampling:
      return _shaped(generator.translate(prompts), n_best, scores)
    values = self.sampling(**sampling)
    found = generator.complete([Request(prompt, values, number) for number, prompt in enumerate(prompts)])
    return _shaped(Answers(found, []), n_best, scores)

  def sampling(self, **chosen: float) -> Sampling:
    """Values for drawing a continuation: those chosen, and the model's own; UserError for one out of its range."""
    return Sampling.of(self.configured, chosen)

  def configured(self, name: str) -> Any:
    """A language model's own value for decoding."""
    raise NotImplementedError

  # What the jobs translate and serve use.

  def answer(
    self,
    lines: Sequence[str],
    target: Languages = None,
    n_best: int = 1,
    source: str | None = None,
    request: TranslationRequest = NOTHING,
  ) -> Answers:
    """Answers lines: hypotheses of each, and which lines were truncated.

    Args:
      lines: without line breaks. A language model continues them.
      target: from choose_target.
      n_best: hypotheses of each line.
      source: source language, as far as it is known, by whose rules sentences end.
      request: what else is asked.
    """
    translator = self.translator_for(n_best, request)
    if self.training_lines is None:
      return translator.translate_lines(lines, target)
    return self._translated(translator, lines, target, source, request)

  def translator_for(self, n_best: int = 1, request: TranslationRequest = NOTHING) -> Translator:
    """The translator; UserError where it does not do what is asked."""
    translator = self.translator(n_best)
    with self.named_in_refusals():
      translator.check(request)
    return translator

  def _translated(
    self,
    translator: Translator,
    texts: Sequence[str],
    target: Languages,
    source: str | None,
    request: TranslationRequest,
  ) -> Answers:
    """Answers of texts, by sentences where that is the way of the model."""
    if self.training_lines is None:
      return translator.translate(texts, target)
    if not source:
      sources = {target[0]} if isinstance(target, tuple) else {s for s, t in self._pairs if target in (None, t)}
      source = sources.pop() if len(sources) == 1 else ''
    paragraphs = Paragraphs(translator, self.split_sentences, self.training_lines, self.max_length)
    return paragraphs.translate(texts, target, [source] * len(texts), request=request)

  _pairs = functools.cached_property(lambda self: self.pairs())

  @property
  def over_the_length(self) -> str:
    return f'over max_length={self.max_length} tokens'

  @contextlib.contextmanager
  def named_in_refusals(self) -> Iterator[None]:
    """Puts path and name of the model before what its task refuses, which does not know them."""
    try:
      yield
    except UserError as e:
      raise type(e)(f'{self.path} holds a run of {self.model}: {e}') from None

  def _checked(self, name: str, texts: Iterable[str]) -> list[str]:
    """Texts as a list, as an iterator gives them once only; UserError for what is no text."""
    checked = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
    if not all(isinstance(text, str) for text in checked):
      raise UserError(f'{name} must be a list of str; saw {texts!r:.80}: put a single one in a list')
    for i, text in enumerate(checked):
      if any('\ud800' <= c <= '\udfff' for c in text):
        raise UserError(f'text must be Unicode; {name}[{i}] holds half of a surrogate pair')
    return checked

  @staticmethod
  def _wanted(n_best: int | None) -> int:
    if n_best is not None and n_best < 1:
      raise UserError(f'n_best must be at least 1, or None for one that is not in a list; saw {n_best}')
    return n_best or 1


def _shaped(answers: Answers, n_best: int | None, scores: bool) -> list:
  """Hypotheses of each sentence as translate and generate return them."""
  shaped = [[h if scores else h.text for h in hypotheses] for hypotheses in answers.hypotheses]
  return [best for best, *_ in shaped] if n_best is None else shaped


def check_n_best(n_best: int, beam_size: int) -> None:
  """Raises UserError where a beam has fewer hypotheses."""
  if n_best > beam_size:
    raise UserError(
      f'a beam of {beam_size} has no {n_best} hypotheses to choose from: use --n_best={beam_size}, or a larger '
      '--beam_size'
    )


def of_finite_probability(
  make: Callable[[list[int], float, float], T],
  ids_WT: np.ndarray,
  lengths_W: np.ndarray,
  log_probs_W: np.ndarray,
  scores_W: np.ndarray,
) -> list[T]:
  """make(ids, score, log p) of each hypothesis of a text that has a probability above 0; there must be one."""
  found = [
    make(ids_T[:length].tolist(), float(score), float(log_prob))
    for ids_T, length, log_prob, score in zip(ids_WT, lengths_W, log_probs_W, scores_W, strict=True)
    if length and np.isfinite(log_prob)
  ]
  if not found:
    raise UserError(
      'a text has no answer of finite probability: weights must be finite; use an earlier checkpoint, or ask less '
      'by prefix, ban and terms'
    )
  return found


def check_continuations(n_best: int, search: str, beam_size: int) -> None:
  """Raises UserError where a search of a language model has fewer continuations of a prompt."""
  if search == 'greedy' and n_best > 1:
    raise UserError(f'a prompt has one greedy continuation; saw {n_best} wanted: --search=sample or beam has several')
  if search == 'beam':
    check_n_best(n_best, beam_size)


def choose_target(
  languages: Sequence[str] | None, requested: str | None, source: str | None = None, both: bool = False
) -> Languages:
  """Languages whose tags a sentence gets, given those requested; None: no tag.

  Args:
    languages: those with a tag; None: the model takes no tag.
    requested: target language, or None.
    source: source language, or None; not read unless both sides have tags.
    both: whether both sides have tags.

  Raises:
    UserError: a model of several languages needs a target language; others take none.
  """
  if languages is None:
    if requested:
      raise UserError(f'this model has one target language and takes no tag; saw --target={requested}: leave it out')
    return None
  if both and not source:
    raise UserError('this model reads the language of its source: give --source= too, a language as of --target')
  if both and source not in languages:
    raise UserError(f'this model does not translate from {source!r}; {closest(source, languages)}')
  if not requested and len(languages) == 1:
    return languages[0]
  if not requested:
    raise UserError(
      f'this model translates into several languages and must be told which: --target=, one of {", ".join(languages)}'
    )
  if requested not in languages:
    raise UserError(f'this model does not translate into {requested!r}; {closest(requested, languages)}')
  return (source, requested) if both else requested
