"""Beam search with an encoder-decoder model: a pure function of weights and batch, at inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.search import beam_search
from lingvo_moe.search import flat_sequence
from lingvo_moe.tasks.encoder_decoder import EncoderDecoder
from lingvo_moe.tasks.vocab import BOS
from lingvo_moe.tasks.vocab import EOS
from lingvo_moe.tasks.vocab import PAD


def search(
  model: EncoderDecoder,
  theta: Theta,
  batch: Mapping[str, tf.Tensor],
  *,
  max_lengths: Callable[[tf.Tensor], tf.Tensor],
  most: int,
  beam_size: int,
  length_norm_alpha: float,
  n_best: int = 1,
  min_length: int = 1,
) -> beam_search.Hypotheses:
  """Beam search for a batch, in which no token is dropped by experts.

  Args:
    model: the model.
    theta: nested weights.
    batch: src_ids, src_segments, src_positions, one source a row. A row without tokens gets no hypothesis.
    max_lengths: function of src_segments that gives the most symbols of each answer with its end, 0 in empty rows.
    most: the most that it gives.
    beam_size: W.
    length_norm_alpha: see beam_search.
    n_best: number of hypotheses returned.
    min_length: least number of symbols of an answer with its end, if its length limit allows as many.
  """
  max_steps = ops.loop_bound(max_lengths(batch['src_segments']), most)

  def search_rows(batch):
    rows = sizes(batch['src_ids'])[0]
    memory_BUM, _ = model.encode(theta, batch)
    cache = model.init_cache(theta, memory_BUM, flat_sequence.first_room(max_steps, beam_size))
    return beam_search.beam_search(
      lambda ids_BW, now, cache: model.decode_step(theta, ids_BW, now, batch['src_segments'], cache),
      cache,
      batch_size=rows,
      beam_size=beam_size,
      max_steps=max_steps,
      max_lengths_B=max_lengths(batch['src_segments']),
      bos_id=BOS,
      eos_id=EOS,
      pad_id=PAD,
      vocab_size=model.target_embedding.vocab_size,
      length_norm_alpha=length_norm_alpha,
      n_best=n_best,
      min_length=min_length,
      keep=model.keep_positions,
    )

  return ops.map_rows(search_rows, batch, beam_search.specs(n_best))
