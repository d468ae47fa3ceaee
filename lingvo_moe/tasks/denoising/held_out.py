"""Held-out evaluation of a denoising model: perplexity of the targets of each file, and windows filled in."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lingvo_moe.core import log_directory
from lingvo_moe.tasks import metrics
from lingvo_moe.tasks.denoising.filling import Filled
from lingvo_moe.tasks.denoising.filling import Filler
from lingvo_moe.tasks.denoising.input import HeldOutInput
from lingvo_moe.tasks.denoising.vocab import SentinelVocab
from lingvo_moe.tasks.plain_text import losses_by_file
from lingvo_moe.tasks.plain_text.inference import at_inference
from lingvo_moe.tasks.task import Feed
from lingvo_moe.tasks.task import HeldOutOptions
from lingvo_moe.tasks.task import Outcome
from lingvo_moe.tasks.task import Runner

if TYPE_CHECKING:
  from lingvo_moe.tasks.denoising.config import DenoisingConfig

_SEARCH = ('num_samples', 'beam_size', 'length_norm_alpha')


class Found(NamedTuple):
  """Sums over the targets of each file, and the windows that were filled in, best first."""

  nats: np.ndarray
  tokens: np.ndarray
  filled: list[list[Filled]]


class DenoisingJob:
  """Perplexity of the targets of every file, sentinels and ends included, and the first windows of each filled in.

  It writes perplexity.json and samples.jsonl, a line for each window that is filled in; with `score` no windows.
  """

  summary_file = log_directory.PERPLEXITY
  suffix = '.jsonl'

  def __init__(self, config: DenoisingConfig, vocab: SentinelVocab, runner: Runner, options: HeldOutOptions):
    config = at_inference(config, runner, config.inputs_length, options.batch_tokens)
    self._vocab = vocab
    with tempfile.TemporaryDirectory() as folder:
      self._input = HeldOutInput(config, vocab, folder, Feed(quiet=True), options.split, options.max_sentences)
    self._eval = runner.function(config.program().eval_step)
    wanted = 0 if options.score else config.num_samples
    self._samples = [
      example
      for file in range(len(self._input.subsets))
      for example in [example for example in self._input.examples if example[0] == file][:wanted]
    ]
    self._filler = Filler(config, vocab, runner) if self._samples else None
    self.texts = self._input.fingerprints
    text = repr((self.texts, len(self._input.examples)))
    self.settings = {name: getattr(config, name) for name in (() if options.score else _SEARCH)}
    self.settings['text'] = hashlib.sha256(text.encode()).hexdigest()[:16]

  def run(self, label: str, quiet: bool = False, kept: MutableMapping[str, str] | None = None) -> Found:
    """Evaluates and fills in with the weights that the runtime holds."""
    del kept  # one pass over the text is short
    nats, tokens = losses_by_file.sums(self._eval, self._input, len(self._input.subsets), label, quiet)
    filled = self._filler.fill([inputs[:-1] for _, inputs, _ in self._samples]) if self._filler else []
    return Found(nats, tokens, filled)

  def finish(self, found: Found) -> Outcome:
    """Works out perplexities, and writes samples as text."""
    names = self._input.subsets
    files = {name: metrics.perplexity(*sums) for name, *sums in zip(names, found.nats, found.tokens, strict=True)}
    scalars = {f'perplexity/{name}': of['perplexity'] for name, of in files.items()}
    samples = []
    for (file, inputs, targets), (best, *_) in zip(self._samples, found.filled, strict=True):
      sides = {'inputs': inputs, 'targets': targets, 'answer': best.ids}
      texts = {name: self._vocab.decode(ids) for name, ids in sides.items()}
      samples.append({'file': names[file], **texts, 'filled': best.text, 'log_prob': best.log_prob})
    lines = {'samples': [json.dumps(sample, ensure_ascii=False) for sample in samples]} if samples else {}
    total = metrics.perplexity(found.nats.sum(), found.tokens.sum())
    return Outcome(lines, scalars, {'files': files, 'all': total, 'samples': samples})

  def report(self, summary: Mapping[str, Any]) -> str:
    """The summary for people."""
    rows = {**summary['files'], **({'all': summary['all']} if len(summary['files']) > 1 else {})}
    width = max(len('file'), *map(len, rows))
    lines = [f'{"file":{width}}    targets  nats a target  perplexity']
    for name, of in rows.items():
      lines.append(f'{name:{width}}  {of["tokens"]:9d}  {of["cross_entropy"]:13.4f}  {of["perplexity"]:10.4g}')
    for number, sample in enumerate(summary['samples'], start=1):
      lines += ['', *(f'{what} {number}: {sample[what]}' for what in ('inputs', 'targets', 'answer'))]
    return '\n'.join(lines)
