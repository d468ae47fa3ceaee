"""The recurrent language model: segments, padding, and that continuations are those of the full pass."""

import dataclasses

import language_models
import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.recurrent_stack import Lstm, RecurrentStack
from lingvo_moe.ops import backend, cpu
from lingvo_moe.tasks.lm.lm_config import RecurrentConfig
from lingvo_moe.tasks.task import task_of

CONFIG = RecurrentConfig(
  vocab_size=12,
  window=8,
  batch_tokens=32,
  num_groups=2,
  model_dim=8,
  ff_dim=12,
  lstm_dim=6,
  num_experts=4,
  gate='noisy_top_k',
  capacity_factor=None,
  input_dropout=0.0,
  residual_dropout=0.0,
  label_smoothing=0.0,
  beam_size=3,
  max_new_tokens=6,
  length_norm_alpha=0.0,
)
MODEL = CONFIG.model()
THETA = theta_of(MODEL, seed=3, scale=0.8)


def test_each_layer_is_added_to_its_input_and_experts_go_through_a_sigmoid():
  # LSTMs without weights give zeros, so x + sigmoid(ffn(x)) is left: with wi = 1 and wo = 2, relu(x) * 2 of one
  # feature.
  stack = RecurrentStack(Lstm(1), FeedForward(1, 1, bias=False))
  lstm = {'lstm': {name: tf.zeros(spec.shape) for name, spec in Lstm(1).weights().items()}}
  theta = {'layer_00': lstm, 'layer_01': {'ffn': {'wi': tf.ones([1, 1]), 'wo': tf.constant([[2.0]])}}, 'layer_02': lstm}
  y_BTM, _ = stack(theta, tf.constant([[[0.5], [-3.0]]]), tf.ones([1, 2], tf.int32))
  np.testing.assert_allclose(y_BTM[0, :, 0], [0.5 + 1 / (1 + np.exp(-1)), -3 + 0.5], rtol=1e-6)


def test_no_position_sees_a_later_one_and_padding_changes_nothing():
  batch = task_of(CONFIG).random_batch()
  x = MODEL.token_scores(THETA, batch)
  changed = dict(batch, inputs=np.where(np.arange(8) > 4, 11 - batch['inputs'] % 8, batch['inputs']))
  np.testing.assert_allclose(MODEL.token_scores(THETA, changed)[:, :5], x[:, :5], atol=1e-5)
  assert np.all(np.abs(MODEL.token_scores(THETA, changed) - x)[:, 5:] > 1e-6)
  short = {**batch, 'segments': batch['segments'] * (np.arange(8) < 5)}
  np.testing.assert_allclose(MODEL.token_scores(THETA, short), x * (np.arange(8) < 5), atol=1e-5)


def test_packed_documents_score_as_in_rows_of_their_own():
  packed, together = language_models.check_packed(MODEL, THETA)
  whole = dict(packed, segments=np.minimum(packed['segments'], 1))
  assert np.max(np.abs(MODEL.token_scores(THETA, whole)[0, 4:7] - together[4:7])) > 1e-3


@pytest.mark.parametrize('search', ['sample', pytest.param('greedy', marks=pytest.mark.slow), 'beam'])
def test_continuations_have_the_log_probabilities_of_the_full_pass(search):
  # They are longer than the window, which does not limit how far the state goes.
  config = dataclasses.replace(CONFIG, search=search, window=2)
  found = language_models.generate(config, THETA, n_best=1 if search == 'greedy' else 3)
  language_models.check_log_probs(MODEL, THETA, found, longest=6)


@pytest.mark.parametrize(
  'kind, search',
  [
    ('reference', 'beam'),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [('reference', 'sample'), ('xla', 'sample'), ('xla', 'beam')]
    ),
  ],
)
def test_backends_go_on_alike(kind, search):
  config = dataclasses.replace(CONFIG, search=search, max_new_tokens=20)  # positions are dropped on the way
  language_models.check_alike(config, THETA, kind)


def gradients(config, kind):
  program, batch = config.program(), {k: tf.constant(v) for k, v in task_of(config).random_batch(full=False).items()}
  with backend.use(kind):
    return program.gradients(tf.constant(0), program.init()['weights'], batch)


@pytest.mark.parametrize('sizes', [{}, {'num_experts': 0, 'lstm_dim': 0}], ids=['moe, projected', 'dense'])
def test_backends_have_the_same_loss_and_gradients_with_dropout(sizes):
  config = dataclasses.replace(CONFIG, residual_dropout=0.2, input_dropout=0.2, **sizes)
  ours, metrics = gradients(config, cpu.backend(training=True))
  theirs, same = gradients(config, backend.REFERENCE)
  np.testing.assert_allclose(metrics['loss'], same['loss'], rtol=1e-5)
  assert sorted(metrics['routing']) == (['decoder/layer_01'] if config.num_experts else [])
  for name, gradient in theirs.items():
    np.testing.assert_allclose(tf.convert_to_tensor(ours[name]), gradient, rtol=1e-3, atol=1e-5, err_msg=name)
    assert name.endswith(('gate', 'gate_noise')) or np.max(np.abs(gradient)) > 0, name


@pytest.mark.slow
def test_micro_batches_have_the_gradients_of_the_whole():
  # With a gate whose loss is of each group: that of the noisy gates is of a micro-batch.
  config = dataclasses.replace(CONFIG, gate='top2', second_choice='always', residual_dropout=0.2)
  whole, parts = (gradients(c, backend.REFERENCE)[0] for c in (config, dataclasses.replace(config, micro_batches=2)))
  for name, gradient in whole.items():
    np.testing.assert_allclose(parts[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


def test_dropout_needs_a_key():
  decoder = dataclasses.replace(MODEL.decoder, residual_dropout=0.5)
  language_models.check_dropout(CONFIG, MODEL, dataclasses.replace(MODEL, decoder=decoder), THETA)


def test_the_softmax_has_weights_of_its_own():
  batch = task_of(CONFIG).random_batch()
  doubled = {**THETA, 'output_embedding': {'table': 2 * THETA['output_embedding']['table']}}
  np.testing.assert_allclose(MODEL.logits(doubled, batch)[0], 2 * MODEL.logits(THETA, batch)[0], rtol=1e-5)


@pytest.mark.parametrize(
  'values, message',
  [
    (dict(gate='expert_choice'), 'one by which tokens choose experts, where a causal decoder has experts'),
    (dict(gate='noisy_top_k', choices=4), 'choices must be less than num_experts=4'),
    (dict(gate='hierarchical', groups_of_experts=3), 'groups_of_experts must be a divisor of num_experts=4'),
    (dict(lstm_dim=-1), 'lstm_dim must be at least 0'),
  ],
)
def test_values_that_do_not_fit_are_refused(values, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(CONFIG, **values)
