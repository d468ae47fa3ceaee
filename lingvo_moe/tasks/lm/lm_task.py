"""Language modelling as a task of the jobs."""

import dataclasses
import functools
from typing import Any

import numpy as np

from lingvo_moe.models.batches import zeros
from lingvo_moe.search.repetition import FIELDS
from lingvo_moe.tasks import metrics, task
from lingvo_moe.tasks import plain_text_task as plain_text
from lingvo_moe.tasks.lm import generation
from lingvo_moe.tasks.lm.generation import Continuer
from lingvo_moe.tasks.lm.lm_config import LanguageConfig
from lingvo_moe.tasks.lm.lm_input import BATCH_KEYS, HeldOutInput, TrainInput
from lingvo_moe.vocab.plain_text_vocab import TextVocab
from lingvo_moe.vocab.sentencepiece_vocab import BOS

GENERATION = ('search', 'sample_temperature', 'top_k', 'top_p', 'sample_seed', 'max_new_tokens')
_SAMPLING = (*GENERATION, 'num_samples', 'prompt')
BEAM = ('beam_size', 'length_norm_alpha', 'length_norm_k', 'early_stopping')


class PerplexityJob(plain_text.PerplexityJob):
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
    names = () if options.score else (*_SAMPLING, *(BEAM if config.search == 'beam' else ()))
    names += FIELDS if config.repetition and not options.score else ()
    self._set_settings(('eval_stride', *names), text)
    self.texts = {name: repr(counts) for name, counts in zip(self._input.subsets, self._input.files, strict=True)}
    count = 0 if options.score else min(config.num_samples, 1 if config.search == 'greedy' else config.num_samples)
    self._continuer = Continuer(self._config, vocab, runner, count) if count else None

  def _numbers(self, file: int | None, nats: float, tokens: float) -> dict[str, Any]:
    if file is None:
      return {**metrics.perplexity(nats, tokens), **metrics.by_unit(nats, **self._input.units)}
    words, size, count = self._input.files[file]
    return {'documents': count, **metrics.perplexity(nats, tokens), **metrics.by_unit(nats, words, size)}

  def _make_samples(self) -> list[dict[str, Any]]:
    prompt = self._config.prompt
    [samples] = self._continuer.translate([prompt]).hypotheses if self._continuer else [[]]
    return [{'prompt': prompt, 'text': h.text, 'log_prob': h.log_prob} for h in samples]

  def _in_summary(self, sample: dict[str, Any]) -> str:
    return sample['text']

  def _shown(self, number: int, sample: str) -> list[str]:
    return [f'sample {number}:', sample]


class LanguageTask(plain_text.PlainTextTask):
  """Language modelling: perplexity of text, and continuations of prompts of any length."""

  config: LanguageConfig
  continues_text = True
  exports_class = 'lingvo_moe.addons.export.language_exports.LanguageExports'
  train_input_class = TrainInput
  dev_input_class = HeldOutInput
  held_out_job_class = PerplexityJob
  translator_class = generation.Continuer

  def random_batch(self, seed: int = 0, full: bool = True) -> task.Batch:
    """Batch of random ids: rows of `window` tokens, or of 1 to `window` with padding after them."""
    rng, window = np.random.default_rng(seed), self.config.window
    shape = self.config.rows_of_batch(), window
    lengths_B1 = np.full([shape[0], 1], window) if full else rng.integers(1, window + 1, [shape[0], 1])
    segments_BT = (np.arange(window) < lengths_B1).astype(np.int32)
    labels_BT = rng.integers(4, self.config.model().target_embedding.vocab_size, shape, np.int32) * segments_BT
    inputs_BT = np.concatenate([np.full([shape[0], 1], BOS, np.int32), labels_BT[:, :-1]], axis=1) * segments_BT
    return {'inputs': inputs_BT, 'labels': labels_BT, 'segments': segments_BT}

  def batch_shapes(self, training: bool = True) -> task.Batch:
    return dict.fromkeys(BATCH_KEYS, zeros(self.config.rows_of_batch(training), self.config.window))

  def inference_programs(self) -> dict[str, task.InferenceProgram]:
    shapes, width = self.batch_shapes(training=False), self.config.beam_size
    return {
      'eval': task.InferenceProgram(lambda model, theta, batch: model.loss(theta, batch)[1], shapes),
      'score': task.InferenceProgram(lambda model, theta, batch: model.token_scores(theta, batch), shapes),
      'decode': _search(self.config, generation.prompt_shapes(self.config, width)),
    }

  def probe_search(self) -> task.InferenceProgram:
    """Beam search after the beginnings of the first rows of a random batch, with all hypotheses."""
    window = self.config.window
    steps = min(self.config.max_new_tokens, window)
    config = dataclasses.replace(self.config, search='beam', max_new_tokens=steps)
    ids_BT = self.random_batch(full=True)['inputs'][: config.num_groups]
    prompts = [row[: 1 + i % (window // 2)] for i, row in enumerate(ids_BT)]
    return _search(config, generation.prompt_arrays(prompts, config, config.beam_size))


def _search(config: LanguageConfig, batch: task.Batch) -> task.InferenceProgram:
  search = functools.partial(generation.generate, config=config, n_best=config.beam_size)
  return task.InferenceProgram(search, batch)
