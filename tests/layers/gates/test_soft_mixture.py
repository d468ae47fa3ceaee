"""Soft mixture: the weighted sum of all experts, and the two losses of 1991."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import weights
from lingvo_moe.layers.gates.soft_mixture import SoftMixture
from lingvo_moe.layers.moe import MoE


@pytest.mark.parametrize('dispatch', ['einsum', 'gather', 'grouped'])
def test_every_expert_answers(dispatch):
  layer = MoE(model_dim=6, hidden_dim=8, num_experts=3, num_groups=2, gate=SoftMixture(), dispatch=dispatch)
  theta = {**weights.initialize(layer.weights(), seed=3), 'gate': tf.random.stateless_normal([6, 3], [0, 9])}
  x, paddings = tf.random.stateless_normal([2, 5, 6], [0, 1]), tf.constant([[0.0] * 5, [0.0, 1.0, 0.0, 0.0, 1.0]])
  p = tf.nn.softmax(x @ theta['gate'])
  h = tf.nn.relu(tf.einsum('BTM,EMH->BTEH', x, theta['wi']))
  expected = tf.einsum('BTE,BTEM->BTM', p, tf.einsum('BTEH,EHM->BTEM', h, theta['wo']))
  y, routing = layer(theta, x, paddings)
  np.testing.assert_allclose(y, expected * (1 - paddings)[..., tf.newaxis], atol=1e-5)
  np.testing.assert_array_equal(routing.stats.tokens_E, [8, 8, 8])


def competitive_loss(gates_BE, outputs_BEM, target_BM):
  """Loss -log sum_i p_i exp(-1/2 ||d - o_i||^2) [B], equation 1.3: each expert learns the cases that it fits best."""
  distance_BE = tf.reduce_sum(tf.square(target_BM[:, tf.newaxis] - outputs_BEM), axis=-1)
  return -tf.reduce_logsumexp(tf.math.log(tf.maximum(gates_BE, 1e-30)) - 0.5 * distance_BE, axis=-1)


def cooperative_loss(gates_BE, outputs_BEM, target_BM):
  """Loss ||d - sum_i p_i o_i||^2 [B], equation 1.1: each expert cancels the error that the others leave."""
  y_BM = tf.einsum('BE,BEM->BM', gates_BE, outputs_BEM)
  return tf.reduce_sum(tf.square(target_BM - y_BM), axis=-1)


def test_losses_by_hand():
  gates, outputs, target = tf.constant([[0.25, 0.75]]), tf.constant([[[1.0], [3.0]]]), tf.constant([[2.0]])
  np.testing.assert_allclose(cooperative_loss(gates, outputs, target), [(2 - 2.5) ** 2])
  np.testing.assert_allclose(competitive_loss(gates, outputs, target), [0.5], rtol=1e-6)  # -log exp(-1/2)
  far = tf.constant([[[1.0], [2.0]]])
  np.testing.assert_allclose(competitive_loss(gates, far, target), [-np.log(0.25 * np.exp(-0.5) + 0.75)], rtol=1e-6)


def trained(loss, steps=400):
  """Gates [B, 2] and squared errors [B, 2] of experts, after training on two tasks: y = x and y = -x.

  The gate sees which task a case is of, the linear experts see x alone.
  """
  x = tf.tile(tf.linspace(-2.0, 2.0, 32), [2])[:, tf.newaxis]
  task = tf.one_hot(tf.repeat([0, 1], 32), 2)
  target = x * (task[:, :1] - task[:, 1:])
  theta = [tf.Variable(0.3 * tf.random.stateless_normal(shape, [0, n])) for n, shape in enumerate([[2, 2], [2, 1]])]
  answer = lambda: (tf.nn.softmax(task @ theta[0]), x[..., tf.newaxis] * theta[1])
  optimizer = tf.keras.optimizers.Adam(0.05)
  optimizer.build(theta)

  @tf.function
  def step():
    with tf.GradientTape() as tape:
      value = tf.reduce_mean(loss(*answer(), target))
    optimizer.apply_gradients(zip(tape.gradient(value, theta), theta))

  for _ in range(steps):
    step()
  gates, outputs = answer()
  combined = tf.einsum('BE,BEM->BM', gates, outputs)
  assert float(tf.reduce_mean(tf.square(target - combined))) < 0.01  # either loss solves both tasks
  return gates.numpy(), tf.reduce_sum(tf.square(target[:, tf.newaxis] - outputs), axis=-1).numpy()


def test_experts_specialise_by_the_competitive_loss_and_not_by_the_cooperative_one():
  error_of_likeliest = lambda gates, errors: np.mean(np.take_along_axis(errors, np.argmax(gates, axis=1)[:, None], 1))
  gates, errors = trained(competitive_loss)
  chosen = np.argmax(gates, axis=1)
  assert set(chosen[:32]) == {chosen[0]} and set(chosen[32:]) == {1 - chosen[0]}  # an expert a task
  assert np.min(np.max(gates, axis=1)) > 0.95 and error_of_likeliest(gates, errors) < 0.01
  gates, errors = trained(cooperative_loss)
  assert error_of_likeliest(gates, errors) > 0.05  # no expert solves its task: the other corrects it
