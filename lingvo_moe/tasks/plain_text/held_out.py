"""Held-out evaluation of a model of plain text: perplexity of each file, and samples of what the model writes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lingvo_moe.core import log_directory
from lingvo_moe.core.progress import Progress
from lingvo_moe.tasks import metrics, task


class Computed(NamedTuple):
  """Sums over the tokens of each file, and samples as they are written."""

  nats: np.ndarray
  tokens: np.ndarray
  samples: list[dict[str, Any]]


class PerplexityJob(task.HeldOutJob):
  """Perplexity of every file, and samples: perplexity.json and, a line for each sample, samples.jsonl.

  Args:
    config: configuration of the run.
    vocab: its vocabulary.
    runner: a runtime.
    options: with `score` there are no samples.
  """

  summary_file = log_directory.PERPLEXITY
  suffix = '.jsonl'
  input_class: ClassVar[type]  # HeldOutInput of the task
  columns: ClassVar[tuple[metrics.Column, ...]]
  in_events: ClassVar[tuple[str, ...]] = ('perplexity',)  # numbers of each file for the event file

  def __init__(self, config: Any, vocab: Any, runner: task.Runner, options: task.HeldOutOptions) -> None:
    self._config = config.for_inference(runner.row_multiple, config.row_length, options.batch_tokens)
    with tempfile.TemporaryDirectory() as folder:
      feed = task.Feed(quiet=True)
      self._input = self.input_class(self._config, vocab, folder, feed, options.split, options.max_sentences)
    self._evaluate = runner.function(self._config.program().eval_step)

  def _set_settings(self, names: tuple[str, ...], text: str) -> None:
    """Settings of the results: fields of the configuration, and the hash of a description of the text."""
    self.settings = {name: getattr(self._config, name) for name in names}
    self.settings['text'] = hashlib.sha256(text.encode()).hexdigest()[:16]

  def run(self, label: str, quiet: bool = False, unfinished: MutableMapping[str, str] | None = None) -> Computed:
    """Evaluates and samples with the weights that the runtime holds."""
    del unfinished  # one pass over the text is short
    nats, tokens = np.zeros([2, len(self._input.subsets)])
    with Progress(len(self._input), 'batch', label=label, quiet=quiet) as progress:
      for batch in self._input:
        of_batch = self._evaluate(batch)
        nats += of_batch['xent_by_file']
        tokens += of_batch['target_tokens_by_file']
        progress.update()
    return Computed(nats, tokens, self._make_samples())

  def finish(self, computed: Computed) -> task.Outcome:
    """Works out perplexities."""
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
    """The summary for people."""
    rows = {**summary['files'], **({'all': summary['all']} if len(summary['files']) > 1 else {})}
    lines = [metrics.table('file', rows, self.columns)]
    for number, sample in enumerate(summary['samples'], start=1):
      lines += ['', *self._shown(number, sample)]
    return '\n'.join(lines)

  def _numbers(self, file: int | None, nats: float, tokens: float) -> dict[str, Any]:
    """Numbers of a file, by its place; None: of all."""
    del file
    return metrics.perplexity(nats, tokens)

  def _make_samples(self) -> list[dict[str, Any]]:
    raise NotImplementedError

  def _in_summary(self, sample: dict[str, Any]) -> Any:
    return sample

  def _shown(self, number: int, sample: Any) -> list[str]:
    """Lines of a sample of the summary, for people."""
    raise NotImplementedError
