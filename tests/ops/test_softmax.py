"""Softmax cross-entropy and its hand-written gradient, against autodiff of the plain formula."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.ops import reference, vjp
from lingvo_moe.ops.cpu import cross_entropy

FORMS = {
  'reference': reference.softmax_cross_entropy,
  'dense': vjp.softmax_cross_entropy,
  'sparse': cross_entropy.softmax_cross_entropy,
}
EACH = pytest.mark.parametrize('softmax_loss', FORMS.values(), ids=FORMS)


def plain(logits_BTV, label_BT, smoothing, z_weight):
  """Cross-entropy with the smoothed target, plus z_weight * log(Z)^2, with the derived gradient."""
  vocab_size = logits_BTV.shape[-1]
  target_BTV = (1 - smoothing) * tf.one_hot(label_BT, vocab_size) + smoothing / vocab_size
  log_z_BT = tf.reduce_logsumexp(logits_BTV, axis=-1)
  xent_BT = -tf.reduce_sum(target_BTV * (logits_BTV - log_z_BT[..., tf.newaxis]), axis=-1)
  return xent_BT + z_weight * log_z_BT**2


@EACH
def test_two_symbols_by_hand(softmax_loss):
  logits = tf.constant([[[math.log(3.0), 0.0]]])  # p = 3/4, 1/4; Z = 4
  xent, loss = softmax_loss(logits, tf.constant([[0]]), smoothing=0.2, z_weight=0.5)
  np.testing.assert_allclose(xent, [[-math.log(3 / 4)]], rtol=1e-6)
  smoothed = -0.9 * math.log(3 / 4) - 0.1 * math.log(1 / 4)
  np.testing.assert_allclose(loss, [[smoothed + 0.5 * math.log(4) ** 2]], rtol=1e-6)


@EACH
def test_without_smoothing_or_z_loss_both_results_are_the_cross_entropy(softmax_loss):
  xent, loss = softmax_loss(tf.zeros([1, 2, 8]), tf.constant([[3, 0]]))
  np.testing.assert_allclose(xent, [[math.log(8)] * 2], rtol=1e-6)
  np.testing.assert_allclose(xent, loss, rtol=1e-6)


@EACH
@pytest.mark.parametrize(
  'smoothing, z_weight, sizes',
  [
    *((*values, 'eager') for values in ((0, 0), (0.1, 0), (0, 0.01), (0.1, 0.01))),
    (0.1, 0.01, 'traced'),
    (0.1, 0.01, 'traced and open'),
  ],
)
def test_value_and_gradient_are_those_of_the_plain_formula(softmax_loss, smoothing, z_weight, sizes):
  logits = 3 * tf.random.normal([2, 4, 7])
  label = tf.random.uniform([2, 4], 0, 7, tf.int32)
  pull = tf.random.normal([2, 4])

  def value_and_gradient(f):
    def run(logits):
      with tf.GradientTape() as tape:
        tape.watch(logits)
        loss = f(logits)
        value = tf.reduce_sum(loss * pull)
      return loss, tape.gradient(value, logits)

    open_sizes = [tf.TensorSpec([None, None, 7])] if sizes == 'traced and open' else None
    return (run if sizes == 'eager' else tf.function(run, open_sizes))(logits)

  ours = value_and_gradient(lambda x: softmax_loss(x, label, smoothing, z_weight)[1])
  theirs = value_and_gradient(lambda x: plain(x, label, smoothing, z_weight))
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@EACH
def test_the_plain_cross_entropy_passes_no_gradient(softmax_loss):
  logits = tf.random.normal([1, 2, 3])
  with tf.GradientTape() as tape:
    tape.watch(logits)
    xent, _ = softmax_loss(logits, tf.constant([[0, 1]]))
  assert tape.gradient(xent, logits) is None


@EACH
def test_large_scores_stay_finite(softmax_loss):
  logits = tf.constant([[[1e4, 0.0, -1e4]]])
  with tf.GradientTape() as tape:
    tape.watch(logits)
    _, loss = softmax_loss(logits, tf.constant([[0]]), 0.1, 1e-4)
  assert np.all(np.isfinite(loss)) and np.all(np.isfinite(tape.gradient(loss, logits)))
