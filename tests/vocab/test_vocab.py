"""Vocabularies: ids, round trips in many scripts, training, and error messages."""

import dataclasses
import filecmp
import hashlib
import os
import pathlib
import random
import re
import struct

import forks
import hypothesis
import hypothesis.strategies as st
import killed
import pytest
import sentencepiece
import tensorflow as tf
import tensorflow_text
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.tasks.mt import run_vocabs
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.vocab import sentencepiece_training
from lingvo_moe.vocab import sentencepiece_vocab as vocab_lib
from lingvo_moe.vocab import vocab as core_vocab
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab
from lingvo_moe.vocab.vocab_training import extend_vocab, train_vocab

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
  'x  <s> </s> <unk> <pad> <0x41> tab\tend',
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
  pairs = parallel.find_pairs(write_corpus(folder / 'data', ('de-en', 'en-ru')))
  return train_vocab(pairs, str(folder / 'shared'), SIZE)


def test_special_ids_are_fixed(model):
  vocab = TaggedVocab(model)
  assert vocab.size == SIZE
  processor = sentencepiece.SentencePieceProcessor(model_file=model)
  assert [processor.id_to_piece(i) for i in range(4)] == ['<pad>', '<s>', '</s>', '<unk>']
  assert (vocab_lib.PAD, vocab_lib.BOS, vocab_lib.EOS, vocab_lib.UNK) == (0, 1, 2, 3)


def test_every_script_comes_back(model):
  vocab = TaggedVocab(model)
  ids = vocab.encode(SCRIPTS)
  assert all(vocab_lib.UNK not in row for row in ids)
  assert vocab.detokenize(ids) == [re.sub(' +', ' ', line) for line in SCRIPTS]


def test_tokenising_works_inside_a_graph(model):
  vocab = TaggedVocab(model)
  in_graph = tf.function(lambda lines: vocab.tokenize(lines).to_tensor(-1))(tf.constant(SCRIPTS))
  assert in_graph.dtype == tf.int32
  assert [[int(i) for i in row if i >= 0] for row in in_graph] == vocab.encode(SCRIPTS)


def test_detokenising_stops_at_eos_and_skips_what_is_not_text(model):
  vocab = TaggedVocab(model)
  (ids,) = vocab.encode(['house'])
  assert vocab.detokenize([[1, *ids, 0, 2, *ids], [], [2], [*ids, SIZE + 5]]) == ['house', '', '', 'house']


def test_no_bytes_can_break_a_line(model):
  processor = sentencepiece.SentencePieceProcessor(model_file=model)
  (text,) = TaggedVocab(model).detokenize([[processor.piece_to_id('<0x0A>'), processor.piece_to_id('<0x0D>')]])
  assert '\n' not in text and '\r' not in text


def test_a_tag_is_one_symbol_and_a_missing_one_is_refused(model):
  vocab = TaggedVocab(model)
  assert len({vocab.tag_id('en'), vocab.tag_id('ru')}) == 2
  with pytest.raises(UserError, match=re.escape(f'the symbol <2eng>; {model} lacks it: closest: en (a corpus')):
    vocab.tag_id('eng')
  with pytest.raises(UserError, match=f'lingvo-moe vocab --extend={model} --languages=xh'):
    vocab.tag_id('xh')


def test_a_language_without_a_tag_is_refused_before_anything_is_written(model, tmp_path):
  data = write_corpus(tmp_path / 'data', ('de-eng',))
  config = MtConfig(data_dir=data, source_vocab=model, target_vocab=model, tag_target=True)
  with pytest.raises(UserError, match=f'the symbol <2eng>; {model} lacks it: closest: en '):
    run_vocabs.prepare(config, str(tmp_path / 'vocab'), False)
  assert not (tmp_path / 'vocab').exists()


def test_an_extended_vocabulary_keeps_its_ids_and_has_new_tags_and_pieces(model, tmp_path):
  base = TaggedVocab(model)
  more = train_vocab(parallel.find_pairs(write_corpus(tmp_path, ['chuchichäschtli-en'])), str(tmp_path / 'more'), 300)
  path = extend_vocab(base, str(tmp_path / 'new'), ['gsw', 'ru'], TaggedVocab(more), False)
  found, old = TaggedVocab(path), base.pieces(range(base.size))
  assert found.pieces(range(base.size)) == old and found.tags() == ['en', 'gsw', 'ru']
  added = found.pieces(range(base.size, found.size))
  assert added[0] == '<2gsw>' and 'ch' in added and not set(added) & set(old)
  text = ['Haus number 3 of 21', 'chuchichäschtli number 4']
  of_base, of_new = base.encode(text), found.encode(text)
  assert of_new[0] == of_base[0] and len(of_new[1]) < len(of_base[1])
  assert found.decode(of_new[1]) == text[1] and found.normalization == base.normalization
  with pytest.raises(UserError, match='has all these symbols and pieces: use it as it is'):
    extend_vocab(found, str(tmp_path / 'newer'), ['gsw'], None, False)


def user_defined(path, output):
  """The vocabulary as earlier versions made it: its tags are found in text."""
  proto = sentencepiece_model_pb2.ModelProto.FromString(open(path, 'rb').read())
  tags = [piece for piece in proto.pieces if piece.piece.startswith('<2')]
  assert tags and all(piece.type == piece.CONTROL for piece in tags)
  for piece in tags:
    piece.type = piece.USER_DEFINED
  output.write_bytes(proto.SerializeToString())
  processor = sentencepiece.SentencePieceProcessor(model_file=str(output))
  assert processor.piece_to_id('<2ru>') in processor.encode('say <2ru> now')
  return str(output)


@pytest.mark.parametrize('earlier', [False, True])
def test_a_tag_within_a_sentence_is_text(model, tmp_path, earlier):
  vocab = TaggedVocab(user_defined(model, tmp_path / 'earlier.model') if earlier else model)
  text = 'say <2ru> now'
  (ids,) = vocab.encode([text])
  assert vocab.tags() == ['en', 'ru'] and not {vocab.tag_id('en'), vocab.tag_id('ru')} & set(ids)
  assert vocab.detokenize([ids, [vocab.tag_id('ru'), *ids], [vocab.tag_id('ru')]]) == [text, text, '']
  assert vocab.written([text]) == [text]
  assert vocab.fingerprint == hashlib.sha256(open(vocab.path, 'rb').read()).hexdigest()
  tokenizer = tensorflow_text.SentencepieceTokenizer(vocab.model_bytes)  # of an export
  assert tokenizer.tokenize([text]).to_list() == [ids]


def test_a_tag_in_the_text_of_a_vocabulary_is_no_second_piece(tmp_path):
  write_corpus(tmp_path / 'data', ('en-ru', 'ru-en'))
  for path in (tmp_path / 'data').glob('*/*'):
    path.write_text(''.join(f'say <2ru> {i}\n' for i in range(150)))
  vocab = TaggedVocab(train_vocab(parallel.find_pairs(f'{tmp_path}/data'), f'{tmp_path}/v', SIZE, exact_size=False))
  assert vocab.tags() == ['en', 'ru'] and vocab.written(['say <2ru> 5']) == ['say <2ru> 5']


def test_no_file_is_refused(tmp_path):
  with pytest.raises(UserError, match='no vocabulary file .*lingvo-moe vocab'):
    TaggedVocab(str(tmp_path / 'none.model'))


HOSTILE = {  # the fourth kills tensorflow-text 2.21
  'too short for its size': lambda table, trie: table[:3],
  'a size beyond the end': lambda table, trie: struct.pack('<I', 4 * len(table)) + table[4:],
  'half of it': lambda table, trie: table[: len(table) // 2],
  'a trie that leads outside': lambda table, trie: table[:4] + b'\xff' * trie + table[4 + trie :],
  'texts without an end': lambda table, trie: table[: 4 + trie] + b'x' * (len(table) - 4 - trie),
  'no texts': lambda table, trie: table[: 4 + trie],
}


@pytest.mark.parametrize('change', HOSTILE)
def test_a_hostile_model_is_refused_before_it_reaches_tensorflow_text(change, tmp_path, monkeypatch):
  pairs = parallel.find_pairs(write_corpus(tmp_path / 'data', ('de-en',)))
  path = pathlib.Path(train_vocab(pairs, str(tmp_path / 'v'), SIZE, normalization='nmt_nfkc'))
  proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
  table = proto.normalizer_spec.precompiled_charsmap  # the trie's size, the trie, and texts by their places
  (trie,) = struct.unpack('<I', table[:4])
  proto.normalizer_spec.precompiled_charsmap = HOSTILE[change](table, trie)
  path.write_bytes(proto.SerializeToString())
  monkeypatch.setattr(tensorflow_text, 'SentencepieceTokenizer', lambda *_, **__: pytest.fail('it was read'))
  for read in (TaggedVocab, core_vocab.Vocab):
    with pytest.raises(UserError, match='is not a SentencePiece model'):
      read(str(path)).encode(['Haus'])


@pytest.mark.parametrize('content', [b'', b'not a model'])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
  (tmp_path / 'bad.model').write_bytes(content)
  with pytest.raises(UserError, match='is not a SentencePiece model'):
    TaggedVocab(str(tmp_path / 'bad.model'))


def test_other_special_ids_are_refused(tmp_path):
  lines = (f'house number {i}' for i in range(100))
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=lines, model_prefix=str(tmp_path / 'other'), vocab_size=30, minloglevel=2
  )
  with pytest.raises(UserError, match=r'pad 0, bos 1, eos 2, unk 3; .* has pad -1, bos 1, eos 2, unk 0'):
    TaggedVocab(str(tmp_path / 'other.model'))


def test_the_same_corpus_and_seed_give_the_same_bytes(tmp_path):
  pairs = parallel.find_pairs(write_corpus(tmp_path / 'data'))
  make = lambda name, **kw: open(
    train_vocab(pairs, str(tmp_path / name), SIZE, side='source', max_sentences=100, **kw), 'rb'
  ).read()
  assert make('a', temperature=5) == make('b', temperature=5)


def test_lines_are_drawn_in_the_shares_of_the_temperature(tmp_path):
  from lingvo_moe.vocab import vocab_training

  write_corpus(tmp_path, ('de-en',), 400)
  pairs = parallel.find_pairs(write_corpus(tmp_path, ('ru-en',), 100))

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
  pairs = parallel.find_pairs(write_corpus(tmp_path / 'data'))
  with pytest.raises(UserError, match=message):
    train_vocab(pairs, str(tmp_path / 'x'), size)


def test_an_output_that_cannot_be_written_is_refused_before_training(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot make the folder of'):
    train_vocab([], str(tmp_path / 'file' / 'x'), SIZE)


def test_a_corpus_of_empty_lines_gives_no_vocabulary(tmp_path):
  for language in ('de', 'en'):
    (tmp_path / f'train.{language}').write_text('\n' * 50)
  with pytest.raises(UserError, match='every line that was read is empty'):
    train_vocab(parallel.find_pairs(str(tmp_path), 'de-en'), str(tmp_path / 'x'), SIZE)


def test_unequal_sides_are_found_before_training(tmp_path):
  data = write_corpus(tmp_path)
  (tmp_path / 'de-en' / 'train.en').write_text('one\n')
  with pytest.raises(UserError, match='saw 150 in .* and 1 in'):
    train_vocab(parallel.find_pairs(data), str(tmp_path / 'x'), SIZE)


def ensure_vocabs(config, folder):
  made = run_vocabs.prepare(config, folder, resumed=False)
  return made.source_vocab, made.target_vocab


def test_missing_vocabularies_are_made_once(tmp_path):
  config = DataConfig(data_dir=write_corpus(tmp_path / 'data'), source_vocab_size=SIZE, target_vocab_size=300)
  source, target = ensure_vocabs(config, str(tmp_path / 'vocab'))
  assert (TaggedVocab(source).size, TaggedVocab(target).size) == (SIZE, 300)
  before = os.stat(source).st_mtime_ns
  assert ensure_vocabs(config, str(tmp_path / 'vocab')) == (source, target)
  assert os.stat(source).st_mtime_ns == before
  given = dataclasses.replace(config, source_vocab=source, target_vocab=target)
  copies = ensure_vocabs(given, str(tmp_path / 'elsewhere'))
  assert [filecmp.cmp(*paths, shallow=False) for paths in zip(copies, (source, target))] == [True, True]


def test_a_vocabulary_that_was_not_made_for_a_run_is_kept(tmp_path, capsys):
  (tmp_path / 'vocab').mkdir()
  (tmp_path / 'vocab' / 'source.model').write_text('mine')
  config = DataConfig(data_dir=write_corpus(tmp_path / 'data'), source_vocab_size=SIZE, target_vocab_size=300)
  source, _ = ensure_vocabs(config, str(tmp_path / 'vocab'))
  assert TaggedVocab(source).size == SIZE and (tmp_path / 'vocab' / 'source.model.old').read_text() == 'mine'
  assert f'{source} was not made for this run; it is kept as {source}.old' in capsys.readouterr().err


def test_a_made_vocabulary_keeps_its_settings(tmp_path):
  data = write_corpus(tmp_path / 'data')
  shared = dict(data_dir=data, shared_vocab=True)
  source, target = ensure_vocabs(DataConfig(source_vocab_size=SIZE, **shared), str(tmp_path))
  assert source == target
  with pytest.raises(UserError, match=f'has vocab_size={SIZE}, now vocab_size=320'):
    ensure_vocabs(DataConfig(source_vocab_size=320, **shared), str(tmp_path))


def test_a_vocabulary_by_corpus_grows_with_the_square_root_of_its_lines(tmp_path, capsys):
  rng = random.Random(0)
  word = lambda: ''.join(rng.choices('abcdefghijklmno', k=5))
  for pair, lines in (('de-en', 7), ('fr-en', 9)):  # 16 lines of 15 letters and spaces
    (tmp_path / pair).mkdir()
    for language in pair.split('-'):
      text = ''.join(' '.join(word() for _ in range(30)) + '\n' for _ in range(lines))
      (tmp_path / pair / f'train.{language}').write_text(text)
  values = dict(data_dir=str(tmp_path), shared_vocab=True, tag_target=False)
  pieces = 300 + 16 + 25 * 4
  for asked, by_corpus, expected in ((500, True, pieces), (500, False, 500), (400, True, 400)):
    config = DataConfig(source_vocab_size=asked, vocab_by_corpus=by_corpus, **values)
    made = run_vocabs.prepare(config, str(tmp_path / f'{asked}, {by_corpus}'), resumed=False)
    assert made.source_vocab_size == TaggedVocab(made.source_vocab).size == expected
    said = f'source_vocab_size={pieces} is chosen for the corpus\n'
    assert (said in capsys.readouterr().err) == (expected == pieces)


def test_a_vocabulary_for_tags_on_both_sides_has_those_of_sources(tmp_path):
  config = MtConfig(data_dir=write_corpus(tmp_path / 'data'), source_vocab_size=SIZE, shared_vocab=True)
  config = dataclasses.replace(config, tag_target=True, tag_sides='both')
  assert TaggedVocab(ensure_vocabs(config, str(tmp_path))[0]).tags() == ['de', 'en', 'ru']


def test_a_rule_of_normalisation_is_kept_and_an_unset_one_takes_what_is_there(tmp_path, capsys):
  folder = write_corpus(tmp_path / 'data', ['de-en'])
  data = DataConfig(data_dir=folder, source_vocab_size=SIZE, target_vocab_size=SIZE, target_normalization='nfkc')
  _, target = ensure_vocabs(data, str(tmp_path / 'vocab'))
  assert TaggedVocab(target).normalization == 'nfkc'
  with pytest.raises(UserError, match="target.model has normalization='nfkc', now normalization='identity'"):
    ensure_vocabs(dataclasses.replace(data, target_normalization='identity'), str(tmp_path / 'vocab'))
  unset = dataclasses.replace(data, target_normalization=None)
  assert ensure_vocabs(unset, str(tmp_path / 'vocab'))[1] == target


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\0\n\r\u2581'))))
@hypothesis.example(['\u3000a\u00a0b\u200b', 'ﬁ½m²…և', 'e\u0301 é', '<s></s><pad><unk><0x41><2en>', '\u2028\x85\t'])
def test_a_target_vocabulary_writes_every_text(model, lines):
  lines = [re.sub(' +', ' ', line).strip(' ') for line in lines]
  vocab = TaggedVocab(model)
  assert vocab.written(lines) == lines
  assert vocab.detokenize(vocab.encode(lines)) == lines  # by the tokeniser of TensorFlow


def test_lines_too_long_for_sentences_are_left_out_and_said(tmp_path, capfd):
  corpus_folder = write_corpus(tmp_path / 'data', ['de-en'])
  with open(f'{corpus_folder}/de-en/train.de', 'a', encoding='utf-8') as f:
    f.write('Zebra ' * 1000 + '\n')
  with open(f'{corpus_folder}/de-en/train.en', 'a', encoding='utf-8') as f:
    f.write('zebra\n')
  pairs = parallel.find_pairs(corpus_folder)
  path = train_vocab(pairs, str(tmp_path / 'x'), SIZE, side='source', exact_size=False)
  assert capfd.readouterr().err == f'1 of 151 lines for {path} are over 4,192 bytes and were left out\n'
  train_vocab(pairs, str(tmp_path / 'y'), SIZE, side='target', exact_size=False)
  assert capfd.readouterr().err == ''


def test_the_command_writes_a_vocabulary_and_answers_mistakes_in_a_line(tmp_path):
  data = write_corpus(tmp_path / 'data')
  command = ['-m', 'lingvo_moe.cli.commands.main', 'vocab']
  command += [f'--data_dir={data}', f'--vocab_size={SIZE}', f'--output={tmp_path}/out']
  env = dict(os.environ, PYTHONPATH=os.path.join(os.path.dirname(__file__), '..', '..', '..'))
  done = forks.run(command, env=env)
  assert done.returncode == 0, done.stderr
  assert TaggedVocab(f'{tmp_path}/out.model').size == SIZE
  assert len(open(f'{tmp_path}/out.vocab').read().splitlines()) == SIZE
  again = forks.run(command, env=env)
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
