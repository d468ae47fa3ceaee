"""Held-out evaluation of a language model: perplexity of each file, and continuations of a prompt."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lingvo_moe.core import log_directory
from lingvo_moe.tasks import metrics
from lingvo_moe.tasks.lm.generation import Continuation
from lingvo_moe.tasks.lm.generation import Continuer
from lingvo_moe.tasks.lm.input import HeldOutInput
from lingvo_moe.tasks.plain_text import losses_by_file
from lingvo_moe.tasks.plain_text.inference import at_inference
from lingvo_moe.tasks.plain_text.vocab import TextVocab
from lingvo_moe.tasks.task import Feed
from lingvo_moe.tasks.task import HeldOutOptions
from lingvo_moe.tasks.task import Outcome
from lingvo_moe.tasks.task import Runner

if TYPE_CHECKING:
  from lingvo_moe.tasks.lm.config import LanguageConfig

_SAMPLING = ('search', 'sample_temperature', 'top_k', 'top_p', 'sample_seed', 'num_samples', 'prompt', 'max_new_tokens')
_BEAM = ('beam_size', 'length_norm_alpha')


class Found(NamedTuple):
  """Sums over the tokens of each file, and continuations of the prompt."""

  nats: np.ndarray
  tokens: np.ndarray
  continuations: list[Continuation]


class PerplexityJob:
  """Perplexity of every file a token and a word, bits a byte, and continuations of the prompt.

  It writes perplexity.json and samples.jsonl, a line for each continuation; with `score` no continuations.
  """

  summary_file = log_directory.PERPLEXITY
  suffix = '.jsonl'

  def __init__(self, config: LanguageConfig, vocab: TextVocab, runner: Runner, options: HeldOutOptions):
    self._config = at_inference(config, runner, config.window, options.batch_tokens)
    with tempfile.TemporaryDirectory() as folder:
      self._input = HeldOutInput(self._config, vocab, folder, Feed(quiet=True), options.split, options.max_sentences)
    program = self._config.program()
    self._eval = runner.function(program.eval_step)
    self._names = ('eval_stride', *(() if options.score else _SAMPLING))
    self._names += _BEAM if config.search == 'beam' and not options.score else ()
    self._wanted = 0 if options.score else config.num_samples
    if config.search == 'greedy':
      self._wanted = min(1, self._wanted)
    self._continuer = Continuer(config, vocab, runner, self._wanted) if self._wanted else None
    text = repr((self._input.subsets, self._input.files)) + self._input.fingerprint
    self.settings = {name: getattr(config, name) for name in self._names}
    self.texts = {name: repr(counts) for name, counts in zip(self._input.subsets, self._input.files, strict=True)}
    self.settings['text'] = hashlib.sha256(text.encode()).hexdigest()[:16]

  def run(self, label: str, quiet: bool = False, kept: MutableMapping[str, str] | None = None) -> Found:
    """Evaluates and samples with the weights that the runtime holds."""
    del kept  # one pass over the text is short
    nats, tokens = losses_by_file.sums(self._eval, self._input, len(self._input.subsets), label, quiet)
    samples = self._continuer.continue_texts([self._config.prompt])[0] if self._continuer else []
    return Found(nats, tokens, samples)

  def finish(self, found: Found) -> Outcome:
    """Works out perplexities."""
    files = {}
    for name, nats, tokens, (words, size, count) in zip(
      self._input.subsets, found.nats, found.tokens, self._input.files, strict=True
    ):
      files[name] = {'documents': count, **metrics.perplexities(nats, tokens, words=words, bytes=size)}
    total = metrics.perplexities(found.nats.sum(), found.tokens.sum(), **self._input.units)
    scalars = {f'{what}/{name}': of[what] for name, of in files.items() for what in ('perplexity', 'bits_per_byte')}
    lines = {}
    if self._continuer:
      as_json = lambda c: json.dumps(
        {'prompt': self._config.prompt, 'text': c.text, 'log_prob': c.log_prob}, ensure_ascii=False
      )
      lines['samples'] = [as_json(c) for c in found.continuations]
    summary = {'files': files, 'all': total, 'samples': [c.text for c in found.continuations]}
    return Outcome(lines, scalars, summary)

  def report(self, summary: Mapping[str, Any]) -> str:
    """The summary for people."""
    rows = {**summary['files'], **({'all': summary['all']} if len(summary['files']) > 1 else {})}
    width = max(len('file'), *map(len, rows))
    lines = [f'{"file":{width}}     tokens  nats a token  perplexity a token  a word   bits a byte']
    for name, of in rows.items():
      lines.append(
        f'{name:{width}}  {of["tokens"]:9d}  {of["cross_entropy"]:12.4f}  {of["perplexity"]:18.4g}  '
        f'{of["perplexity_per_word"]:7.4g}  {of["bits_per_byte"]:11.4f}'
      )
    for number, text in enumerate(summary['samples'], start=1):
      lines += ['', f'sample {number}:', text]
    return '\n'.join(lines)
