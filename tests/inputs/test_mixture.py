"""Mixtures of corpora: what a line says, and that batches follow it."""

import dataclasses
import shutil

import numpy as np
import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel
from lingvo_moe.inputs import mixture
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.mixture import Corpus
from lingvo_moe.inputs.mt_input import TrainInput
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab
from lingvo_moe.vocab.vocab_training import train_vocab


def test_a_mixture_is_lines_or_a_file_of_them(tmp_path):
  path = tmp_path / 'corpora.txt'
  path.write_text('# prefix  weights\ntrain  1\n\nbt  2 200:0.5  tag   loss=0.25 # back-translated\n')
  config = DataConfig(corpora=str(path))
  assert config.corpora == 'train 1; bt 2 200:0.5 tag loss=0.25'
  assert config.mixture == (Corpus('train'), Corpus('bt', ((0, 2.0), (200, 0.5)), 'bt', 250))
  assert dataclasses.replace(config, corpora=config.corpora) == config
  assert DataConfig().mixture == (Corpus('train'),)
  assert mixture.parse('bt 1 tag=machine')[0].tag == 'machine'
  factor = lambda text: mixture.parse(f'bt 1 loss={text}')[0].loss
  assert [factor(text) for text in ('0.001', '1.5', '1.001')] == [1, 1500, 1001]  # 1000 * 1.001 is 1000.9999999999999


@pytest.mark.parametrize(
  'text, message',
  [
    ('train', 'cannot read train .*: write a weight after the prefix'),
    ('train 1; bt tag', "saw 'bt tag': write e.g. bt 2 20000:0.5 tag loss=0.5"),
    ('train 1 5:2 3:1', "ascending steps, .*; saw 'train 1 5:2 3:1'"),
    ('train 1 -5', "saw 'train 1 -5'"),
    ('dev 1 1:2', "neither dev nor test, .* saw 'dev 1 1:2'"),
    ('train 1; train 2', "a line for each prefix; saw two of 'train'"),
    ('train 1 10:0; bt 2 5:1 10:0', 'a weight above 0 in each stage; from step 10 on all are 0'),
  ],
)
def test_what_is_no_mixture_is_refused(text, message):
  with pytest.raises(UserError, match=message):
    DataConfig(corpora=text)


def test_pairs_share_by_their_lines_and_corpora_by_their_weights():
  bt = Corpus('bt', ((0, 3.0), (10, 0.0)))
  shares = lambda step: mixture.shares(
    [Corpus('train'), bt, Corpus('train')], ['a', 'a', 'b'], [10, 90, 100], 1.0, [], step
  )
  np.testing.assert_allclose(shares(0), [0.125, 0.375, 0.5])
  np.testing.assert_allclose(shares(10), [0.5, 0, 0.5])


def test_lines_are_drawn_so_that_their_examples_have_the_shares():
  # Of bt a tenth is kept, so ten times as many lines are drawn: 0.25, 0.75 and 0 of 0.25 + 7.5.
  np.testing.assert_allclose(
    mixture.drawn(np.array([0.25, 0.75, 0]), [9, 5, 0], [9, 50, 7]), [0.25 / 7.75, 7.5 / 7.75, 0]
  )
  corpora = [Corpus('train'), Corpus('bt', ((0, 4.0),))]
  np.testing.assert_allclose(mixture.shares(corpora, ['a', 'a'], [10, 0], 1.0, [], 0), [1, 0])
  np.testing.assert_allclose(mixture.shares(corpora, ['a', 'b'], [90, 10], 2.0, [], 0), [0.75, 0.25])  # by the root
  assert mixture.shares(corpora, ['a', 'a'], [0, 0], 1.0, [], 0).tolist() == [0, 0]


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """Corpora of a pair whose sentences begin with 'de' and 'bt', one of a second pair, and vocabularies."""
  root = tmp_path_factory.mktemp('mixture')
  for pair, prefix, lines in (('de-en', 'train', 100), ('de-en', 'bt', 300), ('fr-en', 'train', 50)):
    begin = prefix if prefix == 'bt' else pair[:2]
    text = ''.join(f'{begin} {" ".join(str(i * k) for k in range(1, 2 + i % 5))}\n' for i in range(lines))
    (root / 'data' / pair).mkdir(parents=True, exist_ok=True)
    for language in pair.split('-'):
      (root / 'data' / pair / f'{prefix}.{language}').write_text(text)
  pairs = [pair for split in ('train', 'bt') for pair in parallel.find_pairs(str(root / 'data'), split=split)]
  path = train_vocab(pairs, str(root / 'vocab'), 300, corpus_tags=['bt'])
  return root, path


def train_input(world, cache='cache', **values):
  root, vocab = world[0], TaggedVocab(world[1])
  values = {'corpora': 'train 1; bt 3 12:1 40:0 tag loss=0.5', 'batch_tokens': 512, 'window': 400} | values
  config = DataConfig(data_dir=str(root / 'data'), tag_target=False, **values)
  return TrainInput(config, (vocab, vocab), str(root / cache), Feed(quiet=True))


def rows_of(world, batch):
  """(whether each row is back-translated, whether its source is tagged) of a batch of one example a row."""
  vocab = TaggedVocab(world[1])
  rows = batch['tgt_segments'][:, 0] > 0
  texts = [vocab.decode(ids[ids > 2]) for ids in batch['tgt_labels'][rows]]
  return np.array([text.startswith('bt') for text in texts]), batch['src_ids'][rows, 0] == vocab.corpus_tag_id('bt')


@pytest.mark.parametrize('values', [{}, {'packing': True}, {'source_sampling': {'dropout': 0.3}}])
def test_tags_and_factors_belong_to_the_examples_of_their_corpus(world, values):
  stream, vocab, seen = train_input(world, **values), TaggedVocab(world[1]), set()
  tag = vocab.corpus_tag_id('bt')
  for batch in map(stream.batch, range(5)):
    factors, segments = batch['tgt_loss_factors'], batch['tgt_segments']
    assert factors.dtype == np.int32 and not factors[segments == 0].any()
    for row, segment in {(row, segment) for row, of_row in enumerate(segments) for segment in of_row if segment}:
      [factor] = set(factors[row][segments[row] == segment])
      source = batch['src_ids'][row][batch['src_segments'][row] == segment]
      text = vocab.decode(batch['tgt_labels'][row][segments[row] == segment])
      seen.add((text[:2], int(factor), bool(source[0] == tag), tag in source[1:]))
  assert seen == {('bt', 500, True, False), ('de', 1000, False, False), ('fr', 1000, False, False)}


def test_a_stage_begins_with_its_step_and_resumes_anywhere(world):
  stream = train_input(world)
  assert stream.examples == {'de-en': 400, 'fr-en': 50}
  shares = 'corpora: bt 66.7%, train 33.3%; from step 12 on bt 44.4%, train 55.6%; from step 40 on train 100%'
  assert str(stream.stats).endswith(shares)
  batches = [stream.batch(step) for step in range(60)]
  share = lambda steps: np.concatenate([rows_of(world, batches[step])[0] for step in steps]).mean()
  assert share(range(12)) > share(range(12, 40)) > share(range(40, 60)) == 0
  assert any(rows_of(world, batches[step])[0].any() for step in (38, 39))
  for step in (59, 40, 12, 7):  # another process, which has no file of ends
    for name, array in train_input(world, cache=f'cache{step}').batch(step).items():
      np.testing.assert_array_equal(array, batches[step][name])


def test_shares_are_of_examples_and_not_of_lines_that_are_too_long(world):
  folder = world[0] / 'data' / 'de-en'
  for language in ('de', 'en'):
    (folder / f'long.{language}').write_text(''.join(f'bt {i}{" 7" * 40 * (i % 10 > 0)}\n' for i in range(200)))
  stream = train_input(world, corpora='train 1; long 4', pairs='de-en', max_length=32, window=2000)
  assert str(stream.stats).endswith('corpora: long 80%, train 20%')
  own = np.concatenate([rows_of(world, stream.batch(step))[0] for step in range(len(stream._window(0).plans))])
  assert abs(own.mean() - 0.8) < 0.02  # by lines it would be 0.29


def test_a_tag_needs_its_symbol_and_a_corpus_its_files(world):
  with pytest.raises(UserError, match='the source vocabulary needs the symbol <@no>; .*vocab --corpus_tags=no'):
    train_input(world, corpora='train 1; bt 1 tag=no')
  with pytest.raises(UserError, match=r'no file web.de\[.gz\] and web.en'):
    train_input(world, corpora='train 1; web 1')


def test_a_file_is_of_one_corpus(world, tmp_path):
  (tmp_path / 'data').mkdir()
  shutil.copytree(world[0] / 'data' / 'de-en', tmp_path / 'data' / 'de-en')
  for language in ('de', 'en'):
    (tmp_path / 'data' / 'de-en' / f'train.{language}').rename(tmp_path / 'data' / 'de-en' / f'train-00.{language}')
    (tmp_path / 'data' / 'de-en' / f'bt.{language}').rename(tmp_path / 'data' / 'de-en' / f'train-bt.{language}')
  with pytest.raises(UserError, match='a file is of one corpus; .*/train-bt.de is of train and of train-bt'):
    train_input((tmp_path, world[1]), corpora='train 1; train-bt 1')


def test_a_stage_without_an_example_is_refused(world):
  for language in ('de', 'en'):
    (world[0] / 'data' / 'de-en' / f'blank.{language}').write_text('\n \n')
  train_input(world, corpora='train 1; blank 1')
  with pytest.raises(UserError, match='needs an example; from step 7 on, all lines are empty or too long'):
    train_input(world, corpora='train 1 7:0; blank 1')
