"""Experts of every kind: each against a plain loop, with every dispatcher, alone and under every gate."""

import dataclasses
import functools
import itertools
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng, weights
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.experts import EXPERTS
from lingvo_moe.layers.gates import table
from lingvo_moe.layers.gates.top_k import TopK
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.transformer import Layer
from lingvo_moe.ops import backend, cpu, xla

X_BTM = tf.random.stateless_normal([4, 6, 6], [0, 1])
PADDINGS_BT = tf.constant([[0.0] * 6] * 3 + [[0.0] * 4 + [1.0] * 2])
LAYER = MoE(model_dim=6, hidden_dim=10, num_experts=4, num_groups=2, capacity_factor=8.0, gate=TopK(2))
# Once, a program runs sooner than it is traced. Compiled ones take seconds each: in the test of every gate they have
# every kind, in training; others are slow.
WAYS = ['gather', 'grouped']
COMPILED = 'compiled gather'
KIND_OF = dict(zip(table.GATES, itertools.cycle(EXPERTS)))
assert len(KIND_OF) >= len(EXPERTS)
FORMULAS = {
  'relu': lambda w, e, x: np.maximum(x @ w['wi'][e], 0) @ w['wo'][e],
  'gelu': lambda w, e, x: gelu(x @ w['wi'][e]) @ w['wo'][e],
  'swish': lambda w, e, x: silu(x @ w['wi'][e]) @ w['wo'][e],
  'geglu': lambda w, e, x: (gelu(x @ w['wg'][e]) * (x @ w['wi'][e])) @ w['wo'][e],
  'swiglu': lambda w, e, x: (silu(x @ w['wg'][e]) * (x @ w['wi'][e])) @ w['wo'][e],
  'deep': lambda w, e, x: np.maximum(np.maximum(x @ w['wi'][e], 0) @ w['wh'][e], 0) @ w['wo'][e],
}


def gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
  return x / (1 + np.exp(-x))


def theta_of(layer):
  """Weights, none of which is zero."""
  specs = weights.flatten(layer.weights())
  values = {n: 0.4 * tf.random.stateless_normal(s.shape, [5, i]) for i, (n, s) in enumerate(specs.items())}
  return weights.unflatten(values)


def run(layer, in_force=backend.REFERENCE, jit=False, key=None):
  """Outputs, and gradients of the tokens and of every weight."""
  theta = theta_of(layer)

  def values_and_gradients(theta, x_BTM):
    with backend.use(in_force), tf.GradientTape() as tape:
      tape.watch([theta, x_BTM])
      y_BTM, routing = layer(theta, x_BTM, PADDINGS_BT, key)
      value = tf.reduce_sum(tf.square(y_BTM)) + routing.stats.aux_loss
    grads = tape.gradient(value, [x_BTM, *weights.flatten(theta).values()], unconnected_gradients='zero')
    return [y_BTM, *map(tf.convert_to_tensor, grads)]

  if jit:
    values_and_gradients = tf.function(values_and_gradients, jit_compile=True, autograph=False)
  return values_and_gradients(theta, X_BTM)


def run_by(way, layer, key):
  in_force = cpu.backend(training=True) if way == 'grouped' else xla.BACKEND
  return run(layer, in_force, way.startswith('compiled'), key)


@functools.cache
def run_einsum(layer, training):
  """What the other dispatchers are compared with: einsum dispatch, not compiled."""
  return run(dataclasses.replace(layer, dispatch='einsum'), key=prng.key(1) if training else None)


def assert_all_close(got, expected):
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(tf.reduce_max(tf.abs(b)))))


@pytest.mark.parametrize('kind', EXPERTS)
def test_each_kind_by_a_plain_loop(kind):
  layer = dataclasses.replace(LAYER, expert=kind)
  theta = {name: weight.numpy() for name, weight in theta_of(layer).items()}
  expected = np.zeros(X_BTM.shape)
  for b, t in zip(*np.nonzero(PADDINGS_BT.numpy() == 0)):
    x = X_BTM[b, t].numpy()
    p = np.exp(x @ theta['gate'])
    chosen = np.argsort(-p)[:2]
    expected[b, t] = sum(p[e] / p[chosen].sum() * FORMULAS[kind](theta, e, x) for e in chosen)
  np.testing.assert_allclose(layer(theta_of(layer), X_BTM, PADDINGS_BT)[0], expected, atol=1e-5)


@pytest.mark.parametrize('way', [*WAYS, pytest.param(COMPILED, marks=[pytest.mark.compiled, pytest.mark.slow])])
@pytest.mark.parametrize('kind', EXPERTS)
def test_each_kind_gives_the_same_values_and_gradients_with_every_dispatcher(kind, way):
  layer = dataclasses.replace(LAYER, expert=kind, expert_dropout=0.3)
  expected = run_einsum(layer, training=True)
  got = run_by(way, dataclasses.replace(layer, dispatch=way.split()[-1]), prng.key(1))
  assert_all_close(got, expected)


@pytest.mark.parametrize(
  'training, way',
  [
    *itertools.product([True, False], WAYS),
    pytest.param(True, COMPILED, marks=pytest.mark.compiled),
    pytest.param(False, COMPILED, marks=[pytest.mark.compiled, pytest.mark.slow]),
  ],
)
@pytest.mark.parametrize('name', table.GATES)
def test_every_gate_gives_the_same_values_and_gradients_with_every_dispatcher(name, training, way):
  options = lambda dispatch: types.SimpleNamespace(groups_of_experts=3, dispatch=dispatch)
  layer = lambda dispatch: dataclasses.replace(
    LAYER,
    expert=KIND_OF[name],
    num_experts=9,
    capacity_factor=1.5,
    dispatch=dispatch,
    gate=table.make(name, options(dispatch)),
  )
  key = prng.key(1) if training else None
  expected = run_einsum(layer('einsum'), training)
  assert_all_close(run_by(way, layer(way.split()[-1]), key), expected)


def test_a_shared_expert_is_a_dense_layer_beside_the_routed_ones():
  routed, both = LAYER, dataclasses.replace(LAYER, shared_experts=2)
  theta = theta_of(both)
  assert theta['shared']['wi'].shape == (6, 20)
  dense = tf.nn.relu(X_BTM @ theta['shared']['wi']) @ theta['shared']['wo']
  expected = routed(theta, X_BTM, PADDINGS_BT)[0] + dense
  np.testing.assert_allclose(both(theta, X_BTM, PADDINGS_BT)[0], expected, atol=1e-5)


def test_shared_experts_have_the_dropout_of_experts_and_draw_it_for_themselves():
  layer = dataclasses.replace(LAYER, shared_experts=1, expert_dropout=0.5)
  theta = theta_of(layer)
  theta |= {'wo': tf.zeros_like(theta['wo'])}
  inference = layer(theta, X_BTM, PADDINGS_BT)[0]
  train = tf.function(lambda key: layer(theta, X_BTM, PADDINGS_BT, key)[0], autograph=False)
  trained = [train(prng.key(i)) for i in range(300)]
  assert np.abs(trained[0] - trained[1]).max() > 0.1
  np.testing.assert_allclose(np.mean(trained, axis=0), inference, atol=0.3)
  none = dataclasses.replace(layer, expert_dropout=0.0)
  np.testing.assert_array_equal(none(theta, X_BTM, PADDINGS_BT, prng.key(1))[0], none(theta, X_BTM, PADDINGS_BT)[0])


@pytest.mark.parametrize('name', table.GATES)
def test_only_weights_of_gates_and_norms_stay_float32(name):
  gate = table.make(name, types.SimpleNamespace(groups_of_experts=3))
  experts = dataclasses.replace(LAYER, num_experts=9, gate=gate, shared_experts=1)
  layer = Layer(Attention(6, 2, 3), experts, cross_attention=True, post_norm=True)
  theta = weights.unflatten({n: tf.zeros(s.shape) for n, s in weights.flatten(layer.weights()).items()})
  cast = weights.flatten(weights.cast(theta, layer.weights(), tf.bfloat16))
  norms = {n for n in cast if n.endswith(('norm/scale', 'norm/bias'))}
  assert len(norms) == 12
  kept = norms | {f'moe/{n}' for n in gate.weights(6, 9)}
  assert {n: w.dtype for n, w in cast.items()} == {n: tf.float32 if n in kept else tf.bfloat16 for n in cast}


def test_experts_of_bfloat16_keep_their_type():
  layer = dataclasses.replace(LAYER, expert='geglu', dispatch='grouped')
  theta = {n: w if n == 'gate' else tf.cast(w, tf.bfloat16) for n, w in theta_of(layer).items()}
  assert layer(theta, tf.cast(X_BTM, tf.bfloat16), PADDINGS_BT)[0].dtype == tf.bfloat16
