"""A task as pure functions of a state: one step worked out by hand, and what it may depend on."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Constant, Normal, WeightSpec
from lingvo_moe.optim import schedule
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.optimizer import Optimizer, Update
from lingvo_moe.program import Program


@dataclasses.dataclass(frozen=True)
class Line:
  """y = x w, with noise on x in training; owns a weight that it does not use."""

  noise: float = 0.0

  def weights(self):
    return {
      'layer': {'w': WeightSpec((2, 3), 'MH', Normal(1.0), factored='MH')},
      'unused': WeightSpec((4,), 'M', Constant(1.0)),
    }

  def loss(self, theta, batch, key=None):
    x = batch['x']
    if key is not None:
      x += self.noise * prng.normal(key, [2])
    loss = tf.reduce_sum((tf.linalg.matvec(theta['layer']['w'], x, transpose_a=True) - batch['y']) ** 2)
    return loss, {'loss': loss}


@dataclasses.dataclass(frozen=True)
class Descent(Optimizer):
  """weight - rate * gradient, counting updates in a slot."""

  def slots(self, spec):
    return {'count': WeightSpec((), '', Constant(0.0))}

  def update(self, grad, slots, weight, spec, step, rate):
    return Update(weight - rate * grad, {'count': slots['count'] + 1}, tf.reduce_sum(grad**2))


BATCH = {'x': tf.constant([1.0, 2.0]), 'y': tf.constant([1.0, 0.0, -1.0])}


def program(noise=0.0, **kwargs):
  return Program(Line(noise), Descent(), schedule.ConstantRate(0.1), **kwargs)


def test_the_first_state_names_weights_slots_and_step():
  state = Program(Line(), Adafactor(), schedule.ConstantRate(0.1)).init()
  assert state['step'].dtype == tf.int64 and int(state['step']) == 0
  assert {name: tuple(w.shape) for name, w in state['weights'].items()} == {'layer/w': (2, 3), 'unused': (4,)}
  assert {name: tuple(s.shape) for name, s in state['slots'].items()} == {
    'layer/w/row': (2,),
    'layer/w/column': (3,),
    'unused/moment': (4,),
  }
  for slot in state['slots'].values():
    np.testing.assert_array_equal(slot, tf.zeros_like(slot))


def test_one_step_by_hand():
  state = program().init()
  state['weights']['layer/w'] = tf.constant([[1.0, 0, 0], [0, 1, 0]])
  # x w = (1, 2, 0); less y = (0, 2, 1); gradient 2 x (0, 2, 1).
  new, metrics = program().train_step(state, BATCH)
  np.testing.assert_allclose(new['weights']['layer/w'], [[1, -0.4, -0.2], [0, 0.2, -0.4]], atol=1e-6)
  np.testing.assert_array_equal(new['weights']['unused'], [1] * 4)
  assert int(new['step']) == 1 and float(new['slots']['layer/w/count']) == 1
  assert float(metrics['loss']) == 5
  np.testing.assert_allclose(metrics['grad_norm'], 10)  # 2 * |(1, 2)| * |(2, 1)|
  np.testing.assert_allclose(metrics['learning_rate'], 0.1)


@pytest.mark.parametrize('clip_norm', [0.0, 1.0])
def test_what_is_frozen_has_no_update_no_slots_and_no_part_in_the_norm(clip_norm):
  state = program().init()
  state['weights']['layer/w'] = tf.constant([[1.0, 0, 0], [0, 1, 0]])
  kept = program(frozen=('layer',), clip_norm=clip_norm)
  assert kept.slot_specs.keys() == {'unused/count'} and list(kept.weight_specs) == ['layer/w', 'unused']
  new, metrics = kept.train_step({**state, 'slots': kept.init()['slots']}, BATCH)
  np.testing.assert_array_equal(new['weights']['layer/w'], state['weights']['layer/w'])
  assert list(new['weights']) == ['layer/w', 'unused'] and new['slots'].keys() == {'unused/count'}
  assert float(metrics['grad_norm']) == 0


def test_a_part_is_a_weight_or_a_whole_word_of_names():
  assert list(program(frozen=('layer/w',)).trained_specs) == ['unused']
  for part in ('lay', 'layer/', 'layer/w/x', ''):
    with pytest.raises(UserError, match=f"'{part}' is no part of the weights; .*the parts are layer, unused"):
      program(frozen=(part,)).slot_specs  # noqa: B018


def test_clipping_shortens_the_gradient_and_reports_its_length_before():
  state = program().init()
  state['weights']['layer/w'] = tf.constant([[1.0, 0, 0], [0, 1, 0]])
  new, metrics = program(clip_norm=1.0).train_step(state, BATCH)
  np.testing.assert_allclose(metrics['grad_norm'], 10)
  np.testing.assert_allclose(
    state['weights']['layer/w'] - new['weights']['layer/w'], 0.1 * np.outer([1, 2], [0, 4, 2]) / 10, atol=1e-6
  )


def test_a_step_is_a_function_of_seed_and_step():
  noisy = program(noise=1.0, seed=1)
  state = noisy.init()
  loss = lambda p, step: float(p.train_step({**state, 'step': tf.constant(step, tf.int64)}, BATCH)[1]['loss'])
  assert loss(noisy, 3) == loss(noisy, 3)
  assert len({loss(noisy, 3), loss(noisy, 4), loss(program(noise=1.0, seed=2), 3)}) == 3


def test_the_seed_decides_the_initial_weights():
  values = [program(seed=seed).init()['weights']['layer/w'].numpy() for seed in (1, 1, 2)]
  np.testing.assert_array_equal(values[0], values[1])
  assert np.all(values[0] != values[2])


def test_a_step_leaves_the_state_it_was_given_alone():
  state = program().init()
  before = {name: w.numpy() for name, w in state['weights'].items()}
  program().train_step(state, BATCH)
  assert int(state['step']) == 0
  for name, w in state['weights'].items():
    np.testing.assert_array_equal(w, before[name])


def test_evaluation_has_no_noise():
  noisy, plain = program(noise=1.0), program()
  weights = plain.init()['weights']
  assert float(noisy.eval_step(weights, BATCH)['loss']) == float(plain.eval_step(weights, BATCH)['loss'])


@dataclasses.dataclass(frozen=True)
class Mean:
  """The mean over rows of (x w + noise)^2, which adds up over parts of a batch."""

  def weights(self):
    return {'w': WeightSpec((), '', Constant(2.0))}

  def totals(self, batch):
    return {'rows': tf.cast(tf.shape(batch['x'])[0], tf.float32)}

  def loss(self, theta, batch, key=None, totals=None):
    rows = (totals or self.totals(batch))['rows']
    y_B = batch['x'] * theta['w'] + prng.uniform(key, batch['x'].shape)
    loss = tf.reduce_sum(y_B**2) / rows
    return loss, {'loss': loss, 'largest': tf.zeros([])}


@pytest.mark.parametrize('parts', [2, 4])
def test_micro_batches_add_up_to_the_same_gradient_and_metrics(parts):
  batch = {'x': tf.constant([1.0, 2.0, 3.0, -1.0, 0.5, 4.0, 2.0, 1.0])}
  gradients = {}
  for micro_batches in (1, parts):
    p = Program(Mean(), Descent(), schedule.ConstantRate(0.1), num_groups=4, micro_batches=micro_batches)
    state = p.init()
    traced = tf.function(lambda p=p, state=state: p.gradients(state['step'], state['weights'], batch), autograph=False)
    gradients[micro_batches] = traced()
  for got, expected in zip(tf.nest.flatten(gradients[parts]), tf.nest.flatten(gradients[1]), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-6)
