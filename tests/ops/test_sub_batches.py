"""Sub-batches of rows: results equal those of the whole batch, for any number of sub-batches."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe import ops
from lingvo_moe.core import prng, weights
from lingvo_moe.layers import moe as moe_lib
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.noisy_top_k import NoisyTopK
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.scanned_stack import ScannedStack
from lingvo_moe.layers.stack import Stack
from lingvo_moe.models.batches import BATCH_KEYS
from lingvo_moe.models.encoder_decoder import EncoderDecoder
from lingvo_moe.ops import backend, cpu
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.custom_gradient import pull_back
from lingvo_moe.optim import schedule
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.program import Program, joined
from lingvo_moe.runtime import local


def in_parts(count, **values):
  return Backend('cpu', cpu.OVERRIDES, 'grouped', sub_batches=count, **values)


def calls_of(*shapes, parts=3):
  """Number of sub-batches of by_rows for arguments of these shapes."""
  calls = []

  def count(x, y, scale, *, add=0.0):
    calls.append((x, y))
    return {'sum': x * scale + y + add}

  def run(*args):
    with backend.use(in_parts(parts)):
      return cpu.sub_batches.by_rows(count, places=(0, 1))(*args, 2.0, add=1.0)['sum']

  specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
  traced = tf.function(run, specs, autograph=False)
  args = [np.random.default_rng(0).normal(size=[d or 5 for d in shape]).astype(np.float32) for shape in shapes]
  np.testing.assert_allclose(traced(*args), args[0] * 2 + args[1] + 1, rtol=1e-6)
  return len(calls)


def test_rows_are_divided_unless_there_is_one_or_none():
  assert calls_of([None, 2], [None, 2], parts=1) == 1
  assert calls_of([None, 2], [None, 2]) == 3
  assert calls_of([6, 2], [6, 2]) == 3
  assert calls_of([1, 2], [1, 2]) == 1
  assert calls_of([6, 2], [1, 2]) == 3  # one row beside all, such as a mask
  assert calls_of([6], [6]) == 1  # no axis but that of rows: not of a batch


@pytest.mark.parametrize('rows', [1, 2, 3, 7])
def test_sub_batches_are_the_whole_forward_and_backward(rows):
  def f(x_BTM, w_MH, table_VM, b_H):
    h_BTH = ops.linear(x_BTM, w_MH, b_H, tf.nn.relu)
    total = tf.reduce_sum(h_BTH, axis=0, keepdims=True)  # over all rows, as in layers with experts
    logits_BTV = ops.product('BTM,VM->BTV', ops.linear(h_BTH * total, tf.transpose(w_MH)), table_VM)
    return ops.softmax_cross_entropy(logits_BTV, tf.ones(tf.shape(x_BTM)[:2], tf.int32), 0.1, 0.01)

  def value_and_gradients(in_force):
    def run(*args):
      with backend.use(in_force), tf.GradientTape() as tape:
        tape.watch(args)
        xent_BT, loss_BT = f(*args)
        loss = tf.reduce_sum(loss_BT**2)
      return [xent_BT, loss_BT, *tape.gradient(loss, args)]

    specs = [tf.TensorSpec(shape) for shape in ([None, 2, 4], [4, 6], [5, 4], [6])]
    return tf.function(run, specs, autograph=False)

  args = [tf.random.normal(shape) for shape in ([rows, 2, 4], [4, 6], [5, 4], [6])]
  for a, b in zip(value_and_gradients(in_parts(3))(*args), value_and_gradients(backend.REFERENCE)(*args), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('rows', [1, 7, 20])
def test_rows_are_mapped_in_a_loop_whose_last_sub_batch_is_filled_up(rows, monkeypatch):
  monkeypatch.setattr(cpu.sub_batches, '_MIN_ROWS', 3)
  calls = []

  def f(x):
    calls.append(backend.current())
    return {'y': tf.cumsum(x, axis=1), 'rows': tf.shape(x)[0]}

  @tf.function(input_signature=[tf.TensorSpec([None, 4])], autograph=False)
  def run(x):
    specs = {'y': tf.TensorSpec([None, 4]), 'rows': tf.TensorSpec([], tf.int32)}
    with backend.use(in_parts(2, parallel_calls=3)):
      return ops.map_rows(f, x, specs)

  x = np.random.default_rng(0).normal(size=[rows, 4]).astype(np.float32)
  found = run(x)
  np.testing.assert_allclose(found['y'], np.cumsum(x, axis=1), rtol=1e-6)
  assert int(found['rows']) == {1: 1, 7: 4, 20: 7}[rows]
  assert [(b.sub_batches, b.parallel_calls) for b in calls] == [(1, 1)]  # divided once


STACK = Stack(2, Attention(8, 2, 4, dropout=0.1), FeedForward(8, 12), MoE(8, 12, 3, num_groups=2), residual_dropout=0.1)
ROWS, LENGTH, VOCABULARY = 4, 5, 15


def model(kind=Stack, **values):
  stack = kind(**{**vars(STACK), **values})
  decoder = dataclasses.replace(stack, cross_attention=True)
  return EncoderDecoder(stack, decoder, Embedding(VOCABULARY, 8), input_dropout=0.1, label_smoothing=0.1)


def batch():
  rng = np.random.default_rng(3)
  batch = {name: rng.integers(3, VOCABULARY, [ROWS, LENGTH], dtype=np.int32) for name in BATCH_KEYS}
  for side in ('src', 'tgt'):
    batch[f'{side}_segments'] = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, [ROWS, 1])).astype(np.int32)
    batch[f'{side}_positions'] = np.tile(np.arange(LENGTH, dtype=np.int32), [ROWS, 1])
  return batch


SCANNED = {'kind': ScannedStack, 'moe_every': 1}  # blocks of one layer
ALWAYS = [{}, {'moe': None}, SCANNED]
IN_TRAINING = [{'remat': 'block'}, {'remat': 'attention'}]  # no effect at inference


@pytest.mark.parametrize(
  'values, training', [*((v, True) for v in ALWAYS + IN_TRAINING), *((v, False) for v in ALWAYS)], ids=str
)
def test_a_model_computes_the_same_in_sub_batches(values, training):
  task = model(**values)
  theta = weights.flatten(theta_of(task, seed=1, scale=0.4))
  key_B = prng.fold(prng.key(5), tf.range(ROWS)) if training else None

  def loss_and_gradients(batch):
    if not training:
      return task.loss(weights.unflatten(theta), batch)
    with tf.GradientTape() as tape:
      tape.watch(theta)
      loss, metrics = task.loss(weights.unflatten(theta), batch, key_B)
    return loss, metrics, tape.gradient(loss, theta)

  def run(in_force):  # not traced, which would take ten times as long: these graphs have 10,000 nodes and run once
    with backend.use(in_force):
      found = loss_and_gradients({name: tf.constant(ids) for name, ids in batch().items()})
    return [tf.convert_to_tensor(x) for x in tf.nest.flatten(found)]

  for a, b in zip(run(in_parts(2)), run(in_parts(1)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)


def gradients_and_metrics(task, count):
  """Gradients and metrics of a train step in so many parts at most, those of evaluation, and the number of losses."""
  calls = []

  class Counted(type(task)):
    def loss(self, *args, **kwargs):
      calls.append(args)
      return super().loss(*args, **kwargs)

  program = Program(Counted(**vars(task)), Adafactor(), schedule.ConstantRate(0.1), num_groups=2)
  values = {name: tf.convert_to_tensor(x) for name, x in weights.flatten(theta_of(task, seed=1, scale=0.4)).items()}
  with backend.use(in_parts(count)):
    found = program.gradients(
      tf.constant(3, tf.int64), values, {name: tf.constant(ids) for name, ids in batch().items()}
    )
    evaluated = program.eval_step(values, {name: tf.constant(ids) for name, ids in batch().items()})
  return found, {name: evaluated[name] for name in ('xent', 'target_tokens')}, len(calls)


@pytest.mark.parametrize('values', [{}, {'moe': None}, SCANNED, {'remat': 'block'}], ids=str)
def test_parts_of_whole_groups_have_the_gradients_and_metrics_of_the_batch(values):
  task = dataclasses.replace(model(**values), report_decisions=True)
  *got, parts = gradients_and_metrics(task, 2)
  *expected, one = gradients_and_metrics(task, 1)
  assert (parts, one) == (4, 2)
  for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize('values', [{'num_groups': 1}, {'gate': NoisyTopK()}], ids=str)
def test_groups_that_are_routed_together_are_one_part_in_training(values):
  task = model(moe=dataclasses.replace(STACK.moe, **values))
  assert gradients_and_metrics(task, 2)[-1] == 3  # two of them of the evaluation


def test_rows_are_joined_and_divided_only_where_all_of_them_are_taken():
  def chain(x_BTM, w_MH, w_HM):
    return ops.layer_norm(ops.linear(ops.linear(x_BTM, w_MH), w_HM), tf.ones([4]), tf.zeros([4]), 1e-6)

  def between(x_BTM, w_MH, w_HM):
    return ops.linear(ops.linear(x_BTM, w_MH) + 1.0, w_HM)

  def splits(f):
    specs = [tf.TensorSpec(shape) for shape in ([4, 2, 4], [4, 6], [6, 4])]
    with backend.use(in_parts(2)):
      graph = tf.function(f, specs, autograph=False).get_concrete_function().graph
    return sum(op.type in ('Split', 'SplitV') for op in graph.get_operations())

  assert splits(chain) == 1
  assert splits(between) == 2


def test_a_joined_result_has_a_gradient_of_its_own():
  def run(x_BTM, w_MH):
    h_BTH = ops.linear(x_BTM, w_MH)
    return pull_back(lambda h_BTH: ops.linear(h_BTH, tf.transpose(w_MH)), [h_BTH], [tf.ones_like(x_BTM)])[0]

  args = tf.random.normal([4, 2, 4]), tf.random.normal([4, 6])
  with backend.use(in_parts(2)):
    got = tf.function(run, autograph=False)(*args)
  np.testing.assert_allclose(got, tf.ones([4, 2, 4]) @ args[1], rtol=1e-5)


def test_a_batch_with_fewer_rows_than_there_are_parts_is_one(monkeypatch):
  monkeypatch.setattr(local, '_backends', lambda name, jit: (in_parts(2), in_parts(2)))
  runtime = local.LocalRuntime(Program(model(), Adafactor(), schedule.ConstantRate(0.1)))
  runtime.init()
  row = {name: ids[:1] for name, ids in batch().items()}
  expected = model().loss(weights.unflatten(runtime.state()['weights']), row)[1]['xent']
  np.testing.assert_allclose(runtime.eval_step(row)['xent'], expected, rtol=1e-5)
  with backend.use(in_parts(2)):
    np.testing.assert_allclose(runtime.program.eval_step(runtime.state()['weights'], row)['xent'], expected, rtol=1e-5)


def test_nested_metrics_are_summed_over_parts():
  parts = [{'x': (tf.constant(1.0), [tf.constant([2.0, 3.0])])}, {'x': (tf.constant(4.0), [tf.constant([5.0, 6.0])])}]
  scalar, (vector,) = joined(parts)['x']
  assert float(scalar) == 5 and vector.numpy().tolist() == [7, 9]


def test_experts_are_found_wherever_a_model_keeps_its_layers():
  @dataclasses.dataclass(frozen=True)
  class Blocks:
    blocks: tuple
    by_name: dict

  layer = MoE(8, 12, 4, num_groups=4)
  task = Blocks((layer, FeedForward(8, 12)), {'last': [layer]})
  assert moe_lib.layers_of(task) == [layer, layer]
  part = dataclasses.replace(layer, num_groups=2)
  assert moe_lib.of_part(task, 2) == Blocks((part, FeedForward(8, 12)), {'last': [part]})
