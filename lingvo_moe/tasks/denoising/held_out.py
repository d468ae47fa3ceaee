"""Held-out evaluation of a denoising model: perplexity of the targets of each file, and windows filled in."""

from __future__ import annotations

from typing import Any

from lingvo_moe.tasks import metrics, task
from lingvo_moe.tasks.denoising.config import DenoisingConfig
from lingvo_moe.tasks.denoising.filling import Filler
from lingvo_moe.tasks.denoising.input import HeldOutInput
from lingvo_moe.tasks.denoising.vocab import SentinelVocab
from lingvo_moe.tasks.plain_text import held_out

_SEARCH = ('num_samples', 'beam_size', 'length_norm_alpha')


class PerplexityJob(held_out.PerplexityJob):
  """Perplexity of the targets of every file, sentinels and ends included, and the first windows of each filled in."""

  input_class = HeldOutInput
  columns = (
    metrics.Column('targets', 'tokens', '9d'),
    metrics.Column('nats a target', 'cross_entropy', '13.4f'),
    metrics.Column('perplexity', 'perplexity', '10.4g'),
  )

  def __init__(self, config: DenoisingConfig, vocab: SentinelVocab, runner: task.Runner, options: task.HeldOutOptions):
    super().__init__(config, vocab, runner, options)
    self._vocab = vocab
    self.texts, examples = self._input.fingerprints, self._input.examples
    self._set_settings(() if options.score else _SEARCH, repr((self.texts, len(examples))))
    count = 0 if options.score else config.num_samples
    self._sampled = [e for i in range(len(self._input.subsets)) for e in [e for e in examples if e[0] == i][:count]]
    self._filler = Filler(self._config, vocab, runner)

  def _make_samples(self) -> list[dict[str, Any]]:
    samples = []
    answers = self._filler.decode([inputs for _, inputs, _ in self._sampled])
    for (file, inputs, targets), (best, *_) in zip(self._sampled, answers, strict=True):
      sides = {'inputs': inputs, 'targets': targets, 'answer': best.ids}
      texts = {name: self._vocab.decode(ids) for name, ids in sides.items()}
      filled = {'filled': self._vocab.fill(inputs, best.ids), 'log_prob': best.log_prob}
      samples.append({'file': self._input.subsets[file], **texts, **filled})
    return samples

  def _shown(self, number: int, sample: dict[str, Any]) -> list[str]:
    return [f'{what} {number}: {sample[what]}' for what in ('inputs', 'targets', 'answer')]
