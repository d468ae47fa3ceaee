"""The output softmax's loss, with label smoothing and z-loss, and its gradient in one pass over the scores."""

from __future__ import annotations

import tensorflow as tf

from lingvo_moe.core.shapes import is_static
from lingvo_moe.core.shapes import sizes
from lingvo_moe.layers.gradient import custom_gradient


def softmax_loss(
  logits_BTV: tf.Tensor, label_BT: tf.Tensor, smoothing: float = 0.0, z_weight: float = 0.0
) -> tuple[tf.Tensor, tf.Tensor]:
  """Cross-entropy of each label, plain and as it is trained on.

  The trained loss is the cross-entropy with a target of 1 - smoothing on the label and smoothing / V on all V symbols
  (Szegedy et al., 2016), plus z_weight * log(Z)^2, which keeps the normaliser Z near 1. The gradient is written out:
  softmax times (1 + 2 z_weight log Z), less the target. Derived by TensorFlow it would take three more passes over
  [B, T, V], the largest tensor there is.

  Args:
    logits_BTV: float32 scores.
    label_BT: int32 ids.
    smoothing: share of the target that is spread evenly, in [0, 1).
    z_weight: weight of the z-loss; 0 for none.

  Returns:
    float32 [B, T] each: (-log p of the label, which passes no gradient; the loss to minimise).
  """

  @custom_gradient
  def loss(logits_BTV):
    p_BTV = tf.nn.softmax(logits_BTV)
    # The normaliser by way of the likeliest symbol, whose probability is at least 1 / V.
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
      if is_static(rows, length):  # XLA's shapes: it makes the target as it goes
        target_BTV = tf.one_hot(label_BT, vocab_size, 1.0 - smoothing)
        return (pull_BTV - target_BTV) * dloss_BT[..., tf.newaxis]
      # The target has one entry a row, at the label. The difference is written where the product was.
      dlogits_XV = tf.reshape(pull_BTV * dloss_BT[..., tf.newaxis], [-1, vocab_size])
      label_X2 = tf.stack([tf.range(rows * length), tf.reshape(label_BT, [-1])], axis=-1)
      dlabel_X = (1.0 - smoothing) * tf.reshape(dloss_BT, [-1])
      return tf.reshape(tf.tensor_scatter_nd_sub(dlogits_XV, label_X2, dlabel_X), sizes(p_BTV))

    return (xent_BT, loss_BT), grad

  xent_BT, loss_BT = loss(logits_BTV)
  return tf.stop_gradient(xent_BT), loss_BT
