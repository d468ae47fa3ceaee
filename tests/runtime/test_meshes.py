"""Meshes: a MoE layer compiles on every kind of mesh, with every dispatcher, unscanned and scanned; an LSTM too."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.recurrent_stack import Lstm
from lingvo_moe.layers.scanned_stack import scan
from lingvo_moe.ops import backend, xla

jax = pytest.importorskip('jax')
spmd = pytest.importorskip('lingvo_moe.runtime.spmd')
lowering = pytest.importorskip('lingvo_moe.runtime.lowering')

pytestmark = pytest.mark.compiled

# Every axis alone, and every set of them, as in docs/meshes.md.
MESHES = (
  'data:2',
  'expert:2',
  'model:2',
  'data:2,expert:2',
  'data:2,model:2',
  'expert:2,model:2',
  'data:2,expert:2,model:2',
  'node:2,expert:2',
)
BLOCKS = 2
ALL_AXES = 'data:2,expert:2,model:2'
# The others are slow: test_layouts.py has einsum dispatch on other meshes, and test_pipelines.py scanned layers.
FAST = [(mesh, 'gather', False) for mesh in MESHES]
FAST += [(ALL_AXES, 'einsum', False), (ALL_AXES, 'einsum', True), ('model:2', 'gather', True)]
EVERY = [
  pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
  for case in itertools.product(MESHES, ('einsum', 'gather'), (False, True))
]


def gradients_of(dispatch, scanned):
  """Function of (weights, x): the outputs, then the gradients of their weighted sum."""
  layer = MoE(model_dim=8, hidden_dim=16, num_experts=4, num_groups=4, dispatch=dispatch)
  specs = weights_lib.flatten(layer.weights())
  if scanned:
    specs = weights_lib.flatten(weights_lib.stack(specs, BLOCKS))
  return specs, functools.partial(_outputs_and_gradients, layer, scanned)


def _outputs_and_gradients(layer, scanned, weights, x_BTM):
  one = weights_lib.flatten(layer.weights())
  paddings_BT = tf.zeros(x_BTM.shape[:2])

  def block(number, x_BTM, shared, theta):
    theta = weights_lib.unflatten({name: xla_sharding.gather(w, one[name].dims) for name, w in theta.items()})
    y_BTM, _ = layer(theta, x_BTM, paddings_BT, prng.key(0, 'test', number))
    return x_BTM + y_BTM, tf.zeros([])

  stored = {name: xla_sharding.store(w, 'L' * scanned + one[name].dims) for name, w in weights.items()}
  x_BTM = xla_sharding.shard(x_BTM, 'BTM')
  with tf.GradientTape() as tape:
    tape.watch([x_BTM, *stored.values()])
    if scanned:
      y_BTM, _ = scan(block, x_BTM, [], stored, one)
    else:
      y_BTM, _ = block(tf.constant(0), x_BTM, [], stored)
    loss = tf.reduce_sum(y_BTM * tf.sin(tf.cast(tf.reshape(tf.range(tf.size(y_BTM)), y_BTM.shape), tf.float32)))
  return [y_BTM, *tape.gradient(loss, [x_BTM, *stored.values()])]


@functools.cache
def arguments(scanned):
  rng = np.random.default_rng(0)
  specs, _ = gradients_of('einsum', scanned)
  weights = {name: rng.standard_normal(spec.shape).astype(np.float32) for name, spec in specs.items()}
  return weights, rng.standard_normal([8, 4, 8]).astype(np.float32)


@functools.cache
def on_one_device(scanned):
  with backend.use(xla.BACKEND):
    traced = tf.function(gradients_of('einsum', scanned)[1], autograph=False)
    return [x.numpy() for x in traced(*map(tf.nest.map_structure, [tf.constant] * 2, arguments(scanned)))]


@pytest.mark.parametrize('mesh, dispatch, scanned', EVERY)
def test_a_layer_with_experts_runs_on_every_kind_of_mesh(mesh, dispatch, scanned):
  mesh = Mesh.parse(mesh)
  specs, function = gradients_of(dispatch, scanned)
  lowered = lowering.Lowering(None, mesh, spmd.connect(mesh))
  stored = {name: lowered.stored(name, spec) for name, spec in specs.items()}
  jitted = jax.jit(lowering.traced(function, mesh), in_shardings=(stored, lowered.rows), out_shardings=lowered.whole)
  for got, expected in zip(jitted(*arguments(scanned)), on_one_device(scanned), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.max(np.abs(expected)))


def lstm_and_gradients(layer, weights, x_BTM):
  """Outputs and cells of an LSTM whose rows begin anew in the middle, then gradients of their weighted sum."""
  specs, begins_BT = layer.weights(), tf.range(8)[:, tf.newaxis] * tf.range(4) % 3 == 0
  stored = {name: xla_sharding.store(weights[name], specs[name].dims) for name in sorted(specs)}
  x_BTM = xla_sharding.shard(x_BTM, 'BTM')
  with tf.GradientTape() as tape:
    tape.watch([x_BTM, *stored.values()])
    state = layer({name: xla_sharding.gather(w, specs[name].dims) for name, w in stored.items()}, x_BTM, begins_BT)
    loss = tf.add_n([tf.reduce_sum(y * tf.sin(tf.range(1.0, y.shape[-1] + 1.0))) for y in state])
  return [*state, *tape.gradient(loss, [x_BTM, *stored.values()])]


@pytest.mark.parametrize('cell_dim', [0, 12], ids=['plain', 'projected'])
@pytest.mark.parametrize('mesh', [m if m == ALL_AXES else pytest.param(m, marks=pytest.mark.slow) for m in MESHES])
def test_an_lstm_runs_on_every_kind_of_mesh(mesh, cell_dim):
  layer = Lstm(8, cell_dim)
  rng, function, mesh = np.random.default_rng(0), functools.partial(lstm_and_gradients, layer), Mesh.parse(mesh)
  weights = {name: rng.standard_normal(spec.shape).astype(np.float32) for name, spec in layer.weights().items()}
  x_BTM = rng.standard_normal([8, 4, 8]).astype(np.float32)
  lowered = lowering.Lowering(None, mesh, spmd.connect(mesh))
  stored = {name: lowered.stored(name, spec) for name, spec in layer.weights().items()}
  jitted = jax.jit(lowering.traced(function, mesh), in_shardings=(stored, lowered.rows), out_shardings=lowered.whole)
  one_device = function({name: tf.constant(w) for name, w in weights.items()}, tf.constant(x_BTM))
  for got, expected in zip(jitted(weights, x_BTM), one_device, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.max(np.abs(expected)))
