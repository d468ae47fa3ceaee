"""Decoding loop on a flat cache: a hypothesis uses the positions its ancestors wrote; unused ones are dropped."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.search import flat_sequence

ROWS, WIDTH, STEPS = 3, 2, 9


def keep(cache_BU, positions_BU):
  return tf.gather(cache_BU, positions_BU, batch_dims=1)


def run(parents_TBW, last_BW, dropping, jit_compile=False):
  """What each hypothesis owns at every step, as a sum of powers of two, one of each (time, w); and all of U.

  A hypothesis has its last step at last_BW.
  """
  parents_TBW, last_BW = tf.constant(parents_TBW, tf.int32), tf.constant(last_BW, tf.int32)

  def step(now, state, cache_BU):
    time, sums_TBW, sizes_T = state
    new_W = 2.0 ** tf.cast(now.time * WIDTH + tf.range(WIDTH), tf.float32)
    own_WU = tf.one_hot(now.start + tf.range(WIDTH), tf.shape(cache_BU)[1])
    cache_BU = tf.where(tf.reduce_any(own_WU > 0, axis=0), tf.einsum('W,WU->U', new_W, own_WU), cache_BU)
    sums_BW = tf.einsum('BWU,BU->BW', now.mask_BWU, cache_BU)
    at_T = tf.range(STEPS) == now.time
    sums_TBW = tf.where(at_T[:, tf.newaxis, tf.newaxis], sums_BW, sums_TBW)
    sizes_T = tf.where(at_T, tf.shape(cache_BU)[1], sizes_T)
    return parents_TBW[now.time], (time + 1, sums_TBW, sizes_T), cache_BU

  def loop():
    num_slots = 1 if dropping else STEPS * WIDTH
    return flat_sequence.loop(
      step,
      (tf.constant(0), tf.zeros([STEPS, ROWS, WIDTH]), tf.zeros([STEPS], tf.int32)),
      tf.fill([ROWS, num_slots], 1e9),  # of no hypothesis
      alive=lambda time, *_: time <= last_BW,
      batch_size=ROWS,
      beam_size=WIDTH,
      max_steps=STEPS,
      keep=keep if dropping else None,
    )

  steps, (_, sums_TBW, sizes_T) = tf.function(loop, jit_compile=jit_compile, autograph=False)()
  return int(steps), sums_TBW.numpy(), sizes_T.numpy().tolist()


def expected_sums(parents_TBW):
  sums_TBW, sums_BW = [], np.zeros([ROWS, WIDTH])
  for time, parents_BW in enumerate(parents_TBW):
    sums_BW = sums_BW + 2.0 ** (time * WIDTH + np.arange(WIDTH))
    sums_TBW.append(sums_BW)
    sums_BW = np.take_along_axis(sums_BW, parents_BW, axis=1)
  return np.stack(sums_TBW)


@pytest.mark.parametrize('room', [1, 2, 5, 20])
@pytest.mark.parametrize('seed', range(3))
def test_a_hypothesis_owns_what_its_ancestors_wrote(seed, room, monkeypatch):
  monkeypatch.setattr(flat_sequence, 'ROOM', room)
  parents_TBW = np.random.default_rng(seed).integers(0, WIDTH, [STEPS, ROWS, WIDTH])
  last_BW = np.full([ROWS, WIDTH], STEPS)
  steps, sums_TBW, _ = run(parents_TBW, last_BW, dropping=True)
  assert steps == STEPS
  np.testing.assert_array_equal(sums_TBW, expected_sums(parents_TBW))


@pytest.mark.parametrize('jit_compile', [False, True])
def test_where_nothing_is_dropped_every_position_stays_where_it_is(jit_compile):
  parents_TBW = np.random.default_rng(0).integers(0, WIDTH, [STEPS, ROWS, WIDTH])
  last_BW = np.full([ROWS, WIDTH], STEPS)
  steps, sums_TBW, sizes_T = run(parents_TBW, last_BW, dropping=False, jit_compile=jit_compile)
  assert (steps, sizes_T) == (STEPS, [STEPS * WIDTH] * STEPS)
  np.testing.assert_array_equal(sums_TBW, expected_sums(parents_TBW))


def test_a_past_in_common_is_kept_once(monkeypatch):
  # Room for 2 steps is 4 positions. Whenever there is none left, t positions are owned where all continue hypothesis 0,
  # and 2 t where nobody dies; they are rounded up to a multiple of 4, and room is added.
  monkeypatch.setattr(flat_sequence, 'ROOM', 2)
  forever = np.full([ROWS, WIDTH], STEPS)
  _, _, sizes = run(np.zeros([STEPS, ROWS, WIDTH], np.int32), forever, dropping=True)
  assert sizes == [4, 4, 8, 8, 8, 12, 12, 12, 12]  # made at 0, 2 (2 owned), 5 (5 owned)
  _, _, sizes = run(np.tile(np.arange(WIDTH), [STEPS, ROWS, 1]), forever, dropping=True)
  assert sizes == [4, 4, 8, 8, 12, 12, 16, 16, 20]


def test_what_has_ended_owns_nothing(monkeypatch):
  # Nobody dies, but rows 0 and 1 end after steps 1 and 3, and hypothesis 0 of row 2 after step 3.
  monkeypatch.setattr(flat_sequence, 'ROOM', 2)
  last_BW = np.array([[1, 1], [3, 3], [3, 6]])
  steps, _, sizes = run(np.tile(np.arange(WIDTH), [STEPS, ROWS, 1]), last_BW, dropping=True)
  assert steps == 7
  assert sizes[:7] == [4, 4, 8, 8, 8, 8, 12]  # at 4 the last hypothesis owns 4, and at 6 it owns 6


def test_a_step_is_given_the_hypotheses_that_are_live():
  last_BW = tf.constant([[0, 2], [1, 1], [3, 0]])

  def step(now, state, cache):
    time, live_TBW = state
    live_TBW = tf.where((tf.range(STEPS) == time)[:, tf.newaxis, tf.newaxis], now.live_BW, live_TBW)
    return tf.zeros([ROWS, WIDTH], tf.int32), (time + 1, live_TBW), cache

  steps, (_, live_TBW) = flat_sequence.loop(
    step,
    (tf.constant(0), tf.zeros([STEPS, ROWS, WIDTH], tf.bool)),
    tf.zeros([ROWS, STEPS * WIDTH]),
    alive=lambda time, _: time <= last_BW,
    batch_size=ROWS,
    beam_size=WIDTH,
    max_steps=STEPS,
  )
  assert int(steps) == 4
  np.testing.assert_array_equal(live_TBW, np.arange(STEPS)[:, np.newaxis, np.newaxis] <= last_BW.numpy())
