"""Ensembles: log-probabilities are means of those of the runs; equal runs give what one gives."""

import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
import toy_run as toy
import untrained_run

import lingvo_moe
from lingvo_moe import decoder, translate
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir

pytestmark = pytest.mark.usefixtures('one_trace')

SENTENCES = [source for source, _ in toy.sentences()][::4]


@pytest.fixture(scope='module')
def other(toy_run, tmp_path_factory):
  """An untrained run of the same vocabularies, without experts and with two decoder layers."""
  run = RunDir(str(tmp_path_factory.mktemp('other')))
  name, config = toy_run.load()
  config = run.begin(name, dataclasses.replace(config, num_experts=0, model_dim=16, decoder_layers=2))
  run.checkpoints().save(untrained_run.state_of(config, 60, seed=1))
  return run.path


@pytest.fixture(scope='module')
def single(toy_run):
  return lingvo_moe.load(toy_run.path)


@pytest.fixture(scope='module')
def doubled(toy_run):
  """An ensemble of equal members."""
  return lingvo_moe.load(toy_run.path, ensemble=['@last'])


@pytest.fixture(scope='module')
def mixed(toy_run, other):
  """An ensemble of the two runs."""
  return lingvo_moe.load(toy_run.path, ensemble=[other])


@pytest.mark.parametrize('values', [{}, {'search': 'sample', 'sample_temperature': 2.0}, {'ban': ['dog']}])
def test_equal_members_give_what_one_gives(single, doubled, values):
  found = doubled.translate(SENTENCES, n_best=4, scores=True, **values)
  expected = single.translate(SENTENCES, n_best=4, scores=True, **values)
  assert [[h.text for h in own] for own in found] == [[h.text for h in own] for own in expected]
  numbers = lambda answers: [h[1:3] for own in answers for h in own]
  np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-4, atol=1e-4)
  if not values:
    assert doubled.translate(SENTENCES, search='greedy') == single.translate(SENTENCES, search='greedy')


def test_equal_members_align_as_one(single, doubled):
  [own], [theirs] = (m.translate(SENTENCES[:1], n_best=4, alignments=True) for m in (doubled, single))
  assert [h.alignment for h in own] == [h.alignment for h in theirs]


def test_a_checkpoint_is_named_with_or_without_its_run(toy_run):
  ensemble = lingvo_moe.load(toy_run.path, ensemble=['@last', f'{toy_run.path}@best'])
  assert ensemble.checkpoint.count(toy_run.path) == 2


@pytest.fixture(scope='module')
def mean_of(single, other):
  """Function from pairs to the means of their log-probabilities by the two runs."""
  runs = single, lingvo_moe.load(other)
  return lambda pairs: np.mean([[s.log_prob for s in run.score(pairs)] for run in runs], axis=0)


def test_log_probabilities_are_means_of_those_of_the_members(mixed, mean_of):
  pairs = toy.sentences()[:4]
  np.testing.assert_allclose([s.log_prob for s in mixed.score(pairs)], mean_of(pairs), rtol=1e-5)


def test_log_probabilities_of_beam_search_are_means_too(mixed, mean_of):
  found = mixed.translate(SENTENCES, n_best=4, scores=True)
  mean = mean_of([(source, h.text) for source, own in zip(SENTENCES, found) for h in own])
  # Of a text that is written by the pieces by which it is read.
  assert np.isclose([h.log_prob for own in found for h in own], mean, rtol=1e-4).sum() >= 4


def test_translate_takes_an_ensemble(toy_run, other, mixed):
  output, lines = io.StringIO(), ''.join(line + '\n' for line in SENTENCES[:3])
  translate.translate(translate.Options(toy_run.path, ensemble=[other], n_best=4), io.BytesIO(lines.encode()), output)
  texts = [text for own in mixed.translate(SENTENCES[:3], n_best=4) for text in own]
  assert [line.split('\t')[3] for line in output.getvalue().splitlines()] == texts


def test_decode_takes_an_ensemble(toy_run, other, tmp_path):
  decoded = [
    decoder.Options(toy_run.path, split='dev', once=True, max_sentences=2, out=str(tmp_path), ensemble=e)
    for e in ([], [other])
  ]
  decoder.decode(decoded[0])
  with pytest.raises(UserError, match='holds results made with ensemble'):
    decoder.decode(decoded[1])
  decoder.decode(decoder.Options(**{**vars(decoded[1]), 'overwrite': True}))
  [scores] = tmp_path.glob('*/scores.json')
  assert len(json.loads(scores.read_text())['settings']['ensemble']) == 1


def test_runs_that_do_not_fit_are_refused(toy_run, other, tmp_path):
  alien = tmp_path / 'alien'
  shutil.copytree(other, alien)
  name, config = RunDir(str(alien)).load()
  sizes = {'target_vocab_size': config.source_vocab_size}
  RunDir(str(alien)).write_config(name, dataclasses.replace(config, target_vocab=config.source_vocab, **sizes))
  for name, message in (
    ('@7', 'has no checkpoint of step 7'),
    ('@first', r"is RUN, RUN@STEP, RUN@best or RUN@last; saw '@first'"),
    (str(tmp_path / 'none'), 'there is no such directory'),
    (str(alien), 'share their vocabularies'),
  ):
    with pytest.raises(UserError, match=message):
      lingvo_moe.load(toy_run.path, ensemble=[name])
