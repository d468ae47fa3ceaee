"""Held-out evaluation of a language model: perplexity of each file, and continuations of a prompt."""

from __future__ import annotations

from typing import Any

from lingvo_moe.tasks import metrics, task
from lingvo_moe.tasks.lm.config import LanguageConfig
from lingvo_moe.tasks.lm.generation import Continuer
from lingvo_moe.tasks.lm.input import HeldOutInput
from lingvo_moe.tasks.plain_text import held_out
from lingvo_moe.tasks.plain_text.vocab import TextVocab

_SAMPLING = ('search', 'sample_temperature', 'top_k', 'top_p', 'sample_seed', 'num_samples', 'prompt', 'max_new_tokens')
_BEAM = ('beam_size', 'length_norm_alpha')


class PerplexityJob(held_out.PerplexityJob):
  """Perplexity of every file a token and a word, bits a byte, and continuations of the prompt."""

  input_class = HeldOutInput
  columns = (
    metrics.Column('tokens', 'tokens', '9d'),
    metrics.Column('nats a token', 'cross_entropy', '12.4f'),
    metrics.Column('perplexity a token', 'perplexity', '18.4g'),
    metrics.Column('a word', 'perplexity_per_word', '7.4g'),
    metrics.Column('bits a byte', 'bits_per_byte', '11.4f'),
  )
  in_events = ('perplexity', 'bits_per_byte')

  def __init__(self, config: LanguageConfig, vocab: TextVocab, runner: task.Runner, options: task.HeldOutOptions):
    super().__init__(config, vocab, runner, options)
    text = repr((self._input.subsets, self._input.files)) + self._input.fingerprint
    names = () if options.score else (*_SAMPLING, *(_BEAM if config.search == 'beam' else ()))
    self._set_settings(('eval_stride', *names), text)
    self.texts = {name: repr(counts) for name, counts in zip(self._input.subsets, self._input.files, strict=True)}
    count = 0 if options.score else min(config.num_samples, 1 if config.search == 'greedy' else config.num_samples)
    self._continuer = Continuer(self._config, vocab, runner, count) if count else None

  def _numbers(self, file: int | None, nats: float, tokens: float) -> dict[str, Any]:
    if file is None:
      return metrics.perplexities(nats, tokens, **self._input.units)
    words, size, count = self._input.files[file]
    return {'documents': count, **metrics.perplexities(nats, tokens, words=words, bytes=size)}

  def _make_samples(self) -> list[dict[str, Any]]:
    prompt = self._config.prompt
    [found] = self._continuer.translate([prompt]).hypotheses if self._continuer else [[]]
    return [{'prompt': prompt, 'text': h.text, 'log_prob': h.log_prob} for h in found]

  def _in_summary(self, sample: dict[str, Any]) -> str:
    return sample['text']

  def _shown(self, number: int, sample: str) -> list[str]:
    return [f'sample {number}:', sample]
