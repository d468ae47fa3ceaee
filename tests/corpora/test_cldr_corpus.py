"""The CLDR corpus: same bytes from the same recipe, clean splits, and sources that determine their English."""

import collections
import functools
import os
import pathlib
import unicodedata

import forks
import killed
import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.cldr import corpus as cldr_corpus
from lingvo_moe.corpora.cldr import phrases as cldr_phrases
from lingvo_moe.corpora.cldr import speaker as cldr_speaker

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_CODES = ['ar', 'de', 'fa', 'sw', 'zh']
_MAX_PAIRS = 600


def _speaker(code):
  return cldr_speaker.Speaker(code, cldr_phrases.INVENTORY)


def _files(directory):
  return {
    str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob('*')) if path.is_file()
  }


def _lines(path):
  text = path.read_text(encoding='utf-8')
  assert text.endswith('\n')
  return text[:-1].split('\n')


def _run(*arguments, **environment):
  return forks.run(
    ['-m', 'lingvo_moe.cli.commands.main', 'cldr', *arguments],
    env={**os.environ, 'PYTHONPATH': str(_ROOT), **environment},
  )


@pytest.fixture(scope='module', autouse=True)
def phrases_are_drawn_once():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cldr_corpus, 'make_phrases', functools.lru_cache(cldr_corpus.make_phrases))
    yield


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  directory = tmp_path_factory.mktemp('cldr') / 'corpus'
  cldr_corpus.make_corpus(str(directory), _CODES, max_pairs=_MAX_PAIRS, progress=False)
  return directory


# Files.


def test_a_language_has_the_same_bytes_in_any_process_and_beside_any_others(corpus, tmp_path):
  done = _run(
    f'--out_dir={tmp_path / "c"}', '--languages=German,zh,ha', f'--max_pairs={_MAX_PAIRS}', PYTHONHASHSEED='123'
  )
  assert done.returncode == 0, done.stderr
  again, first = _files(tmp_path / 'c'), _files(corpus)
  shared = [name for name in first if name.startswith(('de-en/', 'zh-en/'))]
  assert len(shared) == 12
  assert all(again[name] == first[name] for name in shared)
  assert '3 languages' in done.stdout and 'Hausa' in done.stdout


def test_no_held_out_english_is_in_any_training_set(corpus):
  def english(split):
    return {line.lower() for code in _CODES for line in _lines(corpus / f'{code}-en' / f'{split}.en')}

  assert not english('train') & (english('dev') | english('test'))
  assert not english('dev') & english('test')
  assert all(cldr_corpus.split_of(line) == 'test' for line in english('test'))


def test_the_split_sees_neither_case_nor_punctuation():
  assert cldr_corpus.split_of('Peru: 3 days ago') == cldr_corpus.split_of('peru 3 days, ago')


def test_lines_are_paired_and_sizes_follow_the_power_law(corpus):
  for code in _CODES:
    for split, size in ('train', cldr_corpus.train_size(code, _MAX_PAIRS)), ('dev', 100), ('test', 200):
      directory = corpus / f'{code}-en'
      assert len(_lines(directory / f'{split}.{code}')) == len(_lines(directory / f'{split}.en')) == size
  sizes = [cldr_corpus.train_size(code) for code in cldr_corpus.LANGUAGES]
  assert sizes == [10000 * 4 // (rank + 3) for rank in range(1, len(sizes) + 1)]
  assert sizes[0] == 10000 and 200 < sizes[-1] < 400 and len(sizes) > 100


def test_text_is_nfc_with_plain_spaces_and_nothing_invisible(corpus):
  for path in corpus.rglob('*-en/*'):
    for line in _lines(path):
      assert line == unicodedata.normalize('NFC', line) == ' '.join(line.split(' ')).strip()
      assert '  ' not in line and line
      bad = [c for c in line if unicodedata.category(c)[0] in 'CZ' and c not in ' \u200c\u200d']
      assert not bad, (path, line, bad)


def test_no_source_has_two_translations(corpus):
  for code in _CODES:
    sources = [line for split in cldr_corpus.SPLITS for line in _lines(corpus / f'{code}-en' / f'{split}.{code}')]
    assert len(set(sources)) == len(sources)


def test_copying_the_source_scores_low(corpus):
  sacrebleu = pytest.importorskip('sacrebleu')
  for code, bound in ('ar', 15), ('de', 15), ('fa', 2), ('sw', 15), ('zh', 2):
    directory = corpus / f'{code}-en'
    score = sacrebleu.corpus_bleu(_lines(directory / f'test.{code}'), [_lines(directory / 'test.en')]).score
    assert score < bound, code


def test_a_directory_of_something_else_is_refused_and_survives_overwrite(tmp_path):
  (tmp_path / 'thesis.tex').write_text('years of work')
  (tmp_path / 'de-en').mkdir()
  with pytest.raises(UserError, match=r'did not make \(de-en, thesis.tex\).*--overwrite'):
    cldr_corpus.make_corpus(str(tmp_path), ['de'], max_pairs=_MAX_PAIRS, progress=False)
  cldr_corpus.make_corpus(str(tmp_path), ['de'], max_pairs=_MAX_PAIRS, overwrite=True, progress=False)
  assert (tmp_path / 'thesis.tex').read_text() == 'years of work'
  assert len(_lines(tmp_path / 'de-en' / 'train.en')) == cldr_corpus.train_size('de', _MAX_PAIRS)


def test_an_own_directory_is_replaced(tmp_path):
  directory = tmp_path / 'corpus'
  for code in ('de', 'fi'):
    cldr_corpus.make_corpus(str(directory), [code], max_pairs=_MAX_PAIRS, progress=False)
  assert sorted(os.listdir(directory)) == ['cldr_corpus.json', 'fi-en']
  assert os.listdir(tmp_path) == ['corpus']  # nothing temporary stays


def test_an_unknown_language_is_answered_with_the_closest():
  with pytest.raises(UserError, match=r"saw 'Germna'.*closest: .*de \(German\)"):
    cldr_corpus.resolve_languages(['Germna'])
  with pytest.raises(UserError, match="saw 'qq'"):
    cldr_corpus.resolve_languages(['de', 'qq'])
  assert cldr_corpus.resolve_languages(['fra', 'deu', 'Hindi', 'de']) == ['hi', 'fr', 'de']


def test_the_command_answers_mistakes_in_one_line(tmp_path):
  (tmp_path / 'file').write_text('')
  done = _run(f'--out_dir={tmp_path / "file"}')
  assert done.returncode == 1 and done.stderr.count('\n') == 1 and 'is a file: name a directory' in done.stderr


def test_the_quickstart_is_at_least_twelve_languages_apart_in_script_and_size():
  codes = cldr_corpus.QUICKSTART_LANGUAGES
  assert cldr_corpus.resolve_languages(codes) == sorted(codes, key=cldr_corpus.LANGUAGES.index)
  assert len(set(codes)) >= 12
  assert len({cldr_speaker.script_of(code) for code in codes}) >= 8
  sizes = [cldr_corpus.train_size(code) for code in codes]
  assert max(sizes) > 10 * min(sizes)


# What is said.


def test_every_language_can_say_a_third_of_the_phrases():
  phrases = cldr_phrases.Phrases(seed=3)
  drawn = {split: [] for split in cldr_corpus.SPLITS}
  english = _speaker('en')
  for _ in range(50):
    tree = phrases.draw()
    drawn['train'].append(cldr_corpus.Phrase(tree, english.say(tree)))
  said = {code: len(cldr_corpus.translate(code, drawn, 50)['train']) for code in cldr_corpus.LANGUAGES}
  assert min(said.values()) >= 50 * 0.24, collections.Counter(said).most_common()[-5:]  # a sample's error allowed


@pytest.mark.parametrize(
  'code, tree, text',
  [
    ('en', ('date', 'full', 2018, 3, 4), 'Sunday, March 4, 2018'),
    ('de', ('date', 'full', 2018, 3, 4), 'Sonntag, 4. März 2018'),
    ('zh', ('date', 'full', 2018, 3, 4), '2018年3月4日星期日'),
    ('en', ('date', 'MMMEd', 2018, 3, 4), 'Sunday, March 4'),  # abbreviations are written out
    ('en', ('time', 15, 5), '3:05 PM'),  # with an ordinary space
    ('en', ('dates', (2018, 3, 4), (2018, 4, 9)), 'March 4 – April 9, 2018'),
    ('en', ('quantity', '1', 'length-mile'), '1 mile'),
    ('ar', ('quantity', '2', 'duration-day'), 'يومان'),  # the dual states its number
    ('ru', ('quantity', '21', 'duration-day'), '21 день'),
    ('ru', ('quantity', '5', 'duration-day'), '5 дней'),
    ('fa', ('relative', 'past', '12', 'day'), '۱۲ روز پیش'),  # native digits
    ('fr', ('money', '5500', 'TND'), '5 500 dinars tunisiens'),
    ('sw', ('compact', '17000'), 'elfu 17'),  # Babel says 'elfu 1700'
    ('hi', ('compact', '8500000'), '85 लाख'),
    ('ja', ('list', 'or', ('name', 'month', '3'), ('name', 'month', '5')), '3月または5月'),
    ('fr', ('colon', ('name', 'city', 'Africa/Cairo'), ('percent', '7')), 'Le Caire : 7 %'),
  ],
)
def test_a_tree_is_said_as_the_language_says_it(code, tree, text):
  assert _speaker(code).say(tree) == text


@pytest.mark.parametrize(
  'code, tree',
  [
    ('sw', ('dates', (2018, 3, 4), (2018, 4, 9))),  # CLDR: '4 - 9 Apr 2018', without March
    ('he', ('quantity', '1.5', 'nonsense')),
    ('zh', ('compact', '2000')),  # '2000', without a word
    ('ug', ('list', 'standard', ('name', 'month', '3'), ('name', 'month', '5'))),  # CLDR joins with 'and'
    ('rw', ('quantity', '3', 'length-mile')),  # only the root's '3 mi'
    ('rw', ('relative', 'past', '3', 'day')),  # only the root's '-3 d'
  ],
)
def test_what_would_lose_or_borrow_the_english_is_not_said(code, tree):
  with pytest.raises(cldr_speaker.Unspeakable):
    _speaker(code).say(tree)


def test_languages_do_not_leak_into_each_other():
  month = ('name', 'weekday', '0')
  swahili, turkish = _speaker('sw').say(month), _speaker('tr').say(month)
  assert (swahili, turkish) == ('Jumatatu', 'Pazartesi')  # Babel alone gives Turkish the Swahili day


def test_nothing_foreign_is_ever_replaced(tmp_path):
  (tmp_path / 'de-en').mkdir()
  (tmp_path / 'de-en' / 'notes.txt').write_text('mine')
  with pytest.raises(UserError, match='de-en is to be replaced, but holds notes.txt'):
    cldr_corpus.make_corpus(str(tmp_path), ['de'], max_pairs=_MAX_PAIRS, overwrite=True, progress=False)
  assert (tmp_path / 'de-en' / 'notes.txt').read_text() == 'mine'


@pytest.mark.parametrize('beside', [False, True])
def test_a_corpus_killed_at_any_point_is_made_again_and_never_taken_for_another(tmp_path, monkeypatch, beside):
  monkeypatch.setattr(cldr_corpus, 'SPLITS', ('train',))
  monkeypatch.setattr(cldr_corpus, 'make_phrases', lambda seed, max_pairs: seed)
  monkeypatch.setattr(
    cldr_corpus, 'translate', lambda code, seed, size: {s: [(f'{code} {seed}', 'hi')] for s in cldr_corpus.SPLITS}
  )
  out = tmp_path / 'out'
  make = lambda seed, codes: cldr_corpus.make_corpus(str(out), codes, seed, overwrite=True, progress=False)
  recipe = make(1, ['de', 'fr'])['recipe']
  old = _files(out)
  if beside:
    (out / 'notes.txt').write_text('mine')

  olds = []

  def look(number):
    found = _files(out)
    assert not beside or found.pop('notes.txt') == b'mine'
    if cldr_corpus._manifest(str(out))['recipe'] == recipe:
      assert {name: data for name, data in found.items() if name[0] != '.' and not name.endswith('.partial')} == old
      olds.append(number)
    else:
      assert beside or {name.split('/')[0] for name in found} == {'cldr_corpus.json', 'fr-en', 'es-en'}

  assert killed.at_every_point(lambda: make(2, ['fr', 'es']), look) > len(olds) > 10
  assert sorted(os.listdir(tmp_path)) == ['out']
  assert sorted(os.listdir(out)) == ['cldr_corpus.json', 'es-en', 'fr-en', *['notes.txt'] * beside]
  assert (out / 'fr-en' / 'train.fr').read_text() == 'fr 2\n'
