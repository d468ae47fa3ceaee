"""The denoising model: its loss by file, and that what fills in a span has the probability of the full pass."""

import dataclasses
import functools
import types

import numpy as np
import pytest
import tensorflow as tf
from language_models import on_backend, stacked
from random_theta import theta_of

from lingvo_moe.models.batches import padded
from lingvo_moe.search import beam_search
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
from lingvo_moe.tasks.denoising.denoising_task import Filler
from lingvo_moe.tasks.task import Hypothesis, task_of
from lingvo_moe.vocab.sentencepiece_vocab import EOS

CONFIG = DenoisingConfig(
  vocab_size=10,
  sentinels=4,
  inputs_length=16,
  batch_tokens=64,
  num_groups=2,
  encoder_layers=2,
  decoder_layers=2,
  model_dim=8,
  ff_dim=12,
  num_heads=2,
  head_dim=4,
  relative_buckets=6,
  relative_distance=8,
  num_experts=4,
  gate='switch',
  activation='geglu',
  expert='geglu',
  input_dropout=0.0,
  residual_dropout=0.0,
  attention_dropout=0.0,
  label_smoothing=0.0,
  beam_size=3,
  length_norm_alpha=0.0,
)
MODEL = CONFIG.model()
THETA = theta_of(MODEL, seed=2, scale=0.6)
SOURCES = [np.array(ids) for ids in ([5, 13, 6, EOS], [13, 4, 5, 6, 7, 8, 9, 12, 5, EOS], [9, 13, EOS])]


def search(config=CONFIG, theta=THETA, sources=SOURCES, kind='cpu', n_best=3):
  batch = padded(sources, len(sources) + 1, 16).as_source()
  run = lambda theta, batch: inference.search(config.model(), theta, batch, config, n_best)
  return on_backend(kind, run, theta, batch, traced=config.scan_layers)


plainly = functools.cache(search)


def test_answers_have_the_log_probabilities_of_the_full_pass():
  found = plainly()
  assert not found.lengths_BW[-1].any()  # a row without a source
  for row, source in enumerate(SOURCES):
    for w, length in enumerate(found.lengths_BW[row]):
      ids = found.ids_BWT[row, w, :length]
      assert 1 <= length <= CONFIG.lengths.targets and EOS not in ids[:-1]
      batch = padded([source], 1, 16).as_source() | padded([ids], 1, length).as_target()
      np.testing.assert_allclose(found.log_probs_BW[row, w], MODEL.score(THETA, batch)[0], rtol=1e-3, atol=1e-3)


def test_an_answer_depends_on_its_source_alone():
  together, alone = plainly(), search(sources=SOURCES[1:2])
  np.testing.assert_array_equal(alone.lengths_BW[0], together.lengths_BW[1])
  np.testing.assert_allclose(alone.log_probs_BW[0], together.log_probs_BW[1], rtol=1e-4)


def test_a_scanned_stack_answers_as_an_unrolled_one_does():
  config = dataclasses.replace(CONFIG, scan_layers=True, remat='block')
  scanned, plain = search(config, stacked(THETA, config.model())), plainly()
  np.testing.assert_array_equal(scanned.ids_BWT, plain.ids_BWT)
  np.testing.assert_allclose(scanned.log_probs_BW, plain.log_probs_BW, rtol=1e-4)


@pytest.mark.parametrize('kind', [pytest.param('xla', marks=pytest.mark.slow), 'reference'])
def test_backends_answer_alike(kind):
  ours, theirs = plainly(), search(kind=kind)
  np.testing.assert_array_equal(ours.lengths_BW, theirs.lengths_BW)
  np.testing.assert_allclose(ours.log_probs_BW[:-1], theirs.log_probs_BW[:-1], rtol=1e-4)


def test_the_loss_is_the_mean_of_minus_log_p_of_the_targets_and_sums_by_file():
  batch = task_of(CONFIG).random_batch(full=False)
  batch['files'] = np.array([[1, 0], [0, 1], [0, 1], [1, 0]], np.int32)
  loss, metrics = MODEL.loss(THETA, batch)
  log_p = tf.nn.log_softmax(MODEL.logits(THETA, batch)[0]).numpy()
  real = batch['tgt_segments'] > 0
  rows, length = real.shape
  nats = -log_p[np.arange(rows)[:, None], np.arange(length), batch['tgt_labels']] * real
  np.testing.assert_allclose(loss, nats.sum() / real.sum() + 0.01 * metrics['aux_loss'], rtol=1e-5)
  np.testing.assert_allclose(metrics['xent_by_file'], [nats[[0, 3]].sum(), nats[1:3].sum()], rtol=1e-4)
  assert metrics['target_tokens_by_file'].numpy().tolist() == [real[[0, 3]].sum(), real[1:3].sum()]


def test_positions_matter_and_only_relative_ones_do():
  """A source moved to the right by padding of its own segment is encoded as before."""
  ids = np.array([[5, 6, 7, 0, 0], [0, 0, 5, 6, 7], [7, 6, 5, 0, 0]], np.int32)
  segments = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
  batch = {'src_ids': ids, 'src_segments': segments, 'src_positions': np.zeros_like(ids)}
  memory, _ = MODEL.encode(THETA, batch)
  np.testing.assert_allclose(memory[0, :3], memory[1, 2:], atol=1e-5)
  assert np.abs(memory[0, :3] - memory[2, 2::-1]).max() > 1e-3


def test_a_text_may_have_fewer_answers_than_are_asked_for():
  none = float('-inf')
  arrays = np.array([[[5, 2], [0, 0]]]), np.array([[2, 0]]), np.array([[-1.0, none]]), np.array([[-0.5, none]])
  runner = types.SimpleNamespace(row_multiple=1, function=lambda f: lambda batch: beam_search.Hypotheses(*arrays, 2))
  vocab = types.SimpleNamespace(
    encode=lambda text: [5, 13], is_sentinel=lambda id: id == 13, fill=lambda source, ids: f'{source.tolist()} {ids}'
  )
  [found] = Filler(CONFIG, vocab, runner, n_best=2).translate(['']).hypotheses
  assert found == [Hypothesis('[5, 13, 2] [5, 2]', -0.5, -1.0)]
