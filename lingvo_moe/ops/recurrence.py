"""LSTM with a vjp written by hand, for backends whose derived gradient of a loop is slow or large.

The derived gradient of reference.lstm keeps a dozen values of every position and sums an outer product a position into
the gradient of the weight. Here preactivations, cells and outputs are kept, and that gradient is one matrix product
over all positions.
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.ops.custom_gradient import custom_gradient, pull_back
from lingvo_moe.ops.loops import counted
from lingvo_moe.ops.reference import lstm_cell
from lingvo_moe.xla_sharding import shard


def lstm(z_BTJH, begins_BT, weight_MJH, projection_HM=None):
  """LSTM as reference.lstm: a loop over positions forward, and one backward for the gradient."""
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

    arrays = _arrays(length, rows, (dtype, [4, hidden]), (tf.float32, [hidden]), (dtype, [features]))
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

      arrays = _arrays(length, rows, (dtype, [4, hidden]), (dtype, [features]))
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


def _arrays(length, rows, *specs):
  rows = rows if isinstance(rows, int) else None
  return [tf.TensorArray(dtype, length, element_shape=[rows, *shape]) for dtype, shape in specs]
