"""Adafactor and Adam against plain numpy, over several steps."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.config import registry
from lingvo_moe.core import weights
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.adam import Adam, AdamW
from lingvo_moe.optim.moving_average import WithMovingAverage, bias
from lingvo_moe.optim.optimizer import clip_by_global_norm


def spec_of(shape, dims, factored=''):
  return WeightSpec(shape, dims, Constant(0.0), factored=factored)


EXPERTS = spec_of((3, 4, 5), 'EMH', 'MH')
MATRIX = spec_of((4, 5), 'MH', 'MH')
HEADS = spec_of((4, 2, 5), 'MNK', 'MK')
VECTOR = spec_of((5,), 'M')
KEY_BIAS = spec_of((2, 3), 'NK')


def zero_slots(optimizer, spec):
  return {name: tf.zeros(s.shape, s.dtype) for name, s in optimizer.slots(spec).items()}


def run(optimizer, spec, weight, grads, rate=0.1):
  """Weight and slots after each gradient in turn."""
  slots = zero_slots(optimizer, spec)
  for step, grad in enumerate(grads):
    args = tf.constant(grad, tf.float32), slots, tf.constant(weight, tf.float32)
    weight, slots, square = optimizer.update(*args, spec, tf.constant(step, tf.int64), tf.constant(rate))
    np.testing.assert_allclose(square, np.sum(np.square(grad)), rtol=1e-5)
    weight = weight.numpy()
  return weight, slots


def plain_adafactor(spec, weight, grads, rate=0.1):
  """Algorithms 4 and 5 of Shazeer and Stern (2018), in float64, with the product of row and column written out."""
  weight = np.asarray(weight, np.float64)
  v, row, column = 0.0, 0.0, 0.0
  for t, grad in enumerate(grads, start=1):
    beta2 = min(0.99, 1 - t**-0.8)
    square = np.asarray(grad, np.float64) ** 2 + 1e-30
    if spec.factored:
      first, second = (spec.dims.index(letter) for letter in spec.factored)
      row = beta2 * row + (1 - beta2) * square.mean(axis=second, keepdims=True)
      column = beta2 * column + (1 - beta2) * square.mean(axis=first, keepdims=True)
      v = row * column / row.mean(axis=first, keepdims=True)
    else:
      v = beta2 * v + (1 - beta2) * square
    update = grad / np.sqrt(v)
    update = update / max(1.0, np.sqrt(np.mean(update**2)) / 1.0)
    weight = weight - rate * max(1e-3, np.sqrt(np.mean(weight**2))) * update
  return weight


@pytest.mark.parametrize('spec', [EXPERTS, MATRIX, HEADS, VECTOR], ids=lambda s: s.dims)
def test_adafactor_agrees_with_numpy(spec):
  rng = np.random.default_rng(0)
  weight = rng.normal(size=spec.shape)
  grads = [rng.normal(size=spec.shape) * scale for scale in (1, 0.1, 5, 1, 20, 0.3)]
  got, _ = run(Adafactor(), spec, weight, grads)
  np.testing.assert_allclose(got, plain_adafactor(spec, weight, grads), atol=2e-6)


def test_adafactor_keeps_a_row_and_a_column_for_every_expert():
  assert {name: (s.shape, s.dims) for name, s in Adafactor().slots(EXPERTS).items()} == {
    'row': ((3, 4), 'EM'),
    'column': ((3, 5), 'EH'),
  }
  assert {name: (s.shape, s.dims) for name, s in Adafactor().slots(VECTOR).items()} == {'moment': ((5,), 'M')}


@pytest.mark.parametrize('optimizer', [Adafactor(), Adam(), AdamW(weight_decay=0.3)])
def test_slots_begin_at_zero(optimizer):
  slots = weights.initialize(optimizer.slots(EXPERTS), seed=1)
  assert sum(np.size(slot) for slot in slots.values()) > 0
  for slot in slots.values():
    np.testing.assert_array_equal(slot, 0)


def test_adafactor_first_step_forgets_its_slots():
  # t = 1: beta2 = 1 - 1^-0.8 = 0. The update of an unfactored weight is then the sign of its gradient.
  grad, weight = [0.5, -2.0, 1e-3, 3.0, -1.0], [2.0] * 5
  slots = {'moment': tf.fill([5], 7.0)}
  args = tf.constant(grad), slots, tf.constant(weight)
  new, slots, _ = Adafactor().update(*args, VECTOR, tf.constant(0), tf.constant(0.1))
  np.testing.assert_allclose(slots['moment'], np.square(grad), rtol=1e-6)
  np.testing.assert_allclose(new, 2 - 0.1 * 2 * np.sign(grad), rtol=1e-6)


@pytest.mark.parametrize(
  't, cap, beta2',
  [
    (2, 0.99, 1 - 2**-0.8),
    (100, 0.99, 1 - 100**-0.8),
    (317, 0.99, 0.99),
    (10**6, 0.99, 0.99),
    (317, 1.0, 1 - 317**-0.8),
    (10**6, 1.0, 1 - 10**-4.8),
    (100, 0.9, 0.9),
  ],
)
def test_adafactor_beta2_rises_to_its_cap(t, cap, beta2):
  slots = {'moment': tf.ones([5])}
  _, slots, _ = Adafactor(beta2_cap=cap).update(
    tf.zeros([5]), slots, tf.ones([5]), VECTOR, tf.constant(t - 1), tf.constant(0.1)
  )
  np.testing.assert_allclose(slots['moment'], [beta2] * 5, rtol=1e-5)


@pytest.mark.parametrize(('clip', 'rms'), [(1.0, 1.0), (0.5, 0.5), (4.0, 4.0), (50.0, 10 / (0.99 + 0.01 * 100) ** 0.5)])
def test_adafactor_clips_an_update_to_its_rms(clip, rms):
  # After a long calm a gradient 10 times as large would make an update of 10 / sqrt(.99 * 1 + .01 * 10^2) = 7.1.
  slots = {'moment': tf.ones([5])}
  weight = tf.fill([5], 3.0)
  args = tf.fill([5], 10.0), slots, weight, VECTOR, tf.constant(10**6), tf.constant(0.1)
  new, *_ = Adafactor(clip=clip).update(*args)
  np.testing.assert_allclose(weight - new, [0.1 * 3 * rms] * 5, rtol=1e-5)


@pytest.mark.parametrize('weight, scale', [(0.0, 1e-3), (1e-4, 1e-3), (0.5, 0.5)])
def test_adafactor_steps_in_proportion_to_the_weight_but_never_below_a_thousandth(weight, scale):
  got, _ = run(Adafactor(), VECTOR, [weight] * 5, [[1.0] * 5])
  np.testing.assert_allclose(weight - got, [0.1 * scale] * 5, rtol=1e-3)


def test_adafactor_of_experts_is_one_clip_and_scale_for_all_of_them():
  # Expert 0 is a thousand times as large; the others step by the common scale, not by their own.
  weight = np.stack([np.full([4, 5], 1.0), np.full([4, 5], 1e-3), np.full([4, 5], 1e-3)])
  got, _ = run(Adafactor(), EXPERTS, weight, [np.ones([3, 4, 5])])
  np.testing.assert_allclose(weight - got, 0.1 * np.sqrt((1 + 2e-6) / 3), rtol=1e-4)


@pytest.mark.parametrize('optimizer', [Adafactor(), Adam(), AdamW(weight_decay=0.3)])
@pytest.mark.parametrize('spec', [EXPERTS, VECTOR], ids=['experts', 'vector'])
def test_stacked_layers_are_updated_each_by_itself(optimizer, spec):
  rng = np.random.default_rng(0)
  weights, grads = rng.normal(size=(2, *spec.shape)), rng.normal(size=(3, 2, *spec.shape))
  weights[1], grads[:, 1] = weights[1] * 10, grads[:, 1] * 1e-3
  together, _ = run(optimizer, spec_of((2, *spec.shape), 'L' + spec.dims, spec.factored), weights, grads)
  alone = [run(optimizer, spec, weights[layer], grads[:, layer])[0] for layer in range(2)]
  np.testing.assert_allclose(together, np.stack(alone), rtol=1e-5, atol=1e-6)


def test_adafactor_leaves_an_expert_without_tokens_where_it_was():
  rng = np.random.default_rng(0)
  weight = rng.normal(size=[3, 4, 5])
  grads = rng.normal(size=[4, 3, 4, 5])
  grads[:, 1] = 0
  got, slots = run(Adafactor(), EXPERTS, weight, grads)
  np.testing.assert_array_equal(got[1], weight[1].astype(np.float32))
  assert np.all(np.isfinite(got)) and np.all(slots['row'][1] > 0)
  # The expert is updated when it gets its first token later.
  grads[3, 1] = 1
  got, _ = run(Adafactor(), EXPERTS, weight, grads)
  assert np.all(np.isfinite(got)) and np.all(got[1] != weight[1].astype(np.float32))


def test_adafactor_survives_gradients_whose_squares_multiply_to_nothing():
  # Squares of 1e-15: row * column would be 1e-60, below float32.
  got, _ = run(Adafactor(), MATRIX, np.ones([4, 5]), [np.full([4, 5], 1e-15)] * 2)
  assert np.all(np.isfinite(got)) and np.all(got < 1)


def test_adam_agrees_with_numpy():
  rng = np.random.default_rng(1)
  weight = rng.normal(size=[4, 5])
  grads = rng.normal(size=[6, 4, 5])
  got, _ = run(Adam(0.9, 0.98, 1e-3), MATRIX, weight, grads, rate=0.01)
  mean, moment = 0.0, 0.0
  for t, grad in enumerate(grads, start=1):
    mean, moment = 0.9 * mean + 0.1 * grad, 0.98 * moment + 0.02 * grad**2
    weight = weight - 0.01 * mean / (1 - 0.9**t) / (np.sqrt(moment / (1 - 0.98**t)) + 1e-3)
  np.testing.assert_allclose(got, weight, atol=1e-6)


def plain_adamw(weight, grads, rate, decay):
  mean, moment = 0.0, 0.0
  for t, grad in enumerate(grads, start=1):
    mean, moment = 0.9 * mean + 0.1 * grad, 0.999 * moment + 0.001 * grad**2
    update = mean / (1 - 0.9**t) / (np.sqrt(moment / (1 - 0.999**t)) + 1e-8)
    weight = weight - rate * (update + decay * weight)
  return weight


def pytorch_adamw(weight, grads, rate, decay):
  torch = pytest.importorskip('torch')
  parameter = torch.nn.Parameter(torch.tensor(weight))
  optimizer = torch.optim.AdamW([parameter], lr=rate, weight_decay=decay)
  for grad in grads:
    parameter.grad = torch.tensor(grad)
    optimizer.step()
  return parameter.detach().numpy()


def optax_adamw(weight, grads, rate, decay):
  optax = pytest.importorskip('optax')
  weight = np.asarray(weight, np.float32)
  optimizer = optax.adamw(rate, weight_decay=decay)
  state = optimizer.init(weight)
  for grad in grads:
    updates, state = optimizer.update(np.asarray(grad, np.float32), state, weight)
    weight = optax.apply_updates(weight, updates)
  return weight


@pytest.mark.parametrize('other', [plain_adamw, pytorch_adamw, optax_adamw])
@pytest.mark.parametrize('spec', [EXPERTS, MATRIX, HEADS, VECTOR, KEY_BIAS], ids=lambda s: s.dims)
def test_adamw_is_that_of_pytorch_and_optax(spec, other):
  rng = np.random.default_rng(2)
  weight = 3 * rng.normal(size=spec.shape)
  grads = rng.normal(size=[6, *spec.shape]) * np.reshape([1, 0.1, 5, 1, 20, 0.3], [6] + [1] * len(spec.shape))
  got, _ = run(AdamW(weight_decay=0.1), spec, weight, grads, rate=0.01)
  expected = other(weight, grads, 0.01, 0.1 if spec.is_matrix else 0.0)
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_matrices_decay_and_norms_and_biases_do_not():
  config = registry.get('mt.cldr.Tiny')()
  specs = weights.flatten(config.model().weights())
  left = {name.rpartition('/')[2] for name, spec in specs.items() if not spec.is_matrix}
  assert left == {'scale', 'bias', 'bi', 'bo', 'bq', 'bv'}
  assert {name.rpartition('/')[2] for name, spec in specs.items() if spec.is_matrix} == {
    *('table', 'gate', 'wi', 'wo', 'wq', 'wk', 'wv'),
  }


def test_adam_first_step_is_the_sign_of_the_gradient():
  got, _ = run(Adam(), VECTOR, [0.0] * 5, [[3.0, -2.0, 1e-4, 5.0, -1.0]])
  np.testing.assert_allclose(got, [-0.1, 0.1, -0.1, -0.1, 0.1], rtol=1e-4)


@pytest.mark.parametrize(('optimizer', 'epsilon'), [(Adam(), 1e-9), (AdamW(), 1e-8)], ids=['adam', 'adamw'])
def test_a_gradient_as_small_as_epsilon_is_followed_by_half_a_step(optimizer, epsilon):
  weight, _ = run(optimizer, VECTOR, np.zeros(5), [np.full(5, epsilon)])  # rate * g / (|g| + epsilon)
  np.testing.assert_allclose(weight, np.full(5, -0.1 / 2), rtol=1e-5)


@pytest.mark.parametrize('beta2', [1e-30, 0.5, 0.98, 0.999, 0.9999999, 0.99999999, 1 - 2.0**-53])
def test_adam_with_any_beta2_follows_equal_gradients_by_the_rate(beta2):
  """Edges of numbers: decay rates whose float32 is 1."""
  grads = [np.array([1e-3, -1.0, 2.0, -30.0, 4.0])] * 20
  weight, _ = run(Adam(beta2=beta2), VECTOR, np.zeros(5), grads[:1])
  np.testing.assert_allclose(weight, -0.1 * np.sign(grads[0]), rtol=1e-5)
  weight, _ = run(Adam(beta2=beta2), VECTOR, np.zeros(5), grads)
  np.testing.assert_allclose(weight, -2.0 * np.sign(grads[0]), rtol=1e-4)


def test_slots_are_float32_whatever_the_weight():
  spec = WeightSpec((4, 5), 'MH', Constant(0.0), factored='MH', dtype=tf.bfloat16)
  for optimizer in (Adafactor(), Adam()):
    assert {s.dtype for s in optimizer.slots(spec).values()} == {tf.float32}
    args = tf.ones([4, 5], tf.bfloat16), zero_slots(optimizer, spec), tf.ones([4, 5], tf.bfloat16)
    weight, slots, square = optimizer.update(*args, spec, tf.constant(0), tf.constant(0.1))
    assert square.dtype == tf.float32 and float(square) == 20
    assert weight.dtype == tf.bfloat16 and {s.dtype for s in slots.values()} == {tf.float32}


def test_gradients_longer_than_the_limit_are_scaled_to_it_together():
  grads = {'a': tf.constant([3.0, 0.0]), 'b': tf.constant([[4.0]])}  # norm 5
  clipped, norm = clip_by_global_norm(grads, 2.5)
  assert float(norm) == 5
  np.testing.assert_allclose(clipped['a'], [1.5, 0])
  np.testing.assert_allclose(clipped['b'], [[2]])


@pytest.mark.parametrize('limit', [5.0, 7.0])
def test_gradients_within_the_limit_are_left_alone(limit):
  grads = {'a': tf.constant([3.0, 4.0])}
  clipped, norm = clip_by_global_norm(grads, limit)
  np.testing.assert_array_equal(clipped['a'], [3, 4])
  assert float(norm) == 5


def test_gradients_of_zero_stay_zero():
  clipped, norm = clip_by_global_norm({'a': tf.zeros([2])}, 1.0)
  np.testing.assert_array_equal(clipped['a'], [0, 0])
  assert float(norm) == 0


@pytest.mark.parametrize('inner', [Adafactor(), Adam()])
def test_moving_average_follows_the_weights_and_leaves_the_updates_alone(inner):
  rng = np.random.default_rng(5)
  weight, grads, decay = rng.normal(size=(4, 5)), rng.normal(size=(6, 4, 5)), 0.8
  after = [run(inner, MATRIX, weight, grads[:t])[0] for t in range(1, 7)]
  averaged, slots = run(WithMovingAverage(inner, decay), MATRIX, weight, grads)
  np.testing.assert_array_equal(averaged, after[-1])
  shares = 0.2 * 0.8 ** np.arange(5, -1, -1)
  expected = np.average(after, axis=0, weights=shares)
  np.testing.assert_allclose(slots['average'] / bias(decay, 6), expected, rtol=1e-5)
  assert slots.keys() == inner.slots(MATRIX).keys() | {'average'}


def test_moving_average_over_many_steps_keeps_its_scale():
  optimizer, decay, steps = WithMovingAverage(Adam(), 0.9999), 0.9999, 20_000
  spec = WeightSpec((1,), 'M', Constant(1.0))

  @tf.function
  def average():
    slots = {name: tf.zeros(own.shape) for name, own in optimizer.slots(spec).items()}
    still = lambda slots: optimizer.update(tf.zeros([1]), slots, tf.ones([1]), spec, tf.constant(0), tf.constant(0.0))
    return tf.while_loop(lambda i, _: i < steps, lambda i, slots: (i + 1, still(slots).slots), (0, slots))[1]['average']

  np.testing.assert_allclose(average() / bias(decay, steps), 1.0, atol=2e-5)
