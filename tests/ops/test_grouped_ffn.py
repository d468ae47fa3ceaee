"""Grouped feed-forward on CPUs: every form against a plain loop; Looped runs only experts with rows."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.ops.cpu import grouped_ffn

M, H = 3, 5


@pytest.fixture(params=['unrolled', 'unrolled, factored', 'looped'])
def way(request, monkeypatch):
  max_unrolled, max_multiplied = {'unrolled': (9, 9), 'unrolled, factored': (9, 1), 'looped': (1, 1)}[request.param]
  monkeypatch.setattr(grouped_ffn, '_MAX_UNROLLED', max_unrolled)
  monkeypatch.setattr(grouped_ffn, '_MAX_MULTIPLIED', max_multiplied)
  return request.param


def some(*shapes):
  rng = np.random.default_rng(0)
  return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def plain(count_E, x_XM, wi_EMH, wo_EHM, dy_XM):
  """Result and gradients (y, dx, dwi, dwo), row by row."""
  y, dx, dwi, dwo = (np.zeros_like(a) for a in (x_XM, x_XM, wi_EMH, wo_EHM))
  for row, e in enumerate(np.repeat(np.arange(len(count_E)), count_E)):
    h = np.maximum(x_XM[row] @ wi_EMH[e], 0)
    dh = (wo_EHM[e] @ dy_XM[row]) * (h > 0)
    y[row], dx[row] = h @ wo_EHM[e], wi_EMH[e] @ dh
    dwi[e] += np.outer(x_XM[row], dh)
    dwo[e] += np.outer(h, dy_XM[row])
  return y, dx, dwi, dwo


def traced(count_E):
  """Traced function of (x, wi, wo, dy): results at inference and in training, and the gradients for x, wi and wo."""
  expert_offsets = tf.constant(np.cumsum([0, *count_E]), tf.int32)

  def run(x_XM, wi_EMH, wo_EHM, dy_XM):
    with tf.GradientTape() as tape:
      tape.watch([x_XM, wi_EMH, wo_EHM])
      y_XM = grouped_ffn.grouped_ffn(x_XM, expert_offsets, wi_EMH, wo_EHM)
    gradients = tape.gradient(y_XM, [x_XM, wi_EMH, wo_EHM], dy_XM)
    forward = grouped_ffn.grouped_ffn_forward(x_XM, expert_offsets, wi_EMH, wo_EHM)
    return forward, y_XM, *map(tf.convert_to_tensor, gradients)

  rows, weights = tf.TensorSpec([None, M]), [tf.TensorSpec([len(count_E), *shape]) for shape in ((M, H), (H, M))]
  return tf.function(run, input_signature=[rows, *weights, rows])


@pytest.mark.parametrize('count_E', [[2, 0, 7, 1], [0, 0, 3], [4, 4], [0, 0, 0]])
def test_answers_and_gradients_are_those_of_a_plain_loop(way, count_E):
  rows = sum(count_E) + 1
  values = some((rows, M), (len(count_E), M, H), (len(count_E), H, M), (rows, M))
  inference, *training = traced(count_E)(*values)
  want = plain(count_E, *values)
  np.testing.assert_allclose(inference, want[0], atol=1e-5)
  for got, expected in zip(training, want, strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_gradients_of_few_experts_are_stacked_and_of_many_factored(way):
  types = [op.type for op in traced([2, 1, 3]).get_concrete_function().graph.get_operations()]
  assert types.count('Einsum') == (0 if way == 'unrolled' else 2)
  assert ('SplitV' in types) == (way != 'looped')


def test_a_loop_runs_only_experts_with_rows_each_on_its_own():
  calls = {}

  def expert(w, x_CM):
    calls[int(w[0])] = x_CM[:, 0].numpy().tolist()
    return [w * x_CM, x_CM[:, :1]]

  loop = grouped_ffn.Looped(tf.constant([0, 1, 1, 3, 3]))
  weights, x_XM = tf.constant([[10.0], [11], [12], [13]]), tf.constant([[1.0, 2], [3, 4], [5, 6], [7, 8]])
  y_XM, first_X1 = loop.each(expert, [2, 1], [weights], [x_XM])
  assert calls == {10: [1.0], 12: [3.0, 5.0]}
  np.testing.assert_array_equal(y_XM, [[10, 20], [36, 48], [60, 72], [0, 0]])
  np.testing.assert_array_equal(first_X1, [[1], [3], [5], [0]])
