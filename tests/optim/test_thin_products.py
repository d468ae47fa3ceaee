"""Products before they are multiplied out: which are found, when they are there, and what they are padded to."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from ancestors import ancestors

from lingvo_moe.optim.cpu.thin_products import ThinProduct

X, DY = tf.TensorSpec([3, None, None, 8]), tf.TensorSpec([3, None, None, 6])


def behind(make):
  """What is found behind make(x, dy), which is traced."""
  found = []
  traced = tf.function(lambda x, dy: found.append(ThinProduct.behind(make(x, dy))), input_signature=[X, DY])
  traced.get_concrete_function()
  return found[0]


@pytest.mark.parametrize('equation', ['EGCM,EGCH->EMH', 'EGCH,EGCM->EHM', 'abcd,abce->ade'])
def test_a_product_of_experts_rows_is_found(equation):
  assert behind(lambda x, dy: tf.einsum(equation, x, dy)) is not None


@pytest.mark.parametrize(
  'make',
  [
    lambda x, dy: tf.einsum('EGCM,EGCH->EHM', x, dy),  # transposed
    lambda x, dy: tf.einsum('EGCM,eGCH->EMH', x, dy),
    lambda x, dy: tf.einsum('EGCM,ECGH->EMH', x, dy),  # other rows
    lambda x, dy: tf.einsum('EGCM,EGCH->EGMH', x, dy),
    lambda x, dy: tf.einsum('EGCM,EGCH->MH', x, dy),
    lambda x, dy: tf.einsum('EM,EH->EMH', x[:, 0, 0], dy[:, 0, 0]),
    lambda x, dy: tf.einsum('EGCM->EGM', x),
    lambda x, dy: tf.cast(tf.einsum('EGCM,EGCH->EMH', x, dy), tf.float64),
    lambda x, dy: 2.0 * tf.einsum('EGCM,EGCH->EMH', x, dy),
    lambda x, dy: tf.matmul(x[:, 0], dy[:, 0], transpose_a=True),
  ],
)
def test_nothing_else_is(make):
  assert behind(make) is None


def test_a_product_times_a_number_is_a_product():
  thin = behind(lambda x, dy: ThinProduct.behind(tf.einsum('EGCM,EGCH->EMH', x, dy)).scaled(2.0))
  assert thin is not None


def test_no_product_is_found_where_it_is_there_already():
  assert ThinProduct.behind(tf.einsum('ECM,ECH->EMH', tf.ones([3, 2, 8]), tf.ones([3, 2, 6]))) is None


def test_factors_are_had_no_sooner_than_the_product():
  def make(x, dy):
    with tf.control_dependencies([tf.zeros([], name='waits')]):
      return tf.einsum('EGCM,EGCH->EMH', x, dy)

  for factor in behind(make):
    assert 'waits' in [op.name for op in ancestors([factor.op])]


@pytest.mark.parametrize(
  'rows, padded', [(0, 4), (1, 4), (4, 4), (5, 6), (9, 12), (33, 48), (48, 48), (64, 64), (65, None)]
)
def test_rows_are_padded_to_one_of_a_few_numbers_or_are_not_few(rows, padded):
  rng = np.random.default_rng(0)
  thin = ThinProduct(*(tf.constant(rng.normal(size=(3, rows, size)), tf.float32) for size in (8, 6)))
  assert bool(thin.worth_it) == (padded is not None)
  want = np.einsum('ECM,ECH->EMH', *thin)
  np.testing.assert_allclose(thin.multiplied(), want, atol=1e-5)
  np.testing.assert_allclose(thin.norm(), np.linalg.norm(want), rtol=1e-5)
  np.testing.assert_allclose(thin.scaled(0.5), want / 2, atol=1e-5)
  if padded:
    assert [factor.shape for factor in thin.padded()] == [(3, padded, 8), (3, padded, 6)]
    np.testing.assert_allclose(thin.padded().multiplied(), want, atol=1e-5)
