"""Input: contents of batches, which depend on (seed, step) alone, and the token cache."""

import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import threading
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.addons.export import text_search
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, text
from lingvo_moe.inputs import dev_lines, mt_input, pair_caches, token_cache
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.inputs.examples import Examples
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.mt_input import HeldOutInput, TextInput, TrainInput
from lingvo_moe.storage import blocks, files, json_files
from lingvo_moe.tasks.mt import run_vocabs
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab
from lingvo_moe.vocab.vocab_training import train_vocab

LINES = {'de-en': 300, 'fr-en': 60}
EXTRA = ['', 'very ' * 60]  # an empty line and one over the limit


def write_pair(root, pair, split, sources, targets):
  (root / pair).mkdir(parents=True, exist_ok=True)
  source, target = pair.split('-')
  (root / pair / f'{split}.{source}').write_text(''.join(s + '\n' for s in sources))
  (root / pair / f'{split}.{target}').write_text(''.join(t + '\n' for t in targets))


def sentence(language, i):
  return f'{language} ' + ' '.join(str(i * k) for k in range(1, 2 + i % 5))


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  """A corpus of two pairs, a shared vocabulary, and a cache."""
  root = tmp_path_factory.mktemp('world')
  for pair, n in LINES.items():
    source, target = pair.split('-')
    sources = [sentence(source, i) for i in range(n)] + EXTRA
    targets = [sentence(target, i) for i in range(n)] + ['x', 'x']
    write_pair(root / 'data', pair, 'train', sources, targets)
    write_pair(root / 'data', pair, 'dev', sources[:20], targets[:20])
  vocab = train_vocab(parallel.find_pairs(str(root / 'data')), str(root / 'v'), 320, tags=True)
  config = DataConfig(
    data_dir=str(root / 'data'),
    source_vocab=vocab,
    target_vocab=vocab,
    temperature=2.0,
    batch_tokens=160,
    max_length=40,
    num_groups=2,
    window=64,
  )
  return config, str(root / 'cache')


def load_vocabs(config):
  source = TaggedVocab(config.source_vocab)
  return source, source if config.target_vocab == config.source_vocab else TaggedVocab(config.target_vocab)


def train_input(config, cache_dir, process_index=0, process_count=1):
  return TrainInput(config, load_vocabs(config), str(cache_dir), Feed(process_index, process_count, quiet=True))


def dev_input(config, cache_dir, process_index=0, process_count=1, max_sentences=0):
  feed = Feed(process_index, process_count, quiet=True)
  return HeldOutInput(config, load_vocabs(config), str(cache_dir), feed, max_sentences)


def make(world, **changes):
  config, cache_dir = world
  part = {k: changes.pop(k) for k in ('process_index', 'process_count') if k in changes}
  return train_input(dataclasses.replace(config, **changes), cache_dir, **part)


def same(a, b):
  assert a.keys() == b.keys()
  for key in a:
    np.testing.assert_array_equal(a[key], b[key])


def pairs_in(batch):
  """(source ids, target labels, target inputs) of every pair, having checked that both sides are whole."""
  for row in range(len(batch['src_ids'])):
    segments = sorted(set(batch['src_segments'][row]) - {0})
    assert segments == sorted(set(batch['tgt_segments'][row]) - {0}) == list(range(1, len(segments) + 1))
    for segment in segments:
      found = []
      for side, keys in (('src', ['src_ids']), ('tgt', ['tgt_labels', 'tgt_inputs'])):
        where = np.flatnonzero(batch[f'{side}_segments'][row] == segment)
        np.testing.assert_array_equal(np.diff(where), 1)
        np.testing.assert_array_equal(batch[f'{side}_positions'][row, where], np.arange(len(where)))
        found += [batch[key][row, where].tolist() for key in keys]
      yield found


@pytest.mark.parametrize('packing', [False, True])
def test_a_batch_holds_whole_pairs_of_the_corpus(world, packing):
  train = make(world, packing=packing)
  vocab = TaggedVocab(world[0].source_vocab)
  expected = {}
  for pair, n in LINES.items():
    source, target = pair.split('-')
    sources = vocab.encode([sentence(source, i) for i in range(n)])
    targets = vocab.encode([sentence(target, i) for i in range(n)])
    expected |= {(*s, 2): [*t, 2] for s, t in zip(sources, targets, strict=True)}
  seen = 0
  for step in range(10):
    batch = train.batch(step)
    rows, length = batch['src_ids'].shape
    assert rows % 2 == 0 and rows * length <= 160
    for key, value in batch.items():
      assert value.shape == (rows, length) and value.dtype == np.int32
      side = key[:3]
      assert not value[batch[f'{side}_segments'] == 0].any()
    for source, labels, inputs in pairs_in(batch):
      assert expected[tuple(source)] == labels
      assert inputs == [1, *labels[:-1]]
      seen += 1
  assert seen > 30
  if packing:
    assert batch['src_segments'].max() > 1


@pytest.mark.parametrize('packing', [False, True])
def test_a_batch_depends_on_its_step_alone(world, packing):
  forward = make(world, packing=packing)
  batches = [forward.batch(step) for step in range(60)]
  resumed = make(world, packing=packing)
  for step in (37, 5, 59, 0):
    same(resumed.batch(step), batches[step])
  assert any(not np.array_equal(make(world, seed=2).batch(s)['src_ids'], batches[s]['src_ids']) for s in range(3))


@pytest.mark.parametrize('packing', [False, True])
def test_processes_share_the_rows_of_the_same_batch(world, packing):
  whole = make(world, packing=packing, batch_tokens=320)
  parts = [make(world, packing=packing, batch_tokens=320, process_index=i, process_count=2) for i in range(2)]
  for step in range(12):
    pieces = [part.batch(step) for part in parts]
    same({key: np.concatenate([p[key] for p in pieces]) for key in pieces[0]}, whole.batch(step))


def test_processes_must_divide_the_rows(world):
  with pytest.raises(UserError, match='saw num_groups=2 for 3 processes: use a multiple of 3'):
    make(world, process_count=3)


def test_the_dataset_gives_the_same_batches(world):
  train = make(world)
  for step, batch in zip(range(4, 9), train.dataset(4).as_numpy_iterator(), strict=False):
    same(batch, train.batch(step))


def test_counts_of_batches_are_kept_on_disk_and_may_be_lost(world, tmp_path, monkeypatch):
  monkeypatch.setattr(mt_input, '_SAVE_EVERY', 2)
  config = world[0]
  expected = train_input(config, str(tmp_path)).batch(80)
  (path,) = tmp_path.glob('batches-*.json')
  assert len(json.loads(path.read_text())['ends']) >= 4
  fresh = train_input(config, str(tmp_path))
  window_of = fresh._sampler.window
  monkeypatch.setattr(
    fresh._sampler, 'window', lambda number, begins: calls.append(number) or window_of(number, begins)
  )
  calls = []
  same(fresh.batch(80), expected)
  assert len(calls) <= 3
  path.write_bytes(path.read_bytes()[:-3])  # no JSON any more
  same(train_input(config, str(tmp_path)).batch(80), expected)


def test_two_runs_that_share_a_cache_keep_their_own_counts_of_batches(world, tmp_path, monkeypatch):
  monkeypatch.setattr(mt_input, '_SAVE_EVERY', 2)
  others = ({'seed': 2}, {'window': 50}, {'temperature': 1.0}, {'batch_tokens': 320}, {'weights': {'de-en': 3}})
  for number, changes in enumerate(({}, *others), start=1):
    train = make((world[0], str(tmp_path)), **changes)
    ours = train.batch(80)
    assert len(list(tmp_path.glob('batches-*.json'))) == number
    train._starts = [0]  # counts again
    same(train.batch(80), ours)


def test_long_and_empty_lines_are_left_out_and_counted(world):
  stats = make(world).stats
  assert (stats.total('lines'), stats.total('too_long'), stats.total('empty')) == (364, 2, 2)
  assert stats.total('kept') == 360
  assert str(stats).startswith('2 pairs, 360 examples') and str(stats).endswith('left out: 2 too long, 2 empty')


def test_shares_follow_the_temperature(world):
  shares = make(world).shares
  assert shares['de-en'] == pytest.approx(302**0.5 / (302**0.5 + 62**0.5))


def test_weights_multiply_shares_and_are_of_pairs_that_are_there(world):
  shares = make(world, weights={'de-en': 3}).shares
  assert shares['de-en'] == pytest.approx(3 * 302**0.5 / (3 * 302**0.5 + 62**0.5))
  with pytest.raises(UserError, match=r"weights are of pairs that are trained on; saw 'de-fr'; closest: de-en.*"):
    make(world, weights={'de-fr': 3})


def test_an_epoch_has_as_many_steps_as_it_takes_to_read_as_many_lines(world):
  train = make(world)
  assert train.steps_per_epoch == pytest.approx(364 / 64 * len(train._window(0).plans), rel=0.05)
  alone = make(world, pairs='de-en', window=302)  # a window is an epoch
  assert alone.steps_per_epoch == len(alone._window(0).plans)


def test_a_limit_that_leaves_nothing_is_refused(world):
  with pytest.raises(UserError, match='max_length=3 tokens; none of 364 pairs is: raise max_length'):
    make(world, max_length=3)


def test_a_tag_comes_first_and_counts_as_a_position(world):
  tag = TaggedVocab(world[0].source_vocab).tag_id('en')
  plain = {tuple(s) for step in range(40) for s, _, _ in pairs_in(make(world).batch(step))}
  for source, _, _ in pairs_in(make(world, tag_target=True).batch(0)):
    assert source[0] == tag and tuple(source[1:]) in plain


def test_several_target_languages_are_told_apart_by_tags(tmp_path):
  for name in ('de-en', 'en-de'):
    source, target = name.split('-')
    write_pair(
      tmp_path, name, 'train', [sentence(source, i) for i in range(80)], [sentence(target, i) for i in range(80)]
    )
  vocab_path = train_vocab(parallel.find_pairs(str(tmp_path)), str(tmp_path / 'v'), 310)
  config = DataConfig(data_dir=str(tmp_path), source_vocab=vocab_path, target_vocab=vocab_path, max_length=40)
  vocab = TaggedVocab(vocab_path)
  tags = {vocab.tag_id('en'): 'en', vocab.tag_id('de'): 'de'}
  seen = set()
  for source, labels, _ in pairs_in(train_input(config, str(tmp_path / 'c')).batch(0)):
    assert vocab.detokenize([labels])[0].startswith(tags[source[0]])
    seen.add(source[0])
  assert seen == set(tags)


def test_dev_is_read_once_in_order(world):
  config, cache_dir = world
  dev = dev_input(config, cache_dir)
  batches = list(dev)
  assert sum(1 for batch in batches for _ in pairs_in(batch)) == 40
  for a, b in zip(batches, dev, strict=True):
    same(a, b)
  few = dev_input(config, cache_dir, max_sentences=3)
  found = {tuple(source[:-1]) for batch in few for source, *_ in pairs_in(batch)}
  spaced = [sentence(language, i) for language in ('de', 'fr') for i in (0, 6, 13)]  # of 20
  assert found == set(map(tuple, TaggedVocab(config.source_vocab).encode(spaced)))


def test_evaluation_tells_the_pair_of_every_row(world):
  config, cache_dir = world
  dev = dev_input(config, cache_dir)
  assert dev.subsets == ['de-en', 'fr-en']
  rows = np.zeros(2, int)
  for batch in dev:
    filled = batch['src_segments'].any(axis=1)
    np.testing.assert_array_equal(batch['pairs'].sum(axis=1), filled)
    rows += batch['pairs'].sum(axis=0)
  assert rows.tolist() == [20, 20]
  halves = [dev_input(config, cache_dir, process_index=i, process_count=2) for i in (0, 1)]
  for whole, *parts in zip(dev, *halves, strict=True):
    np.testing.assert_array_equal(whole['pairs'], np.concatenate([part['pairs'] for part in parts]))


def test_the_hash_of_dev_text_is_that_of_its_pairs_sentences_and_batches(world, tmp_path):
  config, cache_dir = world
  made = lambda config=config, **options: dev_input(config, cache_dir, **options).content_hash
  whole = made()
  assert [made(), made(process_index=1, process_count=2), made(max_sentences=20)] == [whole] * 3
  moved = shutil.copytree(config.data_dir, tmp_path / 'moved')
  assert made(dataclasses.replace(config, data_dir=str(moved), seed=config.seed + 1)) == whole
  with open(moved / 'de-en' / 'train.de', 'a') as f, open(moved / 'de-en' / 'train.en', 'a') as g:
    print('more', file=f), print('more', file=g)
  others = [made(max_sentences=3), made(dataclasses.replace(config, data_dir=str(moved), pairs='de-en'))]
  assert made(dataclasses.replace(config, data_dir=str(moved))) == whole  # train is not dev
  path = moved / 'fr-en' / 'dev.en'
  first, second, *rest = path.read_text().splitlines()
  path.write_text('\n'.join([second, first, *rest]) + '\n')
  others += [made(dataclasses.replace(config, data_dir=str(moved)))]
  others += [made(dataclasses.replace(config, eval_batch_tokens=2 * config.batch_tokens))]
  assert len({whole, *others}) == 5


def test_given_sentences_come_back_by_number(world):
  config = world[0]
  vocab = TaggedVocab(config.source_vocab)
  lines = ['de 1 2', '', 'very ' * 60, '   ', 'fr 7']
  text = TextInput(config, (vocab, vocab), lines)
  assert text.empty == [1, 3] and text.truncated == [2]
  seen = {}
  for index, batch in text:
    assert batch.keys() == {'src_ids', 'src_segments', 'src_positions'} and len(index) == len(batch['src_ids'])
    for i, ids, segments in zip(index, batch['src_ids'], batch['src_segments'], strict=True):
      if i >= 0:
        seen[int(i)] = ids[segments > 0].tolist()
      else:
        assert not segments.any()
  ids = vocab.encode(lines)
  assert seen == {0: [*ids[0], 2], 4: [*ids[4], 2], 2: [*ids[2][:39], 2]}


def test_given_sentences_may_be_tagged_and_scored(world):
  config = world[0]
  vocab = TaggedVocab(config.source_vocab)
  sources, targets = ['de 1', 'de 2 3'], ['en 1', '']
  text = TextInput(config, (vocab, vocab), sources, 'en', targets)
  rows = {}
  for index, batch in text:
    found = list(pairs_in(batch))
    rows |= dict(zip([i for i in index if i >= 0], found, strict=True))
  ids, labels = vocab.encode(sources), vocab.encode(targets)
  for i in range(2):
    assert rows[i] == [[vocab.tag_id('en'), *ids[i], 2], [*labels[i], 2], [1, *labels[i]]]
  with pytest.raises(UserError, match='saw 2 sources and 1 targets'):
    TextInput(config, (vocab, vocab), sources, targets=['x'])


def test_no_sentences_make_no_batches(world):
  assert list(TextInput(world[0], load_vocabs(world[0]), [])) == []
  assert list(TextInput(world[0], load_vocabs(world[0]), ['', ' '])) == []


# The cache.


@pytest.fixture
def without_dev(tmp_path, world):
  """A corpus of one pair without dev, in which some lines are there twice, on both sides or on one."""
  sources = [sentence('aa', i) for i in range(60)]
  targets = [sentence('zz', i) for i in range(60)]
  sources += [*sources[:30], *(f'other {i}' for i in range(30))]
  targets += [*targets[:30], *targets[30:]]
  write_pair(tmp_path / 'data', 'aa-zz', 'train', sources, targets)
  config = dataclasses.replace(world[0], data_dir=str(tmp_path / 'data'), pairs='aa-zz', tag_target=False)
  return config, str(tmp_path / 'cache'), sources, targets


def test_dev_is_offered_from_train_and_shares_no_side_with_it(without_dev):
  config, cache_dir, sources, targets = without_dev
  with pytest.raises(UserError, match='no file dev.aa.* or take dev text from train, with --set dev_lines=1000'):
    dev_lines.find_pairs(config, 'dev')
  config = dataclasses.replace(config, dev_lines=12)
  train = train_input(config, cache_dir)
  dev = dev_input(config, cache_dir)
  trained = {side: set() for side in ('src', 'tgt')}
  for step in range(60):
    for source, target, _ in pairs_in(train.batch(step)):
      trained['src'].add(tuple(source))
      trained['tgt'].add(tuple(target))
  evaluated = [(tuple(source), tuple(target)) for batch in dev for source, target, _ in pairs_in(batch)]
  assert len(evaluated) == 12
  assert not {source for source, _ in evaluated} & trained['src']
  assert not {target for _, target in evaluated} & trained['tgt']
  stats = train.stats.pairs[0]
  [(_, dev_sources, dev_targets)] = dev_lines.read_pairs(config, 'dev')
  kept = [(s, t) for s, t in zip(sources, targets) if s not in dev_sources and t not in dev_targets]
  assert (stats.kept, stats.held_out) == (len(kept), 120 - len(kept)) and stats.held_out > 12
  assert f'left out: {stats.held_out} for dev' in str(train.stats)


def test_dev_from_train_is_the_same_text_as_for_the_decoder_and_must_leave_half(without_dev):
  config, cache_dir, sources, targets = without_dev
  config = dataclasses.replace(config, dev_lines=12)
  [(pair, *read)] = dev_lines.read_pairs(config, 'dev')
  chosen = dev_lines.choose(config, [pair], [120])[0]
  assert read == [[sources[i] for i in chosen], [targets[i] for i in chosen]] and len(chosen) == 12
  assert len(set(read[0])) == 12  # of equal lines, one
  [(_, *whole)] = dev_lines.read_pairs(config, 'train')  # of which a user asks the score
  assert whole == [sources, targets]
  with pytest.raises(UserError, match='must leave half .*saw dev_lines=70, and aa-zz has 120 lines: use at most 60'):
    train_input(dataclasses.replace(config, dev_lines=70), cache_dir)
  config = dataclasses.replace(config, dev_lines=None)
  assert [len(lines) for _, *sides in dev_lines.read_pairs(config, 'dev') for lines in sides] == [6, 6]


@pytest.mark.parametrize('size, taken', [(2, 1), (39, 1), (40, 2), (19_999, 999), (20_000, 1000), (90_000, 1000)])
def test_dev_from_train_is_a_twentieth_of_it_but_1000_lines_at_most(tmp_path, world, size, taken):
  for language in ('aa', 'zz'):
    path = tmp_path / 'aa-zz' / f'train.{language}'
    path.parent.mkdir(exist_ok=True)
    path.write_text(''.join(f'{language} {i}\n' for i in range(size)))
  config = dataclasses.replace(world[0], data_dir=str(tmp_path), pairs='aa-zz', dev_lines=None)
  assert len(dev_lines.choose(config, dev_lines.find_pairs(config, 'dev'), [size])[0]) == taken


@pytest.fixture
def three_pairs(tmp_path, world):
  """Two languages with the same English text, one of them in both directions, without dev."""
  english = [sentence('en', i) for i in range(300)]
  write_pair(tmp_path / 'data', 'de-en', 'train', [sentence('de', i) for i in range(300)], english)
  write_pair(tmp_path / 'data', 'fr-en', 'train', [sentence('fr', i) for i in range(100)], english[50:150])
  values = {'data_dir': str(tmp_path / 'data'), 'pairs': 'de-en,en-de,fr-en', 'dev_lines': 10, 'tag_target': False}
  return dataclasses.replace(world[0], **values), str(tmp_path / 'cache')


def test_no_pair_trains_on_dev_text_of_another(three_pairs):
  config, cache_dir = three_pairs
  dev = {pair.name: (sources, targets) for pair, sources, targets in dev_lines.read_pairs(config, 'dev')}
  assert dev['en-de'] == dev['de-en'][::-1]
  for name in dev:  # a decoder of one pair finds the same
    [(_, *alone)] = dev_lines.read_pairs(dataclasses.replace(config, pairs=name), 'dev')
    assert tuple(alone) == dev[name]
  examples = Examples(config, 'train', cache_dir, load_vocabs(config), quiet=True)
  held = {side: set().union(*(dev[pair][side] for pair in dev)) for side in (0, 1)}
  held = held[0] | held[1]  # the vocabulary is shared
  for number, pair in enumerate(examples.pairs):
    source, _ = examples.lengths(np.full(examples.sizes[number], number), np.arange(examples.sizes[number]))
    for length, *texts in zip(source, *parallel.read_pair(pair), strict=True):
      assert (length == 0) == bool(held & set(texts))
  # Lines are chosen by their English text: a sentence in the dev text of fr-en is in that of de-en as a rule.
  assert len(held & {sentence('en', i) for i in range(300)}) < 17


def test_lines_that_differ_from_dev_text_in_spaces_or_invisible_characters_are_left_out(three_pairs):
  config, cache_dir = three_pairs
  folder = pathlib.Path(config.data_dir) / 'fr-en'
  english = [sentence('en', i) for i in range(300)]
  again = [
    line.replace(' ', ' \u200d\u2060', 1) for line in english
  ]  # other tokens: the vocabulary knows none of these
  write_pair(pathlib.Path(config.data_dir), 'fr-en', 'train', [f'fr {i}' for i in range(300)], again)
  write_pair(pathlib.Path(config.data_dir), 'fr-en', 'dev', ['fr x'], ['en x'])
  config = dataclasses.replace(config, pairs='de-en,fr-en')
  dev = {line for _, _, targets in dev_lines.read_pairs(config, 'dev') for line in targets}
  examples = Examples(config, 'train', cache_dir, load_vocabs(config), quiet=True)
  lengths, _ = examples.lengths(np.full(300, 1), np.arange(300))
  assert [english[i] in dev for i in range(300)] == (lengths == 0).tolist() and folder.exists()


def test_dev_and_test_lines_that_are_in_train_are_counted(world, tmp_path):
  sides = lambda numbers: [[sentence(language, i) for i in numbers] for language in ('de', 'en')]
  for split, (sources, targets) in {
    'train': sides(range(100)),
    'dev': ([f'{s} \u200e' for s in sides(range(30))[0]], [f'new {i}' for i in range(30)]),
    'test': sides(range(99, 250)),
  }.items():
    write_pair(tmp_path, 'de-en', split, ['', *sources], ['', *targets])
  config = dataclasses.replace(world[0], data_dir=str(tmp_path), pairs='de-en')
  [warning] = dev_lines.within_train(config, str(tmp_path / 'cache'))
  assert warning.startswith('warning: 30 of 31 dev lines are in train')  # of test 1 of 152, which is under 1%


def test_a_line_of_which_nothing_can_be_seen_is_empty_everywhere(world, tmp_path):
  unseen = ['\u2060', '\u200d', '\u00ad', '\ufeff ', '\ufe0f', '\u2800\u3000']
  write_pair(tmp_path, 'de-en', 'train', [*unseen, 'de 1', 'de 2'], [*['en 1'] * 6, 'en 1', '\u200b'])
  config = dataclasses.replace(world[0], data_dir=str(tmp_path), pairs='de-en')
  examples = Examples(config, 'train', str(tmp_path / 'cache'), load_vocabs(config), quiet=True)
  assert (examples.stats.total('empty'), examples.stats.total('kept')) == (7, 1)
  vocab = TaggedVocab(config.source_vocab)
  assert TextInput(config, (vocab, vocab), [*unseen, '\0', 'de 1']).empty == list(range(7))


def test_an_exported_model_empties_the_same_lines():
  characters = [chr(code) for code in (*range(1, 0xD800), *range(0xE000, 0x32000), *range(0xE0000, 0xE1000))]
  found = tf.strings.regex_replace(characters, text_search._UNSEEN, '').numpy()
  assert [c for c, rest in zip(characters, found, strict=True) if (rest == b'') != text.is_empty(c)] == []
  lines = tf.strings.regex_replace(['\ufeffde\u200b 1', ' \u2060\u00ad'], text_search._UNSEEN, '').numpy()
  assert [line.decode() for line in lines] == ['de\u200b 1', '']


def test_a_byte_order_mark_is_no_token(world, tmp_path):
  config = dataclasses.replace(world[0], pairs='de-en')
  vocab = TaggedVocab(config.source_vocab)
  batches = [next(iter(TextInput(config, (vocab, vocab), [line])))[1] for line in ('de 1', '\ufeffde 1')]
  assert batches[0]['src_ids'].tolist() == batches[1]['src_ids'].tolist()
  found = []
  for name, mark in (('with', '\ufeff'), ('without', '')):
    write_pair(tmp_path / name, 'de-en', 'train', [f'{mark}de 1', 'de 2'], [f'{mark}en 1', 'en 2'])
    config = dataclasses.replace(config, data_dir=str(tmp_path / name))
    examples = Examples(config, 'train', str(tmp_path / 'cache'), load_vocabs(config), quiet=True)
    found.append([lengths.tolist() for lengths in examples.lengths(np.zeros(2, int), np.arange(2))])
  assert found[0] == found[1]


def test_broken_dev_files_are_no_lack_of_dev(three_pairs):
  config, _ = three_pairs
  config = dataclasses.replace(config, pairs='de-en,fr-en')
  folder = pathlib.Path(config.data_dir) / 'fr-en'
  (folder / 'dev.fr').write_text('fr\n')
  for number in (0, 10):
    with pytest.raises(UserError, match='both sides of a pair must be there') as e:
      dev_lines.find_pairs(dataclasses.replace(config, dev_lines=number), 'dev')
    assert 'take dev text' not in str(e.value)
  (folder / 'dev.en').write_text('en\n')
  assert [(p.name, p.split) for p in dev_lines.find_pairs(config, 'dev')] == [('de-en', 'train'), ('fr-en', 'dev')]


def test_of_plain_files_pairs_that_have_dev_keep_it(tmp_path, world):
  (tmp_path / 'data').mkdir()
  for name in ('train.de', 'train.en', 'train.fr', 'dev.de', 'dev.en'):
    (tmp_path / 'data' / name).write_text(''.join(f'{name} {i}\n' for i in range(40)))
  config = dataclasses.replace(world[0], data_dir=str(tmp_path / 'data'), pairs='de-en,fr-de', dev_lines=10)
  found = dev_lines.find_pairs(config, 'dev')
  assert [(pair.name, pair.split) for pair in found] == [('de-en', 'dev'), ('fr-de', 'train')]
  with pytest.raises(UserError, match="no pair of .* matches 'fr-de'"):
    dev_lines.find_pairs(dataclasses.replace(config, dev_lines=0), 'dev')


def test_a_pair_without_an_example_is_named(tmp_path, world):
  write_pair(tmp_path / 'data', 'de-en', 'dev', ['de 1'], ['en 1'])
  write_pair(tmp_path / 'data', 'fr-en', 'dev', [''], ['en 1'])
  config = dataclasses.replace(world[0], data_dir=str(tmp_path / 'data'), tag_target=False)
  dev = dev_input(config, str(tmp_path / 'cache'))
  assert str(dev.stats).endswith('; left out: 1 empty; without an example: fr-en')


@pytest.mark.parametrize('number', [5, None])
def test_a_pair_that_has_dev_keeps_it(world, number):
  config = dataclasses.replace(world[0], dev_lines=number)
  assert [pair.split for pair in dev_lines.find_pairs(config, 'dev')] == ['dev', 'dev']
  assert dev_input(config, world[1]).stats.total('lines') == 40


@pytest.fixture
def small(tmp_path, world):
  write_pair(tmp_path / 'data', 'de-en', 'train', ['de 1', '', 'de 3'], ['en 1', 'en 2', 'en 3'])
  pairs = parallel.find_pairs(str(tmp_path / 'data'))
  vocab = TaggedVocab(world[0].source_vocab)
  return pairs, vocab, tmp_path / 'cache'


def open_small(small):
  pairs, vocab, folder = small
  return pair_caches.open_pairs(pairs, (vocab, vocab), str(folder), quiet=True)[0]


def entries(small):
  return sorted(p.name for p in small[2].iterdir() if p.is_dir())


def test_the_cache_keeps_the_lines_by_number(small):
  source, _ = open_small(small)
  ids, lengths = source.gather(np.array([2, 1, 0]))
  expected = small[1].encode(['de 3', '', 'de 1'])
  assert ids.tolist() == [i for line in expected for i in line] and lengths.tolist() == [len(e) for e in expected]
  assert source.lengths(np.arange(3)).tolist() == [len(e) for e in expected[::-1]]
  assert source.tokens.dtype == np.uint16


@pytest.mark.parametrize('size, dtype', [(65_536, np.uint16), (65_537, np.int32)])
def test_ids_of_a_large_vocabulary_fit_their_type(tmp_path, size, dtype):
  (tmp_path / 'text').write_text('a\n')
  vocab = types.SimpleNamespace(size=size, fingerprint='of it')
  end = np.array([]), np.array([])
  tokenise = lambda parts, _: (pair for _ in parts for pair in [(np.array([size - 1]), np.array([1])), end])
  entry = token_cache.CacheEntry('x', [str(tmp_path / 'text')], vocab, tokenise)
  [entry] = token_cache.open_entries([entry], str(tmp_path / 'cache'), quiet=True)
  assert entry.tokens.dtype == dtype and entry.tokens.tolist() == [size - 1]


def test_the_cache_is_used_again_and_rebuilt_when_the_text_changes(small, monkeypatch):
  open_small(small)
  before = entries(small)
  with monkeypatch.context() as m:
    m.setattr(token_cache, '_make', lambda *_: pytest.fail('made again'))
    open_small(small)
  path = small[0][0].source_files[0]
  stat = os.stat(path)
  with open(path, 'w') as f:
    f.write('de 9\n\nde 3\n')
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time: the content tells
  source, _ = open_small(small)
  assert source.gather(np.array([0]))[0].tolist() == small[1].encode(['de 9'])[0]
  assert len(entries(small)) == len(before) and entries(small) != before  # what the file held before is gone


def test_the_cache_is_rebuilt_for_another_vocabulary(small, tmp_path):
  open_small(small)
  lines = [sentence('zz', i) for i in range(100)]
  write_pair(tmp_path / 'other', 'de-en', 'train', lines, lines)
  other = TaggedVocab(train_vocab(parallel.find_pairs(str(tmp_path / 'other')), str(tmp_path / 'o'), 300))
  source, _ = pair_caches.open_pairs(small[0], (other, other), str(small[2]), quiet=True)[0]
  assert source.gather(np.array([0]))[0].tolist() == other.encode(['de 1'])[0]


@pytest.mark.parametrize('name, left', [('tokens', 2), ('json', 0)])
def test_a_damaged_shard_is_made_again(small, name, left):
  source, _ = open_small(small)
  with open(os.path.join(source.folder, f'00000.{name}'), 'r+b') as f:
    f.truncate(left)
  os.remove(os.path.join(source.folder, 'meta.json'))  # as a crash of the machine may leave it
  again, _ = open_small(small)
  assert again.gather(np.array([0]))[0].tolist() == small[1].encode(['de 1'])[0]


def test_a_flipped_byte_of_any_file_of_the_cache_changes_no_batch(world, tmp_path, monkeypatch):
  monkeypatch.setattr(mt_input, '_SAVE_EVERY', 1)
  config = world[0]
  batches = lambda: [train_input(config, str(tmp_path)).batch(step) for step in (0, 9, 80)]
  expected = batches()
  rng = np.random.default_rng(7)
  paths = [path for path in sorted(tmp_path.rglob('*')) if path.is_file() and path.stat().st_size]
  names = {path.name.partition('-')[0] for path in paths}
  assert names >= {'00000.tokens', '00000.offsets', '00000.json', 'meta.json', 'batches'}
  for path in paths:
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    path.write_bytes(data)
    for found, wanted in zip(batches(), expected, strict=True):
      same(found, wanted)


@pytest.mark.parametrize('name', ['offsets', 'tokens'])
def test_a_damaged_block_alone_is_made_again_when_it_is_read(tmp_path, world, monkeypatch, capsys, name):
  monkeypatch.setattr(blocks, '_BYTES', 64)
  monkeypatch.setattr(token_cache, '_SHARD_BYTES', 2000)
  lines = [sentence('de', i) for i in range(300)]
  write_pair(tmp_path / 'data', 'de-en', 'train', lines, lines)
  vocab, pairs = TaggedVocab(world[0].source_vocab), parallel.find_pairs(str(tmp_path / 'data'))
  opened = lambda: pair_caches.open_pairs(pairs, (vocab, vocab), str(tmp_path / 'cache'))[0][0]
  path = os.path.join(opened().folder, f'00001.{name}')
  before = pathlib.Path(path).read_bytes()
  with open(path, 'r+b') as f:
    f.seek(130)
    f.write(b'\xff\xff')
  source, again = opened(), []
  made = source._shards[1]._tokenised
  monkeypatch.setattr(token_cache._Shard, '_tokenised', lambda self, *lines: again.append(lines) or made(*lines))
  assert capsys.readouterr().err == ''
  assert [*source.gather(np.arange(300))[0]] == [i for line in vocab.encode(lines) for i in line]
  assert f'(block 2 of {path} was changed since it was written); this block is made again' in capsys.readouterr().err
  assert pathlib.Path(path).read_bytes() == before
  [(first, last)] = again
  assert last - first < 15


def test_a_touched_corpus_is_not_tokenised_again(small, monkeypatch):
  open_small(small)
  before = entries(small)
  os.utime(small[0][0].source_files[0])
  monkeypatch.setattr(token_cache, '_make', lambda *args: pytest.fail('made again'))
  open_small(small)
  assert entries(small) == before


def test_what_an_earlier_version_made_is_removed(small):
  source, _ = open_small(small)
  older = pathlib.Path(f'{source.folder[:-16]}{"0" * 16}')
  older.mkdir()
  meta = {'tokens': 3, 'shard_lines': [3], 'files': list(small[0][0].source_files), 'vocab': small[1].fingerprint}
  (older / 'meta.json').write_text(json.dumps(meta))
  shutil.rmtree(source.folder)
  open_small(small)
  assert not older.exists()


@pytest.mark.parametrize('of', [{'vocab': 'of another run'}, {'files': ['/another/train.de']}])
def test_an_entry_of_the_same_name_and_another_vocabulary_or_text_stays(small, of):
  source, _ = open_small(small)
  other = pathlib.Path(f'{source.folder[:-16]}{"0" * 16}')
  shutil.copytree(source.folder, other)
  meta = json_files.parse((other / 'meta.json').read_text())
  (other / 'meta.json').write_text(json_files.dump({**meta, **of}))
  shutil.rmtree(source.folder)
  open_small(small)
  assert other.exists()


def test_the_cache_folder_is_listed_once_for_all_entries(tmp_path, monkeypatch):
  vocab, listed = types.SimpleNamespace(size=9, fingerprint='of it'), []
  lists = files.listdir
  monkeypatch.setattr(files, 'listdir', lambda path: listed.append(path) or lists(path))
  tokenise = lambda parts, _: (
    pair for _ in parts for pair in [(np.array([1]), np.array([1])), (np.array([]), np.array([]))]
  )

  def made(text):
    of_text = []
    for name in 'abcdef':
      (tmp_path / name).write_text(text)
      of_text.append(token_cache.CacheEntry(name, [str(tmp_path / name)], vocab, tokenise))
    listed.clear()
    token_cache.open_entries(of_text, str(tmp_path / 'cache'), quiet=True)
    return listed.count(str(tmp_path / 'cache'))

  assert (made('x\n'), made('yy\n')) == (1, 1)
  assert len([name for name in os.listdir(tmp_path / 'cache') if name != 'hashes.json']) == 6  # the older are gone


def test_what_a_killed_process_claimed_is_taken_over(small):
  folder = pathlib.Path(open_small(small)[0].folder)
  (folder / 'meta.json').unlink()
  (folder / '00000.json').unlink()
  ended = subprocess.Popen(['true'])
  ended.wait()
  (folder / '00000.claim').write_text(f'{socket.gethostname()} {ended.pid} abc')
  assert len(open_small(small)[0]) == 3 and not (folder / '00000.claim').exists()


def test_builders_at_the_same_time_share_the_work(small, monkeypatch):
  monkeypatch.setattr(token_cache, 'WAIT_SECONDS', 0.01)
  monkeypatch.setattr(token_cache, '_SHARD_BYTES', 4)
  made, write = [], token_cache._Shard.write
  monkeypatch.setattr(token_cache._Shard, 'write', lambda self, stream: made.append(self.path) or write(self, stream))
  barrier, results = threading.Barrier(3), []

  def build():
    barrier.wait()
    results.append(open_small(small)[0].gather(np.arange(3))[0].tolist())

  threads = [threading.Thread(target=build) for _ in range(3)]
  for t in threads:
    t.start()
  for t in threads:
    t.join()
  assert len(results) == 3 and results[0] == results[1] == results[2]
  assert len(entries(small)) == 2 and len(made) == len(set(made)) > 4


def test_unequal_sides_and_bad_text_are_refused_while_tokenising(small):
  pairs = small[0]
  with open(pairs[0].target_files[0], 'a') as f:
    f.write('en 4\n')
  with pytest.raises(UserError, match='saw 3 in .* and 4 in'):
    open_small(small)
  with open(pairs[0].target_files[0], 'wb') as f:
    f.write(b'en 1\nen \xff\nen 3\n')
  with pytest.raises(UserError, match='line 2 of .*train.en is not'):
    open_small(small)
  assert not [*small[2].rglob('*.claim'), *small[2].rglob('*.partial')]


def test_a_cache_that_cannot_be_written_is_refused(small, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot write the token cache .*: give another place for it'):
    open_small((small[0], small[1], tmp_path / 'file' / 'cache'))


# The configuration.


@pytest.mark.parametrize(
  'values, message',
  [
    (dict(batch_tokens='4096'), "batch_tokens must be an integer; saw '4096'"),
    (dict(packing=1), 'packing must be True or False; saw 1'),
    (dict(seed=True), 'seed must be an integer; saw True'),
    (dict(temperature=0), 'temperature must be above 0; saw 0.0: 1 keeps'),
    (dict(weights={'de-en': 0}), "weights must be finite numbers above 0; saw (('de-en', 0.0),): a pair that is not"),
    (dict(weights={'de-en': -1, 'fr-en': 1}), 'weights must be finite numbers above 0'),
    (dict(weights={'de-en': float('nan')}), 'weights must be finite numbers; saw'),
    (dict(weights={'de-en': float('inf')}), 'weights must be finite numbers; saw'),
    (dict(weights=(('de-en', 1), ('de-en', 2))), 'weights must be one number for each pair'),
    (dict(weights=3), "weights must be a dict of numbers by name; saw 3: e.g. {'de-en': 3}"),
    (dict(weights={'de-en': '3'}), 'weights must be a dict of numbers by name'),
    (dict(num_groups=0), 'num_groups must be at least 1; saw 0'),
    (dict(batch_tokens=100), 'saw batch_tokens=100 with 1 rows of 128: use at least 128'),
    (dict(eval_batch_tokens=256, num_groups=4), 'eval_batch_tokens=256 with 4 rows of 128: use at least 512'),
    (dict(boundaries=(8, 64)), 'ascending integers that end with max_length=128; saw'),
    (dict(boundaries=(64, 8, 128)), 'ascending integers'),
    (dict(split_files=('dev',)), 'split_files must be'),
    (dict(max_length=2), 'max_length must be at least 3'),
    (dict(character_coverage=1.5), 'character_coverage must be from 0.98 to 1'),
  ],
)
def test_impossible_values_are_refused(values, message):
  with pytest.raises(UserError) as caught:
    DataConfig(**values)
  assert message in str(caught.value)


def test_split_files_may_be_a_dict_or_lists():
  assert DataConfig(split_files={'dev': 'val'}).split_files == (('dev', 'val'),)
  assert DataConfig(split_files=[['dev', 'val']]).split_files == (('dev', 'val'),)


def test_vocabularies_must_be_named(world):
  with pytest.raises(UserError, match='target_vocab must name a SentencePiece .model file'):
    run_vocabs.load(dataclasses.replace(world[0], source_vocab_size=320, target_vocab=''))
