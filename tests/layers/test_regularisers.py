"""Regularisers of MoE layers: dropout within experts and feed-forwards, output masking, second choices, gate scale."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng, weights
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.top2 import Top2, top2_gating
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend, cpu, xla

LAYER = MoE(model_dim=6, hidden_dim=32, num_experts=4, num_groups=2, capacity_factor=8.0, gate=Top2('always'))
DROPPING = dataclasses.replace(LAYER, expert_dropout=0.5)
THETA = {**weights.initialize(LAYER.weights(), seed=3), 'gate': tf.random.stateless_normal([6, 4], [0, 9])}
X_BTM = tf.random.stateless_normal([4, 10, 6], [0, 1])
PADDINGS_BT = tf.zeros([4, 10])
KEY = prng.key(5, 'train')


def run(layer, key=KEY, in_force=backend.REFERENCE, jit=False):
  """Outputs, their gradients, and the routing statistics."""

  @tf.function(jit_compile=jit, autograph=False)
  def values_and_gradients(theta, x_BTM):
    with backend.use(in_force), tf.GradientTape() as tape:
      tape.watch([theta, x_BTM])
      y_BTM, routing = layer(theta, x_BTM, PADDINGS_BT, key)
    grads = tape.gradient(y_BTM, [x_BTM, theta['gate'], theta['wi'], theta['wo']])
    return [y_BTM, *map(tf.convert_to_tensor, grads)], routing.stats

  return values_and_gradients(THETA, X_BTM)


def masks(key=KEY):
  """The masks that a layer multiplies its hidden features by, [B, T, E, H], from prng alone."""
  key_BT1 = prng.bits(prng.fold(key, 'experts'), [4, 10])[..., tf.newaxis]
  return prng.dropout(tf.ones([4, 10, 4, 32]), 0.5, prng.fold(key_BT1, tf.range(4)))


def test_expert_dropout_by_a_plain_loop():
  (y_BTM, *_), _ = run(DROPPING)
  mask_BTEH = masks().numpy()
  gate, wi, wo = (THETA[name].numpy() for name in ('gate', 'wi', 'wo'))
  expected = np.zeros(X_BTM.shape)
  for b, t in np.ndindex(4, 10):
    x = X_BTM[b, t].numpy()
    p = np.exp(x @ gate)
    chosen = np.argsort(-p)[:2]
    for e in chosen:
      expected[b, t] += p[e] / p[chosen].sum() * ((np.maximum(x @ wi[e], 0) * mask_BTEH[b, t, e]) @ wo[e])
  np.testing.assert_allclose(y_BTM, expected, atol=1e-5)


def test_masks_of_experts_drop_at_their_rate_and_differ_between_tokens_and_experts():
  mask_BTEH = masks().numpy()
  assert set(np.unique(mask_BTEH)) == {0.0, 2.0}
  assert abs(np.mean(mask_BTEH) - 1) < 0.1
  rows = mask_BTEH.reshape(-1, 32)
  assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize(
  ('changed', 'in_force', 'jit'),
  [
    ({'dispatch': 'gather'}, backend.REFERENCE, False),
    ({'dispatch': 'grouped'}, backend.REFERENCE, False),
    ({'dispatch': 'grouped'}, cpu.backend(training=True), False),
    ({'dispatch': 'einsum'}, xla.BACKEND, True),
    ({'dispatch': 'gather'}, xla.BACKEND, True),
    ({'capacity_factor': None, 'round_capacity_factor': 0.5}, xla.BACKEND, True),
    ({'num_groups': 1}, backend.REFERENCE, False),
  ],
  ids=['gather', 'grouped', 'grouped on a CPU', 'einsum by XLA', 'gather by XLA', 'rounds', 'one group'],
)
def test_expert_dropout_does_not_depend_on_how_it_is_computed(changed, in_force, jit):
  expected, _ = run(dataclasses.replace(DROPPING, dispatch='einsum'))
  got, _ = run(dataclasses.replace(DROPPING, **changed), in_force=in_force, jit=jit)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_rows_keep_their_masks_in_another_batch():
  key_B = prng.fold(KEY, tf.range(4))
  whole = DROPPING(THETA, X_BTM, PADDINGS_BT, key_B)[0]
  half = dataclasses.replace(DROPPING, num_groups=1)(THETA, X_BTM[2:], PADDINGS_BT[2:], key_B[2:])[0]
  np.testing.assert_allclose(half, whole[2:], atol=1e-5)


def test_nothing_is_dropped_or_masked_at_inference():
  plain, _ = run(LAYER, key=None)
  got, _ = run(dataclasses.replace(DROPPING, output_masking=0.5), key=None)
  np.testing.assert_array_equal(got[0], plain[0])


def test_output_masking_zeroes_tokens_and_scales_the_others():
  (plain, *_), _ = run(LAYER)
  (masked, *_), stats = run(dataclasses.replace(LAYER, output_masking=0.25))
  zero_BT = np.all(masked == 0, axis=-1)
  assert 0.1 < np.mean(zero_BT) < 0.45
  np.testing.assert_allclose(masked[~zero_BT], plain[~zero_BT] / 0.75, rtol=1e-5)
  assert float(tf.reduce_sum(stats.tokens_E)) == 2 * 40  # masked tokens still take slots


def test_second_choices_are_taken_always_or_at_random():
  assert float(run(LAYER)[1].skipped) == 0
  assert float(run(dataclasses.replace(LAYER, gate=Top2('random')))[1].skipped) > 0


def test_the_gate_may_begin_smaller():
  init = lambda scale: weights.initialize(
    dataclasses.replace(LAYER, gate=Top2(gate_init_scale=scale)).weights(), seed=1
  )
  one, tenth = init(1.0), init(0.1)
  np.testing.assert_allclose(tenth['gate'], 0.1 * one['gate'], rtol=1e-6)
  np.testing.assert_array_equal(tenth['wi'], one['wi'])


def test_router_z_loss_by_hand():
  logits = tf.math.log([[[1.0, 3.0], [2.0, 2.0], [5.0, 1.0]]])
  with tf.GradientTape() as tape:
    tape.watch(logits)
    z_loss = top2_gating(logits, tf.constant([[0.0, 0.0, 1.0]])).stats.z_loss
  np.testing.assert_allclose(z_loss, 2 * np.log(4) ** 2, rtol=1e-6)
  p = np.array([[1 / 4, 3 / 4], [1 / 2, 1 / 2], [0, 0]])
  np.testing.assert_allclose(tape.gradient(z_loss, logits)[0], 2 * np.log(4) * p, rtol=1e-5)


def test_dropout_of_a_dense_feed_forward_is_after_its_relu():
  layer = FeedForward(6, 32, dropout=0.5)
  theta = weights.initialize(layer.weights(), seed=1)
  h_BTH = tf.nn.relu(tf.einsum('BTM,MH->BTH', X_BTM, theta['wi']))
  expected = tf.einsum('BTH,HM->BTM', prng.dropout(h_BTH, 0.5, KEY), theta['wo'])
  np.testing.assert_allclose(layer(theta, X_BTM, KEY), expected, atol=1e-5)
  np.testing.assert_array_equal(layer(theta, X_BTM), FeedForward(6, 32)(theta, X_BTM, KEY))


def test_keys_survive_their_way_as_bytes():
  key = prng.bits(KEY, [1000])
  np.testing.assert_array_equal(prng.from_bytes(tf.cast(prng.as_bytes(key), tf.bfloat16)), key)
