"""Updates in place on a CPU, compiled by XLA or stacked, against those of the optimizer."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.ops.cpu.factored import FactoredGradient
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.adam import Adam
from lingvo_moe.optim.cpu import in_place
from lingvo_moe.optim.cpu.in_place import InPlaceUpdates
from lingvo_moe.optim.cpu.matrix_updates import MatrixByMatrix
from lingvo_moe.optim.optimizer import Update


def updated(updates, grad, weight, slots, spec, step, name='w'):
  """Applies one gradient to variables; returns its norm."""
  variables = {'weights': {name: weight}, 'slots': {f'{name}/{slot}': v for slot, v in slots.items()}}
  return updates.apply({name: grad}, variables, {name: spec}, step, tf.constant(0.1))


@pytest.mark.parametrize('optimizer', [Adafactor(), Adam()])
@pytest.mark.parametrize(
  'shape, dims, factored',
  [((3, 8, 6), 'EMH', 'MH'), ((4, 2, 5), 'MNK', 'MK'), ((9,), 'M', ''), ((2, 3, 4), 'LMH', 'MH')],
)
def test_an_update_in_place_is_the_update(optimizer, shape, dims, factored, monkeypatch):
  monkeypatch.setattr(in_place, '_LARGE', 0)
  spec = WeightSpec(shape, dims, Constant(0.0), factored=factored)
  rng = np.random.default_rng(0)
  plain = (
    tf.constant(rng.normal(size=shape), tf.float32),
    {n: tf.zeros(s.shape) for n, s in optimizer.slots(spec).items()},
  )
  weight, slots = tf.nest.map_structure(tf.Variable, plain)
  updates = InPlaceUpdates(optimizer)
  for step in range(3):
    grad = tf.constant(rng.normal(size=shape) * 10.0**step, tf.float32)
    want = optimizer.update(grad, plain[1], plain[0], spec, tf.constant(step, tf.int64), tf.constant(0.1))
    plain = want.weight, want.slots
    before = weight.read_value()
    copy = before.numpy()
    norm = updated(updates, grad, weight, slots, spec, tf.constant(step, tf.int64))
    np.testing.assert_allclose(norm, np.linalg.norm(grad), rtol=1e-6)
    for a, b in zip(tf.nest.flatten(plain), tf.nest.flatten((weight, slots)), strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(
      before, copy
    )  # a tensor read before, for instance to save a checkpoint, keeps its value


@pytest.mark.parametrize('large', [0, 1 << 20], ids=['compiled', 'kernels'])
def test_the_cap_of_beta2_holds_in_place(large, monkeypatch):
  monkeypatch.setattr(in_place, '_LARGE', large)
  spec = WeightSpec((3, 8, 6), 'EMH', Constant(0.0), factored='MH')
  for cap, beta2 in ((0.99, 0.99), (1.0, 1 - 10**-2.4)):  # update 1000
    optimizer = Adafactor(beta2_cap=cap)
    slots = {n: tf.Variable(tf.ones(s.shape)) for n, s in optimizer.slots(spec).items()}
    updated(
      InPlaceUpdates(optimizer), tf.zeros(spec.shape), tf.Variable(tf.ones(spec.shape)), slots, spec, tf.constant(999)
    )
    for slot in slots.values():
      np.testing.assert_allclose(slot, tf.fill(slot.shape, beta2), rtol=1e-5)


def test_the_norm_for_clipping_adds_up_a_gradient_given_as_slices():
  table = tf.Variable(tf.ones([3, 2]))
  spec = WeightSpec((3, 2), 'VM', Constant(0.0), factored='VM')
  slots = {f'table/{n}': tf.Variable(tf.zeros(s.shape)) for n, s in Adafactor().slots(spec).items()}
  variables = {'weights': {'table': table}, 'slots': slots}

  @tf.function(autograph=False)
  def update():
    read = table.read_value()
    with tf.GradientTape() as tape:
      tape.watch(read)
      y = tf.reduce_sum(tf.gather(read, [1, 1, 1, 2]))  # an embedding of symbols, one of them three times
    grad = tape.gradient(y, read)
    assert isinstance(grad, tf.IndexedSlices)
    step = tf.constant(0, tf.int64)
    return InPlaceUpdates(Adafactor()).apply({'table': grad}, variables, {'table': spec}, step, tf.constant(0.1), 1.0)

  np.testing.assert_allclose(update(), np.sqrt(2 * 3**2 + 2 * 1**2), rtol=1e-6)


EXPERTS = WeightSpec((3, 8, 6), 'EMH', Constant(0.0), factored='MH')


def factored_updates(optimizer):
  """Traced update of experts by a factored gradient, with its weight and slots."""
  rng = np.random.default_rng(0)
  weight = tf.Variable(tf.constant(rng.normal(size=EXPERTS.shape), tf.float32))
  slots = {n: tf.Variable(tf.zeros(s.shape)) for n, s in optimizer.slots(EXPERTS).items()}

  @tf.function(
    input_signature=[tf.TensorSpec([3, None, 8]), tf.TensorSpec([3, None, 6]), tf.TensorSpec([], tf.int64)],
    autograph=False,
  )
  def update(x, dy, step):
    return updated(InPlaceUpdates(optimizer), FactoredGradient(x, dy), weight, slots, EXPERTS, step)

  return update, weight, slots


@pytest.fixture(scope='module')
def compiled_update():
  """What factored_updates returns, traced once for any number of rows."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(in_place, '_LARGE', 0)
    update, weight, slots = factored_updates(Adafactor())
    update.get_concrete_function()
  return update, weight, slots


@pytest.mark.parametrize('rows', [0, 1, 4, 5, 62, 64, 65, 90])
def test_an_update_by_a_factored_gradient(rows, compiled_update):
  update, weight, slots = compiled_update
  rng = np.random.default_rng(1)
  weight.assign(rng.normal(size=EXPERTS.shape))
  for slot in slots.values():
    slot.assign(tf.zeros_like(slot))
  plain = (weight.numpy(), {name: slot.numpy() for name, slot in slots.items()})
  for step in range(3):
    x, dy = (rng.normal(size=(3, rows, size)).astype(np.float32) for size in (8, 6))
    x[1] = 0  # an expert without tokens
    grad = np.einsum('ECM,ECH->EMH', x, dy)
    want = Adafactor().update(
      tf.constant(grad), plain[1], plain[0], EXPERTS, tf.constant(step, tf.int64), tf.constant(0.1)
    )
    before = weight.read_value()
    copy = before.numpy()
    norm = update(x, dy, tf.constant(step, tf.int64))
    np.testing.assert_array_equal(before, copy)
    np.testing.assert_allclose(norm, np.linalg.norm(grad), rtol=1e-5)
    np.testing.assert_allclose(weight, want.weight, rtol=1e-5, atol=1e-6)
    for name, slot in slots.items():
      np.testing.assert_allclose(slot, want.slots[name], rtol=1e-5)
    plain = want.weight, want.slots


@pytest.mark.parametrize('rows, factored', [(3, True), (64, True), (65, False)])
def test_it_is_multiplied_out_where_there_are_too_many_rows(rows, factored, monkeypatch):
  monkeypatch.setattr(in_place, '_LARGE', 0)
  marked = lambda self, grad, slots, weight, *_: Update(weight, slots, tf.constant(49.0))
  monkeypatch.setattr(MatrixByMatrix, 'update_factored', marked)
  update, *_ = factored_updates(Adafactor())
  norm = update(tf.ones([3, rows, 8]), tf.ones([3, rows, 6]), tf.constant(0, tf.int64))
  assert (float(norm) == 7.0) == factored


@pytest.mark.parametrize('large', [False, True])
def test_adam_and_small_weights_take_the_product(large, monkeypatch):
  if large:
    monkeypatch.setattr(in_place, '_LARGE', 0)
  optimizer = Adam() if large else Adafactor()
  update, weight, _ = factored_updates(optimizer)
  x, dy = (tf.constant(np.random.default_rng(1).normal(size=(3, 2, size)), tf.float32) for size in (8, 6))
  step = tf.constant(0, tf.int64)
  zeros = {n: tf.zeros(s.shape) for n, s in optimizer.slots(EXPERTS).items()}
  want = optimizer.update(tf.einsum('ECM,ECH->EMH', x, dy), zeros, weight.numpy(), EXPERTS, step, tf.constant(0.1))
  update(x, dy, step)
  np.testing.assert_allclose(weight, want.weight, rtol=1e-5, atol=1e-6)


def test_clipping_keeps_the_factors(monkeypatch):
  monkeypatch.setattr(in_place, '_LARGE', 0)
  rng = np.random.default_rng(1)
  x, dy = (tf.constant(rng.normal(size=(3, 5, size)), tf.float32) for size in (8, 6))
  plain = tf.constant(rng.normal(size=(4, 5)), tf.float32)
  specs = {'experts': EXPERTS, 'matrix': WeightSpec((4, 5), 'MH', Constant(0.0), factored='MH')}

  def run(grads):
    weights = {n: tf.Variable(tf.ones(s.shape)) for n, s in specs.items()}
    slots = {
      f'{n}/{k}': tf.Variable(tf.zeros(v.shape)) for n, s in specs.items() for k, v in Adafactor().slots(s).items()
    }
    apply = lambda: InPlaceUpdates(Adafactor()).apply(
      grads(), {'weights': weights, 'slots': slots}, specs, tf.constant(0), tf.constant(0.1), clip_norm=1.0
    )
    return tf.function(apply)(), weights

  norm, weights = run(lambda: {'experts': FactoredGradient(x, dy), 'matrix': plain})
  want_norm, want = run(lambda: {'experts': tf.einsum('ECM,ECH->EMH', x, dy), 'matrix': plain})
  np.testing.assert_allclose(norm, want_norm, rtol=1e-6)
  for name in specs:
    np.testing.assert_allclose(weights[name], want[name], rtol=1e-5)


def test_layers_of_a_stack_have_steps_of_their_own(monkeypatch):
  monkeypatch.setattr(in_place, '_LARGE', 0)
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
    updated(InPlaceUpdates(Adafactor()), tf.einsum('ECM,ECH->EMH', x, dy), weight, slots, layers, values[0])

  update(x * scales, dy)
  np.testing.assert_allclose(weight, want, rtol=1e-5)


def test_small_weights_are_left_to_tensorflow(monkeypatch):
  monkeypatch.setattr(InPlaceUpdates, '_compiled', None)  # not called
  spec = WeightSpec((4, 5), 'MH', Constant(0.0), factored='MH')
  optimizer = Adafactor()
  slots = {name: tf.Variable(tf.zeros(s.shape)) for name, s in optimizer.slots(spec).items()}
  weight = tf.Variable(tf.ones([4, 5]))

  @tf.function
  def update():
    return updated(InPlaceUpdates(optimizer), tf.ones([4, 5]), weight, slots, spec, tf.constant(0))

  update()
  assert np.all(weight < 1)


@pytest.mark.parametrize('optimizer', [Adafactor(), Adam()])
def test_small_weights_that_are_alike_are_updated_as_one(optimizer, monkeypatch):
  monkeypatch.setattr(in_place, '_SMALL', 20)
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
  alike = [list(names) for names in in_place._alike(specs)]
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
    grads = draw(10.0**step)
    of_step = tf.constant(step, tf.int64), tf.constant(0.1)
    want = {n: optimizer.update(grads[n], slots[n], weights[n], spec, *of_step) for n, spec in specs.items()}
    flat_slots = {f'{n}/{slot}': v for n, of in variables[0].items() for slot, v in of.items()}
    norm = InPlaceUpdates(optimizer).apply(grads, {'weights': variables[1], 'slots': flat_slots}, specs, *of_step)
    np.testing.assert_allclose(norm, np.sqrt(sum(float(u.square) for u in want.values())), rtol=1e-6)
    weights, slots = ({n: getattr(u, field) for n, u in want.items()} for field in ('weight', 'slots'))
    for name in specs:
      got = tf.nest.flatten((variables[1][name], variables[0][name]))
      for a, b in zip(got, tf.nest.flatten((weights[name], dict(slots[name]))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6, err_msg=name)
