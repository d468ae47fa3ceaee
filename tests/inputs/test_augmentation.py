"""Subword sampling and noise: which batches change, that they depend on their step alone, and what the noise is."""

import dataclasses

import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel
from lingvo_moe.inputs import noise
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.mt_input import HeldOutInput, TrainInput
from lingvo_moe.inputs.subword_sampling import SubwordSampler
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab
from lingvo_moe.vocab.vocab_training import train_vocab

WORDS = 'the dog runs over green grass and barks at cats that sleep in a warm house'.split()
EVERYTHING = {
  'source_sampling': {'nbest': 0.5, 'dropout': 0.2},
  'target_sampling': {'dropout': 0.2},
  'noise': dict.fromkeys(noise.KINDS, 0.2),
}


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  root = tmp_path_factory.mktemp('world')
  (root / 'de-en').mkdir()
  lines = [' '.join(WORDS[(i * k) % len(WORDS)] for k in range(1, 3 + i % 9)) + '.' for i in range(200)]
  for split in ('train', 'dev'):
    for language in ('de', 'en'):
      (root / 'de-en' / f'{split}.{language}').write_text(''.join(f'{language.title()} {line}\n' for line in lines))
  vocab = train_vocab(parallel.find_pairs(str(root)), str(root / 'v'), 340, exact_size=False)
  return root, DataConfig(data_dir=str(root), source_vocab=vocab, target_vocab=vocab, batch_tokens=512, max_length=64)


def train_input(world, process=0, processes=1, **changes):
  root, config = world
  config = dataclasses.replace(config, **{'window': 100, **changes})
  vocab = TaggedVocab(config.source_vocab)
  return TrainInput(config, (vocab, vocab), str(root / 'cache'), Feed(process, processes, quiet=True)), vocab


def texts(batch, vocab, side='src_ids', segments='src_segments'):
  rows = zip(batch[side], batch[segments])
  return [vocab.decode(ids[own == k]) for ids, own in rows for k in range(1, own.max(initial=0) + 1)]


def test_a_batch_depends_on_its_step_alone_and_processes_share_it(world):
  train, vocab = train_input(world, num_groups=2, **EVERYTHING)
  batches = [train.batch(step) for step in range(30)]
  again, _ = train_input(world, num_groups=2, **EVERYTHING)
  halves = [train_input(world, process, 2, num_groups=2, **EVERYTHING)[0] for process in range(2)]
  for step in (29, 3, 17):
    for name, array in again.batch(step).items():
      np.testing.assert_array_equal(array, batches[step][name])
      np.testing.assert_array_equal(np.concatenate([half.batch(step)[name] for half in halves]), array)
  plain, _ = train_input(world, num_groups=2)
  seen = {text for step in range(30) for text in texts(plain.batch(step), vocab)}
  noisy = [text for batch in batches for text in texts(batch, vocab)]
  assert 0.2 < np.mean([text in seen for text in noisy]) < 0.6  # 0.8^5 = 0.33 have no noise


@pytest.mark.parametrize('shares', [{'nbest': 1}, {'dropout': 0.3}, {'nbest': 0.5, 'dropout': 0.1}])
def test_sampled_pieces_spell_the_same_text_in_more_pieces(world, shares):
  train, vocab = train_input(world, source_sampling=shares, sampling_alpha=0.0)
  plain, _ = train_input(world)
  window = lambda given: [given.batch(step) for step in range(len(given._window(0).plans))]
  of = lambda given: sorted(text for batch in window(given) for text in texts(batch, vocab))
  assert of(train) == of(plain)
  tokens = lambda given, side: sum(int(np.sum(batch[side] > 0)) for batch in window(given))
  assert tokens(train, 'src_segments') > 1.1 * tokens(plain, 'src_segments')
  assert tokens(train, 'tgt_segments') == tokens(plain, 'tgt_segments')


def test_a_sentence_is_read_otherwise_each_time_and_dev_is_as_it_was(world):
  train, vocab = train_input(world, source_sampling={'dropout': 0.3}, batch_tokens=65536)
  first, second = ({tuple(ids[ids > 0]) for ids in train.batch(step)['src_ids']} for step in range(2))
  assert len(first & second) < len(first) / 2
  root, config = world
  dev = [
    HeldOutInput(
      dataclasses.replace(config, **changes), (vocab, vocab), str(root / 'cache'), Feed(quiet=True)
    ).content_hash
    for changes in ({}, EVERYTHING)
  ]
  assert dev[0] == dev[1]


def test_noise_is_other_noise_in_the_next_window(world):
  train, vocab = train_input(world, noise={'words': 1})
  rows = [vocab.encode([' '.join(WORDS)] * 20)] * 2
  of_windows = [
    [tuple(ids) for ids in train._augmentation(window, rows, (64, 64), [('de', 'en')] * 20)[0]] for window in (0, 1)
  ]
  assert of_windows[0] != of_windows[1]


def test_noise_in_case_is_that_of_the_languages_of_a_pair(world):
  train, vocab = train_input(world, noise={'case': 1})
  rows = [vocab.encode(['grain'] * 20)] * 2
  sources, targets = train._augmentation(0, rows, (64, 64), [('tr', 'en')] * 20)
  assert {vocab.decode(ids) for ids in targets} == {'grain', 'Grain', 'GRAIN'}
  assert 'GRAIN' not in {vocab.decode(ids) for ids in sources}


def test_one_that_becomes_too_long_stays_as_it_is(world):
  for changes in (EVERYTHING, {'source_sampling': {'dropout': 1}}):
    train, _ = train_input(world, max_length=16, packing=True, **changes)
    plain, _ = train_input(world, max_length=16, packing=True)
    assert train.examples == plain.examples and train.batch(0)['src_ids'].shape[1] == 16


def test_nbest_draws_by_probability(world):
  vocab = TaggedVocab(world[1].source_vocab)
  best = vocab.encode(['the dog runs'])[0]
  drawn = lambda alpha: [list(SubwordSampler(vocab, 8, alpha).draw('the dog runs', key)) for key in range(100)]
  assert all(ids == best for ids in drawn(1000.0))
  assert 4 <= len({tuple(ids) for ids in drawn(0.0)}) <= 8


def test_nbest_draws_in_proportion_to_the_product_of_the_probabilities_of_pieces(world):
  vocab, text = TaggedVocab(world[1].source_vocab), 'the dog runs'
  candidates = vocab.nbest(text, 6)
  proto = sentencepiece_model_pb2.ModelProto.FromString(vocab.model_bytes)
  p = np.array([np.exp(0.3 * sum(proto.pieces[i].score for i in ids)) for ids in candidates])
  drawn = [tuple(SubwordSampler(vocab, 6, 0.3).draw(text, key)) for key in range(600)]
  shares = [drawn.count(tuple(ids)) / 600 for ids in candidates]
  np.testing.assert_allclose(shares, p / p.sum(), atol=0.05)
  assert max(p) > 2 * min(p) and len({len(ids) for ids in candidates}) > 1  # a mean over pieces would be another


def test_nbest_needs_a_unigram_vocabulary(world, tmp_path):
  model = sentencepiece_model_pb2.ModelProto.FromString(TaggedVocab(world[1].source_vocab).model_bytes)
  model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
  (tmp_path / 'bpe.model').write_bytes(model.SerializeToString())
  with pytest.raises(UserError, match='nbest needs a unigram vocabulary; .*bpe.model is of another kind: use dropout'):
    SubwordSampler(TaggedVocab(str(tmp_path / 'bpe.model')), 8, 0.2).check_nbest()


@pytest.mark.parametrize(
  'field, value',
  [
    ('noise', {'typo': 0.1}),
    ('noise', {'typos': 0}),
    ('source_sampling', {'nbest': 1.5}),
    ('target_sampling', {'x': 1}),
  ],
)
def test_shares_are_of_known_kinds(field, value):
  with pytest.raises(UserError, match=f'{field} must be numbers above 0 and up to 1 of .*: e.g. '):
    DataConfig(**{field: value})


def test_noise_is_of_its_kind():
  source, target = 'Der Hund, der bellt, läuft.', 'The dog that barks is running.'
  made = {kind: {noise.add(kind, source, target, key) for key in range(60)} for kind in noise.KINDS}
  assert made['case'] == {(source.upper(), target.upper()), (source.title(), target.title()), (source.lower(), target)}
  assert made['punctuation'] == {(source[:-1], target), ('Der Hund der bellt läuft', target)}
  assert {t for kind in ('words', 'typos', 'punctuation') for _, t in made[kind]} == {target}
  assert all(len(s.split()) == 4 and set(s.split()) < set(source.split()) for s, _ in made['words'])
  assert all(abs(len(s) - len(source)) <= 2 for s, _ in made['typos']) and len(made['typos']) > 50
  for s, t in made['placeholders']:
    assert s.replace(source, '').strip() == t.replace(target, '').strip() != ''
  of_three = {noise.add('typos', 'abc', 'x', key)[0] for key in range(300)}
  lost, doubled, exchanged = {'bc', 'ac', 'ab'}, {'aabc', 'abbc', 'abcc'}, {'bac', 'acb', 'abc'}
  assert of_three == lost | doubled | exchanged | {'bbc', 'cbc', 'aac', 'acc', 'aba', 'abb'}
  assert {noise.add('words', 'Hund', 'dog', key) for key in range(9)} == {('Hund', 'dog')}  # one stays
  for kind in noise.KINDS:
    assert noise.add(kind, '', 'x', 1)[1].endswith('x') or kind in ('case', 'placeholders')
