"""A run in memory: translates, scores, routes or generates text. The job translate and the library both use it."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

from lingvo_moe.core import log_directory
from lingvo_moe.core.errors import UserError
from lingvo_moe.ops.cpu import threads
from lingvo_moe.run import inference
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks.task import Answers, Hypothesis, SentenceRouting, TaskConfig, Translator, task_of

T = TypeVar('T')


class PairScore(NamedTuple):
  """Score of a given translation."""

  log_prob: float  # log p(target | source) in nats, summed over the target's tokens and the end
  tokens: int  # tokens of the target with the end; 0 where the source is empty


class LoadedRun:
  """A run with the weights of one checkpoint. Its methods may be called from several threads.

  >>> run = lingvo_moe.load('runs/mine')
  >>> run.translate(['Ein Hund läuft.'])
  ['A dog is running.']

  Each call batches its sentences by length, and results are in the order given. A lock around the compiled step lets
  one batch compute at a time.

  Args:
    run: the log directory.
    config: its configuration, with the values for decoding.
    runtime: a runtime for config.program().
    step: step of the checkpoint.

  Attributes:
    path: the log directory.
    model: name of the model.
    step: step of the checkpoint.
    checkpoint: the checkpoint in words.
    config: the configuration.
  """

  def __init__(self, run: RunDir, config: TaskConfig, runtime: Runtime, step: int) -> None:
    self.path = run.path
    self.model = run.load()[0]
    self.config = config
    self.step = step
    self.checkpoint = inference.describe_step(run.checkpoints(), step)
    self._run = run
    self._task = task_of(config)
    _ = self._task.vocabs  # refuses what does not fit, before the weights are read
    self._runner = _OneAtATime(runtime)
    self._made: dict[tuple, Any] = {}
    self._making = threading.Lock()
    inference.load_weights(runtime, run.checkpoints(), step)

  def __repr__(self) -> str:
    return f'LoadedRun({self.path!r}, {self.model}, {self.checkpoint})'

  @overload
  def translate(
    self, sentences: Iterable[str], target: str | None = None, n_best: None = None, scores: Literal[False] = False
  ) -> list[str]: ...
  @overload
  def translate(
    self, sentences: Iterable[str], target: str | None = None, n_best: None = None, *, scores: Literal[True]
  ) -> list[Hypothesis]: ...
  @overload
  def translate(
    self, sentences: Iterable[str], target: str | None = None, *, n_best: int, scores: Literal[False] = False
  ) -> list[list[str]]: ...
  @overload
  def translate(
    self, sentences: Iterable[str], target: str | None = None, *, n_best: int, scores: Literal[True]
  ) -> list[list[Hypothesis]]: ...

  def translate(self, sentences, target=None, n_best=None, scores=False):
    """Translates sentences, to the text that the job translate writes for them.

    Args:
      sentences: any number of them. One without tokens, such as '', is translated to ''. Of one over the length limit
        of the model the beginning is translated, with a warning.
      target: target language, for models of several.
      n_best: number of translations of each sentence, at most beam_size; None: one, not in a list.
      scores: True for Hypothesis with score and log-probability in place of text.

    Returns:
      For each sentence a translation, or with n_best a list of them, best first.
    """
    sentences = self._checked('sentences', sentences)
    if self.continues_text:
      raise UserError(f'{self.path} holds a language model, which continues text: use generate')
    answers = self.translator(self._wanted(n_best)).translate(sentences, self.choose_target(target))
    for i in answers.truncated:
      warnings.warn(f'sentence {i} is {self.over_the_length} and was translated in part', stacklevel=2)
    return _shaped(answers, n_best, scores)

  def score(self, pairs: Iterable[tuple[str, str]], target: str | None = None) -> list[PairScore]:
    """Scores translations: log p(target | source) of each (source, target).

    An empty source is always translated to an empty line: log p is 0 where the target is empty too, else -inf.

    Args:
      pairs: (source, target) each. A side over the length limit is cut, with a warning.
      target: target language, for models of several.
    """
    pairs = list(pairs)
    if any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
      raise UserError("pairs are (source, target) each, such as [('Ein Hund.', 'A dog.')]")
    sources, targets = [source for source, _ in pairs], [translation for _, translation in pairs]
    sources, targets = self._checked('sources', sources), self._checked('targets', targets)
    scored = self.translator().score(sources, targets, self.choose_target(target))
    for i in scored.truncated:
      warnings.warn(f'pair {i} has a side {self.over_the_length} and was scored in part', stacklevel=2)
    return [PairScore(float(log_prob), int(n)) for log_prob, n in zip(scored.log_probs, scored.target_tokens)]

  def routing(
    self, sentences: Iterable[str], translations: Iterable[str] | None = None, target: str | None = None
  ) -> list[SentenceRouting]:
    """Finds the experts that each MoE layer chooses for each token of the sentences and of their translations.

    Args:
      sentences: any number of them. One without tokens has no layers.
      translations: text that the decoder reads, a line for each sentence; None: the run's own translations.
      target: target language, for models of several.
    """
    sentences = self._checked('sentences', sentences)
    router = self._once(('router',), lambda: self._task.router(self._runner))
    if translations is None:
      translations = self.translate(sentences, target)
    translations = self._checked('translations', translations)
    return router(sentences, translations, self.choose_target(target))

  @overload
  def generate(self, prompts: Iterable[str], n_best: None = None, scores: Literal[False] = False) -> list[str]: ...
  @overload
  def generate(self, prompts: Iterable[str], n_best: None = None, *, scores: Literal[True]) -> list[Hypothesis]: ...
  @overload
  def generate(self, prompts: Iterable[str], *, n_best: int, scores: Literal[False] = False) -> list[list[str]]: ...
  @overload
  def generate(self, prompts: Iterable[str], *, n_best: int, scores: Literal[True]) -> list[list[Hypothesis]]: ...

  def generate(self, prompts, n_best=None, scores=False):
    """Continues prompts by a language model, as `search`, `top_p` and other values for decoding say.

    A sample depends on its prompt, on the prompt's place in the call and on `sample_seed`, so that the same call gives
    the same texts.

    Args:
      prompts: any number of texts; '' gives a text from its beginning.
      n_best: number of continuations of each prompt; None: one, not in a list.
      scores: True for Hypothesis with score and log-probability in place of text.
    """
    prompts = self._checked('prompts', prompts)
    if not self.continues_text:
      raise UserError(f'{self.path} holds a run of {self.model}, which does not continue text: use translate')
    return _shaped(self.translator(self._wanted(n_best)).translate(prompts), n_best, scores)

  # What the jobs translate and serve use.

  def answer(self, lines: Sequence[str], target: str | None = None, n_best: int = 1) -> Answers:
    """Answers lines: hypotheses of each, and which lines were truncated.

    Args:
      lines: without line breaks. A language model continues them.
      target: from choose_target.
      n_best: hypotheses of each line.
    """
    return self.translator(n_best).translate_lines(lines, target)

  def translator(self, n_best: int = 1) -> Translator:
    """The task's translator, made at the first call and kept; UserError where the model does not translate."""
    return self._once(('translator', n_best), lambda: self._task.translator(self._runner, n_best))

  def choose_target(self, requested: str | None) -> str | None:
    """Target language for `answer`, given the one requested; UserError names the languages there are."""
    return self._task.choose_target(requested)

  def pairs(self) -> list[tuple[str, str]]:
    """(source, target) languages of the run, sorted; empty where none is known."""
    return self._task.pairs_of(log_directory.dev_loss_parts(self._run.path, self._task.subset))

  @property
  def over_the_length(self) -> str:
    return f'over max_length={self._task.max_length} tokens'

  @property
  def continues_text(self) -> bool:
    """Whether the model continues text, and does not translate it."""
    return self._task.continues_text

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

  def _once(self, key: tuple, make: Callable[[], T]) -> T:
    """Object for a key, made at the first call, once for all threads."""
    with self._making:
      if key not in self._made:
        self._made[key] = make()
      return self._made[key]


def load(
  path: str,
  *,
  step: int | None = None,
  checkpoint: str | None = None,
  backend: str = 'auto',
  set_threads: bool = True,
  vocab_outside: bool = False,
  **decoding: Any,
) -> LoadedRun:
  """Loads a run; see lingvo_moe.load."""
  if step is not None and checkpoint is not None:
    raise UserError(f'step={step} and checkpoint={checkpoint!r} each choose a checkpoint: give one of them')
  if step is not None and (isinstance(step, bool) or not hasattr(step, '__index__')):
    raise UserError(f'step must be an int; saw {step!r}')
  if backend not in ('auto', 'reference'):
    raise UserError(f"backend must be 'auto' or 'reference'; saw {backend!r}")
  if checkpoint not in (None, 'best', 'last'):
    raise UserError(f"checkpoint must be 'best' or 'last'; saw {checkpoint!r}")
  if set_threads and backend != 'reference':
    threads.set_policy(decoding=True)
  run = RunDir(str(path), vocab_outside)
  config = inference.load_config(run, **decoding)
  step = inference.choose_step(run.checkpoints(), step, checkpoint or 'best if evaluated')
  loaded = LoadedRun(run, config, LocalRuntime(config.program(), backend=backend), step)
  logging.getLogger('lingvo_moe').info('loaded %r', loaded)
  return loaded


class _OneAtATime:
  """Runner whose functions compute one at a time, from whatever threads they are called; tracing is no safer."""

  def __init__(self, runner: Runtime) -> None:
    self.row_multiple = runner.row_multiple
    self._runner = runner
    self._lock = threading.Lock()

  def function(self, f: Callable[[dict, dict], Any]) -> Callable[[Mapping[str, Any]], Any]:
    compiled = self._runner.function(f)

    def call(batch):
      with self._lock:
        return compiled(batch)

    return call


def _shaped(answers: Answers, n_best: int | None, scores: bool) -> list:
  """Hypotheses of each sentence as translate and generate return them."""
  shaped = [[h if scores else h.text for h in hypotheses] for hypotheses in answers.hypotheses]
  return [best for best, *_ in shaped] if n_best is None else shaped
