"""Sampling: continuations drawn symbol by symbol, by temperature, top-k and top-p, or greedily.

A sample depends on its own random key alone, not on the batch or the device that it is drawn in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.search import beam_search, flat_sequence
from lingvo_moe.search.beam_search import NEG_INF, TENSORS, Hypotheses, StepFn
from lingvo_moe.search.continuations import LEAST_TEMPERATURE
from lingvo_moe.search.repetition import Repetition


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Choice of the next symbol. Its values are numbers, or all of them tensors [B] with one for each row."""

  temperature: float | tf.Tensor = 1.0  # divides the logits; 0 takes the likeliest symbol (greedy)
  # only the k likeliest symbols, and those that tie with the last of them, are drawn; 0: all
  top_k: int | tf.Tensor = 0
  # only the fewest likeliest symbols whose probabilities sum to p or more, and ties, are drawn (nucleus sampling,
  # Holtzman et al., arXiv 1904.09751); 1: all
  top_p: float | tf.Tensor = 1.0

  @classmethod
  def of_rows(cls, batch: Mapping[str, tf.Tensor]) -> Sampler:
    """Sampler with the values that a batch has for each row."""
    return cls(batch['temperature'], batch['top_k'], batch['top_p'])

  @property
  def _by_row(self) -> bool:
    return tf.is_tensor(self.temperature)

  def restricted(self, logits_BWV: tf.Tensor) -> tf.Tensor:
    """Logits at the temperature, -inf for the symbols that are never drawn. Top-p follows top-k."""
    logits_BWV -= tf.reduce_max(logits_BWV, axis=-1, keepdims=True)  # the largest is 0 at any temperature
    logits_BWV /= tf.maximum(_column(self.temperature, tf.float32), LEAST_TEMPERATURE)
    size = logits_BWV.shape[-1]
    if self._by_row:
      restricts = tf.reduce_any((self.top_k > 0) | (self.top_p < 1))
      return tf.cond(restricts, lambda: self._among(logits_BWV, size), lambda: logits_BWV)
    if self.top_k or self.top_p < 1:
      return self._among(logits_BWV, size if self.top_p < 1 else min(self.top_k, size))
    return logits_BWV

  def _among(self, logits_BWV: tf.Tensor, most: int) -> tf.Tensor:
    """Logits of the symbols of top_k and top_p, which are the `most` likeliest or tie with these; -inf for others."""
    top_k_B11, top_p_B11 = _column(self.top_k, tf.int32), _column(self.top_p, tf.float32)
    sorted_BWJ = tf.math.top_k(logits_BWV, most).values
    smallest = lambda chosen_BWJ: tf.reduce_min(tf.where(chosen_BWJ, sorted_BWJ, float('inf')), axis=-1, keepdims=True)
    of_k_BW1 = smallest((tf.range(most) < top_k_B11) | (top_k_B11 == 0))
    probs_BWJ = tf.nn.softmax(tf.where(sorted_BWJ < of_k_BW1, NEG_INF, sorted_BWJ))
    of_p_BW1 = smallest((tf.cumsum(probs_BWJ, axis=-1, exclusive=True) < top_p_B11) | (top_p_B11 == 1))
    return tf.where(logits_BWV < tf.maximum(of_k_BW1, of_p_BW1), NEG_INF, logits_BWV)

  def __call__(self, logits_BWV: tf.Tensor, key_BW: tf.Tensor) -> tf.Tensor:
    """The next symbols, int32 [B, W]; the largest of the logits and Gumbel noise is a draw from their softmax."""
    likeliest_BW = tf.argmax(logits_BWV, axis=-1, output_type=tf.int32)
    if not self._by_row and not self.temperature:
      return likeliest_BW
    # Above 0 and below 1, as an infinite noise would draw a symbol whatever its probability.
    uniform_BWV = tf.maximum(prng.uniform(key_BW, tf.unstack(tf.shape(logits_BWV))), 2.0**-25)
    noise_BWV = -tf.math.log(-tf.math.log(uniform_BWV))
    drawn_BW = tf.argmax(self.restricted(logits_BWV) + noise_BWV, axis=-1, output_type=tf.int32)
    return tf.where(self.temperature[:, tf.newaxis] > 0, drawn_BW, likeliest_BW) if self._by_row else drawn_BW


def _column(values: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Values of rows, or one number, as [B, 1, 1] or [1, 1, 1]."""
  return tf.reshape(tf.cast(values, dtype), [-1, 1, 1])


class _Samples(NamedTuple):
  last_BW: tf.Tensor
  ids_BWT: tf.Tensor
  lengths_BW: tf.Tensor
  log_probs_BW: tf.Tensor
  alive_BW: tf.Tensor


def sample(
  step_fn: StepFn,
  cache: Any,
  sampler: Sampler,
  *,
  first_B: tf.Tensor,
  key_BW: tf.Tensor,
  max_steps: Size,
  max_lengths_B: tf.Tensor,
  bos_id: int,
  eos_id: int,
  pad_id: int = 0,
  keep: flat_sequence.Keep | None = None,
  forced_B: tf.Tensor | None = None,
  prefix_BU: tf.Tensor | None = None,
  watch: Callable[[tf.Tensor], tf.Tensor] | None = None,
  repetition: Repetition | None = None,
  before_BP: tf.Tensor | None = None,
) -> Hypotheses:
  """Draws W continuations a row; a sample ends with eos, or without it at max_lengths_B symbols.

  Args:
    step_fn, cache, max_steps, bos_id, eos_id, pad_id, keep, forced_B, prefix_BU: as in beam_search.
    sampler: choice of the next symbol. Pad and bos are never drawn.
    first_B: input of the first step, such as bos or the last symbol of a prompt.
    key_BW: random key of each sample.
    max_lengths_B: most symbols of a sample, counting eos; 0: none.
    watch: called at every step with the symbols drawn, [B, W], pad where a sample has ended; returns whether each row
      goes on, [B].
    repetition, before_BP: as in beam_search; they change logits, before the temperature.

  Returns:
    Hypotheses in the order of their keys; log_probs are those of the model, whatever the sampler does, and so are
    scores.
  """
  shape_BW = tf.shape(key_BW)
  width = key_BW.shape[1]
  max_lengths_B1 = tf.minimum(tf.cast(max_lengths_B, tf.int32), max_steps)[:, tf.newaxis]

  def step(now, state, cache):
    state = _Samples(*state)
    logits_BWV, cache = step_fn(state.last_BW, now, cache)
    logits_BWV = beam_search.with_first(forced_B, now.time, tf.cast(logits_BWV, tf.float32))
    barred_V = tf.reduce_max(tf.one_hot([pad_id, bos_id], logits_BWV.shape[-1]), axis=0) > 0
    scores_BWV = tf.where(barred_V, NEG_INF, logits_BWV)
    if repetition is not None:
      before = first_B[:, tf.newaxis] if before_BP is None else before_BP
      _, scores_BWV = repetition.scores(TENSORS, scores_BWV, before, state.ids_BWT, now.time)
    symbols_BW = sampler(scores_BWV, prng.fold(key_BW, now.time))
    log_probs_BW = tf.gather(tf.nn.log_softmax(logits_BWV), symbols_BW, batch_dims=2)
    alive_BW, length = state.alive_BW, now.time + 1
    goes_on_BW = alive_BW & (symbols_BW != eos_id) & (length < max_lengths_B1)
    if watch:
      goes_on_BW &= watch(tf.where(alive_BW, symbols_BW, pad_id))[:, tf.newaxis]
    at_T = tf.range(tf.shape(state.ids_BWT)[2]) == now.time
    ids_BWT = tf.where(at_T & alive_BW[..., tf.newaxis], symbols_BW[..., tf.newaxis], state.ids_BWT)
    drawn = _Samples(
      last_BW=symbols_BW,
      ids_BWT=ids_BWT,
      lengths_BW=state.lengths_BW + tf.cast(alive_BW, tf.int32),
      log_probs_BW=state.log_probs_BW + tf.where(alive_BW, log_probs_BW, 0.0),
      alive_BW=goes_on_BW,
    )
    itself_BW = tf.ensure_shape(tf.broadcast_to(tf.range(width)[tf.newaxis], shape_BW), key_BW.shape)
    return itself_BW, tuple(drawn), cache

  begin = _Samples(
    last_BW=tf.broadcast_to(first_B[:, tf.newaxis], shape_BW),
    ids_BWT=tf.broadcast_to(pad_id, [shape_BW[0], width, max_steps]),
    lengths_BW=tf.zeros(shape_BW, tf.int32),
    log_probs_BW=tf.zeros(shape_BW),
    alive_BW=tf.broadcast_to(max_lengths_B1 > 0, shape_BW),
  )
  begin = tf.nest.map_structure(
    lambda x: tf.ensure_shape(x, [key_BW.shape[0], width, *[None] * (x.shape.rank - 2)]), begin
  )
  steps, state = flat_sequence.loop(
    step,
    begin,
    cache,
    alive=lambda *state: _Samples(*state).alive_BW,
    batch_size=key_BW.shape[0] or shape_BW[0],
    beam_size=width,
    max_steps=max_steps,
    keep=keep,
    prefix_BU=prefix_BU,
  )
  final = _Samples(*state)
  return Hypotheses(final.ids_BWT, final.lengths_BW, final.log_probs_BW, final.log_probs_BW, steps)
