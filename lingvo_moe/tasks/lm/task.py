"""Language modelling as a task of the jobs."""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_moe.tasks import task
from lingvo_moe.tasks.batches import shapes
from lingvo_moe.tasks.lm import generation
from lingvo_moe.tasks.lm.config import LanguageConfig
from lingvo_moe.tasks.lm.held_out import PerplexityJob
from lingvo_moe.tasks.lm.input import BATCH_KEYS, HeldOutInput, TrainInput
from lingvo_moe.tasks.plain_text.task import PlainTextTask
from lingvo_moe.tasks.vocab import BOS


class LanguageTask(PlainTextTask):
  """Language modelling: perplexity of text, and continuations of prompts of any length."""

  config: LanguageConfig
  continues_text = True
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
    return dict.fromkeys(BATCH_KEYS, shapes(self.config.rows_of_batch(training), self.config.window))

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
  search = lambda model, theta, batch: generation.generate(model, theta, batch, config, config.beam_size)
  return task.InferenceProgram(search, batch)
