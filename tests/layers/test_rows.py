"""Rows of a batch in parts: the same numbers as of the whole, whatever the parts, and divided only where that is meant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe.core import prng
from lingvo_moe.core import weights
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.rows import in_parts
from lingvo_moe.layers.rows import undivided
from lingvo_moe.layers.stack import Stack
from lingvo_moe.ops import cores
from lingvo_moe.tasks.mt.batch_keys import BATCH_KEYS
from lingvo_moe.tasks.mt.model import TranslationModel


def calls_of(f, *shapes):
  """How often in_parts calls a function that f(in_parts, *args) hands it, traced with arguments of such shapes."""
  calls = []

  def count(*args):
    calls.append(args)
    return args[0]

  specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
  tf.function(lambda *args: f(count, *args), specs, autograph=False).get_concrete_function()
  return len(calls)


def test_a_batch_is_divided_only_where_its_rows_are_not_known_while_tracing_and_may_be_told_apart(monkeypatch):
  assert calls_of(in_parts, [None, 2]) == 1  # the threads of kernels share the cores
  monkeypatch.setattr(cores, 'side_by_side', lambda: 3)
  assert calls_of(in_parts, [None, 2]) == 3
  assert calls_of(lambda f, x: in_parts(f, x, None), [None, 2]) == 3
  assert calls_of(in_parts, [None, 2], [1, 2]) == 3  # a row that all parts have
  assert calls_of(lambda f, x: in_parts(f, in_parts(lambda x: 2.0 * x, x), tf.ones([6])), [None, 2]) == 3
  assert calls_of(in_parts, [6, 2]) == 1
  assert calls_of(in_parts, [None, 2], []) == 1  # one random key for all rows

  def already_divided(f, x):
    with undivided():
      return in_parts(f, x)

  assert calls_of(already_divided, [None, 2]) == 1


@pytest.mark.parametrize('rows', [1, 2, 3, 7])
def test_parts_are_the_whole_forward_and_backward(rows, monkeypatch):
  def f(x, w, divide):
    first = divide(lambda x, y: {'sum': x + y, 'product': x * w}, x, 2.0 * x)
    total = tf.reduce_sum(first['sum'], axis=0, keepdims=True)  # of all rows, as experts see them
    return divide(lambda a, b: tf.sin(a * w) + b, first['product'], first['sum'] * total)

  def value_and_gradients(x, w, divide):
    with tf.GradientTape() as tape:
      tape.watch([x, w])
      y = f(x, w, divide)
      loss = tf.reduce_sum(y**2)
    return [y, *tape.gradient(loss, [x, w])]

  monkeypatch.setattr(cores, 'side_by_side', lambda: 3)
  x, w = tf.random.normal([rows, 4]), tf.random.normal([4])
  specs = [tf.TensorSpec([None, 4]), tf.TensorSpec([4])]
  got = tf.function(lambda x, w: value_and_gradients(x, w, in_parts), specs, autograph=False)(x, w)
  want = value_and_gradients(x, w, lambda f, *args: f(*args))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_stays_divided_is_not_put_together(monkeypatch):
  monkeypatch.setattr(cores, 'side_by_side', lambda: 2)

  @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None])], autograph=False)
  def f(x, key):
    between = in_parts(tf.sin, x)
    return in_parts(lambda x, key: tf.exp(x), between, key), between

  graph = f.get_concrete_function().graph
  exps = [op for op in graph.get_operations() if op.type == 'Exp']
  assert [op.inputs[0].op.type for op in exps] == ['Sin', 'Sin']
  (joined,) = [
    op.outputs[0] for op in graph.get_operations() if op.type == 'ConcatV2' and op.inputs[0].op.type == 'Sin'
  ]
  assert {op.type for op in joined.consumers()} == {'Identity'}  # it is the result, and nothing is computed from it


STACK = Stack(2, Attention(8, 2, 4, dropout=0.1), FeedForward(8, 12), MoE(8, 12, 6, num_groups=2), residual_dropout=0.1)
ROWS, LENGTH, VOCABULARY = 4, 5, 15


def model(**values):
  stack = dataclasses.replace(STACK, **values)
  decoder = dataclasses.replace(stack, cross_attention=True)
  return TranslationModel(stack, decoder, Embedding(VOCABULARY, 8), input_dropout=0.1, label_smoothing=0.1)


def batch():
  rng = np.random.default_rng(3)
  batch = {name: rng.integers(3, VOCABULARY, [ROWS, LENGTH], dtype=np.int32) for name in BATCH_KEYS}
  for side in ('src', 'tgt'):
    batch[f'{side}_segments'] = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, [ROWS, 1])).astype(np.int32)
    batch[f'{side}_positions'] = np.tile(np.arange(LENGTH, dtype=np.int32), [ROWS, 1])
  return batch


ALWAYS = [{}, {'moe': None}, {'scan': True}]
IN_TRAINING = [{'remat': 'block'}, {'remat': 'attention'}]  # does nothing at inference


@pytest.mark.parametrize(
  'values, training', [*((v, True) for v in ALWAYS + IN_TRAINING), *((v, False) for v in ALWAYS)], ids=str
)
def test_a_model_computes_the_same_in_parts(values, training, monkeypatch):
  task = model(**values)
  theta = weights.flatten(theta_of(task, seed=1, scale=0.4))
  key_B = prng.fold(prng.key(5), tf.range(ROWS)) if training else None

  def loss_and_gradients(batch):
    with tf.GradientTape() as tape:
      tape.watch(theta)
      loss, metrics = task.loss(weights.unflatten(theta), batch, key_B)
    return loss, metrics, tape.gradient(loss, theta)

  specs = {name: tf.TensorSpec([None, None], tf.int32) for name in BATCH_KEYS}
  run = lambda: tf.function(loss_and_gradients, [specs], autograph=False)(batch())
  whole = run()
  monkeypatch.setattr(cores, 'side_by_side', lambda: 2)
  for a, b in zip(tf.nest.flatten(run()), tf.nest.flatten(whole), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
