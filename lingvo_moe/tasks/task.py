"""The protocol between a task and the jobs: what a registered model's configuration offers.

trainer, decoder, translate and run/ know no task by name. They get a configuration from the registry and work with it
through `TaskConfig`; a new task is a folder beside mt/ whose configuration has these attributes and methods, and no
change to a job. tasks/mt/task.py is the example to read.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from lingvo_moe.program import Program

Batch = Mapping[str, Any]  # name -> the rows of an array that this process feeds
Vocabs = Any  # what turns text into ids: made by a configuration and handed back to it


@dataclasses.dataclass(frozen=True)
class Feed:
  """Which part of each batch's rows a process feeds.

  Attributes:
    process_index: its number.
    process_count: the number of parts.
    quiet: whether to leave out progress bars, as all processes but one do.
  """

  process_index: int = 0
  process_count: int = 1
  quiet: bool = False


class Runner(Protocol):
  """What decoding needs of a runtime; see runtime.Runtime."""

  row_multiple: int

  def function(self, f: Callable[[dict, dict], Any]) -> Callable[[Batch], Any]:
    """f(weights, batch) as a function of the batch, with the weights that the runtime holds when it is called."""


class TrainInput(Protocol):
  """Batches for training; str(stats) describes the corpus in a line of the log."""

  stats: Any

  def dataset(self, start_step: int = 0) -> Iterable[Batch]:
    """The endless stream of batches from a step on. It depends on the configuration, the corpus and the step alone."""


class DevInput(Protocol):
  """Batches for the dev loss, the same and in the same order each time.

  Attributes:
    stats: as in TrainInput.
    subsets: names of the parts of the text by which losses are reported; see TaskConfig.subset.
    content_hash: of all that the loss is computed on, over all processes. Losses are compared where it is equal.
  """

  stats: Any
  subsets: Sequence[str]
  content_hash: str

  def __iter__(self) -> Iterator[Batch]:
    """The batches."""


@dataclasses.dataclass(frozen=True)
class HeldOutOptions:
  """Flags of the decoder that choose what it does with held-out text.

  Attributes:
    split: test, dev, or any file prefix.
    max_sentences: first lines used of each part; 0: all.
    score: whether to compute log-probabilities of the text, in place of producing text.
    batch_tokens: tokens of a batch; 0: the task's default.
    trained: the configuration that the run was trained with, without values for decoding; None: the same.
  """

  split: str = 'test'
  max_sentences: int = 0
  score: bool = False
  batch_tokens: int = 0
  trained: TaskConfig | None = None


class Outcome(NamedTuple):
  """Results of a held-out job with one checkpoint, to be written by the decoder."""

  lines: Mapping[str, Iterable[str]]  # by name: the lines of the file <name><suffix>
  scalars: Mapping[str, float]  # for TensorBoard
  summary: dict[str, Any]  # for the JSON file that is written last
  beside: Mapping[str, Iterable[str]] = types.MappingProxyType({})  # by name: the lines of other files, for readers


class HeldOutJob(Protocol):
  """What the decoder does with each checkpoint: translate and score held-out text, sample, compute perplexity.

  Attributes:
    summary_file: name of the JSON file of a step's summary.
    suffix: of the files of lines.
    settings: what the results depend on beside the checkpoint.
    texts: by its name, a short hash of each text; for a message about results that are there, of other text.

  A job may also have a string `warning`, which the decoder prints before it computes.
  """

  summary_file: str
  suffix: str
  settings: dict[str, Any]
  texts: dict[str, str]

  def run(self, label: str, quiet: bool = False, kept: MutableMapping[str, str] | None = None) -> Any:
    """Computes with the weights that the runtime holds; every process of a run calls it.

    Args:
      label: heads the progress bar.
      quiet: no progress bar.
      kept: lines of these results by name, which an interrupted run has left; in processes other than the one that calls
        `finish` the names alone. A job that takes long leaves those out, and adds its own lines as they are done; others
        leave it alone.

    Returns:
      What `finish` takes.
    """

  def finish(self, found: Any) -> Outcome:
    """Turns what `run` returned into results; called in one process. May print warnings."""

  def report(self, summary: Mapping[str, Any]) -> str:
    """A summary as text for people."""


class TaskConfig(Protocol):
  """The configuration of a model, a frozen dataclass, as jobs use it.

  Attributes:
    data_dir: the corpus.
    max_steps: where training ends.
    log_every: steps between lines of the log.
    eval_every: steps between evaluations of the dev loss, each of which also saves.
    save_every: steps between checkpoints; 0: only when evaluating.
    keep_checkpoints: how many of the newest are kept, beside the best.
    keep_every: checkpoints of steps that are multiples of it are kept for good; 0: none.
    patience: evaluations without a gain in dev loss after which training ends; 0: any number.
    token_counts: names of the metrics that count a step's tokens. Their sum is the pace of training, and each is also
      logged as a total since the run began.
    subset: by what the dev loss is reported in parts, such as 'pair'. The metrics of a batch of dev text hold
      'xent' (summed, in nats) and 'target_tokens', and both again as vectors over DevInput.subsets:
      'xent_by_<subset>' and 'target_tokens_by_<subset>'. They may hold 'choices_by_<subset>', {layer: [P, E]}, and the
      metrics of a training step 'routing', {layer: RoutingStats}, which a report on the run shows.
  """

  data_dir: str
  max_steps: int
  log_every: int
  eval_every: int
  save_every: int
  keep_checkpoints: int
  keep_every: int
  patience: int
  token_counts: tuple[str, ...]
  subset: str

  def program(self) -> Program:
    """The model and how it learns."""

  def check_corpus(self) -> None:
    """Raises UserError unless the text of training and of the dev loss is there; quick, before anything is made."""

  def prepare(self, folder: str, begun: bool) -> TaskConfig:
    """Settles what depends on the corpus, and puts the run's own files, such as vocabularies, into its folder.

    Args:
      folder: of the files; made if need be.
      begun: whether the run was begun before. Its files then stay as they are.

    Returns:
      The configuration that decoder and translate can use without the corpus; it names the files by full paths.
    """

  def with_files(self, rename: Callable[[str], str]) -> TaskConfig:
    """The configuration with another path for each of the run's own files."""

  def vocabs(self) -> Vocabs:
    """Loads the run's vocabularies; UserError where they do not fit the model."""

  def foreign_weights(self, vocabs: Vocabs, other: TaskConfig) -> set[str]:
    """First parts of names of weights that mean something else in a run of `other`, as with other vocabularies."""

  def train_input(self, vocabs: Vocabs, cache_dir: str, feed: Feed) -> TrainInput:
    """Batches for training; `cache_dir` is for what only saves time."""

  def dev_input(self, vocabs: Vocabs, cache_dir: str, feed: Feed) -> DevInput:
    """Batches for the dev loss."""

  def scalars(self, metrics: Mapping[str, Any]) -> dict[str, float]:
    """What is logged of a training step's metrics, by name; 'loss' among them."""

  def held_out_job(self, vocabs: Vocabs, runner: Runner, options: HeldOutOptions) -> HeldOutJob:
    """What the decoder does with the weights that a runtime holds; reads the held-out text."""


@runtime_checkable
class SharesRows(Protocol):
  """A TaskConfig whose foreign weights have rows, axis V, of which some mean the same in another run."""

  def shared_rows(self, vocabs: Vocabs, other: Any) -> Mapping[str, tuple[Sequence[int], Sequence[int]]]:
    """By first part of the weights' names: rows here, and the rows that mean the same in a run of `other`."""


@runtime_checkable
class NamesCorpus(Protocol):
  """A TaskConfig that knows the files it learns from, which a run keeps the hashes of.

  Attributes:
    data_dir: folder of the corpus.
  """

  data_dir: str

  def corpus_files(self) -> Mapping[str, Sequence[str]]:
    """Paths of the files of training and of the dev loss, by part: 'train of de-en'."""


@runtime_checkable
class CountsUnits(Protocol):
  """A DevInput by whose words and bytes the loss is reported too.

  Attributes:
    units: numbers of 'words' and 'bytes' of the text.
  """

  units: Mapping[str, int]


@runtime_checkable
class KnowsEpoch(Protocol):
  """A TrainInput of text that ends.

  Attributes:
    steps_per_epoch: steps, about, in which as many examples are read as the text has.
  """

  steps_per_epoch: float


@runtime_checkable
class CountsExamples(Protocol):
  """A TrainInput that knows how many examples each part of the corpus has, by the names of TaskConfig.subset.

  Attributes:
    examples: by part.
  """

  examples: Mapping[str, int]


class InferenceProgram(NamedTuple):
  """A program at inference, function(model, nested weights, batch), and a batch for it."""

  function: Callable[[Any, Any, Batch], Any]
  batch: Batch
  by_rows: bool = False  # whether its result may stay split as the batch is


class Measurable(Protocol):
  """A TaskConfig whose programs tools can compile, count and compare without text: lingvo-moe cost, lingvo-moe parity."""

  def random_batch(self, seed: int = 0, full: bool = True) -> Batch:
    """Batch of random ids in full rows, or in rows with padding; its size is that of a batch in training."""

  def batch_shapes(self, training: bool = True) -> Batch:
    """Batch with the shapes of a real one, in training or in evaluation, that takes no memory."""

  def inference_programs(self) -> dict[str, InferenceProgram]:
    """Programs by name, with batches of evaluation's size; 'eval', the dev loss, among them."""

  def probe_search(self) -> InferenceProgram:
    """Beam search for a few rows, with beam_size results: what must be equal on every mesh."""


class LayerRouting(NamedTuple):
  """Choices of a MoE layer for the tokens of a sentence, T tokens and R choices each."""

  experts: np.ndarray  # int32 [T, R], the first choice first
  weights: np.ndarray  # float32 [T, R], by which outputs of experts are summed; 0: that expert was not chosen


class SentenceRouting(NamedTuple):
  """Routing of a sentence and its translation."""

  source: list[str]  # pieces that the encoder reads: a tag if the model has tags, the sentence, and the end
  target: list[str]  # pieces that the decoder reads: the beginning, and the translation
  layers: dict[str, LayerRouting]  # 'encoder/layer_01' over the source, 'decoder/layer_01' over the target


@runtime_checkable
class Routes(Protocol):
  """A TaskConfig whose model translates and can tell which experts it asks, if it has any."""

  def router(self, vocabs: Vocabs, runner: Runner) -> Any:
    """Finds the experts of each token; see tasks/mt/token_routing.py: Router. UserError where there is no expert."""


@runtime_checkable
class Generates(Protocol):
  """A TaskConfig whose model continues text."""

  def continuer(self, vocabs: Vocabs, runner: Runner, n_best: int = 1) -> Any:
    """Continues texts with the weights that a runtime holds; see tasks/lm/generation.py: Continuer."""


@runtime_checkable
class HasLanguages(Protocol):
  """A TaskConfig whose model translates between languages."""

  def pairs_of(self, subsets: Sequence[str]) -> list[tuple[str, str]]:
    """(source, target) languages of the run, given names of subsets of its dev loss; empty where none is known."""


@runtime_checkable
class Translates(Protocol):
  """A TaskConfig whose model answers lines, as the job translate needs: by translations, or by continuations.

  Attributes:
    max_length: tokens of a line, at most; of longer ones only the beginning is translated. 0: of any length.
  """

  max_length: int

  def translator(self, vocabs: Vocabs, runner: Runner, n_best: int = 1) -> Any:
    """Translates with the weights that a runtime holds; see tasks/mt/decoding.py: Translator."""

  def choose_target(self, vocabs: Vocabs, asked: str | None) -> str | None:
    """The target language to pass to the translator, given the one that was asked for."""


class TextFunction(Protocol):
  """Function of text in the graph, from strings to strings, with all that it needs beside weights.

  Attributes:
    name: name of the function.
    inputs: specs of its arguments by name, in order.
    about: what its inputs and outputs are: {'inputs': {name: meaning}, 'outputs': {name: meaning}}.
    resources: what it reads beside weights, such as tokenisers, for a SavedModel to keep.
  """

  name: str
  inputs: Mapping[str, Any]
  about: Mapping[str, Mapping[str, str]]
  resources: Sequence[Any]

  def __call__(self, weights: Mapping[str, Any], *arguments: Any) -> dict[str, Any]:
    """Tensors by name, for weights by flat name."""


class DecodingSteps(NamedTuple):
  """Encoder and one step of decoding as functions of flat weights, for static shapes."""

  encode: Callable[[Any, Batch], Any]  # (weights, source) -> cache
  decode_step: Callable[[Any, Batch, Any], Any]  # (weights, inputs, cache) -> (logits, cache)
  source: Batch  # arrays of the right shapes
  inputs: Batch


@runtime_checkable
class AnswersText(Protocol):
  """A TaskConfig whose model can be exported as a function of text."""

  def text_function(self, vocabs: Vocabs) -> TextFunction:
    """The function, for weights of program()."""

  def decoding_steps(self, rows: int) -> DecodingSteps:
    """Encoder and decoding step for so many lines, for weights of program()."""


@runtime_checkable
class HasExperts(Protocol):
  """A TaskConfig whose model may do without some of its experts."""

  def with_share_of_experts(self, share: float) -> TaskConfig:
    """The configuration with a share of the experts of each MoE layer; UserError where its gate needs all."""
