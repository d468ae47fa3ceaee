"""Competing experts in the output softmax: the competitive loss of 1991 in a language model."""

import numpy as np
import tensorflow as tf

from lingvo_moe.config import registry
from lingvo_moe.core import prng, weights
from lingvo_moe.layers.embedding import CompetingOutputs, Embedding


def test_the_loss_is_the_mixture_of_what_each_expert_says():
  output = CompetingOutputs(Embedding(5, 3), num_experts=2)
  theta = weights.initialize(output.weights(), seed=1)
  x_BTM = prng.normal(prng.key(1, 'x'), [1, 4, 3])
  log_p = output.logits(theta, x_BTM).numpy()
  theta = {name: w.numpy() for name, w in theta.items()}
  for t, x_M in enumerate(x_BTM[0].numpy()):
    p_J = np.exp(x_M @ theta['gate']) / np.sum(np.exp(x_M @ theta['gate']))
    scores = [np.exp(x_M @ theta['experts'][j] @ theta['table'].T) for j in range(2)]
    mixture_V = sum(p * s / np.sum(s) for p, s in zip(p_J, scores))
    np.testing.assert_allclose(log_p[0, t], np.log(mixture_V), rtol=1e-4)


def test_an_expert_learns_only_what_it_is_responsible_for():
  """The gradient of expert i is p_i P_i(d) / sum_j p_j P_j(d) of that of its own cross-entropy (equation 1.4)."""
  output = CompetingOutputs(Embedding(5, 3), num_experts=2)
  theta = weights.initialize(output.weights(), seed=1)
  x_BTM, d = prng.normal(prng.key(1, 'x'), [1, 1, 3]), 2
  with tf.GradientTape(persistent=True) as tape:
    tape.watch(theta)
    competitive = -output.logits(theta, x_BTM)[0, 0, d]
    alone = [-tf.nn.log_softmax(x_BTM[0] @ theta['experts'][i] @ tf.transpose(theta['table']))[0, d] for i in range(2)]
  p_J = tf.nn.softmax(x_BTM[0] @ theta['gate'])[0]
  joint_J = p_J * tf.exp(-tf.stack(alone))
  for i, responsible in enumerate(joint_J / tf.reduce_sum(joint_J)):
    got = tape.gradient(competitive, theta['experts'])[i]
    np.testing.assert_allclose(got, responsible * tape.gradient(alone[i], theta['experts'])[i], rtol=1e-3, atol=1e-6)


def test_a_registered_model_has_them_and_its_loss_falls():
  config = registry.get('lm.shakespeare.Competing')(
    vocab='byte',
    vocab_size=260,
    window=8,
    batch_tokens=64,
    num_layers=1,
    model_dim=16,
    ff_dim=16,
    num_heads=2,
    head_dim=8,
  )
  program = config.program()
  assert program.weight_specs['output_embedding/experts'].shape == (4, 16, 16)
  ids = tf.constant(np.random.default_rng(1).integers(3, 9, [8, 8]), tf.int32)
  batch = {'inputs': ids, 'labels': ids, 'segments': tf.ones_like(ids), 'positions': tf.range(8) + 0 * ids}
  state, losses = program.init(), []
  for _ in range(12):
    state, metrics = program.train_step(state, batch)
    losses.append(float(metrics['loss']))
  assert losses[-1] < losses[0] - 0.05
