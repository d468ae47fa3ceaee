"""Pipeline: its schedule, worked out by hand, and its refusals; tests/runtime/test_pipelines.py has the meshes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import collected, dealt
from lingvo_moe.core.weights import Constant, WeightSpec
from lingvo_moe.layers import dispatch
from lingvo_moe.layers.pipeline import Pipeline, pipelined
from lingvo_moe.layers.scanned_stack import scan

# 2 stages and 4 micro-batches; 4 blocks, two of which a stage runs at once.
PLAIN = Pipeline(stages=2, parts=1, micro_batches=4, num_groups=4, repeats=1, blocks=4)
CIRCULAR = dataclasses.replace(PLAIN, repeats=2)


def work(schedule):
  """For each tick and stage: (number of the micro-batch, of the round), or None in the bubble."""
  table = []
  for tick in range(schedule.ticks):
    place = schedule.at(tf.constant(tick))
    row = zip(place.micro_batch_A.numpy(), place.repeat_Z.numpy(), place.valid_Z.numpy(), strict=True)
    table.append([(int(number), int(repeat)) if valid else None for number, repeat, valid in row])
  return table


def test_micro_batches_follow_each_other_through_the_stages():
  of = lambda number: (number, 0)
  assert work(PLAIN) == [
    [of(0), None],
    [of(1), of(0)],
    [of(2), of(1)],
    [of(3), of(2)],
    [None, of(3)],
  ]
  assert PLAIN.entries(0) == [0, 1, 2, 3]


def test_a_set_of_micro_batches_passes_all_repeats_before_the_next_one_enters():
  assert work(CIRCULAR) == [
    [(0, 0), None],
    [(1, 0), (0, 0)],
    [(0, 1), (1, 0)],
    [(1, 1), (0, 1)],
    [(2, 0), (1, 1)],
    [(3, 0), (2, 0)],
    [(2, 1), (3, 0)],
    [(3, 1), (2, 1)],
    [None, (3, 1)],
  ]
  assert CIRCULAR.entries(0) == [0, 1, 4, 5] and CIRCULAR.entries(1) == [2, 3, 6, 7]


@pytest.mark.parametrize('repeats', [1, 2, 4])
def test_every_micro_batch_passes_every_block_once_in_their_order(repeats):
  schedule = Pipeline(stages=4, parts=1, micro_batches=8, num_groups=8, repeats=repeats, blocks=16)
  passed = {number: [] for number in range(8)}
  busy = 0
  for tick in range(schedule.ticks):
    place = schedule.at(tf.constant(tick))
    numbers = [schedule.numbers(place, within).numpy() for within in range(schedule.blocks_at_once)]
    for stage in np.flatnonzero(place.valid_Z.numpy()):
      passed[int(place.micro_batch_A[stage])] += [int(blocks[stage]) for blocks in numbers]
      busy += 1
  assert all(blocks == list(range(16)) for blocks in passed.values())
  # The bubble: each stage waits for stages - 1 ticks in all.
  assert schedule.ticks * 4 - busy == 4 * 3


def test_parts_of_a_micro_batch_stand_beside_each_other_on_axis_z():
  schedule = dataclasses.replace(PLAIN, parts=2, num_groups=8)
  place = schedule.at(tf.constant(1))
  assert schedule.numbers(place, 1).numpy().tolist() == [1, 1, 3, 3]
  assert place.first_Z.numpy().tolist() == [True, True, False, False]
  assert place.last_Z.numpy().tolist() == [False, False, True, True]
  x_B = tf.range(16)  # 8 groups of two rows, dealt to 4 micro-batches of two parts
  x_ODI = schedule.divide(x_B)
  assert x_ODI.numpy().tolist()[1] == [[2, 3], [10, 11]]
  assert schedule.take(x_ODI, place).numpy().tolist() == [[2, 3], [10, 11], [0, 1], [8, 9]]


def test_values_pass_to_the_next_stage_in_a_circle():
  schedule = Pipeline(stages=3, parts=2, micro_batches=3, num_groups=6, repeats=1, blocks=3)
  x_ZI = tf.reshape(tf.range(6), [6, 1])
  assert schedule.passed(x_ZI, 1).numpy().ravel().tolist() == [4, 5, 0, 1, 2, 3]
  assert schedule.passed(x_ZI, -1).numpy().ravel().tolist() == [2, 3, 4, 5, 0, 1]


def test_values_of_blocks_come_back_in_their_order():
  schedule = dataclasses.replace(CIRCULAR, parts=3, num_groups=12, blocks=8)
  x_LD = tf.reshape(tf.range(24), [8, 3])
  by_place = schedule.of_blocks(x_LD)
  assert by_place.shape == [2, 2, 6]
  assert by_place.numpy()[1, 0].tolist() == [3, 4, 5, 9, 10, 11]  # second block at once, first round: blocks 1 and 3
  assert np.array_equal(schedule.by_block(by_place), x_LD)


def test_a_bubble_counts_in_nothing():
  place = CIRCULAR.at(tf.constant(0))
  assert place.in_repeat(tf.constant([3, 5])).numpy().tolist() == [[3, 0], [0, 0]]
  assert place.of_repeat(tf.constant([[3, 5], [7, 9]])).numpy().tolist() == [3, 0]


def test_groups_are_dealt_in_turn_and_collected_again():
  x_B = tf.reshape(tf.range(12), [12, 1])  # 6 groups of two rows, to 3 micro-batches
  x_OB = dealt(x_B, 6, 3)
  assert x_OB.numpy()[..., 0].tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
  assert np.array_equal(collected(x_OB, 6), x_B)


@pytest.mark.parametrize(
  'values, text',
  [
    ({'blocks': 3}, 'the 2 stages of a mesh have equal numbers of blocks .* saw a stack of 3 blocks'),
    ({'repeats': 4}, 'pipeline_repeats=4; saw a stack of 4 blocks'),
    ({'repeats': 2, 'micro_batches': 1}, 'saw micro_batches=1 and 2 stages: use a multiple of 2'),
    ({'parts': 2}, 'saw num_groups=4 for 4 micro-batches and data:2: use a multiple of 8'),
  ],
)
def test_what_does_not_divide_is_refused(values, text):
  with pytest.raises(UserError, match=text):
    dataclasses.replace(PLAIN, **values)


@pytest.mark.parametrize('name', dispatch.DISPATCHERS)
def test_stages_dispatch_by_einsum_and_over_stages_hashes_positions_as_elsewhere(name):
  def in_stage(key):
    assert isinstance(dispatch.make(name, None), dispatch.EinsumDispatcher)
    return prng.uniform(key, [3])

  key_Z = tf.constant([5, 7], tf.uint32)
  got = xla_sharding.over_stages(in_stage, key_Z)
  np.testing.assert_array_equal(got, [prng.uniform(key, [3]) for key in key_Z])
  assert not xla_sharding.in_stage()


SPECS = {'w': WeightSpec((3, 3), 'MM', Constant(0.0)), 'b': WeightSpec((3,), 'M', Constant(0.0))}


def block(number, x_BM, shared, theta, rows):
  """A block that depends on its number, on a shared tensor and on rows; its auxiliary outputs count and have a loss."""
  (memory_BM,), scale_B = shared, rows
  scale_B1 = tf.cast(scale_B, tf.float32)[:, tf.newaxis] * (1 + 0.1 * tf.cast(number, tf.float32))
  y_BM = x_BM + scale_B1 * tf.tanh(x_BM @ theta['w'] + theta['b'] + memory_BM)
  return y_BM, {'loss': tf.reduce_sum(tf.square(y_BM)), 'number': number}


def with_gradients(function, *args):
  """Results of a function of tensors, and the gradients of a sum that every result is weighted in."""
  with tf.GradientTape() as tape:
    tape.watch(args)
    y_BM, aux = function(*args)
    by_block_L = tf.range(1.0, 1.0 + aux['loss'].shape[0])
    total = tf.reduce_sum(y_BM * tf.sin(tf.reshape(tf.range(24.0), [8, 3]))) + tf.reduce_sum(aux['loss'] * by_block_L)
  return y_BM, aux, tape.gradient(total, args)


FACTORS = tf.constant([1.0] * 7 + [256.0], tf.bfloat16)  # 256 + 1 is 256 in bfloat16, and 263 is 264


@pytest.mark.parametrize('stages', [1, 2])
def test_gradients_of_bfloat16_tensors_are_float32_sums_over_blocks_and_micro_batches(stages):
  schedule = Pipeline(stages, 1, micro_batches=8, num_groups=8, repeats=1, blocks=8)
  specs = {'b': WeightSpec((1,), 'M', Constant(0.0))}

  def block(number, x_BM, shared, theta, rows):
    by_row_B1 = tf.gather(FACTORS, rows)[:, tf.newaxis]
    return x_BM + tf.gather(FACTORS, number) * shared[0] + by_row_B1 * theta['b'], {}

  x_BM = memory_BM = tf.zeros([8, 1], tf.bfloat16)
  b_LM = tf.zeros([8, 1], tf.bfloat16)
  with tf.GradientTape() as tape:
    tape.watch([memory_BM, b_LM])
    if stages > 1:
      y_BM, _ = pipelined(block, x_BM, [memory_BM], tf.range(8), {'b': b_LM}, specs, schedule)
    else:
      in_order = lambda number, x_BM, shared, theta: block(number, x_BM, shared, theta, tf.range(8))
      y_BM, _ = scan(in_order, x_BM, [memory_BM], {'b': b_LM}, specs)
  dmemory_BM, db_LM = tape.gradient(y_BM, [memory_BM, b_LM], output_gradients=tf.ones_like(y_BM))
  assert dmemory_BM.dtype == tf.bfloat16 and dmemory_BM.numpy().ravel().tolist() == [264.0] * 8
  if stages > 1:  # otherwise the sum over rows is that of a product
    assert db_LM.numpy().ravel().tolist() == [264.0] * 8


@pytest.mark.parametrize(
  'stages, parts, micro_batches, repeats', [(2, 1, 4, 1), (4, 2, 2, 1), (2, 1, 1, 1), (2, 2, 4, 2), (1, 1, 8, 4)]
)
def test_a_pipeline_computes_what_its_blocks_do_one_after_the_other(stages, parts, micro_batches, repeats):
  schedule = Pipeline(stages, parts, micro_batches, num_groups=8, repeats=repeats, blocks=8)
  rng = np.random.default_rng(0)
  random = lambda *shape: tf.constant(rng.normal(size=shape), tf.float32)
  scale_B = tf.range(8)

  def in_stages(x_BM, memory_BM, w, b):
    y_BM, aux = pipelined(block, x_BM, [memory_BM], scale_B, {'w': w, 'b': b}, SPECS, schedule)
    return y_BM, {name: tf.reduce_sum(value_LD, axis=1) for name, value_LD in aux.items()}

  def in_order(x_BM, memory_BM, w, b):
    losses = []
    for number in range(8):
      x_BM, aux = block(tf.constant(number), x_BM, [memory_BM], {'w': w[number], 'b': b[number]}, scale_B)
      losses.append(aux['loss'])
    # Counts are summed over parts of micro-batches, each of which has one.
    return x_BM, {'loss': tf.stack(losses), 'number': tf.range(8) * micro_batches * parts}

  args = random(8, 3), random(8, 3), 0.3 * random(8, 3, 3), random(8, 3)
  got = tf.function(lambda *args: with_gradients(in_stages, *args), autograph=False)(*args)
  for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(with_gradients(in_order, *args)), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4 * np.max(np.abs(b)))
