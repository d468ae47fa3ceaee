"""Input of denoising: batches of (seed, step) alone, each token in a window once an epoch, fixed held-out noise."""

import dataclasses
import os

import numpy as np
import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.models.batches import BATCH_KEYS
from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
from lingvo_moe.tasks.denoising.denoising_input import HeldOutInput, TrainInput
from lingvo_moe.tasks.task import task_of
from lingvo_moe.vocab import plain_text_vocab as vocab_lib
from lingvo_moe.vocab.sentencepiece_vocab import BOS, EOS
from lingvo_moe.vocab.sentinel_vocab import SentinelVocab
from lingvo_moe.vocab.text_vocab import Bytes

TEXT = ''.join(f'line {i} of {i * 7}\n' for i in range(40))


@pytest.fixture
def config(tmp_path):
  (tmp_path / 'data').mkdir()
  for name, text in ('train-1', TEXT), ('train-2', TEXT[:50]), ('dev-a', TEXT[:101]), ('dev-b', TEXT[40:62]):
    (tmp_path / 'data' / f'{name}.txt').write_text(text)
  config = DenoisingConfig(
    data_dir=str(tmp_path / 'data'), inputs_length=16, batch_tokens=64, num_groups=2, vocab='char', sentinels=4
  )
  return vocab_lib.prepare(config, str(tmp_path / 'vocab'), resumed=False)


def train_input(config, feed=None):
  return TrainInput(config, task_of(config).vocabs, config.data_dir + '/../cache', feed or Feed(quiet=True))


def held_out(config, **options):
  return HeldOutInput(config, task_of(config).vocabs, config.data_dir + '/../cache', Feed(quiet=True), **options)


def restored(vocab, inputs, targets):
  """The text of a window, from its inputs and targets."""
  return vocab.fill(inputs[inputs > 0], targets[targets > 0])


def test_rows_are_full_and_give_back_a_window_of_the_text(config):
  vocab, batches = task_of(config).vocabs, train_input(config)
  batch = batches.batch(3)
  assert config.lengths == (17, 16, 5) and set(batch) == set(BATCH_KEYS)
  assert batch['src_ids'].shape == (4, 16) and batch['tgt_labels'].shape == (4, 5)
  text = TEXT + TEXT[:50]
  for row in range(4):
    window = restored(vocab, batch['src_ids'][row], batch['tgt_labels'][row])
    assert len(window) == 17 and window in text + text[:17]
  assert np.all(batch['src_segments'] == 1) and np.all(batch['tgt_segments'] == 1)
  assert np.all(batch['src_ids'][:, -1] == EOS) and np.all(batch['tgt_labels'][:, -1] == EOS)
  assert np.all(batch['tgt_labels'][:, 0] == vocab.first_sentinel)
  assert np.all(batch['tgt_inputs'][:, 0] == BOS)
  assert np.array_equal(batch['tgt_inputs'][:, 1:], batch['tgt_labels'][:, :-1])
  assert np.array_equal(batch['src_positions'][0], np.arange(16))


def test_every_token_is_in_a_window_once_an_epoch_and_noise_differs_between_epochs(config):
  vocab, batches = task_of(config).vocabs, train_input(config)
  windows = len(TEXT + TEXT[:50]) // 17
  rows = [batches.batch(step) for step in range(-(-2 * windows // 4))]
  sources = np.concatenate([batch['src_ids'] for batch in rows])
  targets = np.concatenate([batch['tgt_labels'] for batch in rows])
  every = np.bincount(vocab.encode(TEXT + TEXT[:50]), minlength=vocab.size)
  for epoch in range(2):
    own = slice(epoch * windows, (epoch + 1) * windows)
    texts = [restored(vocab, *sides) for sides in zip(sources[own], targets[own], strict=True)]
    got = np.bincount(vocab.encode(''.join(texts)), minlength=vocab.size)
    assert np.all(got <= every) and every.sum() - got.sum() < 17
  assert not np.array_equal(sources[:windows], sources[windows : 2 * windows])


def test_a_batch_depends_on_seed_and_step_alone_and_processes_share_its_rows(config):
  whole, again = train_input(config), train_input(config)
  first = {step: whole.batch(step) for step in (7, 0, 100)}
  for step in (100, 0, 7):
    for key, value in again.batch(step).items():
      np.testing.assert_array_equal(value, first[step][key])
  parts = [train_input(config, Feed(i, 2, quiet=True)).batch(7) for i in range(2)]
  streamed = next(iter(whole.dataset(start_step=7)))
  for key, value in first[7].items():
    np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), value)
    np.testing.assert_array_equal(streamed[key], value)
  other = train_input(dataclasses.replace(config, seed=2)).batch(7)
  assert not np.array_equal(other['tgt_labels'], first[7]['tgt_labels'])
  with pytest.raises(UserError, match='num_groups=2 for 3 processes: use a multiple of 3'):
    train_input(config, Feed(0, 3, quiet=True))


def test_held_out_windows_follow_each_other_with_noise_that_no_seed_changes(config):
  vocab, dev = task_of(config).vocabs, held_out(config)
  assert dev.subsets == ['dev-a', 'dev-b']
  texts = {0: '', 1: ''}
  for file, inputs, targets in dev.examples:
    texts[file] += vocab.fill(inputs, targets)
  assert texts == {0: TEXT[:101], 1: TEXT[40:62]}
  same = held_out(dataclasses.replace(config, seed=5))
  assert all(np.array_equal(a[1], b[1]) for a, b in zip(dev.examples, same.examples, strict=True))
  batches = list(dev)
  assert len(batches) == len(dev) == -(-len(dev.examples) // 4)
  assert {batch['src_ids'].shape for batch in batches} == {(4, 16)}
  rows_of_files = np.concatenate([batch['files'] for batch in batches]).sum(axis=0)
  assert rows_of_files.tolist() == [6, 2]
  targets = sum(len(example[2]) for example in dev.examples)
  assert sum(np.sum(batch['tgt_segments']) for batch in batches) == targets
  assert len(held_out(config, first=1).examples) == 2


def test_a_last_token_alone_makes_no_window(config, tmp_path):
  (tmp_path / 'data' / 'test.txt').write_text(TEXT[:18])
  assert len(held_out(config, split='test').examples) == 1


def test_held_out_text_of_one_token_is_refused(config, tmp_path):
  (tmp_path / 'data' / 'test.txt').write_text('l')
  with pytest.raises(UserError, match=r'needs 2 tokens or more to corrupt; .*test\.txt has 1'):
    held_out(config, split='test')


def test_bytes_of_a_character_on_both_sides_of_a_sentinel_are_kept():
  vocab = SentinelVocab(Bytes(), 4)
  first, second = Bytes().encode('\xe9')
  text = vocab.decode([first, vocab.first_sentinel, second, *Bytes().encode('xyz')])
  assert text == '\ufffd<extra_id_0>\ufffdxyz'


@pytest.mark.parametrize('number', ['9' * 5000, '\u0663'])
def test_what_is_no_number_of_a_sentinel_is_text(config, number):
  vocab = SentinelVocab(Bytes(), 4)
  assert vocab.decode(vocab.encode(f'<extra_id_{number}>')) == f'<extra_id_{number}>'


def test_the_hash_of_dev_text_is_that_of_its_files_and_batches(config):
  whole = held_out(config).content_hash
  assert held_out(dataclasses.replace(config, seed=7)).content_hash == whole
  others = {
    held_out(dataclasses.replace(config, batch_tokens=128)).content_hash,
    held_out(config, first=1).content_hash,
  }
  with open(os.path.join(config.data_dir, 'dev-a.txt'), 'a') as f:
    f.write('x')
  assert len({whole, held_out(config).content_hash, *others}) == 4
