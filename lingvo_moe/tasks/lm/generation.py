"""Continuations of prompts: samples, greedy ones, or those of beam search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.search import beam_search
from lingvo_moe.search import sampling
from lingvo_moe.tasks.lm.model import LanguageModel
from lingvo_moe.tasks.plain_text import escapes
from lingvo_moe.tasks.plain_text.inference import at_inference
from lingvo_moe.tasks.plain_text.vocab import TextVocab
from lingvo_moe.tasks.task import Runner
from lingvo_moe.tasks.vocab import BOS
from lingvo_moe.tasks.vocab import EOS
from lingvo_moe.tasks.vocab import PAD

if TYPE_CHECKING:
  from lingvo_moe.tasks.lm.config import LanguageConfig

_ROWS = 16  # prompts of a batch
_ROUND = 16  # lengths of padded prompts are multiples of it, so that few shapes are compiled


class Continuation(NamedTuple):
  """Continuation of a prompt."""

  text: str
  log_prob: float  # natural log, summed over its symbols and the end if it has one
  score: float  # by which continuations are ranked: log_prob, in beam search over the length penalty
  ids: tuple[int, ...] = ()


class Continued(NamedTuple):
  """Continuations of some prompts."""

  hypotheses: list[list[Continuation]]  # of each prompt in the order given
  truncated: list[int]  # none: prompts may be of any length


def width_of(config: LanguageConfig, n_best: int) -> int:
  """W: continuations of a prompt that are computed side by side."""
  return config.beam_size if config.search == 'beam' else n_best


def prompt_arrays(
  prompts: Sequence[np.ndarray], config: LanguageConfig, width: int, rows: int = 0, first: int = 0
) -> dict[str, np.ndarray]:
  """Batch of prompts that begin with bos: all symbols but the last of each, padded, the last ones, and lengths.

  Args:
    prompts: ids.
    config: its max_new_tokens is the limit of each.
    width: W, from `width_of`; it divides the padded length, as static shapes need.
    rows: B; rows without a prompt get no continuation.
    first: number of the first prompt, for its random key.
  """
  rows = rows or len(prompts)
  length = _padded(max(len(p) - 1 for p in prompts), width)
  ids_BT = np.zeros([rows, length], np.int32)
  batch = {name: np.zeros([rows], np.int32) for name in ('last', 'lengths', 'limits', 'numbers')}
  for row, prompt in enumerate(prompts):
    ids_BT[row, : len(prompt) - 1] = prompt[:-1]
    batch['last'][row], batch['lengths'][row] = prompt[-1], len(prompt) - 1
    batch['limits'][row], batch['numbers'][row] = config.max_new_tokens, first + row
  return {'ids': ids_BT, **batch}


def _padded(length: int, width: int) -> int:
  unit = math.lcm(_ROUND, width)
  return max(1, -(-length // unit)) * unit


def prompt_shapes(config: LanguageConfig, width: int) -> dict[str, np.ndarray]:
  """Batch with the shapes of one of prompts as long as a window, to be continued `width` times each."""
  rows = config.rows_of_batch(training=False)
  zeros = lambda *shape: np.broadcast_to(np.zeros([], np.int32), shape)
  return {
    'ids': zeros(rows, _padded(config.window, width)),
    **dict.fromkeys(('last', 'lengths', 'limits', 'numbers'), zeros(rows)),
  }


def go_on(
  model: LanguageModel, theta: Theta, batch: Mapping[str, tf.Tensor], config: LanguageConfig, n_best: int
) -> beam_search.Hypotheses:
  """Continues prompts as config.search says: a pure function of weights and batch, at inference.

  Args:
    model: model of the configuration.
    theta: nested weights.
    batch: from `prompt_arrays`.
    config: its fields from `search` on, beam_size and length_norm_alpha.
    n_best: continuations of each prompt: independent samples, or the best of a beam; 1 if greedy.
  """
  max_steps = ops.loop_bound(batch['limits'], config.max_new_tokens)
  width = width_of(config, n_best)

  def search_rows(batch):
    lengths_B = batch['lengths']
    cache = model.read(theta, batch['ids'], lengths_B, max_steps, width)
    step = lambda ids_BW, now, cache: model.decode_step(theta, ids_BW, now, lengths_B, cache)
    rows, length = sizes(batch['ids'])
    shared = {
      'first_B': batch['last'],
      'max_steps': max_steps,
      'max_lengths_B': batch['limits'],
      'bos_id': BOS,
      'eos_id': EOS,
      'pad_id': PAD,
      'keep': model.keep_positions,
      'prefix_BU': tf.cast(tf.range(length)[tf.newaxis] < lengths_B[:, tf.newaxis], tf.float32),
    }
    if config.search == 'beam':
      return beam_search.beam_search(
        step,
        cache,
        batch_size=rows,
        beam_size=width,
        vocab_size=model.target_embedding.vocab_size,
        length_norm_alpha=config.length_norm_alpha,
        n_best=n_best,
        **shared,
      )
    temperature = 0.0 if config.search == 'greedy' else config.sample_temperature
    sampler = sampling.Sampler(temperature, config.top_k, config.top_p)
    key_B = prng.fold(prng.key(config.sample_seed, 'sample'), batch['numbers'])
    key_BW = prng.fold(key_B[:, tf.newaxis], tf.range(width)[tf.newaxis])
    return sampling.sample(step, cache, sampler, key_BW=key_BW, **shared)

  return ops.map_rows(search_rows, batch, beam_search.specs(n_best))


class Continuer:
  """Continues prompts with the current weights of a runtime.

  A continuation depends on its prompt, on the number of the prompt since the Continuer was made, and on the seed.

  Args:
    config: configuration of the run.
    vocab: its vocabulary.
    runner: a runtime.
    n_best: continuations of each prompt.
  """

  def __init__(self, config: LanguageConfig, vocab: TextVocab, runner: Runner, n_best: int = 1):
    if config.search == 'greedy' and n_best > 1:
      raise UserError(f'a prompt has one greedy continuation; saw {n_best} wanted: --search=sample or beam has several')
    if config.search == 'beam' and n_best > config.beam_size:
      raise UserError(
        f'a beam of {config.beam_size} has no {n_best} continuations: ask for at most {config.beam_size}, or raise '
        '--beam_size'
      )
    groups = runner.row_multiple
    self._config = at_inference(config, runner, config.window)
    self._vocab = vocab
    self._rows = -(-_ROWS // groups) * groups
    self._width = width_of(config, n_best)
    self._done = 0
    program = self._config.program()
    self._go_on = runner.function(
      lambda weights, batch: go_on(program.model, program.theta(weights), batch, self._config, n_best)
    )

  def translate(
    self, prompts: Sequence[str], target: str | None = None, progress: Callable[[int], object] | None = None
  ) -> Continued:
    """Continuations of lines in which a line break is written as a backslash and an n, and so it is in the results."""
    del target
    found = self.continue_texts([escapes.unescaped(prompt) for prompt in prompts], progress)
    return Continued([[c._replace(text=escapes.escaped(c.text)) for c in of_prompt] for of_prompt in found], [])

  def continue_texts(
    self, prompts: Sequence[str], progress: Callable[[int], object] | None = None, first: int | None = None
  ) -> list[list[Continuation]]:
    """Continuations of each prompt; an empty prompt gives a text from its beginning.

    Args:
      prompts: any number of texts.
      progress: called with the number of prompts done since the last call.
      first: number of the first prompt, on which samples depend; None: prompts are counted from one call to the next.
    """
    first = self._done if first is None else first
    ids = [np.concatenate([[BOS], self._vocab.encode(prompt)]).astype(np.int32) for prompt in prompts]
    found = []
    for begin in range(0, len(ids), self._rows):
      part = ids[begin : begin + self._rows]
      rows = self._rows if len(ids) > 1 or self._config.num_groups > 1 else 1
      hypotheses = self._go_on(prompt_arrays(part, self._config, self._width, rows, first + begin))
      found += [self._read(hypotheses, row) for row in range(len(part))]
      if progress is not None:
        progress(len(part))
    self._done = first + len(ids)
    return found

  def _read(self, hypotheses: beam_search.Hypotheses, row: int) -> list[Continuation]:
    found = []
    for w, length in enumerate(hypotheses.lengths_BW[row].tolist()):
      ids = hypotheses.ids_BWT[row, w, :length].tolist()
      log_prob, score = float(hypotheses.log_probs_BW[row, w]), float(hypotheses.scores_BW[row, w])
      if not np.isfinite(log_prob):
        if found:
          continue
        raise UserError(
          'a prompt has no continuation of finite probability: weights must be finite; use an earlier step'
        )
      found.append(Continuation(self._vocab.decode(ids), log_prob, score, tuple(ids)))
    return found
