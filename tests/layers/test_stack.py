"""Encoder and decoder stacks: where experts go, independent rows, scan and rematerialisation."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng, weights
from lingvo_moe.layers.attention import Attention, Now
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.gate import gate_weight
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.recurrent_stack import Lstm, RecurrentStack
from lingvo_moe.layers.scanned_stack import ScannedStack
from lingvo_moe.layers.stack import Stack
from lingvo_moe.ops import backend, cpu, remat
from lingvo_moe.ops.cpu import grouped_ffn

ATTENTION, FFN = Attention(8, 2, 4, dropout=0.1), FeedForward(8, 12)
EXPERTS = MoE(8, 12, num_experts=3, num_groups=2)
ENCODER = Stack(2, ATTENTION, FFN, EXPERTS)
DECODER = dataclasses.replace(ENCODER, cross_attention=True)
DEEP = dataclasses.replace(DECODER, num_layers=4, residual_dropout=0.1)


def some_input(rows, length, seed=0):
  return tf.random.stateless_normal([rows, length, 8], [seed, 77])


@pytest.mark.parametrize(
  'every, layers',
  [(2, ['layer_01', 'layer_03']), (1, [f'layer_{i:02d}' for i in range(5)]), (3, ['layer_02']), (0, [])],
)
def test_experts_stand_in_every_kth_layer_the_last_of_each_k(every, layers):
  stack = Stack(5, ATTENTION, FFN, EXPERTS, moe_every=every)
  assert [name for name, layer in stack.layers.items() if layer.is_moe] == layers
  assert sorted({n.split('/')[0] for n in weights.flatten(stack.weights()) if '/moe/' in n}) == layers


def test_a_stack_without_experts_is_dense():
  assert not any(layer.is_moe for layer in Stack(4, ATTENTION, FFN, None).layers.values())


def test_routing_statistics_come_by_layer_name():
  routing = ENCODER(theta_of(ENCODER), some_input(2, 3), tf.ones([2, 3], tf.int32)).routed
  assert list(routing) == ['layer_01']
  assert float(routing['layer_01'].stats.tokens) == 6


def test_packed_sentences_come_out_as_in_rows_of_their_own():
  theta, x = theta_of(ENCODER), some_input(1, 8)
  decoder_theta, y = theta_of(DECODER, seed=1), some_input(1, 6, seed=2)
  memory, *_ = ENCODER(theta, x, tf.constant([[1, 1, 1, 2, 2, 2, 2, 0]]))
  out, *_ = DECODER(
    decoder_theta, y, tf.constant([[1, 1, 2, 2, 2, 0]]), memory, tf.constant([[1, 1, 1, 2, 2, 2, 2, 0]])
  )
  for x_range, y_range in ((slice(0, 3), slice(0, 2)), (slice(3, 7), slice(2, 5))):
    ones = lambda part: tf.ones(part.shape[:2], tf.int32)
    own_x, own_y = x[:, x_range], y[:, y_range]
    own_memory, *_ = ENCODER(theta, own_x, ones(own_x))
    own_out, *_ = DECODER(decoder_theta, own_y, ones(own_y), own_memory, ones(own_x))
    np.testing.assert_allclose(memory[:, x_range], own_memory, atol=2e-5)
    np.testing.assert_allclose(out[:, y_range], own_out, atol=2e-5)


def test_residual_dropout_needs_a_key_and_differs_by_layer_and_branch():
  theta, x, ones = theta_of(ENCODER), some_input(2, 3), tf.ones([2, 3], tf.int32)
  stack = dataclasses.replace(ENCODER, residual_dropout=0.5)
  np.testing.assert_array_equal(stack(theta, x, ones)[0], ENCODER(theta, x, ones)[0])
  dropped = stack(theta, x, ones, key=prng.key(0))[0]
  assert np.any(np.abs(dropped - ENCODER(theta, x, ones)[0]) > 0.01)
  np.testing.assert_array_equal(dropped, stack(theta, x, ones, key=prng.key(0))[0])
  key = prng.key(0)
  masks = [
    stack.layers['layer_00']._add(tf.zeros([8, 8]), {}, tf.ones([8, 8]), prng.fold(key, number), branch).numpy()
    for number in range(2)
    for branch in ('attention', 'ffn')
  ]
  assert len({mask.tobytes() for mask in masks}) == 4


def stacked(theta, stack):
  """Weights of an unrolled stack in the form of this one."""
  flat = weights.flatten(theta)
  by_layer = lambda name, spec: weights.names_by_layer(name, spec.shape[0]) if spec.dims.startswith('L') else None
  found = {}
  for name, spec in weights.flatten(stack.weights()).items():
    layers = by_layer(name, spec)
    found[name] = flat[name] if layers is None else tf.stack([flat[layer] for layer in layers])
  return weights.unflatten(found)


def output_and_gradients(stack, theta, key, dtype=tf.float32, shapes='static'):
  """Output and gradients for x, memory and every weight, by unrolled names; traced with shapes, or 'eager'."""
  segments, memory_segments = tf.constant([[1] * 5, [1] * 3 + [0] * 2]), tf.ones([2, 4], tf.int32)
  flat = weights.flatten(theta)

  def run(x, memory, flat):
    with tf.GradientTape() as tape:
      tape.watch([x, memory, *flat.values()])
      y, routed, *_ = stack(weights.unflatten(flat), x, segments, memory, memory_segments, key)
      aux = tf.add_n([r.stats.aux_loss for r in routed.values()])
      loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32))) + 3.0 * aux
    dx, dmemory, *dweights = tape.gradient(loss, [x, memory, *flat.values()])
    return y, routed, dx, dmemory, dict(zip(flat, dweights, strict=True))

  x, memory = tf.cast(some_input(2, 5), dtype), tf.cast(some_input(2, 4, seed=1), dtype)
  specs = [tf.TensorSpec([None, None, 8], dtype)] * 2 + [{name: tf.TensorSpec(w.shape) for name, w in flat.items()}]
  if shapes != 'eager':
    run = tf.function(run, autograph=False, input_signature=None if shapes == 'static' else specs)
  y, routed, dx, dmemory, dweights = run(x, memory, flat)
  by_layer = {'x': dx, 'memory': dmemory}
  for name, gradient in dweights.items():
    layers = weights.names_by_layer(name, gradient.shape[0]) if gradient.shape.rank else None
    by_layer.update({name: gradient} if layers is None else zip(layers, tf.unstack(gradient), strict=True))
  return y, routed, by_layer


@functools.cache
def unrolled_output_and_gradients(stack, training=True):
  # Not traced, which takes five times as long for a program that runs once.
  return output_and_gradients(stack, theta_of(stack), prng.key(3) if training else None, shapes='eager')


def assert_same(got, expected, tolerance=2e-5):
  (y, routed, grads), (expected_y, expected_routed, expected_grads) = got, expected
  np.testing.assert_allclose(y, expected_y, rtol=tolerance, atol=tolerance)
  assert routed.keys() == expected_routed.keys() and grads.keys() == expected_grads.keys()
  for layer, of_layer in expected_routed.items():
    for got_value, value in zip(tf.nest.flatten(routed[layer]), tf.nest.flatten(of_layer), strict=True):
      np.testing.assert_allclose(got_value, value, rtol=1e-4, atol=1e-4)
  largest = max(float(tf.reduce_max(tf.abs(g))) for g in expected_grads.values())
  for name, value in expected_grads.items():
    np.testing.assert_allclose(grads[name], value, atol=tolerance * largest, err_msg=name)


@pytest.mark.parametrize('every, training, shapes', [(1, True, 'static'), (2, False, 'eager'), (3, True, 'eager')])
def test_a_scanned_stack_equals_the_unrolled_one(every, training, shapes):
  unrolled = dataclasses.replace(DEEP, moe_every=every, num_layers=2 * every)
  scanned = ScannedStack(**vars(unrolled))
  theta, key = theta_of(unrolled), prng.key(3) if training else None
  expected = unrolled_output_and_gradients(unrolled, training)
  assert_same(output_and_gradients(scanned, stacked(theta, scanned), key, shapes=shapes), expected)


@pytest.mark.parametrize(
  'kind, policy', [(Stack, 'block'), (Stack, 'attention'), (ScannedStack, 'block'), (ScannedStack, 'attention')]
)
def test_rematerialising_changes_no_number(kind, policy):
  stack, key = kind(**{**vars(DEEP), 'remat': policy}), prng.key(3)
  expected = unrolled_output_and_gradients(DEEP)
  assert_same(output_and_gradients(stack, stacked(theta_of(DEEP), stack), key, shapes='eager'), expected)


@functools.cache
def attention_and_gradient(kind, policy):
  stack = kind(**{**vars(DEEP), 'remat': policy})
  theta, memory, ones = stacked(theta_of(DEEP), stack), some_input(2, 4, seed=1), tf.ones([2, 4], tf.int32)
  with tf.GradientTape() as tape:
    tape.watch(memory)
    output = stack(theta, some_input(2, 4), ones, memory, ones, prng.key(3), 3)
    loss = tf.reduce_sum(tf.sin(output.memory_weights_BnTU)) + tf.reduce_sum(output.x_BTM)
  return output.memory_weights_BnTU, tape.gradient(loss, memory)


@pytest.mark.parametrize(
  'kind, policy', [(Stack, 'block'), (Stack, 'attention'), (ScannedStack, 'none'), (ScannedStack, 'block')]
)
def test_attention_weights_of_a_layer_in_training_have_a_gradient_however_it_is_computed(kind, policy):
  weights_BNTU, dmemory = attention_and_gradient(kind, policy)
  expected_BNTU, expected_dmemory = attention_and_gradient(Stack, 'none')
  np.testing.assert_allclose(tf.reduce_sum(weights_BNTU, axis=-1), np.ones([2, 2, 4]), rtol=1e-5)
  np.testing.assert_allclose(weights_BNTU, expected_BNTU, atol=1e-5)
  np.testing.assert_allclose(dmemory, expected_dmemory, atol=2e-5 * np.abs(expected_dmemory).max())


def test_a_value_that_is_kept_replaces_the_one_that_is_computed_again():
  x = tf.constant([1.0, 2.0])
  square = lambda x: 3 * remat.keep(remat.keep(x * x, 'M') + 1, 'M')
  with remat.recording() as made:
    square(x)
  assert [kept.x.numpy().tolist() for kept in made] == [[1, 4], [2, 5]]
  with remat.recording() as made, remat.unkept():
    square(x)
  assert not made
  with tf.GradientTape() as tape, remat.giving([tf.constant([10.0, 20.0])]):
    tape.watch(x)
    y = square(x)
  assert y.numpy().tolist() == [33, 63]  # 3 (10 + 1): the second is not given
  assert tape.gradient(y, x).numpy().tolist() == [6, 12]  # 3 * 2 x, as if nothing had been replaced


@pytest.mark.parametrize(
  'kind, every, looped',  # all pairs but one, which is slow; scanned, a block of one layer
  [
    (Stack, 2, True),
    (ScannedStack, 1, False),
    pytest.param(Stack, 2, False, marks=pytest.mark.slow),
    pytest.param(ScannedStack, 2, True, marks=pytest.mark.slow),
  ],
)
def test_experts_on_rows_of_their_own_change_no_number(kind, every, looped, monkeypatch):
  unrolled = dataclasses.replace(DEEP, moe_every=every, num_layers=2)
  theta, key = theta_of(unrolled), prng.key(3)
  expected = unrolled_output_and_gradients(unrolled)
  if looped:
    monkeypatch.setattr(grouped_ffn, '_MAX_UNROLLED', 1)
    monkeypatch.setattr(grouped_ffn, '_MAX_MULTIPLIED', 1)
  stack = kind(**{**vars(unrolled), 'remat': 'block'})
  with backend.use(cpu.backend(training=True)):
    got = output_and_gradients(stack, stacked(theta, stack), key, shapes='any')
  assert_same(got, expected)


def test_a_dense_stack_is_scanned_layer_by_layer():
  unrolled = Stack(3, ATTENTION, FFN, residual_dropout=0.1)
  scanned = ScannedStack(**vars(unrolled))
  theta, x, ones = theta_of(unrolled), some_input(2, 5), tf.ones([2, 5], tf.int32)
  expected, *_ = unrolled(theta, x, ones, key=prng.key(0))
  np.testing.assert_allclose(scanned(stacked(theta, scanned), x, ones, key=prng.key(0))[0], expected, atol=2e-5)


def test_scanned_activations_may_be_bfloat16():
  scanned = ScannedStack(**vars(DEEP))
  theta, key = theta_of(DEEP), prng.key(3)
  y, _, grads = output_and_gradients(scanned, stacked(theta, scanned), key, tf.bfloat16, shapes='eager')
  assert y.dtype == grads['x'].dtype == grads['memory'].dtype == tf.bfloat16
  assert all(g.dtype == tf.float32 for name, g in grads.items() if name not in ('x', 'memory'))


@dataclasses.dataclass(frozen=True)
class OwnGate(Top2):
  """Gate with weights of a name of its own, one of which may be bfloat16; notes the types that it gets."""

  seen: list = dataclasses.field(default_factory=list, kw_only=True)

  def weights(self, model_dim, num_experts):
    spec = gate_weight(model_dim, num_experts)
    return {'gate': spec, 'gate_prior': spec, 'gate_free': dataclasses.replace(spec, float32=False)}

  def __call__(self, theta, *args):
    self.seen.append([theta[name].dtype for name in ('gate', 'gate_prior', 'gate_free')])
    return super().__call__(theta, *args)


@pytest.mark.parametrize('stack', [DECODER, ScannedStack(**vars(DECODER)), RecurrentStack(Lstm(8), FFN)])
def test_a_gate_says_which_of_its_weights_stay_float32(stack):
  gate, half = OwnGate(), tf.bfloat16
  stack = dataclasses.replace(stack, moe=dataclasses.replace(EXPERTS, gate=gate))
  theta, x, ones = theta_of(stack), tf.cast(some_input(2, 3), half), tf.ones([2, 3], tf.int32)
  now = Now(tf.constant(0), tf.constant(0), tf.eye(3, batch_shape=[2]))
  if isinstance(stack, RecurrentStack):
    stack(theta, x, ones)
    stack.extend(theta, x, now, None, stack.read(theta, x, ones > 0, 3))
  else:
    stack(theta, x, ones, x, ones)
    stack.extend(theta, x, now, ones, stack.init_cache(theta, x, 3))
  assert len(gate.seen) >= 2 and all(seen == [tf.float32, tf.float32, half] for seen in gate.seen)


def test_a_scanned_decoder_decodes_as_the_unrolled_one():
  scanned = ScannedStack(**vars(DEEP))
  theta, memory, segments = theta_of(DEEP), some_input(2, 4, seed=1), tf.ones([2, 4], tf.int32)
  outputs = []
  for stack, weights_ in ((DEEP, theta), (scanned, stacked(theta, scanned))):
    cache = stack.init_cache(weights_, memory, 6)
    for time in range(2):
      x, mask = some_input(2, 3, seed=time), tf.ones([2, 3, 6]) * tf.cast(tf.range(6) < 3 * (time + 1), tf.float32)
      now = Now(tf.constant(time), tf.constant(3 * time), mask)
      y, cache = stack.extend(weights_, x, now, segments, cache)
    outputs.append(y)
  np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-5)


@pytest.mark.parametrize('kind', [Stack, ScannedStack])
def test_a_hypothesis_that_is_not_live_is_sent_to_no_expert_and_changes_no_other(kind):
  stack = kind(**vars(DEEP))
  theta = stacked(theta_of(DEEP), stack)
  muted = {n: tf.zeros_like(w) if n.endswith('moe/wo') else w for n, w in weights.flatten(theta).items()}
  x, memory, segments = some_input(2, 3), some_input(2, 4, seed=1), tf.ones([2, 4], tf.int32)
  own_positions = tf.eye(3, batch_shape=[2])

  def outputs(theta, live_BW):
    now = Now(tf.constant(0), tf.constant(0), own_positions, live_BW)
    return stack.extend(theta, x, now, segments, stack.init_cache(theta, memory, 3))[0].numpy()

  live = tf.constant([[True, False, True], [False, True, True]])
  got, everyone, nobody = outputs(theta, live), outputs(theta, None), outputs(weights.unflatten(muted), None)
  np.testing.assert_allclose(got[live], everyone[live], atol=1e-5)
  np.testing.assert_allclose(got[~live], nobody[~live], atol=1e-5)
  assert np.abs(everyone - nobody).max() > 0.01


@pytest.mark.parametrize('every', [1, 2])
def test_a_scanned_cache_keeps_the_positions_that_an_unrolled_one_keeps(every):
  unrolled = dataclasses.replace(DEEP, moe_every=every)
  scanned = ScannedStack(**vars(unrolled))
  theta, memory, segments = theta_of(unrolled), some_input(2, 4, seed=1), tf.ones([2, 4], tf.int32)
  kept_BU = tf.constant([[1, 2, 0, 0], [0, 2, 1, 1]])
  caches = []
  for stack, weights_ in ((unrolled, theta), (scanned, stacked(theta, scanned))):
    cache = stack.init_cache(weights_, memory, 3)
    now = Now(tf.constant(0), tf.constant(0), tf.ones([2, 3, 3]))
    _, cache = stack.extend(weights_, some_input(2, 3), now, segments, cache)
    caches.append(weights.flatten(stack.keep_positions(cache, kept_BU)))
  for name, value in caches[1].items():
    layers = weights.names_by_layer(name, value.shape[0])
    np.testing.assert_allclose(value, tf.stack([caches[0].pop(layer) for layer in layers]), atol=1e-5)
  assert not caches[0]


def test_the_program_of_a_scanned_decoder_does_not_grow_with_depth():
  def operations(depth):
    stack = ScannedStack(**{**vars(DEEP), 'moe_every': 1, 'num_layers': depth})
    specs = {name: tf.TensorSpec(s.shape) for name, s in weights.flatten(stack.weights()).items()}

    def run(flat):
      theta, memory = weights.unflatten(flat), some_input(2, 4)
      now = Now(tf.constant(0), tf.constant(0), tf.ones([2, 3, 6]))
      return stack.extend(theta, some_input(2, 3), now, tf.ones([2, 4], tf.int32), stack.init_cache(theta, memory, 6))

    graph = tf.function(run, autograph=False).get_concrete_function(specs).graph.as_graph_def()
    return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)

  assert operations(6) == operations(2)


def test_the_program_of_a_scanned_stack_does_not_grow_with_depth():
  def operations(depth):
    stack = ScannedStack(**{**vars(DEEP), 'moe_every': 1, 'num_layers': depth})
    specs = {name: tf.TensorSpec(s.shape) for name, s in weights.flatten(stack.weights()).items()}
    segments = tf.ones([2, 5], tf.int32)

    def run(flat):
      with tf.GradientTape() as tape:
        tape.watch(list(flat.values()))
        y, *_ = stack(weights.unflatten(flat), some_input(2, 5), segments, some_input(2, 5), segments, prng.key(0))
      return tape.gradient(y, list(flat.values()))

    graph = tf.function(run, autograph=False).get_concrete_function(specs).graph.as_graph_def()
    return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)

  assert operations(6) < 1.05 * operations(2)  # auxiliary outputs of the gates are sliced by layer, a few slices each


def test_scanned_layers_begin_with_the_values_of_unrolled_ones():
  scanned = ScannedStack(**vars(DEEP))
  alone, together = (weights.initialize({'decoder': s.weights()}, seed=5) for s in (DEEP, scanned))
  for name, value in together.items():
    layers = weights.names_by_layer(name, value.shape[0])
    if layers is not None:
      np.testing.assert_array_equal(value, tf.stack([alone.pop(layer) for layer in layers]))
  assert sorted(alone) == ['decoder/norm/bias', 'decoder/norm/scale']


def test_a_scanned_stack_is_made_of_whole_blocks():
  with pytest.raises(ValueError, match='blocks of moe_every=2 layers; saw 5 layers: use a multiple'):
    ScannedStack(**{**vars(DEEP), 'num_layers': 5})


def test_where_a_pipeline_returns_no_attention_weights_a_batch_is_routed_in_all_its_groups(monkeypatch):
  stack = dataclasses.replace(
    DECODER, num_layers=4, moe=dataclasses.replace(EXPERTS, num_groups=4, capacity_factor=0.5)
  )
  of_micro_batch = dataclasses.replace(stack.moe, num_groups=2)
  scanned = ScannedStack(**{**vars(stack), 'moe': of_micro_batch}, num_groups=4, micro_batches=2)
  theta = theta_of(stack)
  rows = some_input(4, 3), tf.ones([4, 3], tf.int32), some_input(4, 5), tf.ones([4, 5], tf.int32)
  expected = stack(theta, *rows, prng.key(2), aligned_layer=1)
  monkeypatch.setattr(xla_sharding, 'stages', lambda: 2)
  got = scanned(stacked(theta, scanned), *rows, prng.key(2), aligned_layer=1)
  np.testing.assert_allclose(got.x_BTM, expected.x_BTM, atol=1e-5)
  np.testing.assert_allclose(got.memory_weights_BnTU, expected.memory_weights_BnTU, atol=1e-6)
  assert float(sum(expected.routed['layer_01'].stats.dropped_R)) > 0
