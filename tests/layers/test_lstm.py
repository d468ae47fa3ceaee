"""The LSTM against a plain NumPy loop, its gradients against finite differences, and a step at a time."""

import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe.layers.recurrent_stack import Lstm, LstmState
from lingvo_moe.ops import backend, cpu

LAYERS = {'plain': Lstm(4), 'projected': Lstm(4, 6)}
BEGINS = np.array([[1, 0, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 0, 1]], bool)
X = tf.random.stateless_normal([3, 5, 4], [0, 5])


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def loop(theta, x_BTM, begins_BT):
  """(outputs, cells), one number at a time in time and row."""
  theta = {name: value.numpy() for name, value in theta.items()}
  outputs, cells = [], []
  for row, begins in zip(np.asarray(x_BTM), begins_BT, strict=True):
    output, cell = np.zeros(theta['wr'].shape[0]), np.zeros(theta['wi'].shape[2])
    for x, begin in zip(row, begins, strict=True):
      output, cell = output * (not begin), cell * (not begin)
      z = np.einsum('m,mjh->jh', x, theta['wi']) + np.einsum('m,mjh->jh', output, theta['wr']) + theta['bi']
      cell = sigmoid(z[1] + 1) * cell + sigmoid(z[0]) * np.tanh(z[2])
      output = sigmoid(z[3]) * np.tanh(cell)
      output = output @ theta['wo'] if 'wo' in theta else output
      outputs.append(output)
      cells.append(cell)
  return np.reshape(outputs, [*begins_BT.shape, -1]), np.reshape(cells, [*begins_BT.shape, -1])


@pytest.mark.parametrize('layer', LAYERS.values(), ids=LAYERS)
def test_values_are_those_of_a_plain_loop(layer):
  theta = theta_of(layer)
  state = layer(theta, X, tf.constant(BEGINS))
  outputs, cells = loop(theta, X, BEGINS)
  np.testing.assert_allclose(state.output_BTM, outputs, atol=1e-6)
  np.testing.assert_allclose(state.cell_BTH, cells, atol=1e-6)


def test_one_unit_by_hand():
  # Preactivations are x times 0, 0, 1, 0: both gates and the output gate are 1/2, but forget is sigmoid(1).
  theta = {'wi': tf.constant([[[0.0], [0.0], [1.0], [0.0]]]), 'wr': tf.zeros([1, 4, 1]), 'bi': tf.zeros([4, 1])}
  state = Lstm(1)(theta, tf.constant([[[0.5], [0.25]]]), tf.constant([[True, False]]))
  first = 0.5 * np.tanh(0.5)
  second = sigmoid(1) * first + 0.5 * np.tanh(0.25)
  np.testing.assert_allclose(state.cell_BTH[0, :, 0], [first, second], rtol=1e-6)
  np.testing.assert_allclose(state.output_BTM[0, :, 0], 0.5 * np.tanh([first, second]), rtol=1e-6)


@pytest.mark.parametrize('layer', LAYERS.values(), ids=LAYERS)
def test_gradients_are_those_of_finite_differences(layer):
  theta, begins = theta_of(layer), tf.constant(BEGINS)
  weight_BTM, weight_BTH = (tf.random.stateless_normal([3, 5, n], [n, 9]) for n in (4, layer.hidden_dim))

  def value(theta, x):
    with backend.use(backend.Backend('cpu', cpu.OVERRIDES)):
      state = layer(theta, x, begins)
    return tf.reduce_sum(state.output_BTM * weight_BTM) + tf.reduce_sum(state.cell_BTH * weight_BTH)

  with tf.GradientTape() as tape:
    tape.watch((theta, X))
    y = value(theta, X)
  of_theta, of_x = tape.gradient(y, (theta, X))

  def numeric(name, along, step=1e-2):
    at = lambda step: {**values, name: values[name] + step * along}
    apart = lambda values: value({n: v for n, v in values.items() if n != 'x'}, values['x'])
    return float(apart(at(step)) - apart(at(-step))) / (2 * step)

  values, gradients = {**theta, 'x': X}, {**of_theta, 'x': of_x}
  for name, gradient in gradients.items():
    along = tf.random.stateless_normal(gradient.shape, [3, 4])
    assert float(tf.reduce_sum(gradient * along)) == pytest.approx(numeric(name, along), rel=2e-3), name


@pytest.mark.parametrize('layer', LAYERS.values(), ids=LAYERS)
def test_step_by_step_it_is_what_it_is_over_whole_rows(layer):
  theta = theta_of(layer)
  begins = np.zeros([3, 5], bool)
  begins[:, 0] = True
  whole = layer(theta, X, tf.constant(begins))
  state = LstmState(tf.zeros([3, 1, 4]), tf.zeros([3, 1, layer.hidden_dim]))
  for t in range(5):
    state = layer.step(theta, X[:, t : t + 1], state)
    np.testing.assert_allclose(state.output_BTM[:, 0], whole.output_BTM[:, t], atol=1e-6)
    np.testing.assert_allclose(state.cell_BTH[:, 0], whole.cell_BTH[:, t], atol=1e-6)


def test_a_bfloat16_layer_has_float32_cells_and_nearly_the_same_outputs():
  layer = LAYERS['projected']
  theta = theta_of(layer)
  half = layer(
    {name: tf.cast(w, tf.bfloat16) for name, w in theta.items()}, tf.cast(X, tf.bfloat16), tf.constant(BEGINS)
  )
  assert half.output_BTM.dtype == tf.bfloat16 and half.cell_BTH.dtype == tf.float32
  whole = layer(theta, X, tf.constant(BEGINS)).output_BTM
  np.testing.assert_allclose(tf.cast(half.output_BTM, tf.float32), whole, atol=0.05)
