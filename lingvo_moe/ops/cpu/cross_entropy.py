"""Cross-entropy on CPUs, with the fewest passes of TensorFlow's kernels over the scores of all symbols."""

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.ops.custom_gradient import custom_gradient


def softmax_cross_entropy(logits_BTV, label_BT, smoothing=0.0, z_weight=0.0):
  """Cross-entropy that keeps the softmax, by one kernel; its vjp subtracts the target at the labels alone, in place."""

  @custom_gradient
  def loss(logits_BTV):
    p_BTV = tf.nn.softmax(logits_BTV)
    # log Z = logit - log p of the likeliest symbol, whose probability is at least 1 / V.
    top_BT, top_log_p_BT = tf.reduce_max(logits_BTV, axis=-1), tf.math.log(tf.reduce_max(p_BTV, axis=-1))
    minus_log_p = lambda logit_BT: (top_BT - logit_BT) - top_log_p_BT
    xent_BT = minus_log_p(tf.gather(logits_BTV, label_BT, batch_dims=2))
    loss_BT = xent_BT
    if smoothing:
      loss_BT = (1.0 - smoothing) * xent_BT + smoothing * minus_log_p(tf.reduce_mean(logits_BTV, axis=-1))
    if z_weight:
      log_z_BT = top_BT - top_log_p_BT
      loss_BT += z_weight * tf.square(log_z_BT)

    def grad(_, dloss_BT):
      rows, length, vocab_size = sizes(p_BTV)
      pull_BTV = p_BTV * (1.0 + 2.0 * z_weight * log_z_BT)[..., tf.newaxis] if z_weight else p_BTV
      if smoothing:
        pull_BTV -= smoothing / tf.cast(vocab_size, tf.float32)
      dlogits_FV = tf.reshape(pull_BTV * dloss_BT[..., tf.newaxis], [-1, vocab_size])
      label_F2 = tf.stack([tf.range(rows * length), tf.cast(tf.reshape(label_BT, [-1]), tf.int32)], axis=-1)
      dlabel_F = (1.0 - smoothing) * tf.reshape(dloss_BT, [-1])
      return tf.reshape(tf.tensor_scatter_nd_sub(dlogits_FV, label_F2, dlabel_F), sizes(p_BTV))

    return (xent_BT, loss_BT), grad

  xent_BT, loss_BT = loss(logits_BTV)
  return tf.stop_gradient(xent_BT), loss_BT
