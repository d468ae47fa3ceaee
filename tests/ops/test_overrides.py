"""Overrides of every backend against the reference: values and gradients."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import ops, xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.layers.dispatch import GatherDispatcher, GroupedDispatcher
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.gates.top2 import top2_gating
from lingvo_moe.ops import backend, cpu, gpu, loops, output_softmax, reference, softmax_attention, xla
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.cpu import kernels
from lingvo_moe.ops.custom_gradient import pull_back

RNG = np.random.default_rng(0)
CPU = Backend('cpu', cpu.OVERRIDES, 'grouped')
FORWARD = Backend('cpu', cpu.backend(training=False).overrides, 'grouped')
BACKENDS = {'cpu': CPU, 'cpu_two': Backend('cpu', cpu.OVERRIDES, 'grouped', sub_batches=2), 'gpu': gpu.BACKEND}
BACKENDS |= {'xla': xla.BACKEND, 'cpu_xla': cpu.COMPILED}
COMPILED = ('xla', 'cpu_xla')

# Overrides whose results differ by design; tested below and in other files of this folder.
APART = {'add_gradients', 'slots_per_round', 'loop_bound', 'map_rows', 'map_sub_batches'}


def floats(*shape):
  return tf.constant(RNG.normal(size=shape), tf.float32)


def product(equation):
  sizes = dict(zip('BTMVSGECHJ', (2, 3, 4, 7, 3, 2, 6, 3, 5, 4), strict=True))
  x, weight = (floats(*(sizes[a] for a in axes)) for axes in equation.split('->')[0].split(','))
  return lambda x, weight: ops.product(equation, x, weight), [x, weight]


def routing(capacity):
  paddings = tf.constant(RNG.random([2, 9]) < 0.2, tf.float32)
  return top2_gating(floats(2, 9, 4), paddings, capacity=capacity, noise_GS=tf.constant(RNG.random([2, 9]), tf.float32))


def places_of(dispatcher, routing):
  places = dispatcher(routing)._places
  return places if isinstance(places, ops.Places) else places[0]


def dispatch_rows(dispatcher):
  places = places_of(dispatcher, routing(3))
  # The last of grouped rows belongs to no expert; it may hold any token and gets no gradient.
  rows = slice(None, None if places.has_row_GSR is not None else -1)
  return lambda x_GSM: ops.dispatch_rows(x_GSM, places)[rows], [floats(2, 9, 5)]


def combine_rows(dispatcher):
  r = routing(3)
  places, kept_GSR = places_of(dispatcher, r), tf.cast(r.weight_GSR > 0, tf.float32)
  count = places.choice_X.shape[0]
  if places.has_row_GSR is not None:
    return lambda y_XM, w_GSR: ops.combine_rows(y_XM, w_GSR * kept_GSR, places), [floats(count, 5), r.weight_GSR]
  with_zeros = lambda y_XM: tf.concat([y_XM, tf.zeros([1, 5])], axis=0)  # the row of no expert
  combine = lambda y_XM, w_GSR: ops.combine_rows(with_zeros(y_XM), w_GSR * kept_GSR, places)
  return combine, [floats(count - 1, 5), r.weight_GSR]


def grouped_ffn(count_E):
  offsets = tf.constant(np.cumsum([0, *count_E]), tf.int32)
  rows = sum(count_E) + 1
  values = [floats(rows, 3), floats(len(count_E), 3, 5), floats(len(count_E), 5, 3)]
  # The last row belongs to no expert and is cut off: neither its gradient nor that of its result means anything.
  return lambda x, wi, wo: ops.grouped_ffn(x, offsets, wi, wo)[:-1], values


def softmax(smoothing, z_weight):
  label = tf.constant(RNG.integers(0, 7, [2, 4]), tf.int32)
  return lambda logits: ops.softmax_cross_entropy(logits, label, smoothing, z_weight), [3 * floats(2, 4, 7)]


def linear(weight_shape, inputs, x_shape):
  weight, bias = floats(*weight_shape), floats(*weight_shape[inputs:])
  return lambda x, weight, bias: ops.linear(x, weight, bias, tf.nn.relu, inputs), [floats(*x_shape), weight, bias]


def lstm(*projection):
  begins = tf.constant(RNG.random([3, 5]) < 0.3)
  recur = lambda z, *weights: ops.lstm(z, begins, *weights)
  return recur, [floats(3, 5, 4, 6), floats(2 if projection else 6, 4, 6), *projection]


def attention(*shared, mask_rows=2, relative=None, **values):
  """Two rows of 4 queries and 5 keys, 3 heads; `shared` is the number of query heads of each."""
  mask = tf.constant(RNG.random([mask_rows, 4, 5]) < 0.7)
  key = prng.fold(prng.key(1), tf.range(2))
  given = [floats(2, 3, *shared, 4, 6), floats(2, 3, 5, 6), floats(2, 3, 5, 6)]
  given += [] if relative is None else [floats(relative, 3, *shared, 4, 5)]
  return lambda q, k, v, *bias: ops.attention(q, k, v, mask, *(bias or [None]), key, **values), given


def output_loss(bias, **settings):
  label, factor = tf.constant(RNG.integers(7, size=[4, 3])), tf.constant(RNG.random([4, 3]), tf.float32)
  run = lambda x, table, *bias: ops.output_loss(x, table, *(bias or [None]), label, factor, **settings)
  return run, [floats(4, 3, 5), floats(7, 5), *([floats(7)] if bias else [])]


CASES = {
  'output_loss': output_loss(bias=False),
  'output_loss, all settings': output_loss(True, scale=0.5, masked_symbols=(2, 3), smoothing=0.1, z_weight=0.01),
  'attention': attention(),
  'attention, dropout': attention(dropout=0.5),
  'attention, weights, capped': attention(with_weights=True, logit_cap=2.0, mask_rows=1),
  'attention, shared keys, relative': attention(2, relative=1, with_weights=True),
  'attention, relative by row': attention(relative=2, dropout=0.2),
  'masked_scores': (
    lambda x: ops.masked_scores(x, tf.constant(np.arange(20).reshape(1, 1, 4, 5) % 3 > 0)),
    [floats(2, 3, 4, 5)],
  ),
  'heads_first': (ops.heads_first, [floats(2, 4, 3, 6)]),
  'heads_first, shared keys': (ops.heads_first, [floats(2, 4, 3, 2, 6)]),
  'linear': linear((4, 5), 1, (2, 3, 4)),
  'linear, heads out': linear((4, 2, 5), 1, (2, 3, 4)),
  'linear, heads in': linear((2, 5, 4), 2, (2, 3, 2, 5)),
  **{f'product, {e}': product(e) for e in ('EGCM,EMH->EGCH', 'EGCH,EHM->EGCM', 'BTM,VM->BTV', 'GSM,MJ->GSJ')},
  'relu': (ops.relu, [floats(3, 5, 4)]),
  'rounded': (lambda x: tf.cast(ops.rounded(tf.cast(x, tf.bfloat16)), tf.float32), [floats(3, 5)]),
  'relu, of a product': (lambda x, w: ops.relu(ops.linear(x, w)), [floats(3, 5, 4), floats(4, 6)]),
  'lstm': lstm(),
  'lstm, projected': lstm(floats(6, 2)),
  'layer_norm': (lambda x, s, b: ops.layer_norm(x, s, b, 1e-6), [floats(2, 3, 4), floats(4), floats(4)]),
  **{f'softmax_cross_entropy, {s}, {z}': softmax(s, z) for s in (0.0, 0.1) for z in (0.0, 0.01)},
  **{f'dispatch_rows, {d.__name__}': dispatch_rows(d) for d in (GatherDispatcher, GroupedDispatcher)},
  **{f'combine_rows, {d.__name__}': combine_rows(d) for d in (GatherDispatcher, GroupedDispatcher)},
  **{f'grouped_ffn, {c}': grouped_ffn(c) for c in ([2, 0, 7, 1], [0, 0, 3], [0, 0, 0])},
  'queue_positions': (
    lambda e, t: ops.queue_positions(tf.cast(tf.abs(e) * 2, tf.int32) % 4, t > -0.5, 4),
    [floats(2, 8, 2), floats(2, 8, 2)],
  ),
  'write_cache': (
    lambda buffer, x: ops.write_cache(buffer, x, tf.constant(4)),
    [floats(2, 3, 8, 4), floats(2, 3, 2, 4)],
  ),
  'write_cache, of a layer': (
    lambda buffer, x: ops.write_cache(buffer, x, tf.constant(4), tf.constant(1)),
    [floats(3, 2, 3, 8, 4), floats(2, 3, 2, 4)],
  ),
  'mean_square': (lambda x: [ops.mean_square(x, axes) for axes in ([0], [1], [1, 2], [0, 1, 2])], [floats(3, 16, 5)]),
}


def of_operation(name):
  return [case for case in CASES if case.split(',')[0] == name]


def values_and_gradients(name, in_force, *, gradients, compiled=False):
  f, values = CASES[name]

  def run(*args):
    with backend.use(in_force), tf.GradientTape() as tape:
      tape.watch(args)
      results = [r for r in tf.nest.flatten(f(*args)) if r is not None]
      pull = lambda r: tf.sin(tf.reshape(1.0 + tf.range(tf.size(r), dtype=tf.float32), tf.shape(r)))
      total = tf.add_n([tf.zeros([])] + [tf.reduce_sum(r * pull(r)) for r in results if r.dtype.is_floating])
    if not gradients:
      return results
    found = tape.gradient(total, args)
    return [*results, *(tf.zeros_like(a) if g is None else tf.convert_to_tensor(g) for a, g in zip(args, found))]

  if in_force is backend.REFERENCE:
    return run(*values)
  # Sizes of activations are dynamic for TensorFlow's own kernels, as in the local runtime.
  opened = not compiled and not name.startswith(('product, E', 'mean_square'))
  shape = lambda i, x: [None, *x.shape[1:]] if opened and i == 0 and x.shape.rank > 2 else x.shape
  specs = [tf.TensorSpec(shape(i, x)) for i, x in enumerate(values)]
  return tf.function(run, specs, autograph=False, jit_compile=compiled)(*values)


@functools.cache
def of_reference(name, gradients):
  return values_and_gradients(name, backend.REFERENCE, gradients=gradients)


@pytest.mark.parametrize(
  'of, name',
  [(b, case) for b in BACKENDS for op in sorted(BACKENDS[b].overrides) if op not in APART for case in of_operation(op)],
)
def test_an_override_gives_the_values_and_gradients_of_the_reference(of, name, monkeypatch):
  monkeypatch.setattr(output_softmax, 'CHUNK_BYTES', 100)  # chunks of one row
  monkeypatch.setattr(xla, 'BLOCK', 3)  # experts of several blocks, and of part of one
  gradients = name.split(',')[0] not in ('write_cache', 'mean_square', 'queue_positions')
  got = values_and_gradients(name, BACKENDS[of], gradients=gradients, compiled=of in COMPILED)
  want = of_reference(name, gradients)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
  'name, mixed',  # mixed: bfloat16 activations and a float32 weight
  [(case, False) for op in ('linear', 'product', 'grouped_ffn') for case in of_operation(op)]
  + [('product, BTM,VM->BTV', True), ('product, GSM,MJ->GSJ', True)],
)
def test_products_in_bfloat16_are_near_the_float32_reference(name, mixed, monkeypatch):
  f, values = CASES[name]
  narrow = lambda x, is_activation: tf.cast(x, tf.bfloat16) if is_activation or not mixed else x
  in_bfloat16 = lambda *args: tf.cast(f(*(narrow(x, i == 0) for i, x in enumerate(args))), tf.float32)
  monkeypatch.setitem(CASES, name, (in_bfloat16, values))
  got = values_and_gradients(name, CPU, gradients=True)
  reference = values_and_gradients(name, backend.REFERENCE, gradients=True)
  for a, b, want in zip(got, reference, of_reference(name, True), strict=True):
    scale = np.max(np.abs(want), initial=1e-3)
    np.testing.assert_allclose(a, want, atol=0.03 * scale)
    np.testing.assert_allclose(a, b, atol=0.03 * scale)


@pytest.mark.parametrize('equation', ['BTM,VM->BTV', 'GSM,MJ->GSJ', 'EGCM,EMH->EGCH'])
def test_xla_sums_products_of_bfloat16_and_a_float32_weight_in_float32(equation, monkeypatch):
  name = f'product, {equation}'
  f, (x, weight) = CASES[name] if name in CASES else product(equation)
  x = tf.cast(tf.cast(x, tf.bfloat16), tf.float32)
  weight = tf.cast(tf.cast(weight, tf.bfloat16), tf.float32)
  narrow = lambda x, weight: f(tf.cast(x, tf.bfloat16), weight)
  monkeypatch.setitem(CASES, 'product, exact', (f, [x, weight]))
  monkeypatch.setitem(CASES, 'product, narrow', (narrow, [x, weight]))
  want = values_and_gradients('product, exact', backend.REFERENCE, gradients=True)
  got = values_and_gradients('product, narrow', xla.BACKEND, gradients=True, compiled=True)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=0.01 * np.max(np.abs(b)))


def test_stages_of_a_pipeline_compute_norms_and_activations_together():
  norm = lambda x_TM: ops.layer_norm(ops.relu(x_TM), tf.ones([4]), tf.zeros([4]), 1e-6)
  of_stage = lambda x_TM: pull_back(norm, [x_TM], [tf.sin(norm(x_TM))])[0]

  def by(in_force, x_ZTM):
    with xla_sharding.use(Mesh.parse('stage:2')), backend.use(in_force):
      return xla_sharding.over_stages(of_stage, x_ZTM)

  x_ZTM = floats(2, 3, 4)
  got = tf.function(lambda x: by(xla.BACKEND, x), autograph=False, jit_compile=True)(x_ZTM)
  want = tf.stack([pull_back(norm, [x_TM], [tf.sin(norm(x_TM))])[0] for x_TM in x_ZTM])
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', of_operation('grouped_ffn'))
def test_the_grouped_feed_forward_at_inference(name):
  got = values_and_gradients(name, FORWARD, gradients=False)
  np.testing.assert_allclose(got[0], of_reference(name, gradients=False)[0], atol=1e-5)


def test_every_override_is_of_an_operation_and_has_a_case():
  overrides = {name for b in [*BACKENDS.values(), FORWARD] for name in b.overrides}
  assert all(hasattr(ops, name) for name in overrides)
  assert all(any(hasattr(m, name) for m in (reference, softmax_attention, output_softmax)) for name in overrides)
  assert all(of_operation(name) for name in overrides - APART)


def test_grouped_rows_are_refused_on_a_mesh_with_the_way_out():
  mesh = xla_sharding.use(Mesh.parse('expert:2'))
  with mesh, backend.use(xla.BACKEND), pytest.raises(UserError, match="dispatch='grouped'.*bind dispatch = 'auto'"):
    ops.grouped_ffn(floats(2, 3), tf.constant([0, 1]), floats(1, 3, 5), floats(1, 5, 3))


def test_all_choices_are_served_in_one_round_or_where_shapes_are_static_in_several():
  slot_GSR = tf.constant([[[0, 0], [1, 1], [2, 0]]])
  routing = Routing(tf.zeros_like(slot_GSR), slot_GSR, tf.ones([1, 3, 2]), 2, capacity=tf.constant(3), stats=None)
  seen = []

  def serve(x_GSM, theta, routing):
    seen.append(routing.capacity)
    return theta * x_GSM * tf.reduce_sum(routing.weight_GSR, axis=-1, keepdims=True)

  assert ops.slots_per_round(2) is None
  y_GSM = serve(tf.ones([1, 3, 1]), tf.constant(2.0), routing)
  with backend.use(xla.BACKEND):
    slots = ops.slots_per_round(2)
  a_round = lambda number, x_GSM, theta: serve(x_GSM, theta, routing.round(number, slots))
  same_GSM = loops.summed((routing.capacity + slots - 1) // slots, a_round, tf.ones([1, 3, 1]), tf.constant(2.0))
  assert (slots, seen[-1]) == (2, 2)
  np.testing.assert_array_equal(y_GSM, same_GSM)
  np.testing.assert_array_equal(y_GSM, tf.fill([1, 3, 1], 4.0))


def test_a_loop_is_bounded_by_the_largest_limit_or_where_that_is_not_known_by_the_most_there_can_be():
  limits = tf.constant([3, 9, 4])
  assert int(ops.loop_bound(limits, 20)) == 9
  with backend.use(xla.BACKEND):
    assert ops.loop_bound(limits, 20) == 20


def test_a_backend_is_in_force_within_its_block_only():
  with backend.use(xla.BACKEND):
    assert backend.current() is xla.BACKEND
    with backend.use(CPU):
      assert backend.current() is CPU
    assert backend.current() is xla.BACKEND
  assert backend.current() is backend.REFERENCE


@pytest.mark.parametrize('dtype, head_dim', [(tf.float32, 8), (tf.float32, 6), (tf.bfloat16, 8), (tf.bfloat16, 4)])
def test_a_step_writes_its_own_positions_and_no_others(dtype, head_dim):
  # 16 bytes are 4 features of float32 and 8 of bfloat16, where there are as many.
  before, x = (tf.cast(tf.random.stateless_normal([2, 3, n, head_dim], [n, 0]), dtype) for n in (10, 4))
  specs = [tf.TensorSpec([None, 3, None, head_dim], dtype)] * 2
  write = tf.function(kernels.write_cache, input_signature=[*specs, tf.TensorSpec([], tf.int32)])
  after = tf.concat([before[:, :, :5], x, before[:, :, 9:]], axis=2)
  np.testing.assert_array_equal(write(before, x, 5), after)
  np.testing.assert_array_equal(xla.write_cache(before[:, :, :8], x, 4), tf.concat([before[:, :, :4], x], axis=2))


@pytest.mark.parametrize('dtype, head_dim', [(tf.float32, 8), (tf.float32, 6), (tf.bfloat16, 4)])
def test_a_step_writes_its_own_positions_of_its_own_layer_and_no_others(dtype, head_dim):
  before = tf.cast(tf.random.stateless_normal([4, 2, 3, 10, head_dim], [1, 0]), dtype)
  x = tf.cast(tf.random.stateless_normal([2, 3, 4, head_dim], [2, 0]), dtype)
  specs = [tf.TensorSpec([4, None, 3, None, head_dim], dtype), tf.TensorSpec([None, 3, None, head_dim], dtype)]
  write = tf.function(kernels.write_cache, input_signature=[*specs, *[tf.TensorSpec([], tf.int32)] * 2])
  of_layer = tf.concat([before[2, :, :, :5], x, before[2, :, :, 9:]], axis=2)
  after = tf.concat([before[:2], of_layer[tf.newaxis], before[3:]], axis=0)
  np.testing.assert_array_equal(write(before, x, 5, 2), after)
