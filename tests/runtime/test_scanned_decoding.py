"""Decoding through a scanned stack: the translations of the unrolled one, on one device and on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import registry
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.mt.mt_task import TranslationTask

pytestmark = pytest.mark.compiled

CONFIG = registry.get('mt.m4.MoE2048E36LTiny')(
  source_vocab_size=60,
  target_vocab_size=50,
  batch_tokens=128,
  max_length=16,
  encoder_layers=2,
  decoder_layers=4,
  num_experts=8,
)


@functools.cache
def hypotheses(mesh, scan, period=2):
  """Two best translations of random sentences, by initial weights."""
  config = dataclasses.replace(CONFIG, scan_layers=scan, moe_every=period)
  options = RuntimeOptions(mesh, runtime='spmd') if mesh else machine.LOCAL
  program, runtime = config.program(), machine.connect(options).make_runtime(config.program())
  runtime.init()  # to the same values, scanned or not
  batch = TranslationTask(config).random_batch(seed=1, full=False)
  batch = {name: batch[name] for name in ('src_ids', 'src_segments', 'src_positions')}
  batch['src_segments'][3] = 0  # a row without a source
  search = runtime.function(lambda w, batch: inference.search(program.model, program.theta(w), batch, config, n_best=2))
  return search(batch)


def assert_same(got, want):
  lengths = np.asarray(want.lengths_BW)
  np.testing.assert_array_equal(got.lengths_BW, lengths)
  longest = int(lengths.max())
  assert longest > 4 and lengths[3].max() == 0
  np.testing.assert_array_equal(got.ids_BWT[..., :longest], want.ids_BWT[..., :longest])
  np.testing.assert_allclose(got.scores_BW, want.scores_BW, atol=1e-5)


@pytest.mark.parametrize('period', [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_scanned_decoder_translates_as_the_unrolled_one_on_one_device(period):
  assert_same(hypotheses('', True, period), hypotheses('', False, period))


def test_a_scanned_decoder_translates_on_a_mesh_as_the_unrolled_one_on_one_device():
  pytest.importorskip('jax')
  assert_same(hypotheses('expert:4', True), hypotheses('', False))


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['expert:4', 'data:2,expert:2', 'expert:2,model:2'])
def test_a_scanned_decoder_translates_as_the_unrolled_one_on_every_mesh(mesh):
  pytest.importorskip('jax')
  assert_same(hypotheses(mesh, True), hypotheses(mesh, False))
