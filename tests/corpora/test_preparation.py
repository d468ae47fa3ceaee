"""Preparation of a corpus: what is dropped and why, splits that share nothing, files that are whole or not there."""

import dataclasses
import gzip
import random
import shutil
import tracemalloc
import unicodedata

import forks
import hypothesis
import killed
import numpy as np
import pytest
import text_lines
from hypothesis import strategies as st

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import near_duplicates, parallel, preparation
from lingvo_moe.corpora.pair_files import Texts
from lingvo_moe.corpora.preparation import LineOutcome

RULES = preparation.Rules(dev=1, test=1, max_chars=30)


def write(path, lines):
  data = b''.join((line if isinstance(line, bytes) else line.encode()) + b'\n' for line in lines)
  path.write_bytes(gzip.compress(data) if path.name.endswith('.gz') else data)
  return str(path)


def texts_of(folder, pairs, names=('a.de', 'a.en')):
  return Texts(*(write(folder / name, side) for name, side in zip(names, zip(*pairs), strict=True)))


def prepare(texts, out, rules=RULES, overwrite=False):
  folder = preparation.check_folder(str(out), texts, overwrite)
  found = preparation.examine(texts, rules)
  preparation.write(texts, found.outcomes, folder)
  return found, {split: read(folder, split, texts.sides) for split in preparation.SPLITS}


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


def test_another_corpus_is_added_and_shares_no_sentence_with_dev_and_test(tmp_path):
  prepare(texts_of(tmp_path, [(f'Satz {i}', f'sentence {i}') for i in range(40)]), tmp_path / 'out')
  folder = tmp_path / 'out' / 'de-en'
  before = {path.name: path.read_bytes() for path in folder.iterdir()}
  dev, test = (read(folder, split, ('de', 'en'))[0] for split in ('dev', 'test'))
  rules = dataclasses.replace(RULES, corpus='bt')
  pairs = [('neu', 'new'), (dev[0].decode(), 'other'), ('anders', test[1].decode()), ('neu 2', 'new 2'), ('', 'x')]
  texts = texts_of(tmp_path, pairs, names=('b.de', 'b.en'))

  def add(overwrite=False):
    preparation.check_folder(str(tmp_path / 'out'), texts, overwrite, rules)
    found = preparation.examine(texts, rules, folder=str(folder))
    preparation.write(texts, found.outcomes, str(folder), rules=rules)
    return found

  found = add()
  assert found.count(LineOutcome.SHARES_SENTENCE) == 2 and found.count(LineOutcome.EMPTY) == 1
  assert read(folder, 'bt', ('de', 'en')) == [(b'neu', b'new'), (b'neu 2', b'new 2')]
  assert {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith('bt.')} == before
  assert preparation.table(found, rules).splitlines()[-1].split() == ['bt', '2']
  with pytest.raises(UserError, match=r'is there already \(bt.de, bt.en\)'):
    add()
  add(overwrite=True)


@pytest.mark.parametrize('held_out_in', [('de-en',), ('de-en', 'en-de')])
def test_a_corpus_in_the_other_direction_goes_into_the_pair_that_is_there(tmp_path, held_out_in):
  out, rules = tmp_path / 'out', dataclasses.replace(RULES, corpus='bt')
  prepare(texts_of(tmp_path, [(f'Satz {i}', f'sentence {i}') for i in range(40)]), out)
  (dev,) = read(out / 'de-en', 'dev', ('de', 'en'))
  held_out = [dev, ('Nur hier', 'only here')][: len(held_out_in)]
  if len(held_out_in) > 1:  # both folders: each is its own, and what either holds out is left out
    text_lines.write(out / 'en-de' / 'test.de', ['Nur hier'])
    text_lines.write(out / 'en-de' / 'test-0.en', ['only here'])
  pairs = [('new', 'neu'), (dev[1].decode(), 'anders'), ('other', dev[0].decode()), ('only here', 'hier')]
  texts = texts_of(tmp_path, pairs, names=('b.en', 'b.de'))
  folder = preparation.check_folder(str(out), texts, False, rules)
  assert folder == str(out / held_out_in[-1])
  found = preparation.examine(texts, rules, folder=folder)
  preparation.write(texts, found.outcomes, folder, rules=rules)
  assert found.count(LineOutcome.SHARES_SENTENCE) == 1 + len(held_out)
  left = [(b'neu', b'new'), (b'hier', b'only here')][: 3 - len(held_out)]
  assert read(folder, 'bt', ('de', 'en')) == left


def test_text_of_the_other_direction_does_not_replace_a_pair(tmp_path):
  prepare(texts_of(tmp_path, GOOD), tmp_path / 'out')
  with pytest.raises(UserError, match=r'out/de-en is there already \(dev.de, dev.en, test.de\)'):
    prepare(texts_of(tmp_path, [(t, s) for s, t in GOOD], ('a.en', 'a.de')), tmp_path / 'out')


@pytest.mark.parametrize(
  'corpus, there, other',
  [
    ('train-bt', [], 'train'),
    ('dev-2', [], 'dev'),
    ('bt', ['train', 'bt-00', 'bt-01'], 'bt-00'),  # it would hide its shards
    ('bt-2', ['bt'], 'bt'),
    ('web', ['web-site'], 'web-site'),
    ('trains', ['train-0'], ''),
    ('bt', ['bt2'], ''),
  ],
)
def test_a_corpus_is_not_named_as_a_shard_of_another(tmp_path, corpus, there, other):
  for stem in there:
    for language in ('de', 'en'):
      text_lines.write(tmp_path / 'out' / 'de-en' / f'{stem}.{language}', ['x'])
  check = lambda: preparation.check_folder(
    str(tmp_path / 'out'), texts_of(tmp_path, GOOD), False, dataclasses.replace(RULES, corpus=corpus)
  )
  if other == '':
    assert check() == str(tmp_path / 'out' / 'de-en')
    return
  with pytest.raises(UserError, match=f'--corpus={corpus}, and {other}: choose another'):
    check()


GOOD = [(f'der Hund {i}', f'the dog {i}') for i in range(6)]


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
  keep = [LineOutcome.TRAIN]
  assert found.outcomes.tolist() == [
    *keep * 6,
    LineOutcome.EMPTY,
    LineOutcome.EMPTY,
    LineOutcome.TOO_LONG,
    *keep,
    LineOutcome.LENGTH_RATIO,
    LineOutcome.NOT_UTF8,
    LineOutcome.DUPLICATE,
    LineOutcome.DUPLICATE,
    *keep,
  ]
  assert found.first_not_utf8 == (f'line 12 of {tmp_path}/a.de',)
  table = preparation.table(found, preparation.Rules(dev=0, test=0, max_chars=30, max_ratio=2.0))
  assert [line.split() for line in table.splitlines()] == [
    ['lines', 'read', '15'],
    ['dropped:', 'not', 'UTF-8,', 'or', 'with', 'NUL', 'bytes', '1', 'first:', 'line', '12', 'of', f'{tmp_path}/a.de'],
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
  found = preparation.examine(texts_of(tmp_path, pairs), preparation.Rules(dev=0, test=0, language_id=False))
  # The ratio of the text is (9 * 101 + 90) / (9 * 11 + 90).
  # 11 characters make 68 expect, and 101 are there; 90 make 485 expect, and 100 are there (10 are added to each).
  assert found.outcomes.tolist() == [LineOutcome.TRAIN] * 9 + [LineOutcome.LENGTH_RATIO]


def key(line):
  kept = ''.join(c for c in line.decode() if unicodedata.category(c) != 'Cf')
  return ' '.join(unicodedata.normalize('NFKC', kept).split())


def check_disjoint(splits):
  for earlier, later in (('train', 'dev'), ('train', 'test'), ('dev', 'test')):
    for side in (0, 1):
      shared = {key(pair[side]) for pair in splits[earlier]} & {key(pair[side]) for pair in splits[later]}
      assert not shared, (earlier, later)


words = st.sampled_from(
  ['a', 'b', 'c', 'a b', 'c c', 'é', 'e\u0301', ' a', 'a\u00a0b', 'a\u200e', '\u200b', '', 'x' * 40]
)


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
  for split, outcome in zip(preparation.SPLITS, (LineOutcome.TRAIN, LineOutcome.DEV, LineOutcome.TEST), strict=True):
    assert splits[split] == [given[i] for i in np.flatnonzero(found.outcomes == outcome)]  # in order, as they were
  stripped = [tuple(key(side.encode()) for side in pair) for pair in pairs]
  for i, outcome in enumerate(found.outcomes):
    if outcome == LineOutcome.DUPLICATE:
      assert stripped[i] in stripped[:i]
    if outcome == LineOutcome.SHARES_SENTENCE:
      held_out = [stripped[j] for j in np.flatnonzero(np.isin(found.outcomes, (LineOutcome.DEV, LineOutcome.TEST)))]
      assert any(stripped[i][0] == s or stripped[i][1] == t for s, t in held_out)


SPELLINGS = (
  lambda s: s.replace(' ', '  ', 1),
  lambda s: s.replace(' ', '\u00a0', 1),
  lambda s: unicodedata.normalize('NFD', s),
  lambda s: s + '\u200e',
  lambda s: s.replace('u', 'u\u200b', 1),
)


def test_no_sentence_of_dev_or_test_is_in_train_in_another_spelling_and_text_is_written_as_it_was(tmp_path):
  pairs = [(f'der Hund läuft {i}', f'the dog runs (naïvely) {i}') for i in range(360)]
  again = [(SPELLINGS[i % 5](s), f'{t}, or so') for i, (s, t) in enumerate(pairs[::9])]
  again += [(f'oder {s}', SPELLINGS[i % 5](t)) for i, (s, t) in enumerate(pairs[1::9])]
  found, splits = prepare(texts_of(tmp_path, pairs + again), tmp_path / 'out', preparation.Rules(dev=240, test=60))
  check_disjoint(splits)
  assert (
    found.count(LineOutcome.DUPLICATE) == 0
    and found.count(LineOutcome.DEV) == 240
    and found.count(LineOutcome.SHARES_SENTENCE) > 0
  )
  written = {pair for split in splits.values() for pair in split}
  assert written <= {(s.encode(), t.encode()) for s, t in pairs + again}


def test_a_pair_in_another_spelling_is_a_duplicate(tmp_path):
  pairs = [*GOOD, *((spell(GOOD[0][0]), spell(GOOD[0][1])) for spell in SPELLINGS)]
  assert preparation.examine(texts_of(tmp_path, pairs), RULES).count(LineOutcome.DUPLICATE) == 5


def test_a_line_of_which_nothing_can_be_seen_is_empty(tmp_path):
  unseen = ['\u2060', '\u200d', '\u00ad', '\ufe0f \u200b', '\x01', '\0']
  pairs = GOOD * 20 + [(line, 'a long sentence of many words') for line in unseen]
  found = preparation.examine(texts_of(tmp_path, pairs), preparation.Rules(dev=0, test=0))
  assert found.outcomes[120:].tolist() == [LineOutcome.EMPTY] * 6


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
  assert found.count(LineOutcome.SHARES_SENTENCE) == 0
  assert b'Ja.' not in {source for source, _ in splits['dev'] + splits['test']}
  # Three translations of each source, and no pair whose sentences are its own: each one held out costs two others.
  pairs = [(f'Satz {i}', f'sentence {i} {j}') for i in range(20) for j in range(3)]
  found, splits = prepare(texts_of(tmp_path, pairs), tmp_path / 'three', preparation.Rules(dev=2, test=3))
  assert found.count(LineOutcome.SHARES_SENTENCE) == 10 and found.count(LineOutcome.TRAIN) == 45
  check_disjoint(splits)


def test_the_trainers_reader_finds_what_was_written_gzip_bom_and_crlf_too(tmp_path):
  pairs = [(f'{i} Ha\u0308user\r', f'{i} houses') for i in range(10)]
  pairs[0] = ('\ufeff' + pairs[0][0], pairs[0][1])
  _, splits = prepare(texts_of(tmp_path, pairs, ('x.deu.gz', 'x.en')), tmp_path / 'out')
  for split in preparation.SPLITS:
    (pair,) = parallel.find_pairs(str(tmp_path / 'out'), '', split)
    assert pair.name == 'deu-en'
    source, target = parallel.read_pair(pair)
    assert [(s.encode(), t.encode()) for s, t in zip(source, target, strict=True)] == splits[split]
  everything = sorted(line for split in splits.values() for line, _ in split)
  assert everything == sorted(f'{i} Ha\u0308user'.encode() for i in range(10))  # not normalised; no mark, no CR


def test_columns_of_one_file(tmp_path):
  rows = [f'{i}\tder Hund {i}\tx\tthe dog {i}' for i in range(5)] + ['6\tno more columns']
  texts = Texts(tsv=write(tmp_path / 'a.tsv', rows), columns=(4, 2), pair='en-de')
  found = preparation.examine(texts, RULES)
  assert found.count(LineOutcome.COLUMN_MISSING) == 1 and found.count(LineOutcome.TRAIN) == 3
  preparation.write(texts, found.outcomes, str(tmp_path / 'out' / 'en-de'))
  assert all(
    s.replace(b'the dog', b'der Hund') == t for s, t in read(tmp_path / 'out' / 'en-de', 'train', ('en', 'de'))
  )
  with pytest.raises(UserError, match='two different languages must be named, .*; saw a.tsv: give e.g. --pair=de-en'):
    Texts(tsv=texts.paths[0])


def test_mistakes_are_answered(tmp_path):
  texts = texts_of(tmp_path, GOOD)
  with pytest.raises(UserError, match='no such file: nowhere.de'):
    Texts('nowhere.de', 'nowhere.en')
  with pytest.raises(UserError, match='two files or from one of pairs'):
    Texts(texts.paths[0])
  with pytest.raises(UserError, match='must be two files'):
    Texts(texts.paths[0], texts.paths[0], pair='de-en')
  for columns in ((2, 2), ('de', 'de'), (0, 1), (-1, 1), ('1', 'en'), ('de',)):
    with pytest.raises(UserError, match='two different numbers'):
      Texts(tsv=texts.paths[0], columns=columns, pair='de-en')
  for pair in ('de', 'de-de', '../x-en'):
    with pytest.raises(UserError, match='give e.g. --pair=de-en'):
      Texts(*texts.paths, pair=pair)
  with pytest.raises(UserError, match='saw 6 pairs that are fit to keep, of 6, for --dev=3 --test=3: give more text'):
    preparation.examine(texts, preparation.Rules(dev=3, test=3))


@pytest.mark.parametrize('lengths', [(4, 6), (6, 4), (5000, 4), (4096, 8192 + 3), (0, 3)])
def test_different_numbers_of_lines_are_refused(tmp_path, lengths):
  files = [write(tmp_path / f'a.{x}', [f'{i}' for i in range(n)]) for x, n in zip(('de', 'en'), lengths, strict=True)]
  with pytest.raises(UserError, match=f'saw {lengths[0]} in .*a.de and {lengths[1]} in .*a.en: align them'):
    preparation.examine(Texts(*files), RULES)


def test_a_file_of_another_encoding_is_refused_but_a_few_bad_lines_are_dropped(tmp_path):
  good = [(f'der Hund {i}', f'the dog {i}') for i in range(397)]
  texts = texts_of(tmp_path, good + [(b'sch\xf6n', 'fine'), (b'sch\xf6n', 'nice'), ('sch\0n', 'NUL')])
  assert preparation.examine(texts, RULES).count(LineOutcome.NOT_UTF8) == 3
  texts = texts_of(tmp_path, good[:125] + [(f'sch\xf6n {i}'.encode('latin1'), f'fine {i}') for i in range(275)])
  with pytest.raises(
    UserError, match=r'275 of 400 lines are not, first line 126 of .*a\.de \(byte 4.*iconv -f ENCODING'
  ):
    preparation.examine(texts, RULES)


def test_dev_and_test_take_a_tenth_each_of_a_small_text_and_as_many_as_are_asked_for(tmp_path):
  texts = texts_of(tmp_path, [(f'der Hund {i}', f'the dog {i}') for i in range(300)])
  found = preparation.examine(texts, preparation.Rules())
  assert [found.count(outcome) for outcome in (LineOutcome.TRAIN, LineOutcome.DEV, LineOutcome.TEST)] == [240, 30, 30]
  assert '--dev=N for another number' in preparation.table(found, preparation.Rules())
  rules = preparation.Rules(dev=100)
  found = preparation.examine(texts, rules)
  assert [found.count(outcome) for outcome in (LineOutcome.TRAIN, LineOutcome.DEV, LineOutcome.TEST)] == [170, 100, 30]
  assert '--dev=N' not in preparation.table(found, rules)


def test_targets_that_are_their_sources_are_warned_of(tmp_path):
  copies = [(f'the dog {i}', f'the  dog {i}') for i in range(30)]
  found = preparation.examine(texts_of(tmp_path, copies), RULES)
  assert preparation.warning(found).startswith('warning: 30 of 30 targets equal their sources')
  others = [(f'der Hund {i}', f'the dog {i}') for i in range(100)]
  assert not preparation.warning(preparation.examine(texts_of(tmp_path, copies[:5] + others[30:]), RULES))


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
  mine = Texts(str(folder / 'train.de'), str(folder / 'train.en'))
  linked = [tmp_path / 'linked.de', tmp_path / 'linked.en']
  for link in linked:
    link.symlink_to(folder / f'train{link.suffix}')
  (tmp_path / 'way').symlink_to(tmp_path / 'out')
  round_about = [tmp_path / 'way' / 'de-en' / 'train.de', tmp_path / 'out' / '..' / 'out' / 'de-en' / 'train.en']
  for text in mine, Texts(*map(str, linked)), Texts(*map(str, round_about), pair='de-en'):
    with pytest.raises(UserError, match='holds the text to prepare'):
      prepare(text, tmp_path / 'out', overwrite=True)
  assert len(read(folder, 'train', ('de', 'en'))) == 4


def test_nothing_is_left_of_a_preparation_that_fails(tmp_path):
  texts = texts_of(tmp_path, GOOD)
  found = preparation.examine(texts, RULES)
  texts_of(tmp_path, GOOD[:3])
  with pytest.raises(UserError, match='had 6 lines at first, and 3 a moment later'):
    preparation.write(texts, found.outcomes, str(tmp_path / 'out' / 'de-en'))
  assert list((tmp_path / 'out').iterdir()) == []


def test_memory_grows_by_less_than_50_bytes_a_line(tmp_path, monkeypatch):
  monkeypatch.setattr(preparation, '_CHUNK', 1 << 12)

  def peak(lines):
    texts = texts_of(tmp_path, [(f'der Satz {i} ist lang ' * 2, f'sentence {i} is long ' * 2) for i in range(lines)])
    tracemalloc.start()
    preparation.examine(texts, preparation.Rules(dev=100, test=100, language_id=False))
    try:
      return tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()

  assert (peak(60_000) - peak(20_000)) / 40_000 < 50


GERMAN = [
  'Der alte Hund schläft unter dem großen Baum im Garten.',
  'Wir haben gestern das Auto in die Werkstatt gebracht.',
]
ENGLISH = ['The old dog sleeps under the big tree in the garden.', 'Yesterday we brought the car to the workshop.']


def outcomes(folder, pairs, names=('a.de', 'a.en'), **rules):
  return preparation.examine(
    texts_of(folder, pairs, names), preparation.Rules(**{'dev': 0, 'test': 0, **rules})
  ).outcomes


def test_lines_surely_in_another_language_are_dropped(tmp_path, monkeypatch):
  right = list(zip(GERMAN, ENGLISH))
  pairs = [*right, (ENGLISH[0], ENGLISH[0]), (GERMAN[0], GERMAN[1]), ('Ok, the end.', 'Ok, fin.')]
  expected = [0, 0, LineOutcome.LANGUAGE, LineOutcome.LANGUAGE, 0]
  assert outcomes(tmp_path, pairs).tolist() == expected
  assert outcomes(tmp_path, pairs, ('a.deu', 'a.eng_Latn')).tolist() == expected
  assert outcomes(tmp_path, pairs, ('a.xx', 'a.yy')).tolist() == [0] * 5  # nothing is known of these
  assert outcomes(tmp_path, pairs, language_id=False).tolist() == [0] * 5
  found = preparation.examine(
    texts_of(tmp_path, pairs, ('a.xx', 'a.en-GB')), preparation.Rules(dev=0, test=0, max_ratio=99)
  )
  kept = [line.split(None, 6) for line in preparation.table(found, preparation.Rules()).splitlines() if 'told' in line]
  assert [row[-1] for row in kept] == ['4  xx: py3langid does not know it', '4  en-GB: told as en']
  monkeypatch.setattr(preparation, '_IDENTIFIED_BYTES', 100)
  found = preparation.examine(texts_of(tmp_path, pairs), preparation.Rules(dev=0, test=0))
  assert found.count(LineOutcome.LANGUAGE) == 0
  assert preparation.table(found, preparation.Rules()).splitlines()[-1].startswith('languages were not identified: --')
  monkeypatch.setattr(preparation.language_id, 'is_installed', lambda: False)
  with pytest.raises(UserError, match='--language_id needs py3langid, which is not installed'):
    outcomes(tmp_path, pairs, language_id=True)


def test_boilerplate_on_one_side_is_dropped_but_not_a_short_answer(tmp_path):
  cookies, yes = 'This site uses cookies to serve you.', 'Yes, of course.'
  pairs = [(f'Satz {i} von vielen', target) for i in range(4) for target in (cookies, yes, f'sentence {i} of many')]
  rules = {'max_partners': 3, 'language_id': False, 'max_ratio': 9}
  assert outcomes(tmp_path, pairs, **rules).tolist() == [LineOutcome.BOILERPLATE, 0, 0] * 4
  assert outcomes(tmp_path, pairs[:9], **rules).tolist() == [0] * 9


def test_near_duplicates_are_dropped_where_that_is_asked(tmp_path):
  long = 'Am Abend saßen die drei Freunde lange am Feuer und erzählten einander von ihren Reisen durch den Norden'
  pairs = [(f'{long} {i}.', f'{long} {i}.') for i in range(5)] + [(GERMAN[0], ENGLISH[0])]
  assert outcomes(tmp_path, pairs, language_id=False).tolist() == [0] * 6
  expected = [0, *[LineOutcome.NEAR_DUPLICATE] * 4, 0]
  assert outcomes(tmp_path, pairs, language_id=False, near_duplicates=0.8).tolist() == expected


def test_keys_of_near_duplicates_depend_on_the_text_alone_and_find_the_similar():
  texts = ['', 'a', *GERMAN, *ENGLISH, GERMAN[0] + '!']
  found = near_duplicates.keys(texts, 0.9)
  assert found.shape == (len(texts), near_duplicates.BANDS)
  for i, text in enumerate(texts):
    np.testing.assert_array_equal(near_duplicates.keys([text], 0.9)[0], found[i])
  alike = (found[:, np.newaxis] == found).any(2)
  assert alike[2, 6] and alike.sum() == len(texts) + 2


def test_the_command(tmp_path):
  texts = texts_of(tmp_path, [(f'{s} {i}', f'{t} {i}') for s, t in GOOD for i in range(10)])
  command = ['-m', 'lingvo_moe.cli.commands.main', 'prepare', '--source=a.de', '--target=a.en', '--out=DATA']
  run = lambda *more: forks.run([*command, *more], cwd=tmp_path, timeout=100)
  done = run('--dev=5', '--test=7')
  few = 'warning: max_steps is chosen for corpora of at least 100 lines; saw 48, from which no model learns'
  assert done.returncode == 0 and done.stderr.startswith(few) and done.stderr.count('\n') == 1, done.stderr
  assert done.stdout.splitlines()[0].split() == ['lines', 'read', '60']
  starts = '  lingvo-moe train --model=mt.starter.MoE8E --data_dir='
  assert done.stdout.splitlines()[-1] == f'{starts}DATA --logdir=runs/de-en'
  assert len(read(tmp_path / 'DATA' / 'de-en', 'test', ('de', 'en'))) == 7
  spaced = run('--dev=0', '--test=7', '--out=MY DATA')
  (command_line,) = [line for line in spaced.stdout.splitlines() if 'lingvo-moe train' in line]
  assert command_line == f"{starts}'MY DATA' --logdir=runs/de-en"
  assert run('--pair=de-nl').stdout.splitlines()[-1] == f'{starts}DATA --logdir=runs/all'  # every pair of the folder
  shutil.rmtree(tmp_path / 'DATA' / 'de-nl')
  refused = run()
  assert refused.returncode == 1 and refused.stderr.startswith('error: DATA/de-en is there already')
  assert 'corpora=train 1; web 1"' in run('--corpus=web').stdout
  refused = run('--corpus=train-bt')
  assert refused.returncode == 1 and 'saw --corpus=train-bt, and train: choose another name' in refused.stderr
  for language in ('de', 'en'):  # what is in shards is one corpus
    whole = tmp_path / 'DATA' / 'de-en' / f'train.{language}'
    (tmp_path / 'DATA' / 'de-en' / f'train-01.{language}').write_bytes(whole.read_bytes())
    whole.rename(whole.with_name(f'train-00.{language}'))
  added = run('--corpus=bt')
  assert not added.stderr and 'corpora=train 1; bt 1; web 1"' in added.stdout
  alone = run('--corpus=bt', '--out=ALONE')
  assert 'corpora=bt 1"' in alone.stdout and alone.stderr.startswith('warning: the folder has no dev or test yet')
  assert texts.bytes() > 0


def test_the_command_prints_why_all_was_dropped(tmp_path):
  texts_of(tmp_path, [('', t) for _, t in GOOD])
  command = ['-m', 'lingvo_moe.cli.commands.main', 'prepare', '--source=a.de', '--target=a.en', '--out=DATA']
  done = forks.run(command, cwd=tmp_path)
  assert done.returncode == 1 and 'dropped: empty' in done.stdout
  assert done.stderr.startswith('error: dev and test') and 'saw 0 pairs that are fit to keep, of 6' in done.stderr


@pytest.mark.parametrize('there', [False, True])
def test_a_preparation_killed_at_any_point_leaves_a_whole_corpus_or_none_and_the_next_one_nothing_else(tmp_path, there):
  old, new = texts_of(tmp_path, GOOD), texts_of(tmp_path, [(s + '!', t) for s, t in GOOD], ('b.de', 'b.en'))
  out = tmp_path / 'out'
  _, before = prepare(old, tmp_path / 'other')
  _, after = prepare(new, tmp_path / 'another')
  if there:
    prepare(old, out)
  seen = []

  def look(number):
    if (out / 'de-en').exists():
      seen.append({split: read(out / 'de-en', split, ('de', 'en')) for split in preparation.SPLITS})
    else:
      seen.append(None)

  assert killed.at_every_point(lambda: prepare(new, out, overwrite=True), look) > 6
  assert all(found in ((before, after) if there else (None, after)) for found in seen)
  assert [path.name for path in out.iterdir()] == ['de-en']
  assert {split: read(out / 'de-en', split, ('de', 'en')) for split in preparation.SPLITS} == after
