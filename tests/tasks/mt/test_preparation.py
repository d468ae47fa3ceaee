"""Preparation of a corpus: what is dropped and why, splits that share nothing, files that are whole or not there."""

from __future__ import annotations

import gzip
import random
import shlex
import subprocess
import sys
import tracemalloc

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import text
from lingvo_moe.tasks.mt import corpus
from lingvo_moe.tasks.mt import preparation
from lingvo_moe.tasks.mt.preparation import Fate

RULES = preparation.Rules(dev=1, test=1, max_chars=30)


def write(path, lines):
  data = b''.join((line if isinstance(line, bytes) else line.encode()) + b'\n' for line in lines)
  path.write_bytes(gzip.compress(data) if path.name.endswith('.gz') else data)
  return str(path)


def texts_of(folder, pairs, names=('a.de', 'a.en')):
  return preparation.Texts(*(write(folder / name, side) for name, side in zip(names, zip(*pairs), strict=True)))


def prepare(texts, out, rules=RULES, overwrite=False):
  sides = preparation.languages(texts)
  folder = preparation.check_folder(str(out), '-'.join(sides), texts, sides, overwrite)
  found = preparation.examine(texts, rules)
  preparation.write(texts, found.fates, folder, sides)
  return found, {split: read(folder, split, sides) for split in preparation.SPLITS}


def read(folder, split, sides):
  """The pairs of a split, as bytes without line ends."""
  columns = []
  for language in sides:
    try:
      with open(f'{folder}/{split}.{language}', 'rb') as f:
        columns.append(f.read().split(b'\n')[:-1])
    except FileNotFoundError:
      columns.append([])
  return list(zip(*columns, strict=True))


GOOD = [(f'der Hund {i}', f'the dog {i}') for i in range(6)]


@pytest.mark.parametrize('encoding', ['utf-16-le', 'utf-16-be'])
def test_utf_16_is_told_with_the_command_that_converts_it(tmp_path, encoding):
  texts = texts_of(tmp_path, [(('\ufeff' + a).encode(encoding), b) for a, b in GOOD])
  with pytest.raises(UserError, match=r'a\.de begins as UTF-16 does: convert it, e\.g\. with iconv -f utf-16 -t utf-8'):
    preparation.examine(texts, RULES)
  with pytest.raises(UserError, match=r'line 1 of .*a\.de is not .*: convert it, e\.g\. with iconv -f utf-16 -t utf-8'):
    list(text.line_batches(texts.paths[0]))


def test_every_reason_by_hand(tmp_path):
  pairs = [
    *GOOD,
    ('Katze', ''),  # 6
    (' \u3000 ', 'blank of spaces, one of them ideographic'),  # 7: empty comes before too long
    ('x' * 31, 'the limit is 30'),  # 8
    ('y' * 30, 'z' * 30),  # 9: on the limit
    ('Ja', 'a b c d e f g h i j k l m n'),  # 10: 27 and 10 characters against 2 * 1.0x and 10
    (b'caf\xe9 latin1', 'coffee'),  # 11
    GOOD[0],  # 12
    ('  der Hund 0 ', 'the dog 0'),  # 13: spaces around do not count
    ('der Hund 0', 'the dogs 0'),  # 14: no duplicate, as the pair is new
  ]
  found = preparation.examine(texts_of(tmp_path, pairs), preparation.Rules(dev=0, test=0, max_chars=30, max_ratio=2.0))
  keep = [Fate.TRAIN]
  assert found.fates.tolist() == [
    *keep * 6,
    Fate.EMPTY,
    Fate.EMPTY,
    Fate.TOO_LONG,
    *keep,
    Fate.LENGTH_RATIO,
    Fate.NOT_UTF8,
    Fate.DUPLICATE,
    Fate.DUPLICATE,
    *keep,
  ]
  assert found.first_not_utf8 == (f'line 12 of {tmp_path}/a.de',)
  table = preparation.table(found, preparation.Rules(dev=0, test=0, max_chars=30, max_ratio=2.0))
  assert [line.split() for line in table.splitlines()] == [
    ['lines', 'read', '15'],
    ['dropped:', 'not', 'UTF-8', '1', 'first:', 'line', '12', 'of', f'{tmp_path}/a.de'],
    ['dropped:', 'empty', '2'],
    ['dropped:', 'over', '30', 'characters', '1'],
    ['dropped:', 'length', 'ratio', 'over', '2', '1'],
    ['dropped:', 'duplicate', '2'],
    ['train', '8'],
    ['dev', '0'],
    ['test', '0'],
  ]


def test_a_language_of_few_characters_is_not_to_blame(tmp_path):
  """Ten times as long is the rule here; what is as long as its source stands out."""
  pairs = [('漢' * 10 + chr(0x4E00 + i), 'x' * 100 + str(i)) for i in range(9)] + [('國' * 90, 'y' * 90)]
  found = preparation.examine(texts_of(tmp_path, pairs), preparation.Rules(dev=0, test=0))
  assert found.ratio == pytest.approx((9 * 101 + 90) / (9 * 11 + 90))
  # 11 characters make 68 expect, and 101 are there; 90 make 485 expect, and 100 are there (10 are added to each).
  assert found.fates.tolist() == [Fate.TRAIN] * 9 + [Fate.LENGTH_RATIO]


def check_disjoint(splits):
  for earlier, later in (('train', 'dev'), ('train', 'test'), ('dev', 'test')):
    for side in (0, 1):
      shared = {pair[side].strip() for pair in splits[earlier]} & {pair[side].strip() for pair in splits[later]}
      assert not shared, (earlier, later)


words = st.sampled_from(['a', 'b', 'c', 'a b', 'c c', 'é', 'e\u0301', ' a', '', 'x' * 40])


@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.lists(st.tuples(words, words), min_size=1, max_size=30), st.integers(0, 2), st.integers(0, 2))
def test_splits_share_no_sentence_and_no_line_is_made_up(tmp_path, pairs, dev, test):
  rules = preparation.Rules(dev=dev, test=test, max_chars=30, max_ratio=100)
  try:
    found, splits = prepare(texts_of(tmp_path, pairs), tmp_path / 'out', rules, overwrite=True)
  except UserError as e:
    assert 'must leave pairs to train on' in str(e)
    return
  check_disjoint(splits)
  assert (len(splits['dev']), len(splits['test'])) == (dev, test)
  given = [tuple(side.encode() for side in pair) for pair in pairs]
  for split, fate in zip(preparation.SPLITS, (Fate.TRAIN, Fate.DEV, Fate.TEST), strict=True):
    assert splits[split] == [given[i] for i in np.flatnonzero(found.fates == fate)]  # in order, as they were
  stripped = [tuple(side.strip() for side in pair) for pair in pairs]
  for i, fate in enumerate(found.fates):
    if fate == Fate.DUPLICATE:
      assert stripped[i] in stripped[:i]
    if fate == Fate.SHARES_SENTENCE:
      held_out = [stripped[j] for j in np.flatnonzero(np.isin(found.fates, (Fate.DEV, Fate.TEST)))]
      assert any(stripped[i][0] == s or stripped[i][1] == t for s, t in held_out)


def corpus_of(lines, seed=0):
  rng = random.Random(seed)
  numbers = [rng.randrange(lines // 2) for _ in range(lines)]
  return [(f'der Satz {n} hat {n % 7} Wörter', f'sentence {n} has {rng.randrange(3)} words') for n in numbers]


def test_dev_and_test_do_not_depend_on_the_order_of_lines_but_on_the_seed(tmp_path):
  pairs = corpus_of(600)
  rules = preparation.Rules(dev=20, test=30)
  held_out = lambda splits: {split: set(splits[split]) for split in ('dev', 'test')}
  one = held_out(prepare(texts_of(tmp_path, pairs), tmp_path / '1', rules)[1])
  assert [len(one[split]) for split in ('dev', 'test')] == [20, 30]
  other = held_out(prepare(texts_of(tmp_path, pairs[::-1]), tmp_path / '2', rules)[1])
  assert one == other
  seeded = held_out(prepare(texts_of(tmp_path, pairs), tmp_path / '3', preparation.Rules(20, 30, seed=2))[1])
  assert not one['test'] & seeded['test'] or one['test'] != seeded['test']
  more = held_out(prepare(texts_of(tmp_path, pairs), tmp_path / '4', preparation.Rules(40, 30))[1])
  assert more['test'] == one['test'] and more['dev'] > one['dev']


def test_held_out_pairs_cost_training_nothing_where_sentences_are_their_own(tmp_path):
  pairs = [(f'einer {i}', f'one {i}') for i in range(50)] + [('Ja.', f'Yes, {i}.') for i in range(50)]
  found, splits = prepare(texts_of(tmp_path, pairs), tmp_path / 'out', preparation.Rules(dev=10, test=10))
  assert found.count(Fate.SHARES_SENTENCE) == 0
  assert b'Ja.' not in {source for source, _ in splits['dev'] + splits['test']}
  # Three translations of each source, and no pair whose sentences are its own: each one held out costs two others.
  pairs = [(f'Satz {i}', f'sentence {i} {j}') for i in range(20) for j in range(3)]
  found, splits = prepare(texts_of(tmp_path, pairs), tmp_path / 'three', preparation.Rules(dev=2, test=3))
  assert found.count(Fate.SHARES_SENTENCE) == 10 and found.count(Fate.TRAIN) == 45
  check_disjoint(splits)


def test_the_trainers_reader_finds_what_was_written_gzip_bom_and_crlf_too(tmp_path):
  pairs = [(f'{i} Ha\u0308user\r', f'{i} houses') for i in range(10)]
  pairs[0] = ('\ufeff' + pairs[0][0], pairs[0][1])
  _, splits = prepare(texts_of(tmp_path, pairs, ('x.deu.gz', 'x.en')), tmp_path / 'out')
  for split in preparation.SPLITS:
    (pair,) = corpus.find_pairs(str(tmp_path / 'out'), '', split)
    assert pair.name == 'deu-en'
    source, target = corpus.read_pair(pair)
    assert [(s.encode(), t.encode()) for s, t in zip(source, target, strict=True)] == splits[split]
  everything = sorted(line for split in splits.values() for line, _ in split)
  assert everything == sorted(f'{i} Ha\u0308user'.encode() for i in range(10))  # not normalised; no mark, no CR


def test_columns_of_one_file(tmp_path):
  rows = [f'{i}\tder Hund {i}\tx\tthe dog {i}' for i in range(5)] + ['6\tno more columns']
  texts = preparation.Texts(tsv=write(tmp_path / 'a.tsv', rows), columns=(4, 2))
  found = preparation.examine(texts, RULES)
  assert found.count(Fate.COLUMN_MISSING) == 1 and found.count(Fate.TRAIN) == 3
  preparation.write(texts, found.fates, str(tmp_path / 'out' / 'en-de'), ('en', 'de'))
  assert all(
    s.replace(b'the dog', b'der Hund') == t for s, t in read(tmp_path / 'out' / 'en-de', 'train', ('en', 'de'))
  )
  with pytest.raises(UserError, match='two different languages must be named, .*; saw a.tsv: give e.g. --pair=de-en'):
    preparation.languages(texts)
  assert preparation.languages(texts, 'en-de') == ('en', 'de')


def test_mistakes_are_answered(tmp_path):
  texts = texts_of(tmp_path, GOOD)
  with pytest.raises(UserError, match='no such file: nowhere.de'):
    preparation.Texts('nowhere.de', 'nowhere.en')
  with pytest.raises(UserError, match='two files or from one of columns'):
    preparation.Texts(texts.paths[0])
  with pytest.raises(UserError, match='must be two files'):
    preparation.Texts(texts.paths[0], texts.paths[0])
  with pytest.raises(UserError, match='two different numbers'):
    preparation.Texts(tsv=texts.paths[0], columns=(2, 2))
  for pair in ('de', 'de-de', 'zh-Hans-en', '../x-en'):
    with pytest.raises(UserError, match='give e.g. --pair=de-en'):
      preparation.languages(texts, pair)
  with pytest.raises(UserError, match='saw 6 pairs that are fit to keep, of 6, for --dev=3 --test=3: give more text'):
    preparation.examine(texts, preparation.Rules(dev=3, test=3))


@pytest.mark.parametrize('lengths', [(4, 6), (6, 4), (5000, 4), (4096, 8192 + 3), (0, 3)])
def test_different_numbers_of_lines_are_refused(tmp_path, lengths):
  files = [write(tmp_path / f'a.{x}', [f'{i}' for i in range(n)]) for x, n in zip(('de', 'en'), lengths, strict=True)]
  with pytest.raises(UserError, match=f'saw {lengths[0]} in .*a.de and {lengths[1]} in .*a.en: align them'):
    preparation.examine(preparation.Texts(*files), RULES)


def test_an_existing_folder_is_kept_unless_it_is_empty_or_may_be_replaced(tmp_path):
  texts = texts_of(tmp_path, GOOD)
  folder = tmp_path / 'out' / 'de-en'
  folder.mkdir(parents=True)
  _, first = prepare(texts, tmp_path / 'out')
  with pytest.raises(UserError, match='is there already .*say --overwrite'):
    prepare(texts, tmp_path / 'out')
  other = texts_of(tmp_path, [(s + '!', t) for s, t in GOOD], ('b.de', 'b.en'))
  _, second = prepare(other, tmp_path / 'out', overwrite=True)
  assert first != second and sorted(p.name for p in (tmp_path / 'out').iterdir()) == ['de-en']
  (folder / 'notes.txt').touch()
  with pytest.raises(UserError, match='holds notes.txt'):
    prepare(texts, tmp_path / 'out', overwrite=True)
  (folder / 'notes.txt').unlink()
  mine = preparation.Texts(str(folder / 'train.de'), str(folder / 'train.en'))
  with pytest.raises(UserError, match='holds the text to prepare'):
    prepare(mine, tmp_path / 'out', overwrite=True)


def test_nothing_is_left_of_a_preparation_that_fails(tmp_path):
  texts = texts_of(tmp_path, GOOD)
  found = preparation.examine(texts, RULES)
  texts_of(tmp_path, GOOD[:3])
  with pytest.raises(UserError, match='had 6 lines at first, and 3 a moment later'):
    preparation.write(texts, found.fates, str(tmp_path / 'out' / 'de-en'), ('de', 'en'))
  assert list((tmp_path / 'out').iterdir()) == []


def test_memory_grows_by_less_than_50_bytes_a_line(tmp_path, monkeypatch):
  monkeypatch.setattr(preparation, '_CHUNK', 1 << 12)

  def peak(lines):
    texts = texts_of(tmp_path, [(f'der Satz {i} ist lang ' * 2, f'sentence {i} is long ' * 2) for i in range(lines)])
    tracemalloc.start()
    preparation.examine(texts, preparation.Rules(dev=100, test=100))
    try:
      return tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()

  assert (peak(60_000) - peak(20_000)) / 40_000 < 50


def test_the_command(tmp_path):
  texts = texts_of(tmp_path, [(f'{s} {i}', f'{t} {i}') for s, t in GOOD for i in range(10)])
  command = [sys.executable, '-m', 'lingvo_moe.commands.prepare', '--source=a.de', '--target=a.en', '--out=DATA']
  run = lambda *more: subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=100)
  done = run('--dev=5', '--test=7')
  assert done.returncode == 0 and not done.stderr, done.stderr
  assert done.stdout.splitlines()[0].split() == ['lines', 'read', '60']
  assert '--set pairs=de-en --set eval_sentences=0 --data_dir=DATA' in done.stdout.splitlines()[-1]
  assert len(read(tmp_path / 'DATA' / 'de-en', 'test', ('de', 'en'))) == 7
  spaced = run('--dev=0', '--test=7', '--out=MY DATA')
  (command_line,) = [line for line in spaced.stdout.splitlines() if 'lingvo-moe train' in line]
  assert '--set dev_lines=2 --data_dir=' in command_line and '--data_dir=MY DATA' in shlex.split(command_line)
  refused = run()
  assert refused.returncode == 1 and refused.stderr.startswith('error: DATA/de-en is there already')
  assert texts.bytes() > 0
