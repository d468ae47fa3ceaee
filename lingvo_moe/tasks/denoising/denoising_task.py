"""Denoising as a task of the jobs: filling in spans by beam search, perplexity, and batches to measure."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_moe.models.batches import BATCH_KEYS, SOURCE_KEYS, padded, zeros
from lingvo_moe.search.repetition import FIELDS
from lingvo_moe.tasks import inference, metrics, task
from lingvo_moe.tasks import plain_text_task as plain_text
from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
from lingvo_moe.tasks.denoising.denoising_input import HeldOutInput, TrainInput
from lingvo_moe.text import translator
from lingvo_moe.vocab import plain_text_vocab as vocab_lib
from lingvo_moe.vocab.sentencepiece_vocab import EOS
from lingvo_moe.vocab.sentinel_vocab import SentinelVocab

_ROUND = 16  # lengths of padded sources are multiples of it, so that few shapes are compiled
_SEARCH = ('num_samples', 'beam_size', 'length_norm_alpha', 'length_norm_k', 'early_stopping')


class Filler(plain_text.TextGenerator):
  """Fills in spans with the current weights of a runtime."""

  def __init__(self, config: DenoisingConfig, vocab: SentinelVocab, runner: task.Runner, n_best: int = 1):
    translator.check_n_best(n_best, config.beam_size)
    super().__init__(config, vocab, runner, functools.partial(inference.search, n_best=n_best))

  def _batch(self, texts: Sequence[np.ndarray], rows: int, first: int) -> task.Batch:
    length = -(-max(map(len, texts)) // _ROUND) * _ROUND
    return padded(texts, rows, length).as_source()

  def translate(self, texts: Sequence[str], target: str | None = None, first: int = 0) -> task.Answers:
    """Texts with their sentinels filled in; one without any stays as it is."""
    ids = [self._vocab.encode(text) for text in texts]
    answers = [[task.Hypothesis(text, 0.0, 0.0)] for text in texts]
    with_spans = [i for i, row in enumerate(ids) if any(map(self._vocab.is_sentinel, row))]
    room = self._config.inputs_length - 1
    sources = [np.append(ids[i][:room], EOS) for i in with_spans]
    for i, source, hypotheses in zip(with_spans, sources, self.decode(sources), strict=True):
      answers[i] = [task.Hypothesis(self._vocab.fill(source, h.ids), h.score, h.log_prob) for h in hypotheses]
    return task.Answers(answers, [i for i in with_spans if len(ids[i]) > room])


class PerplexityJob(plain_text.PerplexityJob):
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
    names = () if options.score else (*_SEARCH, *(FIELDS if config.repetition else ()))
    self._set_settings(names, repr((self.texts, len(examples))))
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


class DenoisingTask(plain_text.PlainTextTask):
  """Denoising: perplexity of what spans stand for, and texts with their spans filled in."""

  config: DenoisingConfig
  token_counts = ('source_tokens', 'target_tokens')
  train_input_class = TrainInput
  dev_input_class = HeldOutInput
  held_out_job_class = PerplexityJob
  translator_class = Filler

  @property
  def max_length(self) -> int:
    return self.config.inputs_length

  @functools.cached_property
  def vocabs(self) -> SentinelVocab:
    return SentinelVocab(vocab_lib.load(self.config), self.config.sentinels)

  def random_batch(self, seed: int = 0, full: bool = True) -> task.Batch:
    """Batch of random ids: full rows, or rows of 1 or more tokens with padding after them."""
    rng, rows = np.random.default_rng(seed), self.config.rows_of_batch()
    size = self.config.model().target_embedding.vocab_size
    one = lambda length: np.append(rng.integers(4, size, length - 1), EOS)
    some = lambda most: [one(most if full else rng.integers(1, most + 1)) for _ in range(rows)]
    inputs, targets = self.config.inputs_length, self.config.lengths.targets
    source = padded(some(inputs), rows, inputs)
    return source.as_source() | padded(some(targets), rows, targets).as_target()

  def batch_shapes(self, training: bool = True) -> task.Batch:
    rows = self.config.rows_of_batch(training)
    length = lambda key: self.config.inputs_length if key in SOURCE_KEYS else self.config.lengths.targets
    return {key: zeros(rows, length(key)) for key in BATCH_KEYS}

  def inference_programs(self) -> dict[str, task.InferenceProgram]:
    batch = self.batch_shapes(training=False)
    return inference.programs(batch, batch, self.config)

  def probe_search(self) -> task.InferenceProgram:
    return inference.probe(self.random_batch(full=False), self.config)
