"""Grouped-query attention of translation models: multi-head attention in which key/value heads repeat."""

import dataclasses

import language_models
import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe.addons.export import ctranslate2_model
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.tasks.task import task_of

CONFIG = MtConfig(
  source_vocab_size=30,
  target_vocab_size=25,
  batch_tokens=64,
  max_length=16,
  encoder_layers=2,
  decoder_layers=2,
  model_dim=16,
  ff_dim=24,
  num_heads=8,
  num_kv_heads=2,
  head_dim=4,
  beam_size=3,
  decode_ratio=1.0,
  decode_extra=3,
  length_norm_alpha=2.0,
)


def heads_of_its_own(theta, config):
  """Weights of the model in which every query head has key/value heads, copies of those it shared."""
  specs = weights_lib.flatten(dataclasses.replace(config, num_kv_heads=0).model().weights())
  wide = {}
  for name, weight in weights_lib.flatten(theta).items():
    if name.endswith(('/wk', '/wv', '/bv')):
      weight = tf.repeat(weight, config.num_heads // config.num_kv_heads, axis=-2)
    wide[name] = tf.reshape(weight, specs[name].shape)
  return weights_lib.unflatten(wide)


@pytest.mark.parametrize('num_kv_heads, positions', [(2, 'sinusoidal'), (1, 'relative')])
def test_loss_and_gradients_are_those_of_multi_head_attention_with_repeated_heads(num_kv_heads, positions):
  grouped = dataclasses.replace(CONFIG, num_kv_heads=num_kv_heads, positions=positions)
  theta, batch = theta_of(grouped.model(), seed=1, scale=0.3), task_of(grouped).random_batch(full=False)
  flat = weights_lib.flatten(theta)
  with tf.GradientTape(persistent=True) as tape:
    tape.watch(flat)
    loss = grouped.model().loss(weights_lib.unflatten(flat), batch)[0]
    wide = heads_of_its_own(weights_lib.unflatten(flat), grouped)
    same = dataclasses.replace(grouped, num_kv_heads=0).model().loss(wide, batch)[0]
  np.testing.assert_allclose(loss, same, rtol=1e-6)
  attention = {name: weight for name, weight in flat.items() if 'attention' in name}
  summed = tape.gradient(same, attention)  # over the copies of a head
  for name, gradient in tape.gradient(loss, attention).items():
    assert np.abs(gradient).max() > 1e-4, name
    np.testing.assert_allclose(gradient, summed[name], rtol=1e-5, atol=1e-7, err_msg=name)


def searched(config, theta, n_best=3, kind='cpu'):
  batch = task_of(config).random_batch(full=False)
  sources = {name: batch[name] for name in ('src_ids', 'src_segments', 'src_positions')}
  run = lambda theta, batch: inference.search(config.model(), theta, batch, config, n_best)
  return language_models.on_backend(kind, run, theta, sources, traced=config.scan_layers), sources


@pytest.mark.parametrize('values', [{}, {'num_kv_heads': 1, 'positions': 'relative'}, {'search': 'sample'}])
def test_translations_have_the_log_probabilities_of_teacher_forcing_scanned_or_not(values):
  config = dataclasses.replace(CONFIG, **values)
  theta = theta_of(config.model(), seed=2, scale=0.6)
  found, sources = searched(config, theta)
  for w in range(3):
    ids_BT, lengths_B = found.ids_BWT[:, w], found.lengths_BW[:, w]
    segments_BT = (np.arange(ids_BT.shape[1]) < lengths_B[:, np.newaxis]).astype(np.int32)
    targets = {
      'tgt_inputs': np.pad(ids_BT, [[0, 0], [1, 0]], constant_values=1)[:, :-1] * segments_BT,
      'tgt_labels': ids_BT * segments_BT,
      'tgt_segments': segments_BT,
      'tgt_positions': np.arange(ids_BT.shape[1]) * segments_BT,
    }
    real = lengths_B > 0
    scores_B = config.model().score(theta, sources | targets).numpy()
    assert real.sum() > 2 and lengths_B.max() > 3
    np.testing.assert_allclose(found.log_probs_BW[real, w], scores_B[real], rtol=1e-5, atol=1e-5)
  scanned = dataclasses.replace(config, scan_layers=True)
  looped, _ = searched(scanned, language_models.stacked(theta, scanned.model()))
  np.testing.assert_array_equal(looped.ids_BWT, found.ids_BWT)
  np.testing.assert_allclose(looped.log_probs_BW, found.log_probs_BW, rtol=1e-5)


def test_heads_that_do_not_divide_are_refused_and_as_many_are_none_of_their_own():
  with pytest.raises(UserError, match='saw num_kv_heads=3 for num_heads=8: use a divisor of num_heads, or 0'):
    dataclasses.replace(CONFIG, num_kv_heads=3)
  assert dataclasses.replace(CONFIG, num_kv_heads=8) == dataclasses.replace(CONFIG, num_kv_heads=0)


def test_ctranslate2_gets_no_shared_heads():
  with pytest.raises(UserError, match='--format=ctranslate2 has layers .* saw num_kv_heads=2: use --format=litert'):
    ctranslate2_model.require(CONFIG)
