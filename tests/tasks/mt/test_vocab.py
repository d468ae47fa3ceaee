"""Vocabularies: ids, round trips in many scripts, training, and error messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import killed
import pytest
import sentencepiece
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import sentencepiece_training
from lingvo_moe.tasks import vocab as vocab_lib
from lingvo_moe.tasks.mt import corpus
from lingvo_moe.tasks.mt.data_config import DataConfig
from lingvo_moe.tasks.mt.vocab import Vocab
from lingvo_moe.tasks.mt.vocab_training import ensure_vocabs
from lingvo_moe.tasks.mt.vocab_training import train_vocab

SIZE = 340
SCRIPTS = [
  'Guten Tag, schöne Welt!',
  'Добрый день',
  'καλημέρα κόσμε',
  'שלום עולם',
  'مرحبا بالعالم',
  'नमस्ते दुनिया',
  'வணக்கம்',
  'สวัสดีชาวโลก',
  'こんにちは世界',
  '你好,世界',
  '안녕하세요',
  'ᏣᎳᎩ',
  'ⲁⲛⲟⲕ',
  '𐌰𐌱 🙂',
  'x  <s> </s> <unk> tab\tend',
]


def write_corpus(folder, pairs=('de-en', 'ru-en'), lines=150):
  for pair in pairs:
    for language in pair.split('-'):
      path = folder / pair / f'train.{language}'
      path.parent.mkdir(parents=True, exist_ok=True)
      word = {'de': 'Haus', 'en': 'house', 'ru': 'дом'}.get(language, language)
      path.write_text(''.join(f'{word} number {i} of {i * 7}\n' for i in range(lines)))
  return str(folder)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp('vocab')
  pairs = corpus.find_pairs(write_corpus(folder / 'data', ('de-en', 'en-ru')))
  return train_vocab(pairs, str(folder / 'shared'), SIZE, quiet=True)


def test_special_ids_are_fixed(model):
  vocab = Vocab(model)
  assert vocab.size == SIZE
  processor = sentencepiece.SentencePieceProcessor(model_file=model)
  assert [processor.id_to_piece(i) for i in range(4)] == ['<pad>', '<s>', '</s>', '<unk>']
  assert (vocab_lib.PAD, vocab_lib.BOS, vocab_lib.EOS, vocab_lib.UNK) == (0, 1, 2, 3)


def test_every_script_comes_back_normalised(model):
  vocab = Vocab(model)
  ids = vocab.encode(SCRIPTS)
  assert all(vocab_lib.UNK not in row for row in ids)
  assert vocab.detokenize(ids) == [vocab.normalize(line) for line in SCRIPTS]
  assert vocab.detokenize(ids)[1] == SCRIPTS[1]


def test_tokenising_works_inside_a_graph(model):
  vocab = Vocab(model)
  in_graph = tf.function(lambda lines: vocab.tokenize(lines).to_tensor(-1))(tf.constant(SCRIPTS))
  assert in_graph.dtype == tf.int32
  assert [[int(i) for i in row if i >= 0] for row in in_graph] == vocab.encode(SCRIPTS)


def test_detokenising_stops_at_eos_and_skips_what_is_not_text(model):
  vocab = Vocab(model)
  (ids,) = vocab.encode(['house'])
  assert vocab.detokenize([[1, *ids, 0, 2, *ids], [], [2], [*ids, SIZE + 5]]) == ['house', '', '', 'house']


def test_no_bytes_can_break_a_line(model):
  processor = sentencepiece.SentencePieceProcessor(model_file=model)
  (text,) = Vocab(model).detokenize([[processor.piece_to_id('<0x0A>'), processor.piece_to_id('<0x0D>')]])
  assert '\n' not in text and '\r' not in text


def test_a_tag_is_one_symbol_and_a_missing_one_is_refused(model):
  vocab = Vocab(model)
  assert len({vocab.tag_id('en'), vocab.tag_id('ru')}) == 2
  with pytest.raises(UserError, match=re.escape('needs the symbol <2xh>')):
    vocab.tag_id('xh')


def test_no_file_is_refused(tmp_path):
  with pytest.raises(UserError, match='no vocabulary file .*lingvo-moe vocab'):
    Vocab(str(tmp_path / 'none.model'))


@pytest.mark.parametrize('content', [b'', b'not a model'])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
  (tmp_path / 'bad.model').write_bytes(content)
  with pytest.raises(UserError, match='is not a SentencePiece model'):
    Vocab(str(tmp_path / 'bad.model'))


def test_other_special_ids_are_refused(tmp_path):
  lines = (f'house number {i}' for i in range(100))
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=lines, model_prefix=str(tmp_path / 'other'), vocab_size=30, minloglevel=2
  )
  with pytest.raises(UserError, match=r'pad 0, bos 1, eos 2, unk 3; .* has pad -1, bos 1, eos 2, unk 0'):
    Vocab(str(tmp_path / 'other.model'))


def test_the_same_corpus_and_seed_give_the_same_bytes(tmp_path):
  pairs = corpus.find_pairs(write_corpus(tmp_path / 'data'))
  make = lambda name, **kw: open(
    train_vocab(pairs, str(tmp_path / name), SIZE, side='source', max_sentences=100, quiet=True, **kw), 'rb'
  ).read()
  assert make('a', temperature=5) == make('b', temperature=5)


def test_lines_are_drawn_in_the_shares_of_the_temperature(tmp_path):
  from lingvo_moe.tasks.mt import vocab_training

  write_corpus(tmp_path, ('de-en',), 400)
  pairs = corpus.find_pairs(write_corpus(tmp_path, ('ru-en',), 100))

  class Bar:
    update = set_description = lambda self, n: None

  lines = list(vocab_training._lines(pairs, [400, 100], [180, 220], 'source', 1, Bar()))
  german = [line for line in lines if line.startswith(b'Haus')]
  russian = [line for line in lines if not line.startswith(b'Haus')]
  assert len(german) == len(set(german)) == 180
  assert len(russian) == 220 and len(set(russian)) == 100  # each twice, and twenty a third time


def test_existing_files_are_kept(model):
  with pytest.raises(UserError, match='exists and is not replaced'):
    train_vocab([], model.removesuffix('.model'), SIZE)


@pytest.mark.parametrize(
  'size, message',
  [(9000, r'saw vocab_size=9000, and it gives at most \d+'), (200, r'saw vocab_size=200 and 2\d\d of them')],
)
def test_impossible_sizes_are_explained(tmp_path, size, message):
  pairs = corpus.find_pairs(write_corpus(tmp_path / 'data'))
  with pytest.raises(UserError, match=message):
    train_vocab(pairs, str(tmp_path / 'x'), size, quiet=True)


def test_an_output_that_cannot_be_written_is_refused_before_training(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot make the folder of'):
    train_vocab([], str(tmp_path / 'file' / 'x'), SIZE)


def test_a_corpus_of_empty_lines_gives_no_vocabulary(tmp_path):
  for language in ('de', 'en'):
    (tmp_path / f'train.{language}').write_text('\n' * 50)
  with pytest.raises(UserError, match='every line that was read is empty'):
    train_vocab(corpus.find_pairs(str(tmp_path), 'de-en'), str(tmp_path / 'x'), SIZE, quiet=True)


def test_unequal_sides_are_found_before_training(tmp_path):
  data = write_corpus(tmp_path)
  (tmp_path / 'de-en' / 'train.en').write_text('one\n')
  with pytest.raises(UserError, match='saw 150 in .* and 1 in'):
    train_vocab(corpus.find_pairs(data), str(tmp_path / 'x'), SIZE, quiet=True)


def test_missing_vocabularies_are_made_once(tmp_path):
  config = DataConfig(data_dir=write_corpus(tmp_path / 'data'), source_vocab_size=SIZE, target_vocab_size=300)
  source, target = ensure_vocabs(config, str(tmp_path / 'vocab'), quiet=True)
  assert (Vocab(source).size, Vocab(target).size) == (SIZE, 300)
  before = os.stat(source).st_mtime_ns
  assert ensure_vocabs(config, str(tmp_path / 'vocab'), quiet=True) == (source, target)
  assert os.stat(source).st_mtime_ns == before
  given = DataConfig(source_vocab=source, target_vocab=target)
  assert ensure_vocabs(given, str(tmp_path / 'elsewhere')) == (source, target)


def test_a_vocabulary_that_was_not_made_for_a_run_is_kept(tmp_path, capsys):
  (tmp_path / 'vocab').mkdir()
  (tmp_path / 'vocab' / 'source.model').write_text('mine')
  config = DataConfig(data_dir=write_corpus(tmp_path / 'data'), source_vocab_size=SIZE, target_vocab_size=300)
  source, _ = ensure_vocabs(config, str(tmp_path / 'vocab'), quiet=True)
  assert Vocab(source).size == SIZE and (tmp_path / 'vocab' / 'source.model.old').read_text() == 'mine'
  assert f'{source} was not made for this run; it is kept as {source}.old' in capsys.readouterr().err


def test_a_made_vocabulary_keeps_its_settings(tmp_path):
  data = write_corpus(tmp_path / 'data')
  shared = dict(data_dir=data, shared_vocab=True)
  source, target = ensure_vocabs(DataConfig(source_vocab_size=SIZE, **shared), str(tmp_path), quiet=True)
  assert source == target
  with pytest.raises(UserError, match=f'has vocab_size={SIZE}, now vocab_size=320'):
    ensure_vocabs(DataConfig(source_vocab_size=320, **shared), str(tmp_path), quiet=True)


def test_a_non_joiner_that_becomes_a_space_is_said(tmp_path, capfd):
  word = 'می\u200cخواهم'
  folder = tmp_path / 'data' / 'fa-en'
  folder.mkdir(parents=True)
  (folder / 'train.fa').write_text(f'{word}\nمن\n' * 20, encoding='utf-8')
  (folder / 'train.en').write_text('I want\nI\n' * 20)
  pairs = corpus.find_pairs(str(tmp_path / 'data'))
  make = lambda side, rule: train_vocab(
    pairs, f'{tmp_path}/{side}_{rule}', SIZE, side=side, normalization=rule, exact_size=False, quiet=True
  )
  answer = lambda path: Vocab(path).detokenize(Vocab(path).tokenize([word]))
  parted = make('source', 'nmt_nfkc')
  said = capfd.readouterr().err
  assert said.startswith(f'20 of 40 lines for {parted} have U+200C') and said.count('\n') == 1
  assert '--normalization=nfkc keeps it' in said and answer(parted) == [word.replace('\u200c', ' ')]
  assert answer(make('source', 'nfkc')) == [word]
  make('target', 'nmt_nfkc')
  assert capfd.readouterr().err == ''
  make('source', 'nmt_nfkc_cf')
  assert '--normalization=nfkc_cf keeps it' in capfd.readouterr().err


def test_lines_too_long_for_sentences_are_left_out_and_said(tmp_path, capfd):
  corpus_folder = write_corpus(tmp_path / 'data', ['de-en'])
  with open(f'{corpus_folder}/de-en/train.de', 'a', encoding='utf-8') as f:
    f.write('Zebra ' * 1000 + '\n')
  with open(f'{corpus_folder}/de-en/train.en', 'a', encoding='utf-8') as f:
    f.write('zebra\n')
  pairs = corpus.find_pairs(corpus_folder)
  path = train_vocab(pairs, str(tmp_path / 'x'), SIZE, side='source', exact_size=False, quiet=True)
  assert capfd.readouterr().err == f'1 of 151 lines for {path} are over 4,192 bytes and were left out\n'
  train_vocab(pairs, str(tmp_path / 'y'), SIZE, side='target', exact_size=False, quiet=True)
  assert capfd.readouterr().err == ''


def test_the_command_writes_a_vocabulary_and_answers_mistakes_in_a_line(tmp_path):
  data = write_corpus(tmp_path / 'data')
  command = [sys.executable, os.path.join(os.path.dirname(__file__), '..', '..', '..', 'tools', 'train_vocab.py')]
  command += [f'--data_dir={data}', f'--vocab_size={SIZE}', f'--output={tmp_path}/out']
  env = dict(os.environ, PYTHONPATH=os.path.join(os.path.dirname(__file__), '..', '..', '..'))
  done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert Vocab(f'{tmp_path}/out.model').size == SIZE
  assert len(open(f'{tmp_path}/out.vocab').read().splitlines()) == SIZE
  again = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
  assert again.returncode == 1
  assert again.stderr.splitlines()[-1].startswith('error: ') and 'is not replaced' in again.stderr


def test_a_vocabulary_killed_between_its_two_files_is_made_again_and_a_strangers_listing_is_kept(tmp_path):
  output = str(tmp_path / 'made' / 'v')
  lines = [b'one two three'] * 20

  def make():
    sentencepiece_training.check_output(output, overwrite=False)
    sentencepiece_training.train(lines, output, 270)

  seen = []
  assert (
    killed.at_every_point(make, lambda number: seen.append(sorted(os.listdir(tmp_path / 'made')) if number else [])) > 3
  )
  assert ['v.model.partial', 'v.vocab'] in seen
  assert sorted(os.listdir(tmp_path / 'made')) == ['v.model', 'v.vocab']
  (tmp_path / 'made' / 'v.model').unlink()
  (tmp_path / 'made' / 'v.vocab').write_text('a list of mine')
  with pytest.raises(UserError, match='v.vocab exists and is not replaced'):
    make()
