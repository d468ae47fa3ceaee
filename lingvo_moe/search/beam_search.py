"""Beam search on a flat key/value cache (GShard, arXiv:2006.16668, appendix A.1): the ranking of hypotheses.

The decoder's cache holds all hypotheses of a beam interleaved in one sequence, under a mask: see flat_sequence.py.

Axes: `W` hypotheses of a beam (or of the result), `U` flat positions, `J` candidates among which the best are chosen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow.experimental.numpy as tnp

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import sizes
from lingvo_moe.search import beam, flat_sequence
from lingvo_moe.search import constraints as constraints_lib
from lingvo_moe.search.beam import Finished, Library, Live, Specials
from lingvo_moe.search.constraints import ConstraintProgress, Constraints
from lingvo_moe.search.length_norm import LengthNorm
from lingvo_moe.search.repetition import Repetition

NEG_INF = float('-inf')


def _put(x_BWV: tf.Tensor, symbols_BWJ: tf.Tensor, values_BWJ: tf.Tensor) -> tf.Tensor:
  row_BWJ, hypothesis_BWJ, _ = tf.meshgrid(*map(tf.range, sizes(symbols_BWJ)), indexing='ij')
  return tf.tensor_scatter_nd_update(x_BWV, tf.stack([row_BWJ, hypothesis_BWJ, symbols_BWJ], axis=-1), values_BWJ)


TENSORS = Library(
  tnp,
  best=tf.math.top_k,
  at=lambda x_BJ, places_BW: tf.gather(x_BJ, places_BW, batch_dims=1),
  put=_put,
)


class Hypotheses(NamedTuple):
  """N-best translations of each sentence, best first; here W = n_best."""

  ids_BWT: tf.Tensor  # fields as of beam.Finished; T is max_steps
  lengths_BW: tf.Tensor
  log_probs_BW: tf.Tensor
  scores_BW: tf.Tensor
  steps: tf.Tensor  # int32 scalar; number of calls of step_fn


def specs(n_best: int) -> Hypotheses:
  """Types and shapes of Hypotheses, whose rows and length are not known, for ops.map_rows."""
  return Hypotheses(
    ids_BWT=tf.TensorSpec([None, n_best, None], tf.int32),
    lengths_BW=tf.TensorSpec([None, n_best], tf.int32),
    log_probs_BW=tf.TensorSpec([None, n_best]),
    scores_BW=tf.TensorSpec([None, n_best]),
    steps=tf.TensorSpec([], tf.int32),
  )


StepFn = Callable[[tf.Tensor, flat_sequence.Now, Any], tuple[tf.Tensor, Any]]


def beam_search(
  step_fn: StepFn,
  cache: Any,
  *,
  batch_size: int | tf.Tensor,
  beam_size: int,
  max_steps: int | tf.Tensor,
  max_lengths_B: tf.Tensor,
  bos_id: int,
  eos_id: int,
  vocab_size: int,
  length_norm_alpha: float,
  length_norm_k: float = 5.0,
  n_best: int | None = None,
  min_length: int = 1,
  early_stopping: str | None = 'exact',
  pad_id: int = 0,
  keep: flat_sequence.Keep | None = None,
  first_B: tf.Tensor | None = None,
  forced_B: tf.Tensor | None = None,
  prefix_BU: tf.Tensor | None = None,
  constraints: Constraints | None = None,
  repetition: Repetition | None = None,
  before_BP: tf.Tensor | None = None,
) -> Hypotheses:
  """Beam search for the translations Y of highest log P(Y) / length_penalty(|Y|), |Y| counting eos.

  The algorithm, for each sentence independently:
  1. The beam begins with one live hypothesis, bos, of log-probability 0.
  2. A step ranks all continuations of the live hypotheses by one symbol, by log-probability, and takes the 2 W best (as
     tensor2tensor does). Pad and bos are not among them, though the softmax counts them; nor is eos before min_length -
     1 symbols. A hypothesis of max_length - 1 symbols can only be continued by eos.
  3. Of the 2 W, the continuations that end in eos are finished: they are scored and join those
     finished so far, of which the n_best by score are kept.
  4. Of the others, the W best are the live hypotheses of the next step.
  5. The sentence stops when no live hypothesis is left; with early_stopping='exact', also when none can enter the
     n_best any more: the largest live log-probability, divided by the penalty of max_length (it can only fall, and no
     penalty is larger), does not exceed the n_best-th score so far. That saves steps and never changes the result.
     Two other rules stop earlier, and may; see search/beam.py.
  Ties go to the hypothesis that finished earlier, then to the better parent, to eos, to the smaller symbol.

  The loop ends when every sentence has stopped, or at max_steps. The result of a sentence does not depend on the others
  of its batch, which may keep the loop running. With W = 1 the result scores no less than greedy search's.

  With static shapes (Python ints throughout) and without `keep` the whole search lowers to XLA.

  Args:
    step_fn: (ids_BW, now, cache) -> (logits_BWV, cache). Takes the last symbol of each live hypothesis (bos at time 0),
      writes its keys and values at flat positions now.start to now.start + W - 1, and attends where now.mask_BWU is 1,
      the symbol's own position included. Its input has rows without a live hypothesis too, whose logits are ignored.
    cache: any nest of tensors, whose shapes step_fn keeps, with max_steps * W flat positions, or
      with one if `keep` is given.
    beam_size: W, the live hypotheses kept for each sentence.
    max_steps: T, the most steps to run.
    max_lengths_B: int, the largest |Y| of each sentence, counting eos; cut to max_steps. A sentence
      with 0 gets no hypothesis and costs no step.
    bos_id, eos_id, pad_id: input at the first step, end of a hypothesis, and filling of ids after it.
    length_norm_alpha, length_norm_k: of search/length_norm.py, alpha at least 0.
    min_length: the least |Y|, counting eos, or max_length of a sentence where that is less.
    n_best: number of translations to return; None for beam_size. A smaller one stops earlier and
      returns the same first translations.
    early_stopping: when a sentence stops, one of beam.EARLY_STOPPING; None: when no live hypothesis is left.
    keep: (cache, positions_BU) -> a cache of the values at these flat positions, to drop positions
      that no live hypothesis uses any more; see flat_sequence.loop.
    first_B: input at the first step of each row, such as the last symbol of a prompt; None: bos_id.
    forced_B: first symbol of each row's hypotheses, of probability 1; max_lengths_B must then be 2 or more. None: any.
    prefix_BU: positions of the cache that are taken already; see flat_sequence.loop.
    constraints: what translations must and must not have, from the symbol after `forced_B` on. Steps 2 and 4 then take
      continuations by search/constraints.py. None: nothing.
    repetition: limits on the repetition of symbols, by which log-probabilities are changed; None: none.
    before_BP: symbols that count for these before those of the hypotheses, after pad; None: the first input.

  Raises:
    UserError: a beam_size or n_best below 1, a negative alpha, or a symbol id beyond V.
  """
  n_best, specials = beam_size if n_best is None else n_best, Specials(pad_id, bos_id, eos_id)
  _check(beam_size, n_best, length_norm_alpha, vocab_size, pad=pad_id, bos=bos_id, eos=eos_id)
  max_lengths_B = tf.minimum(tf.cast(max_lengths_B, tf.int32), max_steps)
  min_lengths_B = tf.minimum(min_length, max_lengths_B)
  norm = LengthNorm(length_norm_alpha, length_norm_k)
  most_B1 = tf.cast(max_lengths_B, tf.float32)[:, tf.newaxis]
  places_T = tf.range(max_steps)

  def step(now, state, cache):
    live, finished, *progress = state
    length = now.time + 1
    logits_BWV, cache = step_fn(live.last_BW, now, cache)
    logits_BWV = tf.ensure_shape(tf.cast(logits_BWV, tf.float32), [None, beam_size, vocab_size])
    logits_BWV = with_first(forced_B, now.time, logits_BWV)
    ends, repeats_BWV = (length >= min_lengths_B, length >= max_lengths_B), None
    are_log_probs = repetition is not None and beam_size > 1
    if repetition is not None:
      scores_BWV = tf.nn.log_softmax(logits_BWV) if are_log_probs else logits_BWV
      history = first_BW[:, :1] if before_BP is None else before_BP, live.ids_BWT, now.time
      penalised_BWV, logits_BWV = repetition.scores(TENSORS, scores_BWV, *history)
    if constraints is None:
      best = _continue(live, logits_BWV, *ends, specials, are_log_probs)
    else:
      if repetition is not None:
        logits_BWV, repeats_BWV = penalised_BWV, logits_BWV == NEG_INF
      constrained = constraints, ConstraintProgress(*progress), repeats_BWV
      best = _constrained(*constrained, live, logits_BWV, *ends, specials, are_log_probs)
    penalty = norm.penalty(tf.cast(length, tf.float32))
    ended_BJ = beam.ended(TENSORS, best, eos_id, early_stopping)
    finished = beam.finish(TENSORS, finished, live, best, ended_BJ, places_T, length, penalty, eos_id)
    parents_BW, live = beam.next_live(TENSORS, live, best, ended_BJ, places_T, length, eos_id)
    if constraints is not None:
      progress = constraints_lib.follow(
        tnp, constraints, ConstraintProgress(*progress), parents_BW, live.last_BW, vocab_size
      )
      progress = [tf.ensure_shape(x, start.shape) for x, start in zip(progress, begin_progress)]
    if early_stopping is not None:
      live = beam.stop(TENSORS, live, finished, norm, tf.cast(length, tf.float32), most_B1, early_stopping)
    return parents_BW, (live, finished, *progress), cache

  padding = lambda width: tf.tile(tf.fill([1, 1, max_steps], pad_id), [batch_size, width, 1])
  first_1W = tf.range(beam_size)[tf.newaxis, :] == 0
  first_BW = tf.broadcast_to(bos_id if first_B is None else first_B[:, tf.newaxis], [batch_size, beam_size])
  live = Live(  # the first symbol alone, in each sentence whose max_length is not 0
    last_BW=first_BW,
    ids_BWT=padding(beam_size),
    log_probs_BW=tf.where(first_1W & (max_lengths_B > 0)[:, tf.newaxis], 0.0, NEG_INF),
    ended_B1=tf.zeros([batch_size, 1], tf.int32),
  )
  scores_BW = tf.fill([batch_size, n_best], NEG_INF)
  finished = Finished(padding(n_best), tf.zeros([batch_size, n_best], tf.int32), scores_BW, scores_BW)
  begin_progress = () if constraints is None else constraints_lib.begin(tnp, constraints, beam_size)
  steps, (_, finished, *_) = flat_sequence.loop(
    step,
    (live, finished, *begin_progress),
    cache,
    alive=lambda live, *_: live.log_probs_BW > NEG_INF,
    batch_size=batch_size,
    beam_size=beam_size,
    max_steps=max_steps,
    keep=keep,
    prefix_BU=prefix_BU,
  )
  return Hypotheses(*finished, steps)


def with_first(forced_B: tf.Tensor | None, time: tf.Tensor, logits_BWV: tf.Tensor) -> tf.Tensor:
  """Logits of which those of the first step have one symbol alone, where it is given."""
  if forced_B is None:
    return logits_BWV
  forced_B1V = tf.math.log(tf.one_hot(forced_B, logits_BWV.shape[-1]))[:, tf.newaxis]
  return tf.where(tf.equal(time, 0), forced_B1V, logits_BWV)


def _check(beam_size, n_best, alpha, vocab_size, **specials):
  """Raises UserError if a size, alpha or symbol id is out of range."""
  if beam_size < 1 or n_best < 1:
    raise UserError(f'beam_size={beam_size} and n_best={n_best} must both be at least 1')
  if not alpha >= 0:
    raise UserError(
      f'length_norm_alpha={alpha} must not be negative: 0 ranks by log-probability, '
      'larger values favour longer translations'
    )
  for name, symbol in specials.items():
    if not 0 <= symbol < vocab_size:
      raise UserError(f'{name}_id={symbol} is not in a vocabulary of {vocab_size} symbols: use 0 to {vocab_size - 1}')


def _continue(live, logits_BWV, may_end_B, must_end_B, specials, are_log_probs):
  """The 2 W best continuations of the live hypotheses of each sentence by one symbol."""
  beam_size, vocab_size = logits_BWV.shape[1:]
  # Of the symbols of a hypothesis the 2 W best are enough; top_k takes 3 more as it may return pad, bos and eos.
  logits_BWJ, symbols_BWJ = _top_k(logits_BWV, min(2 * beam_size + 3, vocab_size))
  # log Z = logit - log(prob) of the likeliest symbol, whose probability is at least 1 / V, so that no precision is
  # lost. The softmax is one kernel, tf.reduce_logsumexp four.
  log_z_BW1 = 0.0
  if not are_log_probs:
    best_prob_BW1 = tf.gather(tf.nn.softmax(logits_BWV), symbols_BWJ[:, :, :1], batch_dims=2)
    log_z_BW1 = logits_BWJ[:, :, :1] - tf.math.log(best_prob_BW1)
  eos_BW1 = logits_BWV[:, :, specials.eos : specials.eos + 1]
  ends = may_end_B, must_end_B
  return beam.continuations(TENSORS, live, logits_BWJ, symbols_BWJ, eos_BW1, log_z_BW1, *ends, specials)


def _constrained(constraints, progress, repeats_BWV, live, logits_BWV, may_end_B, must_end_B, specials, are_log_probs):
  """Continues the live hypotheses of each sentence by one symbol under constraints; see `_continue`."""
  log_probs_BWV = logits_BWV
  if not are_log_probs:
    best_prob_BW1 = tf.reduce_max(tf.nn.softmax(logits_BWV), axis=-1, keepdims=True)
    best_BW1 = tf.reduce_max(logits_BWV, axis=-1, keepdims=True)
    log_probs_BWV = tf.minimum(logits_BWV - (best_BW1 - tf.math.log(best_prob_BW1)), 0.0)
  top_k = lambda values_BWV, k: _top_k(values_BWV, min(k, values_BWV.shape[2]))[1]
  kept = constraints_lib.continuations(
    *(tnp, top_k, constraints, progress, live.log_probs_BW, log_probs_BWV, may_end_B, must_end_B, specials),
    repeats_BWV=repeats_BWV,
  )
  return beam.in_order(TENSORS, *kept)


def _top_k(logits_BWV, k, block=32):
  """Top-k logits as by tf.math.top_k, ties included, but faster for large V: it searches only the k best blocks.

  It is exact: if one of the k largest were in a block not chosen, the maxima of k blocks would all rank before it.
  """
  beam_size, vocab_size = logits_BWV.shape[1:]
  num_blocks = -(-vocab_size // block)
  if num_blocks < 4 * k:
    return tf.math.top_k(logits_BWV, k)
  if vocab_size % block:
    paddings = [[0, 0], [0, 0], [0, -vocab_size % block]]
    logits_BWV = tf.pad(logits_BWV, paddings, constant_values=NEG_INF)
  blocks = tf.reshape(logits_BWV, [-1, beam_size, num_blocks, block])
  _, chosen = tf.math.top_k(tf.reduce_max(blocks, axis=-1), k)
  chosen = tf.sort(chosen, axis=-1)  # smaller symbols first again, for the order of ties
  candidates = tf.reshape(tf.gather(blocks, chosen, batch_dims=2), [-1, beam_size, k * block])
  logits_BWJ, index_BWJ = tf.math.top_k(candidates, k)
  block_BWJ = tf.gather(chosen, index_BWJ // block, batch_dims=2)
  return logits_BWJ, block_BWJ * block + index_BWJ % block
