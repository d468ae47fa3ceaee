"""The language model: its loss, and that continuations are those of the full pass."""

import dataclasses
import types

import language_models
import numpy as np
import pytest
import tensorflow as tf
from language_models import PROMPTS
from random_theta import theta_of

from lingvo_moe.ops import backend, xla
from lingvo_moe.search import beam_search
from lingvo_moe.tasks.lm import generation
from lingvo_moe.tasks.lm.lm_config import LmConfig
from lingvo_moe.tasks.task import Hypothesis, task_of
from lingvo_moe.vocab.sentencepiece_vocab import BOS

CONFIG = LmConfig(
  vocab_size=12,
  window=8,
  batch_tokens=32,
  num_groups=2,
  num_layers=2,
  model_dim=8,
  ff_dim=12,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  num_experts=4,
  input_dropout=0.0,
  residual_dropout=0.0,
  attention_dropout=0.0,
  label_smoothing=0.0,
  beam_size=3,
  max_new_tokens=5,
  length_norm_alpha=0.0,
)
MODEL = CONFIG.model()
THETA = theta_of(MODEL, seed=3, scale=0.6)


def generate(config, n_best, prompts=PROMPTS, theta=THETA, first=0):
  return language_models.generate(config, theta, n_best, prompts, first=first)


def test_the_loss_is_the_mean_of_minus_log_p_of_the_tokens_that_count():
  batch = task_of(CONFIG).random_batch(full=False)
  loss, metrics = MODEL.loss(THETA, batch)
  log_p = tf.nn.log_softmax(MODEL.logits(THETA, batch)[0]).numpy()
  real = batch['segments'] > 0
  nats = -log_p[np.arange(4)[:, None], np.arange(8), batch['labels']]
  np.testing.assert_allclose(metrics['xent'], nats[real].sum(), rtol=1e-5)
  np.testing.assert_allclose(loss, nats[real].mean() + 0.01 * metrics['aux_loss'], rtol=1e-5)
  np.testing.assert_allclose(MODEL.token_scores(THETA, batch), -nats * real, rtol=1e-4, atol=1e-5)
  counted = {**batch, 'loss_mask': batch['segments'] * (np.arange(8) == 2), 'files': np.eye(4, dtype=np.int32)}
  metrics = MODEL.loss(THETA, counted)[1]
  np.testing.assert_allclose(metrics['xent_by_file'], (nats * real)[:, 2], rtol=1e-4, atol=1e-6)
  assert float(metrics['target_tokens']) == real[:, 2].sum()


def test_packed_documents_score_as_in_rows_of_their_own():
  language_models.check_packed(MODEL, THETA)


@pytest.mark.parametrize('search', ['sample', 'greedy', 'beam'])
def test_continuations_have_the_log_probabilities_of_the_full_pass(search):
  # Prompts and continuations fit in the window.
  wide = dataclasses.replace(CONFIG, window=32, batch_tokens=64, search=search)
  found = generate(wide, n_best=1 if search == 'greedy' else 2)
  language_models.check_log_probs(MODEL, THETA, found, longest=5)
  if search == 'greedy':
    sampled = generate(dataclasses.replace(wide, search='sample', top_k=1), n_best=1)
    np.testing.assert_array_equal(found.ids_BWT, sampled.ids_BWT)


@pytest.mark.parametrize('search', ['sample', 'beam'])
@pytest.mark.parametrize('kind', [pytest.param('xla', marks=pytest.mark.slow), 'reference'])
def test_backends_go_on_alike(kind, search):
  language_models.check_alike(dataclasses.replace(CONFIG, search=search), THETA, kind)


def test_under_xla_a_prompt_has_room_for_any_number_of_samples():
  config = dataclasses.replace(CONFIG, search='sample', beam_size=4)  # 3 does not divide 16
  batch = generation.prompt_arrays(PROMPTS, config, generation.width_of(config, 3))

  @tf.function(autograph=False)
  def run(batch):
    with backend.use(xla.BACKEND):
      return generation.generate(MODEL, THETA, batch, config, 3)

  shapes = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in batch.items()}
  assert run.get_concrete_function(shapes).structured_outputs.ids_BWT.shape[:2] == [len(PROMPTS), 3]


def test_a_scanned_stack_goes_on_as_an_unrolled_one_does():
  config = dataclasses.replace(CONFIG, scan_layers=True, remat='block')
  scanned, plain = generate(config, 2, theta=language_models.stacked(THETA, config.model())), generate(CONFIG, 2)
  np.testing.assert_array_equal(scanned.ids_BWT, plain.ids_BWT)
  np.testing.assert_allclose(scanned.log_probs_BW, plain.log_probs_BW, rtol=1e-4)


def test_a_continuation_attends_to_no_more_than_the_window():
  """Of one layer: with the last 8 symbols equal, what came before changes nothing."""
  config = dataclasses.replace(CONFIG, num_layers=1, moe_every=0, search='greedy', max_new_tokens=3)
  theta = {'target_embedding': THETA['target_embedding']}
  theta['decoder'] = {name: THETA['decoder'][name] for name in ('layer_00', 'norm')}
  last = [5, 6, 7, 8, 9, 4, 5, 11]
  run = lambda config, prompts: generate(config, 1, prompts, theta=theta)
  prompts = [np.array([BOS, *before, *last]) for before in ([4, 4, 4], [9, 8, 7])]
  found = run(config, prompts)
  np.testing.assert_allclose(found.log_probs_BW[0], found.log_probs_BW[1], rtol=1e-5)
  wide = run(dataclasses.replace(config, window=32, batch_tokens=64), prompts)
  assert abs(float(wide.log_probs_BW[0, 0] - wide.log_probs_BW[1, 0])) > 1e-3


def test_samples_depend_on_seed_and_number_and_not_on_the_batch():
  config = dataclasses.replace(CONFIG, max_new_tokens=12)
  together = generate(config, 3)
  alone = generate(config, 3, PROMPTS[1:2], first=1)
  np.testing.assert_array_equal(alone.ids_BWT[0], together.ids_BWT[1][:, : alone.ids_BWT.shape[2]])
  other = generate(dataclasses.replace(config, sample_seed=1), 3)
  assert not np.array_equal(other.lengths_BW, together.lengths_BW) or not np.array_equal(
    other.ids_BWT, together.ids_BWT
  )


def test_micro_batches_have_the_gradients_of_the_whole():
  step = lambda config: config.program().gradients(
    tf.constant(0),
    config.program().init()['weights'],
    {k: tf.constant(v) for k, v in task_of(config).random_batch(full=False).items()},
  )
  config = dataclasses.replace(CONFIG, residual_dropout=0.1, router_z_loss_weight=0.1)
  whole, parts = step(config)[0], step(dataclasses.replace(config, micro_batches=2))[0]
  for name, gradient in whole.items():
    np.testing.assert_allclose(parts[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


def test_dropout_needs_a_key():
  language_models.check_dropout(CONFIG, MODEL, dataclasses.replace(MODEL, input_dropout=0.5), THETA)


def test_a_prompt_may_have_fewer_continuations_than_are_asked_for():
  none = float('-inf')
  arrays = np.array([[[5, 2], [0, 0]]]), np.array([[2, 0]]), np.array([[-1.0, none]]), np.array([[-0.5, none]])
  runner = types.SimpleNamespace(row_multiple=1, function=lambda f: lambda batch: beam_search.Hypotheses(*arrays, 2))
  vocab = types.SimpleNamespace(encode=lambda text: [5, 6], decode=str)
  config = dataclasses.replace(CONFIG, search='beam')
  [found] = generation.Continuer(config, vocab, runner, n_best=2).translate(['ab']).hypotheses
  assert found == [Hypothesis('[5, 2]', -0.5, -1.0)]
