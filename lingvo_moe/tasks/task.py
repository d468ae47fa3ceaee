"""Task of a configuration: what jobs and tools do with a model, above the values that describe it.

A configuration (tasks/model_config.py) has values and makes the model. `task_of` gives its task: batches for training,
for the dev loss and for tools that measure, a job for held-out text, translation, export. Jobs know no task by name.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.inputs.feed import DevInput, Feed, TrainInput
from lingvo_moe.models.batches import Batch as Batch
from lingvo_moe.models.export_forms import Exports
from lingvo_moe.search.request import NOTHING, TranslationRequest
from lingvo_moe.tasks import metrics as metrics_lib
from lingvo_moe.tasks import run_length
from lingvo_moe.text.sentences import TrainingLines
from lingvo_moe.text.translator import Answers as Answers
from lingvo_moe.text.translator import Hypothesis as Hypothesis
from lingvo_moe.text.translator import Scored as Scored
from lingvo_moe.text.translator import Translator as Translator
from lingvo_moe.vocab.language_tags import Languages as Languages

if TYPE_CHECKING:
  from lingvo_moe.addons.engine.exported_model import ExportedModel
  from lingvo_moe.program import Program


class TaskConfig(Protocol):
  """Values that jobs read of a configuration, a frozen dataclass; ModelConfig says what each means."""

  task_class: str  # the Task of it, by module and name: 'lingvo_moe.tasks.mt.mt_task.TranslationTask'
  data_dir: str
  max_steps: int
  log_every: int
  eval_every: int
  save_every: int
  keep_checkpoints: int
  keep_every: int
  patience: int

  def program(self) -> Program:
    """The model and how it learns."""


class Runner(Protocol):
  """Runtime as decoding needs it; see runtime.Runtime."""

  row_multiple: int
  only_rows: bool

  def function(self, f: Callable[[dict, dict], Any]) -> Callable[[Batch], Any]:
    """f(weights, batch) as a function of the batch, with the weights that the runtime then holds."""


@dataclasses.dataclass(frozen=True)
class HeldOutOptions:
  """Flags of the decoder that choose what it does with held-out text."""

  split: str = 'test'  # test, dev, or any file prefix
  max_sentences: int = 0  # first lines used of each part; 0: all
  score: bool = False  # whether to compute log-probabilities of the text, in place of producing text
  batch_tokens: int = 0  # tokens of a batch; 0: the task's default
  # the configuration that the run was trained with, without values for decoding; None: the same
  trained: TaskConfig | None = None
  split_sentences: str = 'never'  # whether paragraphs are translated by sentence, one of sentences.MODES
  request: TranslationRequest = NOTHING  # what is asked of translations


class Outcome(NamedTuple):
  """Results of a held-out job with one checkpoint, to be written by the decoder."""

  lines: Mapping[str, Iterable[str]]  # by name: the lines of the file <name><suffix>
  scalars: Mapping[str, float]  # for TensorBoard
  summary: dict[str, Any]  # for the JSON file that is written last
  other_files: Mapping[str, Iterable[str]] = types.MappingProxyType({})  # lines by name of the file, for readers


class HeldOutJob:
  """Held-out job of the decoder for each checkpoint: translate and score, sample, or compute perplexity."""

  summary_file: str  # name of the JSON file of a step's summary
  suffix: str  # of the files of lines
  settings: dict[str, Any]  # what the results depend on besides the checkpoint
  texts: dict[str, str]  # a short hash of each text by its name, for a message about existing results of other text
  warning: str = ''  # printed by the decoder before it computes

  def run(self, label: str, quiet: bool = False, unfinished: MutableMapping[str, str] | None = None) -> Any:
    """Computes with the weights that the runtime holds; every process of a run calls it.

    Args:
      label: heads the progress bar.
      quiet: no progress bar.
      unfinished: lines of these results by name, which an interrupted run has left; in processes that do not call
        `finish` the names alone. A job that takes long leaves those out, and adds its own lines as they are done.

    Returns:
      What `finish` takes.
    """
    raise NotImplementedError

  def finish(self, computed: Any) -> Outcome:
    """Turns what `run` returned into results; called in one process. May print warnings."""
    raise NotImplementedError

  def report(self, summary: Mapping[str, Any]) -> str:
    """A summary as text for people."""
    raise NotImplementedError


class InferenceProgram(NamedTuple):
  """A program at inference, function(model, nested weights, batch), and a batch for it."""

  function: Callable[[Any, Any, Batch], Any]
  batch: Batch
  by_rows: bool = False  # whether its result may stay split as the batch is


class LayerRouting(NamedTuple):
  """Choices of a MoE layer for the tokens of a sentence, T tokens and R choices each."""

  experts: np.ndarray  # int32 [T, R], the first choice first
  weights: np.ndarray  # float32 [T, R], by which outputs of experts are summed; 0: that expert was not chosen


class SentenceRouting(NamedTuple):
  """Routing of a sentence and its translation."""

  source: list[str]  # pieces that the encoder reads: a tag if the model has tags, the sentence, and the end
  target: list[str]  # pieces that the decoder reads: bos, and the translation
  layers: dict[str, LayerRouting]  # 'encoder/layer_01' over the source, 'decoder/layer_01' over the target


_OF_EXPORTS = {'translation': 'lingvo_moe.tasks.mt.held_out'}


def job_of_export(model: ExportedModel, options: HeldOutOptions, data_dir: str | None, pairs: str | None) -> HeldOutJob:
  """Held-out job on an export for the engine, whose manifest says which task it has; imports no TensorFlow."""
  module = _OF_EXPORTS.get(model.settings['task'])
  if module is None:
    raise UserError(f'{model.path} is an export that continues text: use lingvo-moe translate, or decode its run')
  return importlib.import_module(module).job_of_export(model, options, data_dir, pairs)


class Task:
  """Task of a configuration. What a subclass leaves out is refused, or has the answer of a task without it."""

  # Names of the metrics that count a step's tokens. Their sum is the pace of training, and each is also logged as a
  # total since the run began.
  token_counts: tuple[str, ...] = ('target_tokens',)
  # By what the dev loss is reported in parts, such as 'pair'. The metrics of a batch of dev text hold 'xent' (summed,
  # in nats) and 'target_tokens', and both again as vectors over DevInput.subsets: 'xent_by_<subset>' and
  # 'target_tokens_by_<subset>'. They may hold 'choices_by_<subset>', {layer: [P, E]}, and the metrics of a training
  # step 'routing', {layer: RoutingStats}, which a report on the run shows.
  subset = 'file'
  max_length = 0  # tokens of a text that is translated; of longer ones only the beginning is read. 0: of any length
  continues_text = False  # whether an answer continues its text, as a language model's, and does not take its place
  training_lines: TrainingLines | None = None  # by which paragraphs are split; None: texts are answered whole
  exports_class = 'lingvo_moe.models.export_forms.Exports'  # of `exports`, by module and name

  def __init__(self, config: TaskConfig) -> None:
    self.config: Any = config  # a subclass has its own kind

  def _refuse(self, what: str) -> NoReturn:
    raise UserError(f'{type(self.config).__name__} {what}')

  # Training

  @functools.cached_property
  def vocabs(self) -> Any:
    """What turns text into ids; UserError where it does not fit the model."""
    return None

  def check_corpus(self) -> None:
    """Raises UserError unless the text of training and of the dev loss is there; quick, before anything is made."""
    self.corpus_files()

  def corpus_files(self) -> Mapping[str, Sequence[str]]:
    """Paths of the files of training and dev loss, by part, such as 'train of de-en'; a run keeps their hashes."""
    return {}

  def prepare(self, folder: str, resumed: bool) -> TaskConfig:
    """Settles what depends on the corpus, and puts the run's own files, such as vocabularies, into its folder.

    Args:
      folder: of the files; made if need be.
      resumed: whether the run goes on. Its files then stay as they are.

    Returns:
      The configuration that decoder and translate can use without the corpus; it names the files by full paths.
    """
    return self.config

  def settled(self, cache_dir: str) -> tuple[TaskConfig, str]:
    """The configuration with numbers where fields are left to the size of the corpus, and a line that names them."""
    if not run_length.is_open(self.config):
      return self.config, ''
    train_input = self.train_input(cache_dir, Feed())
    return run_length.settled(self.config, train_input.steps_per_epoch, sum(train_input.examples.values()))

  def with_files(self, rename: Callable[[str], str]) -> TaskConfig:
    """The configuration with another path for each of the run's own files."""
    return self.config

  def foreign_weights(self, other: Task) -> Mapping[str, tuple[Sequence[int], Sequence[int]]]:
    """Names of weights, or their first parts, that mean something else in a run of `other`, as with other vocabularies.

    Each with the rows (axis V or P) that have one meaning in both: (rows here, rows there).
    """
    return {}

  def train_input(self, cache_dir: str, feed: Feed) -> TrainInput:
    """Batches for training; `cache_dir` is for what only saves time."""
    self._refuse('has no input to train on')

  def dev_input(self, cache_dir: str, feed: Feed) -> DevInput:
    """Batches for the dev loss."""
    self._refuse('has no dev loss')

  @property
  def dev_metric(self) -> str | None:
    """Score of `dev_scores` by which checkpoints are ranked; None: they are by the dev loss."""
    return None

  def dev_scores(self, runner: Runner, quiet: bool) -> dict[str, float]:
    """Scores by name, the larger the better, of dev text with the weights that a runtime holds; every process calls it.

    A process that is `quiet` has none.
    """
    return {}

  def scalars(self, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Logged values of a training step's metrics, by name; 'loss' among them, the cross-entropy in nats a token.

    The default is of metrics with 'xent' (summed, in nats) and 'target_tokens'; those of experts may be there or not.
    """
    return metrics_lib.scalars(metrics)

  # Decoding

  def held_out_job(self, runner: Runner, options: HeldOutOptions) -> HeldOutJob:
    """Held-out job on the weights of a runtime; reads the held-out text."""
    self._refuse('has no held-out evaluation')

  def translator(self, runner: Runner, n_best: int = 1) -> Translator:
    """Answers texts with the weights that a runtime holds, by n_best hypotheses each."""
    self._refuse('does not translate: use the decoder')

  def ensemble(self, others: Sequence[tuple[str, Task]]) -> TaskConfig:
    """Configuration of this model and others, each with a name for messages, as one."""
    self._refuse('has no ensembles: only models of translation have')

  def choose_target(self, asked: str | None, source: str | None = None) -> Languages:
    """The languages to pass to the translator, given those that were asked for."""
    if asked:
      raise UserError(f'this model has no target language; saw target={asked!r}: leave it out')
    return None

  def pairs_of(self, subsets: Sequence[str]) -> list[tuple[str, str]]:
    """(source, target) languages of the run, given names of subsets of its dev loss; empty where none is known."""
    return []

  def targets(self) -> list[str]:
    """Target languages that the run has tags of, sorted; empty where it takes none."""
    return []

  def router(self, runner: Runner) -> Callable[[Sequence[str], Sequence[str], str | None], list[SentenceRouting]]:
    """Function that finds the experts of each token of sentences and translations, given the target language."""
    self._refuse('has no routing by sentence')

  # Export

  @property
  def exports(self) -> Exports:
    """Forms in which the model is exported."""
    return _class_named(self.exports_class, 'exports_class', Exports)(self)

  # Measurement without text: lingvo-moe cost, lint, parity and bench

  def random_batch(self, seed: int = 0, full: bool = True) -> Batch:
    """Batch of random ids in full rows, or in rows with padding; its size is that of a batch in training."""
    self._refuse('has no random batches to measure')

  def batch_shapes(self, training: bool = True) -> Batch:
    """Batch with the shapes of a real one, in training or in evaluation, that takes no memory."""
    self._refuse('has no batch shapes to compile for')

  def inference_programs(self) -> dict[str, InferenceProgram]:
    """Programs by name, with batches of evaluation's size; 'eval', the dev loss, among them."""
    self._refuse('has no programs for inference to measure')

  def probe_search(self) -> InferenceProgram:
    """Beam search for a few rows, with beam_size results: what must be equal on every mesh."""
    self._refuse('has no search to compare')


def task_of(config: TaskConfig) -> Task:
  """The task of a configuration; UserError where its `task_class` names none."""
  return _class_named(config.task_class, 'task_class', Task)(config)


def _class_named(path: str, attribute: str, base: type) -> type:
  """The class of a module and name, 'toy.BytesTask', which an attribute has."""
  module, _, name = path.rpartition('.')
  rule = f'{attribute} must be the module and name of a subclass of {base.__name__}; saw {path!r}'
  try:
    found = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as e:  # ValueError: there is no module
    raise UserError(f"{rule}: {e}; write it as f'{{__name__}}.NAME' in the file of the class") from e
  if not (isinstance(found, type) and issubclass(found, base)):
    raise UserError(f'{rule}, which is not one: derive it from {base.__module__}.{base.__name__}')
  return found
