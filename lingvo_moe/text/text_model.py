"""Text model: what a program can ask of a model that answers text, whichever engine computes it.

run/loaded.py has a run's checkpoint in TensorFlow, addons/engine/exported_model.py an export without it.
"""

import abc
import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, overload

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import Advance
from lingvo_moe.search.continuations import Request, Sampling
from lingvo_moe.search.request import NOTHING, TranslationRequest, is_half
from lingvo_moe.text.placeholder_keeper import PlaceholderKeeper
from lingvo_moe.text.sentences import Paragraphs, Plan, TrainingLines
from lingvo_moe.text.translator import Answers, Hypothesis, Translator
from lingvo_moe.vocab.language_tags import Languages, check_known

Texts = Iterable[str]
Code = str | None  # of a language
Yes, No = Literal[True], Literal[False]


class PairScore(NamedTuple):
  """Score of a given translation."""

  log_prob: float  # log p(target | source) in nats, summed over the target's tokens and the end
  tokens: int  # tokens of the target with the end; 0 where the source is empty


class Asked(NamedTuple):
  """What is asked of lines."""

  target: Languages = None  # from choose_target
  n_best: int = 1  # hypotheses of each line
  source: str | None = None  # source language, as far as it is known, by whose rules sentences end
  request: TranslationRequest = NOTHING  # what else is asked


class TextModel(abc.ABC):
  """Model that translates, scores or continues text. Its methods may be called from several threads."""

  path: str  # where it was loaded from
  model: str  # name of the model
  step: int  # of the checkpoint
  checkpoint: str  # the checkpoint in words
  fingerprint: str  # hash of its weights, or of all that an export has
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

  def languages(self, target: str | None, source: str | None = None) -> Languages:
    """Languages for `answer`, as `choose_target`; a source that the model is known not to have is refused too.

    A model without tags may be asked for its one target language.
    """
    try:
      chosen = self.choose_target(target, source)
    except UserError:
      if {known for _, known in self._pairs} != {target}:
        raise
      chosen = self.choose_target(None, source)
    check_known('source', source, {known for known, _ in self._pairs})
    return chosen

  def pairs(self) -> list[tuple[str, str]]:
    """(source, target) languages of the model, sorted; empty where none is known."""
    return []

  def targets(self) -> list[str]:
    """Target languages that the model has tags of, sorted; empty where it takes none."""
    return []

  @overload
  def translate(
    self, sentences: Texts, target: Code = None, n_best: None = None, scores: No = False, source: Code = None, **asked
  ) -> list[str]: ...
  @overload
  def translate(
    self, sentences: Texts, target: Code = None, n_best: None = None, *, scores: Yes, source: Code = None, **asked
  ) -> list[Hypothesis]: ...
  @overload
  def translate(
    self, sentences: Texts, target: Code = None, *, n_best: int, scores: No = False, source: Code = None, **asked
  ) -> list[list[str]]: ...
  @overload
  def translate(
    self, sentences: Texts, target: Code = None, *, n_best: int, scores: Yes, source: Code = None, **asked
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
    answers = self._translated(translator, sentences, self.languages(target, source), source, request)
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
    translator, languages = self.translator(), self.languages(target, source)
    with self.named_in_refusals():
      scored = translator.score(sources, targets, languages)
    for i in scored.truncated:
      warnings.warn(f'pair {i} has a side {self.over_the_length} and was scored in part', stacklevel=2)
    return [PairScore(float(log_prob), int(n)) for log_prob, n in zip(scored.log_probs, scored.target_tokens)]

  @overload
  def generate(self, prompts: Texts, n_best: None = None, scores: No = False, **sampling: float) -> list[str]: ...
  @overload
  def generate(self, prompts: Texts, n_best: None = None, *, scores: Yes, **sampling: float) -> list[Hypothesis]: ...
  @overload
  def generate(self, prompts: Texts, *, n_best: int, scores: No = False, **sampling: float) -> list[list[str]]: ...
  @overload
  def generate(self, prompts: Texts, *, n_best: int, scores: Yes, **sampling: float) -> list[list[Hypothesis]]: ...

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
    continuations = generator.complete([Request(prompt, values, number) for number, prompt in enumerate(prompts)])
    return _shaped(Answers(continuations, []), n_best, scores)

  def sampling(self, **chosen: float) -> Sampling:
    """Values for drawing a continuation: those chosen, and the model's own; UserError for one out of its range."""
    values, search = Sampling(*map(self.configured, Sampling._fields)), self.configured('search')
    values = values._replace(sample_temperature=0.0) if search == 'greedy' else values
    return values.changed(chosen, search)

  def configured(self, name: str) -> Any:
    """A language model's own value for decoding."""
    raise NotImplementedError

  # What the jobs translate and serve use.

  def answer(self, lines: Sequence[str], asked: Asked, progress: Advance = lambda count: None) -> Answers:
    """Answers lines, which have no line breaks; `progress`, of translation, gets the number done since the last."""
    translator = self.translator_for(asked.n_best, asked.request)
    if self.training_lines is None:
      return translator.translate_lines(lines, asked.target)
    return self._translated(translator, lines, asked.target, asked.source, asked.request, progress)

  def plan(self, lines: Sequence[str], asked: Asked) -> Plan:
    """Parts of lines, for `answer_parts`."""
    translator = self.translator_for(asked.n_best, asked.request)
    if self.training_lines is None:
      return Plan.of_whole(lines)
    languages = [self._source_of(asked.target, asked.source)] * len(lines)
    return self._paragraphs(translator).plan(lines, asked.target, languages, asked.request)

  def answer_parts(self, parts: Sequence[str], asked: Asked) -> Answers:
    """Answers parts of lines."""
    translator, request = self.translator_for(asked.n_best, asked.request), asked.request
    if self.training_lines is None:
      return translator.translate_lines(parts, asked.target)
    return translator.translate(parts, asked.target, **({'request': request} if request.asked else {}))

  def translator_for(self, n_best: int = 1, request: TranslationRequest = NOTHING) -> Translator:
    """The translator; UserError where it does not do what is asked."""
    translator = self.translator(n_best)
    with self.named_in_refusals():
      translator.check(request)
    keeps = request.placeholders and not request.prefix and 'placeholders' in translator.able
    return PlaceholderKeeper(translator) if keeps else translator

  def _translated(
    self,
    translator: Translator,
    texts: Sequence[str],
    target: Languages,
    source: str | None,
    request: TranslationRequest,
    progress: Advance = lambda count: None,
  ) -> Answers:
    """Answers of texts, by sentences where that is the way of the model."""
    if self.training_lines is None:
      return translator.translate(texts, target)
    languages = [self._source_of(target, source)] * len(texts)
    return self._paragraphs(translator).translate(texts, target, languages, progress, request=request)

  def _paragraphs(self, translator: Translator) -> Paragraphs:
    return Paragraphs(translator, self.split_sentences, self.training_lines, self.max_length)

  def _source_of(self, target: Languages, source: str | None) -> str:
    """Language of a source, '' where it is not known."""
    if source:
      return source
    sources = {target[0]} if isinstance(target, tuple) else {s for s, t in self._pairs if target in (None, t)}
    return sources.pop() if len(sources) == 1 else ''

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
      if is_half(text):
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
