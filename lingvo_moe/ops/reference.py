"""Reference arithmetic of the models: each operation once, in plain TensorFlow with derived gradients.

A backend (backend.py) may override an operation by name; tests compare the values and gradients of every override with
those of the function here. `--backend=reference` trains and decodes with these functions alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from lingvo_moe.core.shapes import Size

# Added to a masked score. Finite, so that a row with nothing to attend to stays finite; its exp is 0 beside any score
# that is not masked, so masked positions do not change the result.
MASKED = -1e9


def lookup(table_VM: tf.Tensor, ids_BT: tf.Tensor) -> tf.Tensor:
  """Rows [B, T, M] of an embedding table."""
  return tf.gather(table_VM, ids_BT)


def rounded(x: tf.Tensor) -> tf.Tensor:
  """Marks x, which a cast has rounded: no machine is to compute with what it was before."""
  return x


def linear(
  x: tf.Tensor,
  weight: tf.Tensor,
  bias: tf.Tensor | None = None,
  activation: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
  inputs: int = 1,
) -> tf.Tensor:
  """Linear map activation(x W + b), [..., *out]: x [..., *in], weight [*in, *out], `inputs` axes in, bias [*out]."""
  batch, i, o = 'abcd'[: x.shape.rank - inputs], 'ijk'[:inputs], 'opq'[: weight.shape.rank - inputs]
  y = tf.einsum(f'{batch}{i},{i}{o}->{batch}{o}', x, weight)
  return activation(y if bias is None else y + bias)


def relu(x: tf.Tensor) -> tf.Tensor:
  """ReLU, max(x, 0)."""
  return tf.nn.relu(x)


def product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """Einsum of activations and a weight, in the weight's type; each letter is in two of the tensors, or in all."""
  return tf.einsum(equation, tf.cast(x, weight.dtype), weight)


def beside_experts(x_BTM: tf.Tensor) -> tf.Tensor:
  """Marks x for exports as the residual of a layer: the output of the experts that follow is added to it."""
  return x_BTM


def to_experts(x_GSM: tf.Tensor, expert_GSR: tf.Tensor, weight_GSR: tf.Tensor) -> tf.Tensor:
  """Marks x for exports as the tokens of experts that a graph of its own computes, with their choices and weights."""
  return x_GSM


def from_experts(y_GSM: tf.Tensor) -> tf.Tensor:
  """Marks y for exports as the outputs of one expert of the last `to_experts`, which become weighted sums here."""
  return y_GSM


def attention_product(equation: str, x: tf.Tensor, cache: tf.Tensor) -> tf.Tensor:
  """Einsum of queries with keys, '...K,BNUK->...U', or of attention weights with values, '...U,BNUK->...K'.

  Keys and values are tensors, or what write_cache of the same backend returned.
  """
  return tf.einsum(equation, x, cache)


def masked_scores(scores_BnTU: tf.Tensor, mask_BnTU: tf.Tensor) -> tf.Tensor:
  """Scores, float32, less a large number where the mask is false (0); axes of the mask of length one broadcast."""
  return scores_BnTU + (1.0 - tf.cast(mask_BnTU, tf.float32)) * MASKED


def layer_norm(x_BTM: tf.Tensor, scale_M: tf.Tensor, bias_M: tf.Tensor, epsilon: float) -> tf.Tensor:
  """Layer normalisation (Ba et al., 2016): mean 0, variance 1 over the last axis, then scale and bias, in float32."""
  x32_BTM = tf.cast(x_BTM, tf.float32)
  centred_BTM = x32_BTM - tf.reduce_mean(x32_BTM, axis=-1, keepdims=True)
  variance_BT1 = tf.reduce_mean(tf.square(centred_BTM), axis=-1, keepdims=True)
  return tf.cast(centred_BTM * tf.math.rsqrt(variance_BT1 + epsilon) * scale_M + bias_M, x_BTM.dtype)


def softmax_cross_entropy(
  logits_BTV: tf.Tensor, label_BT: tf.Tensor, smoothing: float = 0.0, z_weight: float = 0.0
) -> tuple[tf.Tensor, tf.Tensor]:
  """Cross-entropy: (-log p of each label, the loss to minimise), float32 [B, T]; the first passes no gradient.

  The loss is the cross-entropy with a target of 1 - smoothing on the label and smoothing / V on all V symbols (Szegedy
  et al., 2016), plus z_weight * log(Z)^2, which keeps the normaliser Z near 1.
  """
  log_p_BTV = tf.nn.log_softmax(logits_BTV)
  xent_BT = -tf.gather(log_p_BTV, label_BT, batch_dims=2)
  loss_BT = (1.0 - smoothing) * xent_BT - smoothing * tf.reduce_mean(log_p_BTV, axis=-1)
  return tf.stop_gradient(xent_BT), loss_BT + z_weight * tf.square(tf.reduce_logsumexp(logits_BTV, axis=-1))


def lstm(
  z_BTJH: tf.Tensor, begins_BT: tf.Tensor, weight_MJH: tf.Tensor, projection_HM: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
  """LSTM over the positions of each row, in order: (outputs y [B, T, M], float32 cells [B, T, H]).

  Args:
    z_BTJH: the input's part of the four preactivations of lstm_cell.
    begins_BT: True where the state before a position is zero.
    weight_MJH: weight of the output of the position before.
    projection_HM: makes outputs of the hidden features (Sak et al., arXiv 1402.1128); None: they are the outputs, H =
      M.
  """

  def step(state, at):
    y_BM, cell_BH = state
    z_BJH, keep_B1 = at
    z_BJH += tf.einsum('BM,MJH->BJH', y_BM * keep_B1, weight_MJH)
    hidden_BH, cell_BH = lstm_cell(z_BJH, cell_BH * tf.cast(keep_B1, cell_BH.dtype))
    return tf.cast(hidden_BH if projection_HM is None else hidden_BH @ projection_HM, y_BM.dtype), cell_BH

  time_first = lambda x: tf.einsum('bt...->tb...', x)
  rows, size = tf.shape(z_BTJH)[0], z_BTJH.shape[-1]
  begin = tf.zeros([rows, weight_MJH.shape[0]], z_BTJH.dtype), tf.zeros([rows, size])
  keep_BT1 = tf.cast(~begins_BT, z_BTJH.dtype)[..., tf.newaxis]
  y_TBM, cell_TBH = tf.scan(step, (time_first(z_BTJH), time_first(keep_BT1)), begin)
  return time_first(y_TBM), time_first(cell_TBH)


def lstm_cell(z_BJH: tf.Tensor, cell_BH: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """LSTM cell (Hochreiter and Schmidhuber, 1997; Gers et al., 2000): (hidden features of z's type, the next cell).

  c' = sigmoid(f + 1) c + sigmoid(i) tanh(g) and h = sigmoid(o) tanh(c'), for preactivations i, f, g, o along axis J.
  The 1 keeps the cell at first (forget bias). The cell is float32.
  """
  i_BH, f_BH, g_BH, o_BH = tf.unstack(tf.cast(z_BJH, tf.float32), num=4, axis=-2)
  cell_BH = tf.sigmoid(f_BH + 1.0) * cell_BH + tf.sigmoid(i_BH) * tf.tanh(g_BH)
  return tf.cast(tf.sigmoid(o_BH) * tf.tanh(cell_BH), z_BJH.dtype), cell_BH


class QueuePositions(NamedTuple):
  position_GSR: tf.Tensor  # int32: number of choices before this one in the queue of its expert; 0 where not taken
  length_GE: tf.Tensor  # int32: number of choices in each queue


def queue_positions(expert_GSR: tf.Tensor, taken_GSR: tf.Tensor, num_experts: int) -> QueuePositions:
  """Positions in the queues of experts (Alg. 1, lines 5-11, 21-22): a group's first choices, then the second."""
  position_R, length_G1E = [], 0.0
  for expert_GS in tf.unstack(tf.where(taken_GSR, expert_GSR, -1), axis=-1):
    mask_GSE = tf.one_hot(expert_GS, num_experts)  # zeros where not taken
    before_GSE = length_G1E + tf.cumsum(mask_GSE, axis=1, exclusive=True)
    position_R.append(tf.reduce_sum(before_GSE * mask_GSE, axis=-1))
    length_G1E += tf.reduce_sum(mask_GSE, axis=1, keepdims=True)
  return QueuePositions(tf.cast(tf.stack(position_R, axis=-1), tf.int32), tf.cast(length_G1E[:, 0], tf.int32))


def slots_per_round(slots: int) -> int | None:
  """Slots of an expert and group in a round over experts that drop nothing; None: no rounds, all choices have room.

  Without rounds the longest queue has room, whatever its length; `slots` is for where sizes must be static.
  """
  return None


class Places(NamedTuple):
  """Index from choices to rows of the experts' input, and its inverse; see layers/dispatch.py."""

  row_GSR: tf.Tensor  # int32: row of each choice; any row if it has none
  choice_X: tf.Tensor  # int32: choice (g, s, r) of each row, flattened; any choice if it has none
  has_row_GSR: tf.Tensor | None  # whether a choice has a row; None: if not, row_GSR is a row of zeros
  has_choice_X: tf.Tensor | None  # whether a row has a choice; None: if not, it may hold any token


def dispatch_rows(x_GSM: tf.Tensor, places: Places) -> tf.Tensor:
  """Rows [X, M] of the experts' input: the token of each row's choice, or zeros."""
  token_X = places.choice_X // places.row_GSR.shape[-1]
  rows_XM = tf.gather(tf.reshape(x_GSM, [-1, x_GSM.shape[-1]]), token_X)
  return rows_XM if places.has_choice_X is None else tf.where(places.has_choice_X[:, tf.newaxis], rows_XM, 0)


def combine_rows(y_XM: tf.Tensor, weight_GSR: tf.Tensor, places: Places) -> tf.Tensor:
  """Tokens [G, S, M]: weighted sum of the rows of each token's choices; a choice without a row counts 0."""
  if places.has_row_GSR is not None:
    weight_GSR = tf.where(places.has_row_GSR, weight_GSR, 0)
  return tf.reduce_sum(tf.gather(y_XM, places.row_GSR) * weight_GSR[..., tf.newaxis], axis=2)


def grouped_ffn(
  x_XM: tf.Tensor, expert_offsets: tf.Tensor, wi_EMH: tf.Tensor, wo_EHM: tf.Tensor, keep_XH: tf.Tensor | None = None
) -> tf.Tensor:
  """Grouped feed-forward: (relu(x wi) keep) wo of rows sorted by expert; [X, M].

  Expert e has rows expert_offsets[e] up to expert_offsets[e + 1]. One more row at the end belongs to no expert; its
  result is zeros. keep_XH is a dropout mask, which gets no gradient.
  """
  y = []
  for e in range(wi_EMH.shape[0]):
    expert_rows = slice(expert_offsets[e], expert_offsets[e + 1])
    h = tf.nn.relu(tf.matmul(x_XM[expert_rows], wi_EMH[e]))
    y.append(tf.matmul(h if keep_XH is None else h * tf.cast(keep_XH[expert_rows], h.dtype), wo_EHM[e]))
  return tf.concat([*y, tf.zeros_like(x_XM[-1:])], axis=0)


def write_cache(buffer: tf.Tensor, x_BNWK: tf.Tensor, start: tf.Tensor, layer: tf.Tensor | None = None) -> tf.Tensor:
  """Key or value cache [B, N, U, K], or a layer of [L, B, N, U, K], after writing x at start, start + 1, ... of U."""
  if layer is not None:
    written_BNUK = write_cache(buffer[layer], x_BNWK, start)
    return tf.tensor_scatter_nd_update(buffer, [[layer]], written_BNUK[tf.newaxis])
  end = start + tf.shape(x_BNWK)[2]
  return tf.concat([buffer[:, :, :start], x_BNWK, buffer[:, :, end:]], axis=2)


def loop_bound(limit_B: tf.Tensor, most: int) -> Size:
  """Largest number of steps of a loop over rows, given a limit for each row; no limit exceeds `most`."""
  return tf.reduce_max(limit_B)


def add_gradients(*grads: Any) -> Any:
  """Sum of gradients of one weight, of parts of a batch: tensors, or tf.IndexedSlices, whose sum has all slices."""
  if not any(isinstance(grad, tf.IndexedSlices) for grad in grads):
    return tf.add_n(grads)
  values, indices = (tf.concat([getattr(grad, field) for grad in grads], axis=0) for field in ('values', 'indices'))
  return tf.IndexedSlices(values, indices, grads[0].dense_shape)


def mean_square(x: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
  """Mean square of x over some axes, kept with size 1: Adafactor's statistic of weights and gradients."""
  return tf.reduce_mean(tf.square(x), axis=axes, keepdims=True)


def map_rows(f: Callable[[Any], Any], rows: Any, specs: Any) -> Any:
  """Maps f over nested tensors [B, ...] whose rows do not depend on each other; `specs` are those of f's results."""
  return f(rows)
