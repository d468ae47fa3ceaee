"""Updates that XLA compiles for a CPU, or that are made as one, against those one by one; and means of squares."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from ancestors import ancestors

from lingvo_moe.core.weights import Constant
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.optim.cpu import fused_updates
from lingvo_moe.optim.cpu import mean_square
from lingvo_moe.optim.cpu.fused_updates import FusedUpdates
from lingvo_moe.optim.cpu.matrix_updates import MatrixByMatrix
from lingvo_moe.optim.optimizer import Adafactor
from lingvo_moe.optim.optimizer import Adam
from lingvo_moe.optim.optimizer import Update


@pytest.mark.parametrize('way', [mean_square.plain, mean_square.for_xla_on_cpus])
@pytest.mark.parametrize('axes', [[0], [1], [2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize('shape', [(3, 16, 5), (2, 6, 4), (1, 1, 7)])
def test_means_of_squares(way, axes, shape):
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  want = np.mean(np.square(x, dtype=np.float64), axis=tuple(axes), keepdims=True)
  for run in (way, tf.function(way, jit_compile=True)):
    got = run(tf.constant(x), axes)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize('optimizer', [Adafactor(), Adam()])
@pytest.mark.parametrize(
  'shape, dims, factored',
  [((3, 8, 6), 'EMH', 'MH'), ((4, 2, 5), 'MNK', 'MK'), ((9,), 'M', ''), ((2, 3, 4), 'LMH', 'MH')],
)
def test_a_fused_update_is_the_update(optimizer, shape, dims, factored, monkeypatch):
  monkeypatch.setattr(fused_updates, '_LARGE', 0)
  spec = WeightSpec(shape, dims, Constant(0.0), factored=factored)
  rng = np.random.default_rng(0)
  compiled = FusedUpdates(optimizer)
  assert compiled.slots(spec) == optimizer.slots(spec)
  plain = (
    tf.constant(rng.normal(size=shape), tf.float32),
    {n: tf.zeros(s.shape) for n, s in optimizer.slots(spec).items()},
  )
  weight, slots = tf.nest.map_structure(tf.Variable, plain)
  for step in range(3):
    grad = tf.constant(rng.normal(size=shape) * 10.0**step, tf.float32)
    of_step = spec, tf.constant(step, tf.int64), tf.constant(0.1)
    want = optimizer.update(grad, plain[1], plain[0], *of_step)
    plain = want.weight, want.slots
    before = weight.read_value()
    copy = before.numpy()
    got = compiled.update(grad, slots, weight, *of_step)
    assert got.weight is weight and all(got.slots[name] is slots[name] for name in slots)
    for a, b in zip(tf.nest.flatten(want), tf.nest.flatten(got), strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(before, copy)  # what has been read, by a saver perhaps, is not written to


def types_that_run(function):
  """Of the operations that the results and the side effects of a traced function need."""
  graph = function.get_concrete_function().graph
  return {op.type for op in ancestors([*(t.op for t in graph.outputs), *graph.control_outputs])}


EXPERTS = WeightSpec((3, 8, 6), 'EMH', Constant(0.0), factored='MH')


def product_updates(optimizer, equation='EGCM,EGCH->EMH'):
  """(the traced update of experts by a product, its weight, its slots)."""
  rng = np.random.default_rng(0)
  weight = tf.Variable(tf.constant(rng.normal(size=EXPERTS.shape), tf.float32))
  slots = {n: tf.Variable(tf.zeros(s.shape)) for n, s in optimizer.slots(EXPERTS).items()}
  fused = FusedUpdates(optimizer)

  @tf.function(
    input_signature=[tf.TensorSpec([None] * 3 + [8]), tf.TensorSpec([None] * 3 + [6]), tf.TensorSpec([], tf.int64)]
  )
  def update(x, dy, step):
    with tf.control_dependencies([weight.read_value()]):
      grad = tf.einsum(equation, x, dy)
    return fused.update(grad, slots, weight, EXPERTS, step, tf.constant(0.1)).square

  return update, weight, slots


@pytest.mark.parametrize('rows', [(1, 0), (1, 1), (2, 2), (1, 5), (2, 31), (1, 64), (5, 13), (3, 30)])
def test_an_update_by_a_product_that_is_not_multiplied_out(rows, monkeypatch):
  monkeypatch.setattr(fused_updates, '_LARGE', 0)
  update, weight, slots = product_updates(Adafactor())
  assert 'Einsum' not in types_that_run(update)
  rng = np.random.default_rng(1)
  plain = (weight.numpy(), {name: slot.numpy() for name, slot in slots.items()})
  for step in range(3):
    x, dy = (rng.normal(size=(3, *rows, size)).astype(np.float32) for size in (8, 6))
    x[1] = 0  # an expert without tokens
    grad = np.einsum('EGCM,EGCH->EMH', x, dy)
    want = Adafactor().update(
      tf.constant(grad), plain[1], plain[0], EXPERTS, tf.constant(step, tf.int64), tf.constant(0.1)
    )
    before = weight.read_value()
    copy = before.numpy()
    square = update(x, dy, tf.constant(step, tf.int64))
    np.testing.assert_array_equal(before, copy)
    np.testing.assert_allclose(square, np.sum(grad**2), rtol=1e-5)
    np.testing.assert_allclose(weight, want.weight, rtol=1e-5, atol=1e-6)
    for name, slot in slots.items():
      np.testing.assert_allclose(slot, want.slots[name], rtol=1e-5)
    plain = want.weight, want.slots


@pytest.mark.parametrize('rows, thin', [(3, True), (64, True), (65, False)])
def test_it_is_multiplied_out_where_there_are_too_many_rows(rows, thin, monkeypatch):
  monkeypatch.setattr(fused_updates, '_LARGE', 0)
  marked = lambda self, grad, slots, weight, *_: Update(weight, slots, tf.constant(-1.0))
  monkeypatch.setattr(MatrixByMatrix, 'update_by_product', marked)
  update, weight, _ = product_updates(Adafactor())
  square = update(tf.ones([3, 1, rows, 8]), tf.ones([3, 1, rows, 6]), tf.constant(0, tf.int64))
  assert (float(square) == -1.0) == thin


@pytest.mark.parametrize('optimizer, equation', [(Adam(), 'EGCM,EGCH->EMH'), (Adafactor(), 'EGCM,eGCH->EMH')])
def test_other_gradients_and_other_optimisers_have_it_multiplied_out(optimizer, equation, monkeypatch):
  monkeypatch.setattr(fused_updates, '_LARGE', 0)
  update, weight, _ = product_updates(optimizer, equation)
  assert 'Einsum' in types_that_run(update)
  x, dy = (tf.constant(np.random.default_rng(1).normal(size=(3, 1, 2, size)), tf.float32) for size in (8, 6))
  step = tf.constant(0, tf.int64)
  zeros = {n: tf.zeros(s.shape) for n, s in optimizer.slots(EXPERTS).items()}
  want = optimizer.update(tf.einsum(equation, x, dy), zeros, weight.numpy(), EXPERTS, step, tf.constant(0.1))
  update(x, dy, step)
  np.testing.assert_allclose(weight, want.weight, rtol=1e-5, atol=1e-6)


def test_layers_of_a_stack_have_steps_of_their_own_whatever_their_gradient_is_made_of(monkeypatch):
  monkeypatch.setattr(fused_updates, '_LARGE', 0)
  layers = WeightSpec((3, 8, 6), 'LMH', Constant(0.0), factored='MH')
  weight = tf.Variable(tf.ones(layers.shape))
  slots = {n: tf.Variable(tf.zeros(s.shape)) for n, s in Adafactor().slots(layers).items()}
  values = tf.constant(0, tf.int64), tf.constant(0.1)
  scales = tf.constant([1.0, 10.0, 100.0])[:, tf.newaxis, tf.newaxis]
  x, dy = (tf.constant(np.random.default_rng(1).normal(size=(3, 2, size)), tf.float32) for size in (8, 6))
  want = (
    Adafactor()
    .update(
      tf.einsum('ECM,ECH->EMH', x * scales, dy),
      {n: tf.zeros_like(s) for n, s in slots.items()},
      weight * scales,
      layers,
      *values,
    )
    .weight
  )
  weight.assign(weight * scales)

  @tf.function
  def update(x, dy):
    FusedUpdates(Adafactor()).update(tf.einsum('ECM,ECH->EMH', x, dy), slots, weight, layers, *values)

  update(x * scales, dy)
  np.testing.assert_allclose(weight, want, rtol=1e-5)


def test_small_weights_are_left_to_tensorflow():
  spec = WeightSpec((4, 5), 'MH', Constant(0.0), factored='MH')
  optimizer = Adafactor()
  slots = {name: tf.Variable(tf.zeros(s.shape)) for name, s in optimizer.slots(spec).items()}
  weight = tf.Variable(tf.ones([4, 5]))

  @tf.function
  def update():
    return FusedUpdates(optimizer).update(tf.ones([4, 5]), slots, weight, spec, tf.constant(0), tf.constant(0.1))

  calls = [op for op in update.get_concrete_function().graph.get_operations() if 'PartitionedCall' in op.type]
  assert not calls
  assert np.all(update().weight < 1)
  np.testing.assert_array_equal(weight, np.ones([4, 5]))  # the new values are the caller's to assign


@pytest.mark.parametrize('optimizer', [Adafactor(), Adam()])
def test_small_weights_that_are_alike_are_updated_as_one(optimizer, monkeypatch):
  monkeypatch.setattr(fused_updates, '_SMALL', 20)
  matrix = WeightSpec((4, 5), 'MH', Constant(0.0), factored='MH')
  vector = WeightSpec((5,), 'M', Constant(0.0))
  specs = {
    'a': matrix,
    'b': vector,
    'c': matrix,
    'd': matrix,
    'e': vector,
    'transposed': WeightSpec((4, 5), 'HM', Constant(0.0), factored='HM'),
    'unfactored': WeightSpec((4, 5), 'MH', Constant(0.0)),
    **{name: WeightSpec((2, 5), 'LM', Constant(0.0)) for name in ('stack', 'other_stack')},
    **{name: WeightSpec((3, 7), 'MH', Constant(0.0), factored='MH') for name in ('large', 'other_large')},
  }
  rng = np.random.default_rng(0)
  draw = lambda scale: {n: tf.constant(scale * rng.normal(size=s.shape), tf.float32) for n, s in specs.items()}
  weights, slots = draw(1.0), {n: optimizer.slots(s) for n, s in specs.items()}
  slots = {n: {slot: tf.zeros(s.shape) for slot, s in of.items()} for n, of in slots.items()}
  variables = tf.nest.map_structure(tf.Variable, (slots, weights))
  alike = [list(names) for names in fused_updates._alike(specs)]
  assert alike == [
    ['a', 'c', 'd'],
    ['b', 'e'],
    ['transposed'],
    ['unfactored'],
    ['stack'],
    ['other_stack'],
    ['large'],
    ['other_large'],
  ]
  for step in range(2):
    grads, of_step = draw(10.0**step), (specs, tf.constant(step, tf.int64), tf.constant(0.1))
    want = optimizer.update_all(grads, slots, weights, *of_step)
    got = FusedUpdates(optimizer).update_all(grads, *variables, *of_step)
    weights, slots = want.weights, want.slots
    tf.nest.assert_same_structure(want._asdict(), got._asdict())
    for name in specs:
      for a, b in zip(*(tf.nest.flatten((u.weights[name], u.slots[name])) for u in (want, got)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(want.square, got.square, rtol=1e-6)
    tf.nest.map_structure(lambda v, x: v.assign(x), variables, (got.slots, got.weights))
