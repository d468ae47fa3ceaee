"""Corpora: pairs and files in each layout, and error messages for damaged text."""

import ast
import bz2
import gzip
import lzma
import re

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, text


def write(path, lines):
  path.parent.mkdir(parents=True, exist_ok=True)
  data = ''.join(line + '\n' for line in lines).encode()
  path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)


@pytest.fixture
def folders(tmp_path):
  for pair in ('deu-en', 'fra-en', 'en-deu'):
    source, target = pair.split('-')
    write(tmp_path / pair / f'train.{source}.gz', ['a', 'b'])
    write(tmp_path / pair / f'train.{target}.gz', ['x', 'y'])
  write(tmp_path / 'deu-en' / 'dev.deu', ['c'])
  write(tmp_path / 'deu-en' / 'dev.en', ['z'])
  return tmp_path


@pytest.fixture
def plain(tmp_path):
  for language in ('cs', 'de', 'en'):
    write(tmp_path / f'train.{language}.gz', ['a', 'b'])
    write(tmp_path / f'val.{language}', ['c'])
  return tmp_path


def names(pairs):
  return [pair.name for pair in pairs]


def test_without_names_every_folder_is_a_pair(folders):
  assert names(parallel.find_pairs(str(folders))) == ['deu-en', 'en-deu', 'fra-en']


def test_names_and_globs_choose(folders):
  assert names(parallel.find_pairs(str(folders), '*-en')) == ['deu-en', 'fra-en']
  assert names(parallel.find_pairs(str(folders), 'fra-en, en-*')) == ['en-deu', 'fra-en']


def test_a_folder_serves_the_other_direction_where_that_has_none_of_its_own(folders):
  (pair,) = parallel.find_pairs(str(folders), 'en-fra')
  assert (pair.name, pair.source, pair.target) == ('en-fra', 'en', 'fra')
  assert pair.source_files == (str(folders / 'fra-en' / 'train.en.gz'),)
  (own,) = parallel.find_pairs(str(folders), 'en-deu')
  assert own.source_files == (str(folders / 'en-deu' / 'train.en.gz'),)
  assert names(parallel.find_pairs(str(folders), 'en-f*')) == ['en-fra']


def test_plain_files_make_a_pair_in_either_direction(plain):
  (pair,) = parallel.find_pairs(str(plain), 'en-de')
  assert (pair.source, pair.target) == ('en', 'de')
  assert pair.source_files == (str(plain / 'train.en.gz'),) and pair.target_files == (str(plain / 'train.de.gz'),)
  assert names(parallel.find_pairs(str(plain), '*-en')) == ['cs-en', 'de-en']


def test_a_split_may_have_another_prefix_and_a_prefix_is_a_split(plain):
  mapped = parallel.find_pairs(str(plain), 'de-en', 'dev', {'dev': 'val'})
  direct = parallel.find_pairs(str(plain), 'de-en', 'val')
  assert mapped[0].source_files == direct[0].source_files == (str(plain / 'val.de'),)


def test_shards_are_taken_in_order(tmp_path):
  for shard in ('train-1', 'train-0'):
    write(tmp_path / f'{shard}.de.gz', [f'{shard} de'])
    write(tmp_path / f'{shard}.en', [f'{shard} en'])
  (pair,) = parallel.find_pairs(str(tmp_path), 'de-en')
  assert parallel.read_pair(pair) == (['train-0 de', 'train-1 de'], ['train-0 en', 'train-1 en'])


def test_a_language_code_may_hold_a_hyphen(tmp_path):
  write(tmp_path / 'zh-Hant-en' / 'train.zh-Hant', ['a'])
  write(tmp_path / 'zh-Hant-en' / 'train.en', ['b'])
  (pair,) = parallel.find_pairs(str(tmp_path))
  assert (pair.source, pair.target) == ('zh-Hant', 'en')


def test_a_pair_without_the_split_is_passed_over(folders):
  assert names(parallel.find_pairs(str(folders), '', 'dev')) == ['deu-en']


def test_only_lf_ends_a_line(tmp_path):
  (tmp_path / 'x.de').write_bytes('a\u2028b\x0bc\r\n\n last'.encode())
  assert list(text.lines([str(tmp_path / 'x.de')])) == ['a\u2028b\x0bc', '', ' last']


def test_lines_come_in_bounded_batches(tmp_path):
  write(tmp_path / 'x.de.gz', [str(i) for i in range(10)])
  seen = []
  batches = list(text.line_batches(str(tmp_path / 'x.de.gz'), 4, seen.append))
  assert [len(b) for b in batches] == [4, 4, 2]
  assert sum(seen) == (tmp_path / 'x.de.gz').stat().st_size


def refuses(message):
  return pytest.raises(UserError, match=re.compile(message, re.DOTALL))


def test_missing_folder():
  with refuses("data_dir must be an existing folder; saw 'nowhere'"):
    parallel.find_pairs('nowhere')


def test_unknown_pair_names_the_closest(folders):
  with refuses("matches 'deu-eng'; closest: deu-en"):
    parallel.find_pairs(str(folders), 'fra-en,deu-eng')


def test_unknown_split_names_the_closest(folders, plain):
  with refuses(r'no file tset.deu\[.gz\] and tset.en\[.gz\] in .*deu-en; of the splits there, .*dev, train'):
    parallel.find_pairs(str(folders), 'deu-en', 'tset')


@pytest.mark.parametrize(
  ('split', 'mapped', 'there', 'typed'),
  [
    ('dev', {'dev': 'val', 'test': 'test_2016'}, ('dev', 'test'), '()'),
    ('dev', {'dev': 'val', 'test': 'news'}, ('dev', 'news'), "(('test', 'news'),)"),
    ('dev', {}, ('valid', 'test', 'x'), "(('dev', 'valid'),)"),
    ('dev', {}, ('test-1', 'test-2'), "(('dev', 'PREFIX'),)"),
  ],
)
def test_split_files_are_said_as_they_are_typed(tmp_path, split, mapped, there, typed):
  for stem in ('train', *there):
    write(tmp_path / 'de-en' / f'{stem}.de', ['a'])
    write(tmp_path / 'de-en' / f'{stem}.en', ['b'])
  with refuses(re.escape(f'--set "split_files={typed}"')):
    parallel.find_pairs(str(tmp_path), 'de-en', split, mapped)
  if 'PREFIX' not in typed:
    parallel.find_pairs(str(tmp_path), 'de-en', split, ast.literal_eval(typed))


def test_a_named_pair_without_train_is_refused(folders):
  (folders / 'deu-en' / 'train.deu.gz').unlink()
  (folders / 'deu-en' / 'train.en.gz').unlink()
  with refuses('no file train.deu'):
    parallel.find_pairs(str(folders), 'deu-en,fra-en')
  assert names(parallel.find_pairs(str(folders), '*-en')) == ['fra-en']


def test_plain_files_need_a_direction(plain):
  with refuses('a pair must be named; .* has train.* in cs, de, en'):
    parallel.find_pairs(str(plain))


def test_one_side_alone_is_refused(folders):
  (folders / 'deu-en' / 'dev.en').unlink()
  with refuses(r'saw .*dev.deu without dev.en\[.gz\] beside it'):
    parallel.find_pairs(str(folders), '', 'dev')


def test_unequal_line_counts_are_both_told(folders):
  write(folders / 'deu-en' / 'dev.en', ['z', 'zz'])
  (pair,) = parallel.find_pairs(str(folders), 'deu-en', 'dev')
  with refuses('saw 1 in .*dev.deu and 2 in .*dev.en: align them'):
    parallel.read_pair(pair)


def test_invalid_utf8_is_told_by_file_and_line(tmp_path):
  (tmp_path / 'x.de').write_bytes(b'gut\n' * 5000 + b'sch\xf6n\n')
  with refuses(r'line 5001 of .*x.de is not \(byte 4'):
    list(text.lines([str(tmp_path / 'x.de')]))


def test_empty_corpus_is_refused(folders):
  write(folders / 'deu-en' / 'dev.deu', [])
  write(folders / 'deu-en' / 'dev.en', [])
  (pair,) = parallel.find_pairs(str(folders), 'deu-en', 'dev')
  with refuses('a corpus must have lines; .*dev.deu is empty'):
    parallel.read_pair(pair)


def test_damaged_gzip_is_told(tmp_path):
  (tmp_path / 'x.de.gz').write_bytes(gzip.compress(b'a\n' * 100_000)[:-20])
  (tmp_path / 'y.de.gz').write_bytes(b'not gzip at all')
  for name in ('x.de.gz', 'y.de.gz'):
    with refuses(f'{name} is damaged or not gzip'):
      list(text.lines([str(tmp_path / name)]))


def test_a_side_may_be_packed_by_xz_or_bzip2_and_zstd_is_named(tmp_path):
  (tmp_path / 'train.de.xz').write_bytes(lzma.compress(b'eins\n'))
  (tmp_path / 'train.en.BZ2').write_bytes(bz2.compress(b'one\n'))
  (pair,) = parallel.find_pairs(str(tmp_path), 'de-en')
  assert parallel.read_pair(pair) == (['eins'], ['one'])
  (tmp_path / 'train.fr.zst').write_bytes(b'\x28\xb5\x2f\xfd' + bytes(9))
  (pair,) = parallel.find_pairs(str(tmp_path), 'fr-en')
  with refuses('train.fr.zst is packed by zstd: unpack it with zstd -d'):
    parallel.read_pair(pair)


def test_a_name_of_a_pair_is_cut_before_the_code_of_a_language():
  names = ['en-pt-BR', 'pt-BR-fr', 'zh-Hans-en', 'de-zh-Hant']
  expected = [('en', 'pt-BR'), ('pt-BR', 'fr'), ('zh-Hans', 'en'), ('de', 'zh-Hant')]
  assert [parallel.languages_of([name])[0] for name in names] == expected
