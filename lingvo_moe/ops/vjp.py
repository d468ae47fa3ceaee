"""Vector-Jacobian products (vjps) written by hand, shared by backends.

Each function overrides the operation of its name in reference.py. The gradients that TensorFlow derives take more
passes over memory, or scatter where a gather is enough.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.ops.custom_gradient import custom_gradient, pull_back
from lingvo_moe.ops.loops import counted
from lingvo_moe.ops.reference import Places, lstm_cell
from lingvo_moe.xla_sharding import shard


def mean_and_variance(x_BTM: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Mean and variance of the features of each token, float32 [B, T, 1]."""
  x_BTM = tf.cast(x_BTM, tf.float32)
  mean_BT1 = _mean(x_BTM)
  return mean_BT1, _mean(tf.square(x_BTM - mean_BT1))


def layer_norm(
  x_BTM: tf.Tensor,
  scale_M: tf.Tensor,
  bias_M: tf.Tensor,
  epsilon: float,
  statistics: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]] = mean_and_variance,
  once: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] = list,
) -> tf.Tensor:
  """Layer norm; its vjp takes half the passes over [B, T, M] of the derived one.

  `once` returns tensors that a compiler computes once, where it would compute them again at each use.
  """

  @custom_gradient
  def run(x_BTM, scale_M, bias_M):
    mean_BT1, variance_BT1 = once(statistics(x_BTM))
    rate_BT1 = tf.math.rsqrt(variance_BT1 + epsilon)
    unit_BTM = (tf.cast(x_BTM, tf.float32) - mean_BT1) * rate_BT1

    def grad(dy_BTM):
      dy_BTM = tf.cast(once([dy_BTM])[0], tf.float32)
      dunit_BTM = dy_BTM * scale_M
      # The output does not change when all features shift alike, or in proportion to themselves: both parts are
      # removed.
      dx_BTM = (dunit_BTM - _mean(dunit_BTM) - unit_BTM * _mean(dunit_BTM * unit_BTM)) * rate_BT1
      return tf.cast(dx_BTM, x_BTM.dtype), sum_to_features(dy_BTM * unit_BTM), sum_to_features(dy_BTM)

    return tf.cast(tf.nn.bias_add(unit_BTM * scale_M, bias_M), x_BTM.dtype), grad

  return run(x_BTM, scale_M, bias_M)


def _mean(x_BTM):
  return tf.reduce_mean(x_BTM, axis=-1, keepdims=True)


def sum_to_features(x: tf.Tensor) -> tf.Tensor:
  """Sum over all axes but the last by BiasAddGrad, a tenth of reduce_sum's time on CPUs."""
  return tf.raw_ops.BiasAddGrad(out_backprop=tf.reshape(x, [-1, x.shape[-1]]))


def softmax_cross_entropy(logits_BTV, label_BT, smoothing=0.0, z_weight=0.0):
  """Cross-entropy that keeps scores and log Z; its vjp is softmax times (1 + 2 z_weight log Z), less the target.

  The derived gradient takes three more passes over [B, T, V], the largest tensor of a step. Tokens are one axis F, and
  the score of a label is a sum too, so that XLA computes all sums in one pass.
  """
  vocab_size, shape_BT = logits_BTV.shape[-1], sizes(logits_BTV)[:2]
  label_FV = tf.reshape(label_BT, [-1, 1]) == tf.range(vocab_size, dtype=label_BT.dtype)

  @custom_gradient
  def loss(logits_FV):
    top_F1 = tf.reduce_max(logits_FV, axis=-1, keepdims=True)
    below_FV = logits_FV - top_F1
    log_sum_F1 = tf.math.log(tf.reduce_sum(tf.exp(below_FV), axis=-1, keepdims=True))  # log Z, less the top
    xent_F1 = loss_F1 = log_sum_F1 - tf.reduce_sum(tf.where(label_FV, below_FV, 0), axis=-1, keepdims=True)
    if smoothing:
      mean_F1 = tf.reduce_sum(below_FV, axis=-1, keepdims=True) / vocab_size
      loss_F1 = (1.0 - smoothing) * xent_F1 + smoothing * (log_sum_F1 - mean_F1)
    if z_weight:
      loss_F1 += z_weight * tf.square(top_F1 + log_sum_F1)

    def grad(_, dloss_F1):
      pull_FV = tf.exp(below_FV - log_sum_F1)
      if z_weight:
        pull_FV *= 1.0 + 2.0 * z_weight * (top_F1 + log_sum_F1)
      return (pull_FV - tf.where(label_FV, 1.0 - smoothing, 0.0) - smoothing / vocab_size) * dloss_F1

    return (xent_F1, loss_F1), grad

  xent_BT, loss_BT = (tf.reshape(x_F1, shape_BT) for x_F1 in loss(tf.reshape(logits_BTV, [-1, vocab_size])))
  return tf.stop_gradient(xent_BT), loss_BT


def weight_gradient(equation: str, x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
  """Gradient of the weight of an einsum, its axes in their order."""
  x_axes, weight_axes, y_axes = split_equation(equation)
  # An einsum's result has the remaining axes of its first operand before those of its second: no transpose is needed.
  if weight_axes[-1] in y_axes:
    return tf.einsum(f'{x_axes},{y_axes}->{weight_axes}', x, dy)
  return tf.einsum(f'{y_axes},{x_axes}->{weight_axes}', dy, x)


def split_equation(equation: str) -> tuple[str, str, str]:
  """Axes of x, of the weight and of the result."""
  operands, y_axes = equation.split('->')
  x_axes, weight_axes = operands.split(',')
  return x_axes, weight_axes, y_axes


def product(equation, x, weight, einsum=tf.einsum, of_weight=weight_gradient) -> tf.Tensor:
  """Einsum; its gradient for the weight is one einsum with the weight's axes in their order.

  The derived gradient has them in another order and is transposed: with 512 experts that takes four times as long as
  the arithmetic. A backend may pass its own `einsum`, and a function of (equation, x, dy) for the weight's gradient.
  """
  x = tf.cast(x, weight.dtype)
  x_axes, weight_axes, y_axes = split_equation(equation)

  @custom_gradient
  def run(x, weight):
    def grad(dy):
      dx = einsum(f'{y_axes},{weight_axes}->{x_axes}', dy, weight)
      # dx first: other layers wait for it, and after it the weight is not read again and may be updated in place.
      with tf.control_dependencies([dx]):
        return dx, of_weight(equation, x, dy)

    return einsum(equation, x, weight), grad

  return run(x, weight)


def dispatch_rows(x_GSM: tf.Tensor, places: Places, einsum: bool = False) -> tf.Tensor:
  """Gather whose gradient is the gather by the inverse index; the derived one is a scatter, whose order of sums varies.

  With `einsum` sums are einsums, as XLA's partitioner (CPU) aborts at a sum over an axis in a manual region.
  """
  token_X = places.choice_X // places.row_GSR.shape[-1]

  @custom_gradient
  def copy(x_GSM):
    def grad(dx_XM):
      has_row_GSR = None if places.has_row_GSR is None else tf.cast(places.has_row_GSR, dx_XM.dtype)
      return _weighted_sum(dx_XM, places.row_GSR, has_row_GSR, einsum)

    rows_XM = tf.gather(_flat(x_GSM), token_X)
    if places.has_choice_X is not None:
      rows_XM *= tf.cast(places.has_choice_X, rows_XM.dtype)[:, tf.newaxis]
    return rows_XM, grad

  return copy(x_GSM)


def combine_rows(y_XM: tf.Tensor, weight_GSR: tf.Tensor, places: Places, einsum: bool = False) -> tf.Tensor:
  """Weighted sum of rows; its gradients are gathers by the inverse index. See dispatch_rows for `einsum`."""
  token_X = places.choice_X // places.row_GSR.shape[-1]

  @custom_gradient
  def weigh(y_XM, weight_GSR):
    def grad(dy_GSM):
      weight_X = tf.gather(tf.reshape(weight_GSR, [-1]), places.choice_X)
      if places.has_choice_X is not None:
        weight_X *= tf.cast(places.has_choice_X, weight_X.dtype)
      dy_XM = tf.gather(_flat(dy_GSM), token_X) * weight_X[:, tf.newaxis]
      dweight_GSR = _inner_products(y_XM, places.row_GSR, dy_GSM, einsum)
      if places.has_row_GSR is not None:
        dweight_GSR *= tf.cast(places.has_row_GSR, dweight_GSR.dtype)
      return dy_XM, dweight_GSR

    return _weighted_sum(y_XM, places.row_GSR, weight_GSR, einsum), grad

  return weigh(y_XM, weight_GSR)


def _weighted_sum(x_XM, row_GSR, weight_GSR, einsum):
  if einsum:
    weight_GSR = tf.ones_like(row_GSR, x_XM.dtype) if weight_GSR is None else weight_GSR
    return tf.einsum('GSRM,GSR->GSM', tf.gather(x_XM, row_GSR), weight_GSR)
  # One choice at a time: an einsum of a row and a number for each token takes 4 to 5 times as long.
  rows = _rows_by_rank(x_XM, row_GSR)
  if weight_GSR is not None:
    weights = tf.unstack(weight_GSR, num=len(rows), axis=-1)
    rows = [rows_GSM * weight_GS[..., tf.newaxis] for rows_GSM, weight_GS in zip(rows, weights)]
  return tf.add_n(rows)


def _inner_products(y_XM, row_GSR, dy_GSM, einsum):
  if einsum:
    return tf.einsum('GSRM,GSM->GSR', tf.gather(y_XM, row_GSR), dy_GSM)
  products = [tf.reduce_sum(rows_GSM * dy_GSM, axis=-1) for rows_GSM in _rows_by_rank(y_XM, row_GSR)]
  return tf.stack(products, axis=-1)


def _rows_by_rank(x_XM, row_GSR):
  return [tf.gather(x_XM, row_GS) for row_GS in tf.unstack(row_GSR, num=row_GSR.shape[-1], axis=-1)]


def _flat(x_GSM):
  return tf.reshape(x_GSM, [-1, x_GSM.shape[-1]])


def lstm(z_BTJH, begins_BT, weight_MJH, projection_HM=None):
  """LSTM in a loop over positions, and its vjp in another.

  The derived gradient keeps a dozen values of every position and sums an outer product a position into the gradient of
  the weight. Here preactivations, cells and outputs are kept, and that gradient is one matrix product.
  """
  keep_TB1 = tf.cast(~tf.transpose(begins_BT), z_BTJH.dtype)[..., tf.newaxis]
  length, rows = sizes(begins_BT)[1], sizes(begins_BT)[0]
  dtype, features, hidden = z_BTJH.dtype, weight_MJH.shape[0], weight_MJH.shape[-1]

  @custom_gradient
  def run(z_BTJH, weight_MJH, *projection):
    z_TBJH = shard(tf.einsum('BTJH->TBJH', z_BTJH), 'TBJH')

    def forward(t, y_BM, cell_BH, zs, cells, ys):
      keep_B1 = keep_TB1[t]
      z_BJH = z_TBJH[t] + tf.einsum('BM,MJH->BJH', y_BM * keep_B1, weight_MJH)
      z_BJH = shard(z_BJH, 'BJH')
      hidden_BH, cell_BH = lstm_cell(z_BJH, cell_BH * tf.cast(keep_B1, tf.float32))
      y_BM = shard(tf.matmul(hidden_BH, projection[0]) if projection else hidden_BH, 'BM')
      cell_BH = shard(cell_BH, 'BH')
      return y_BM, cell_BH, zs.write(t, z_BJH), cells.write(t, cell_BH), ys.write(t, y_BM)

    arrays = _arrays_of_positions(length, rows, (dtype, [4, hidden]), (tf.float32, [hidden]), (dtype, [features]))
    begin = shard(tf.zeros([rows, features], dtype), 'BM'), shard(tf.zeros([rows, hidden]), 'BH')
    *_, zs, cells, ys = counted(length, forward, *begin, *arrays)
    z_TBJH, cell_TBH, y_TBM = shard(zs.stack(), 'TBJH'), shard(cells.stack(), 'TBH'), shard(ys.stack(), 'TBM')
    before = lambda x, keep_TB1: tf.pad(x[:-1], [[1, 0], [0, 0], [0, 0]]) * tf.cast(keep_TB1, x.dtype)

    def grad(dy_BTM, dcell_BTH):
      dy_TBM = shard(tf.einsum('BTM->TBM', dy_BTM), 'TBM')
      dcell_TBH = shard(tf.einsum('BTH->TBH', dcell_BTH), 'TBH')
      cell_before_TBH = before(cell_TBH, keep_TB1)

      def backward(done, dy_BM, dcell_BH, dzs, dys):
        t = length - 1 - done
        dy_BM = shard(dy_BM + dy_TBM[t], 'BM')
        dhidden_BH = tf.matmul(dy_BM, projection[0], transpose_b=True) if projection else dy_BM
        results = shard(dhidden_BH, 'BH'), shard(dcell_BH + dcell_TBH[t], 'BH')
        dz_BJH, dcell_BH = pull_back(lstm_cell, [z_TBJH[t], cell_before_TBH[t]], results)
        dz_BJH, keep_B1 = shard(dz_BJH, 'BJH'), keep_TB1[t]
        dbefore_BM = shard(tf.einsum('BJH,MJH->BM', dz_BJH, weight_MJH) * keep_B1, 'BM')
        dcell_BH = shard(dcell_BH * tf.cast(keep_B1, tf.float32), 'BH')
        return dbefore_BM, dcell_BH, dzs.write(t, dz_BJH), dys.write(t, dy_BM)

      arrays = _arrays_of_positions(length, rows, (dtype, [4, hidden]), (dtype, [features]))
      *_, dzs, dys = counted(length, backward, *begin, *arrays)
      dz_TBJH = shard(dzs.stack(), 'TBJH')
      dweight_MJH = tf.einsum('TBM,TBJH->MJH', before(y_TBM, keep_TB1), dz_TBJH)
      dprojection = []
      if projection:
        output_TBH = tf.sigmoid(tf.cast(z_TBJH[:, :, 3], tf.float32))
        hidden_TBH = tf.cast(output_TBH * tf.tanh(cell_TBH), dtype)
        dprojection = [tf.einsum('TBH,TBM->HM', hidden_TBH, shard(dys.stack(), 'TBM'))]
      return shard(tf.einsum('TBJH->BTJH', dz_TBJH), 'BTJH'), dweight_MJH, *dprojection

    return (tf.einsum('TBM->BTM', y_TBM), tf.einsum('TBH->BTH', cell_TBH)), grad

  return run(z_BTJH, weight_MJH, *([] if projection_HM is None else [projection_HM]))


def _arrays_of_positions(length, rows, *specs):
  rows = rows if isinstance(rows, int) else None
  return [tf.TensorArray(dtype, length, element_shape=[rows, *shape]) for dtype, shape in specs]


# What every backend but the reference takes, unless it has a form of its own.
OVERRIDES = {
  'combine_rows': combine_rows,
  'dispatch_rows': dispatch_rows,
  'layer_norm': layer_norm,
  'lstm': lstm,
  'product': product,
  'softmax_cross_entropy': softmax_cross_entropy,
}
