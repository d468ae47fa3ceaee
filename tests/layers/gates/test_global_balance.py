"""Balance loss over all groups of a batch (arXiv 2501.11873), by hand and over micro-batches, parts and pipelines."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tiny_config

from lingvo_moe.config import configuration, registry
from lingvo_moe.core import prng, weights
from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.mt.random_batch import random_batch
from lingvo_moe.tasks.task import task_of

BALANCED = {'num_groups': 4, 'balance_over': 'batch', 'aux_loss_weight': 0.5}


def tiny(**values):
  return tiny_config.make(**BALANCED, **values)


def language(**values):
  """A model of one stack: a program of half the size."""
  sizes = {'vocab_size': 60, 'num_layers': 1, 'batch_tokens': 64, 'window': 16, 'max_new_tokens': 8}
  return registry.get('lm.shakespeare.Tiny')(**{**BALANCED, **sizes, **values})


def step(config, batch):
  program = config.program()
  state, metrics = program.train_step(program.init(), {name: tf.constant(x) for name, x in batch.items()})
  return state['weights'], metrics


@pytest.mark.parametrize('gate', ['top2', 'top_k', 'switch'])
def test_the_loss_multiplies_shares_and_gates_of_all_tokens(gate):
  config = tiny(gate=gate, router_jitter=0.0, second_choice='always')
  model, batch = config.model(), {name: tf.constant(x) for name, x in random_batch(config, 0).items()}
  theta = weights.unflatten(config.program().init()['weights'])
  _, metrics = model.loss(theta, batch)
  x_GSM, moe = tf.random.stateless_normal([4, 9, config.model_dim], [0, 1]), model.decoder.moe
  paddings_GS = tf.constant([[0.0] * 9, [0.0] * 3 + [1.0] * 6, [1.0] * 9, [0.0] * 8 + [1.0]])
  layer = theta['decoder']['layer_00']['moe']
  routing = moe.gate({'gate': layer['gate']}, x_GSM, paddings_GS)
  real = paddings_GS.numpy().ravel() == 0
  logits = x_GSM.numpy().reshape(36, -1)[real].astype(np.float64) @ layer['gate'].numpy()
  gates = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  ranks = {'top2': 1, 'top_k': 2, 'switch': 1}[gate]
  chosen = np.bincount(np.argsort(-logits, axis=1)[:, :ranks].ravel(), minlength=config.num_experts)
  sums = np.concatenate([gates.sum(axis=0), chosen])
  np.testing.assert_allclose(routing.stats.aux_loss, sums, rtol=1e-5, atol=1e-5)
  expected = 0.0
  for name, (stats, _) in model.logits(theta, batch)[1].items():
    sum_E, chosen_E = np.split(stats.aux_loss.numpy().astype(np.float64), 2)
    loss = config.num_experts * np.mean(sum_E * chosen_E) / np.mean(chosen_E) / float(stats.tokens)
    logged = metrics['routing'][name]
    np.testing.assert_allclose(logged.aux_loss / logged.groups, loss, rtol=1e-5)
    expected += loss
  np.testing.assert_allclose(metrics['aux_loss'], expected, rtol=1e-5)
  by_group, _ = dataclasses.replace(config, balance_over='group').model().loss(theta, batch)
  assert abs(float(by_group) - float(model.loss(theta, batch)[0])) > 1e-4


@pytest.mark.parametrize(
  'config', [tiny(), language(num_layers=2, scan_layers=True)], ids=['translation', 'language model, scanned']
)
def test_micro_batches_give_the_numbers_of_the_whole_batch(config):
  batch = task_of(config).random_batch()
  want, of_whole = step(config, batch)
  got, of_parts = step(dataclasses.replace(config, micro_batches=2), batch)
  for name, weight in want.items():
    np.testing.assert_allclose(got[name], weight, atol=2e-6, err_msg=name)
  for name in ('aux_loss', 'objective', 'grad_norm'):
    np.testing.assert_allclose(of_parts[name], of_whole[name], rtol=1e-5)
  for name, stats in of_whole['routing'].items():
    np.testing.assert_allclose(of_parts['routing'][name].aux_loss, stats.aux_loss, rtol=1e-5)


def test_groups_make_no_difference_to_the_loss():
  # One group alone, or four, without a limit on the slots of experts: equal but for the order of sums.
  config = tiny(capacity_factor=None, gate='top_k')
  batch = random_batch(config, 2)
  want, got = step(dataclasses.replace(config, num_groups=1), batch), step(config, batch)
  np.testing.assert_allclose(got[1]['aux_loss'], want[1]['aux_loss'], rtol=1e-6)
  np.testing.assert_allclose(got[1]['grad_norm'], want[1]['grad_norm'], rtol=1e-5)


def test_a_runtime_that_computes_parts_side_by_side_takes_the_batch_whole():
  config = language(micro_batches=2)
  batch = task_of(config).random_batch()
  want, _ = step(config, batch)
  runtime = LocalRuntime(config.program())
  runtime.init()
  runtime.train_step(batch)
  for name, weight in want.items():
    np.testing.assert_allclose(runtime.state()['weights'][name], weight, atol=2e-6, err_msg=name)


def test_the_choices_of_a_row_do_not_depend_on_its_part():
  config = tiny(second_choice='random')
  batch = {name: tf.constant(x) for name, x in random_batch(config, 4).items()}
  theta, key = weights.unflatten(config.program().init()['weights']), prng.key(0)
  rows = len(batch['src_ids'])
  whole, half = config.model(), dataclasses.replace(config, num_groups=2).model()
  choices = lambda model, rows: model.choices(
    theta, {name: x[rows] for name, x in batch.items()}, prng.fold(key, tf.range(len(batch['src_ids']))[rows])
  )
  total = choices(whole, slice(0, rows))
  parts = [choices(half, slice(0, rows // 2)), choices(half, slice(rows // 2, rows))]
  assert total and all(float(tf.reduce_sum(x)) > 0 for x in total.values())
  for name, x in total.items():
    np.testing.assert_array_equal(parts[0][name] + parts[1][name], x)


@pytest.mark.parametrize('gate', ['noisy_top_k', 'soft'])
def test_gates_with_a_loss_of_their_own_are_refused(gate):
  with pytest.raises(UserError, match=r'balance_over must be left out with gate=.*it is for gate=top2 or top_k'):
    configuration.resolve('mt.cldr.Tiny', settings=[f'gate={gate}', 'balance_over=batch'])
