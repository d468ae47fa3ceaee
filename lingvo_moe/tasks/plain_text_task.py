"""Task of a model of plain text: its corpus, vocabulary and held-out evaluation, and text from text in batches."""

import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lingvo_moe.core.progress import Progress
from lingvo_moe.corpora import documents
from lingvo_moe.inputs import feed as feed_lib
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.plain_text_config import PlainTextConfig
from lingvo_moe.search.beam_search import Hypotheses
from lingvo_moe.storage import log_directory
from lingvo_moe.tasks import inference, metrics, task
from lingvo_moe.tasks.inference import DecodedIds
from lingvo_moe.tasks.task import Task
from lingvo_moe.text import translator
from lingvo_moe.vocab import plain_text_vocab as vocab_lib

ROWS = 16  # texts of a batch


class PlainTextTask(Task):
  """Base of language modelling and denoising."""

  config: PlainTextConfig
  train_input_class: type[feed_lib.TrainInput]  # its TrainInput, of (config, vocabs, cache_dir, feed)
  dev_input_class: type[feed_lib.DevInput]  # its DevInput, of the same
  held_out_job_class: type[task.HeldOutJob]  # its HeldOutJob, of (config, vocabs, runner, options)
  translator_class: type[task.Translator]  # its Translator, of (config, vocabs, runner, n_best)

  @functools.cached_property
  def vocabs(self) -> Any:
    return vocab_lib.load(self.config)

  def corpus_files(self) -> dict[str, list[str]]:
    return {split: documents.find_files(self.config.data_dir, split) for split in ('train', 'dev')}

  def prepare(self, folder: str, resumed: bool) -> PlainTextConfig:
    return vocab_lib.prepare(self.config, folder, resumed)

  def with_files(self, rename: Callable[[str], str]) -> PlainTextConfig:
    named = self.config.vocab != 'byte'  # bytes have no file
    return dataclasses.replace(self.config, vocab=rename(self.config.vocab)) if named else self.config

  def train_input(self, cache_dir: str, feed: Feed) -> feed_lib.TrainInput:
    return self.train_input_class(self.config, self.vocabs, cache_dir, feed)

  def dev_input(self, cache_dir: str, feed: Feed) -> feed_lib.DevInput:
    return self.dev_input_class(self.config, self.vocabs, cache_dir, feed)

  def held_out_job(self, runner: task.Runner, options: task.HeldOutOptions) -> task.HeldOutJob:
    """Perplexity of held-out text, and but for options.score some samples."""
    translator.Translator().check(options.request)
    return self.held_out_job_class(self.config, self.vocabs, runner, options)

  def translator(self, runner: task.Runner, n_best: int = 1) -> task.Translator:
    return self.translator_class(self.config, self.vocabs, runner, n_best)

  def foreign_weights(self, other: Task) -> dict[str, tuple[list[int], list[int]]]:
    """The embeddings, whose vocabulary may be another there."""
    same = isinstance(other, PlainTextTask) and other.vocabs.fingerprint == self.vocabs.fingerprint
    return {} if same else dict.fromkeys(('target_embedding', 'output_embedding'), ([], []))


class FileSums(NamedTuple):
  """Sums over the tokens of each file, and samples as they are written."""

  nats: np.ndarray
  tokens: np.ndarray
  samples: list[dict[str, Any]]


class PerplexityJob(task.HeldOutJob):
  """Perplexity of every file, and samples: perplexity.json and, a line for each sample, samples.jsonl.

  With `options.score` there are no samples.
  """

  summary_file = log_directory.PERPLEXITY
  suffix = '.jsonl'
  input_class: ClassVar[type]  # HeldOutInput of the task
  columns: ClassVar[tuple[metrics.Column, ...]]
  in_events: ClassVar[tuple[str, ...]] = ('perplexity',)  # numbers of each file for the event file

  def __init__(self, config: Any, vocab: Any, runner: task.Runner, options: task.HeldOutOptions) -> None:
    self._config = config.for_inference(runner.row_multiple, config.row_length, options.batch_tokens)
    with tempfile.TemporaryDirectory() as folder:
      feed = Feed(quiet=True)
      self._input = self.input_class(self._config, vocab, folder, feed, options.split, options.max_sentences)
    self._evaluate = runner.function(self._config.program().eval_step)

  def _set_settings(self, names: tuple[str, ...], text: str) -> None:
    """Settings of the results: fields of the configuration, and the hash of a description of the text."""
    self.settings = {name: getattr(self._config, name) for name in names}
    self.settings['text'] = hashlib.sha256(text.encode()).hexdigest()[:16]

  def run(self, label: str, quiet: bool = False, unfinished: MutableMapping[str, str] | None = None) -> FileSums:
    """Evaluates and samples with the weights that the runtime holds."""
    nats, tokens = np.zeros([2, len(self._input.subsets)])
    with Progress(len(self._input), 'batch', label=label, quiet=quiet) as progress:
      for batch in self._input:
        of_batch = self._evaluate(batch)
        nats += of_batch['xent_by_file']
        tokens += of_batch['target_tokens_by_file']
        progress.update()
    return FileSums(nats, tokens, self._make_samples())

  def finish(self, computed: FileSums) -> task.Outcome:
    names = self._input.subsets
    files = {name: self._numbers(i, computed.nats[i], computed.tokens[i]) for i, name in enumerate(names)}
    total = self._numbers(None, computed.nats.sum(), computed.tokens.sum())
    scalars = {f'{what}/{name}': of_file[what] for name, of_file in files.items() for what in self.in_events}
    lines = [json.dumps(sample, ensure_ascii=False) for sample in computed.samples]
    samples = list(map(self._in_summary, computed.samples))
    return task.Outcome(
      {'samples': lines} if lines else {}, scalars, {'files': files, 'all': total, 'samples': samples}
    )

  def report(self, summary: Mapping[str, Any]) -> str:
    rows = {**summary['files'], **({'all': summary['all']} if len(summary['files']) > 1 else {})}
    lines = [metrics.table('file', rows, self.columns)]
    for number, sample in enumerate(summary['samples'], start=1):
      lines += ['', *self._shown(number, sample)]
    return '\n'.join(lines)

  def _numbers(self, file: int | None, nats: float, tokens: float) -> dict[str, Any]:
    """Numbers of a file, by its place; None: of all."""
    return metrics.perplexity(nats, tokens)

  def _make_samples(self) -> list[dict[str, Any]]:
    raise NotImplementedError

  def _in_summary(self, sample: dict[str, Any]) -> Any:
    return sample

  def _shown(self, number: int, sample: Any) -> list[str]:
    """Lines of a sample of the summary, for people."""
    raise NotImplementedError


class TextGenerator(translator.Generator):
  """Base of what continues texts, or fills them in, with the current weights of a runtime.

  `search` is a function(model, theta, batch, config).
  """

  def __init__(self, config: Any, vocab: Any, runner: task.Runner, search: Callable[..., Hypotheses]):
    self._config = config = config.for_inference(runner.row_multiple, config.row_length)
    self._vocab = vocab
    self._groups = runner.row_multiple
    program = config.program()
    self._function = lambda search: runner.function(
      lambda weights, batch: search(program.model, program.theta(weights), batch, config)
    )
    self._search = self._function(search)

  def _batch(self, texts: Sequence[np.ndarray], rows: int, first: int) -> task.Batch:
    """Batch of `rows` rows of some texts, as ids; `first` is the number of the first text."""
    raise NotImplementedError

  def decode(self, texts: Sequence[np.ndarray], first: int = 0) -> Iterator[list[DecodedIds]]:
    """Hypotheses of each text, given as ids."""
    rows = -(-ROWS // self._groups) * self._groups if len(texts) > 1 else self._groups
    for start in range(0, len(texts), rows):
      part = texts[start : start + rows]
      hypotheses = self._search(self._batch(part, rows, first + start))
      yield from (inference.decoded(hypotheses, row) for row in range(len(part)))
