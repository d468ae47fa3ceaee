"""A run in memory: translates, scores, routes or generates text. The job translate and the library both use it."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lingvo_moe.core.errors import UserError
from lingvo_moe.ops.cpu import threads
from lingvo_moe.run import ensemble_members
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.storage import log_directory
from lingvo_moe.tasks.task import SentenceRouting, TaskConfig, task_of
from lingvo_moe.text.text_model import TextModel
from lingvo_moe.text.translator import Translator
from lingvo_moe.vocab.language_tags import Languages

T = TypeVar('T')


class LoadedRun(TextModel):
  """A run with the weights of one checkpoint; a TextModel.

  Each call batches its sentences by length, and results are in the order given. A lock around the compiled step lets
  one batch compute at a time.

  Args:
    run: the log directory.
    config: its configuration, with the values for decoding.
    runtime: a runtime for config.program().
    step: step of the checkpoint.
    members: further checkpoints of an ensemble, whose configuration is given.
  """

  def __init__(
    self, run: RunDir, config: TaskConfig, runtime: Runtime, step: int, members: Sequence[ensemble_members.Member] = ()
  ) -> None:
    self.path = run.path
    self.model = run.load()[0]
    self.config = config
    self.step = step
    self.checkpoint = '; with '.join([run.checkpoints().describe(step), *map(str, members)])
    steps = [(run, step), *((member.run, member.step) for member in members)]
    self.fingerprint = ' '.join(run.checkpoints().fingerprint(step) for run, step in steps)
    self._task = task_of(config)
    _ = self._task.vocabs  # refuses what does not fit, before the weights are read
    self.max_length, self.continues_text = self._task.max_length, self._task.continues_text
    self.training_lines = self._task.training_lines
    self._runner = _OneAtATime(runtime)
    self._made: dict[tuple, Any] = {}
    self._making = threading.Lock()
    ensemble_members.load_weights(runtime, run, step, members)

  def __repr__(self) -> str:
    return f'LoadedRun({self.path!r}, {self.model}, {self.checkpoint})'

  def routing(
    self,
    sentences: Iterable[str],
    translations: Iterable[str] | None = None,
    target: str | None = None,
    source: str | None = None,
  ) -> list[SentenceRouting]:
    """Finds the experts that each MoE layer chooses for each token of the sentences and of their translations.

    Args:
      sentences: any number of them. One without tokens has no layers.
      translations: text that the decoder reads, a line for each sentence; None: the run's own translations.
      target: target language, for models of several.
      source: source language, for models that read it.
    """
    sentences = self._checked('sentences', sentences)
    router = self._once(('router',), lambda: self._task.router(self._runner))
    if translations is None:
      translations = self.translate(sentences, target, source=source, placeholders=False)
    translations = self._checked('translations', translations)
    return router(sentences, translations, self.languages(target, source))

  def translator(self, n_best: int = 1) -> Translator:
    return self._once(('translator', n_best), lambda: self._task.translator(self._runner, n_best))

  def choose_target(self, requested: str | None, source: str | None = None) -> Languages:
    return self._task.choose_target(requested, source)

  def configured(self, name: str) -> Any:
    return getattr(self.config, name)

  def pairs(self) -> list[tuple[str, str]]:
    return self._task.pairs_of(log_directory.dev_loss_parts(self.path, self._task.subset))

  def targets(self) -> list[str]:
    return self._task.targets()

  @property
  def beam_size(self) -> int:
    return self.config.beam_size

  def _once(self, key: tuple, make: Callable[[], T]) -> T:
    """Object for a key, made at the first call, once for all threads."""
    with self._making:
      if key not in self._made:
        with self.named_in_refusals():
          self._made[key] = make()
      return self._made[key]


def load(
  path: str,
  step: int | None,
  checkpoint: str | None,
  backend: str,
  set_threads: bool,
  vocab_outside: bool,
  others: Sequence[str],
  decoding: Mapping[str, Any],
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
  members = [ensemble_members.Member.read(name, run) for name in others]
  config = ensemble_members.joined(run.load_config(**decoding), members)
  step = run.checkpoints().choose(step, checkpoint or 'best if evaluated')
  loaded = LoadedRun(run, config, LocalRuntime(config.program(), backend=backend), step, members)
  logging.getLogger('lingvo_moe').info('loaded %r', loaded)
  return loaded


class _OneAtATime:
  """Runner whose functions compute one at a time, from whatever threads they are called; tracing is no safer."""

  def __init__(self, runner: Runtime) -> None:
    self.row_multiple, self.only_rows = runner.row_multiple, runner.only_rows
    self._runner = runner
    self._lock = threading.Lock()

  def function(self, f: Callable[[dict, dict], Any]) -> Callable[[Mapping[str, Any]], Any]:
    compiled = self._runner.function(f)

    def call(batch):
      with self._lock:
        return compiled(batch)

    return call
