"""Input of language models: every token once an epoch, batches of (seed, step) alone, held-out tokens counted once."""

import dataclasses
import gzip
import os
import types

import numpy as np
import pytest
import sentencepiece

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import documents
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.tasks.lm.generation import Continuer
from lingvo_moe.tasks.lm.lm_config import LmConfig
from lingvo_moe.tasks.lm.lm_input import HeldOutInput, TrainInput
from lingvo_moe.tasks.task import task_of
from lingvo_moe.vocab import plain_text_vocab as vocab_lib
from lingvo_moe.vocab.plain_text_vocab import Pieces
from lingvo_moe.vocab.sentencepiece_vocab import BOS, EOS, SPECIAL, UNK
from lingvo_moe.vocab.text_vocab import Bytes, Characters

TEXT = ''.join(f'line {i} of {i * 7}\n' for i in range(40))


@pytest.fixture
def config(tmp_path):
  (tmp_path / 'data').mkdir()
  (tmp_path / 'data' / 'train-1.txt').write_text(TEXT)
  (tmp_path / 'data' / 'train-2.txt.gz').write_bytes(gzip.compress('Größe\n'.encode()))
  (tmp_path / 'data' / 'dev.txt').write_text(TEXT[:101])
  config = LmConfig(data_dir=str(tmp_path / 'data'), window=8, batch_tokens=32, num_groups=2, documents='line')
  return vocab_lib.prepare(config, str(tmp_path / 'vocab'), resumed=False)


def train_input(config, feed=None):
  return TrainInput(config, task_of(config).vocabs, config.data_dir + '/../cache', feed or Feed(quiet=True))


def test_characters_are_those_of_the_training_text_and_others_unknown(config):
  vocab = task_of(config).vocabs
  assert vocab.characters == ''.join(sorted(set(TEXT + 'Größe\n'))) and config.vocab_size == 4 + len(vocab.characters)
  assert vocab.decode(vocab.encode('line 7\nGröße')) == 'line 7\nGröße'
  assert vocab.encode('lXne').tolist()[1] == UNK and vocab.decode([BOS, *vocab.encode('of'), EOS, 5]) == 'of'


def test_bytes_and_pieces_round_trip(tmp_path, config):
  assert Bytes().decode(Bytes().encode('Größe\n')) == 'Größe\n' and len(Bytes().encode('ö')) == 2
  pieces = vocab_lib.prepare(
    dataclasses.replace(config, vocab='pieces', vocab_size=300), str(tmp_path / 'pieces'), resumed=False
  )
  vocab = task_of(pieces).vocabs
  assert isinstance(vocab, Pieces) and pieces.vocab_size == vocab.size <= 300
  assert vocab.decode(vocab.encode('line 7\n\nof 49\n')) == 'line 7\n\nof 49\n'


def test_inputs_are_the_tokens_before_the_labels_and_bos_begins_a_document(config):
  vocab = task_of(config).vocabs
  stream = train_input(dataclasses.replace(config, packing=True))._stream(0)
  inputs, labels, segments = (x[0] for x in stream.rows(np.array([0]), stream.total))
  documents = ''.join(vocab.decode([i]) if i != EOS else '|' for i in labels).split('|')[:-1]
  assert sorted(documents) == sorted([*TEXT.splitlines(), 'Größe'])
  begins = np.flatnonzero(inputs == BOS)
  assert np.array_equal(begins[1:], np.flatnonzero(labels == EOS)[:-1] + 1)
  inside = inputs != BOS
  assert np.array_equal(inputs[inside], labels[np.flatnonzero(inside) - 1])
  assert np.array_equal(np.diff(segments), inputs[1:] == BOS) and segments[0] == 1


@pytest.mark.parametrize('packing', [False, True])
def test_an_epoch_has_every_window_once_and_epochs_differ(config, packing):
  batches = train_input(dataclasses.replace(config, packing=packing))
  windows = batches._windows.count
  rows = np.concatenate([batches.batch(step)['labels'] for step in range(-(-2 * windows // 4))])
  counts = lambda rows: np.bincount(rows.ravel(), minlength=config.vocab_size)
  stream = batches._stream(0)
  every = counts(stream.rows(np.array([0]), stream.total)[1])
  for epoch in range(2):
    got = counts(rows[epoch * windows : (epoch + 1) * windows])
    assert np.all(got <= every) and every.sum() - got.sum() < config.window
  assert not np.array_equal(rows[:windows], rows[windows : 2 * windows])
  segments = batches.batch(0)['segments']
  assert np.all(segments == 1) if not packing else segments.max() > 1


def test_a_batch_depends_on_seed_and_step_alone_and_processes_share_its_rows(config):
  whole, again = train_input(config), train_input(config)
  steps = [7, 0, 100]
  first = {step: whole.batch(step) for step in steps}
  for step in reversed(steps):
    for key, value in again.batch(step).items():
      np.testing.assert_array_equal(value, first[step][key])
  parts = [train_input(config, Feed(i, 2, quiet=True)).batch(7) for i in range(2)]
  for key, value in first[7].items():
    np.testing.assert_array_equal(np.concatenate([part[key] for part in parts]), value)
  other = train_input(dataclasses.replace(config, seed=2)).batch(7)
  assert not np.array_equal(other['labels'], first[7]['labels'])
  streamed = next(iter(whole.dataset(start_step=7)))
  for key, value in first[7].items():
    np.testing.assert_array_equal(streamed[key], value)


def test_three_processes_cannot_share_two_groups(config):
  with pytest.raises(UserError, match='num_groups=2 for 3 processes: use a multiple of 3'):
    train_input(config, Feed(0, 3, quiet=True))


@pytest.mark.parametrize('stride', [0, 3])
@pytest.mark.parametrize('documents', ['file', 'line'])
def test_every_held_out_token_counts_once_with_as_much_context_as_the_stride_leaves(config, stride, documents):
  config = dataclasses.replace(config, eval_stride=stride, documents=documents)
  dev = HeldOutInput(config, task_of(config).vocabs, config.data_dir + '/../cache', Feed(quiet=True))
  counted, contexts = [], []
  for batch in dev:
    counted += batch['labels'][batch['loss_mask'] > 0].tolist()
    contexts += np.nonzero(batch['loss_mask'])[1].tolist()
    assert batch['labels'].shape == (4, 8) and not np.any(batch['loss_mask'] > batch['segments'])
  text = TEXT[:101]
  own = [text] if documents == 'file' else [line for line in text.split('\n') if line]
  vocab = task_of(config).vocabs
  assert counted == [i for document in own for i in [*vocab.encode(document), EOS]]
  assert contexts[:8] == list(range(8)) and min(contexts[8:]) == (5 if stride else 0)
  assert dev.units == {'words': len(text.split()), 'bytes': sum(map(len, own))} and dev.subsets == ['dev']


def test_the_hash_of_dev_text_is_that_of_its_documents_and_windows(config):
  def made(process=0, count=1, **changes):
    changed = dataclasses.replace(config, **changes)
    return HeldOutInput(
      changed, task_of(changed).vocabs, config.data_dir + '/../cache', Feed(process, count, True)
    ).content_hash

  whole = made()
  assert made(1, 2) == made(seed=7) == whole
  others = [made(eval_stride=3), made(eval_batch_tokens=64), made(documents='file')]
  with open(os.path.join(config.data_dir, 'dev.txt'), 'a') as f:
    f.write('line 1\n')
  assert len({whole, made(), *others}) == 5


def test_paragraphs_are_between_empty_lines(tmp_path):
  (tmp_path / 'train.txt').write_text('\na\nb\n\n \nc\n\n\n')
  assert list(documents.documents(str(tmp_path / 'train.txt'), 'paragraph')) == ['a\nb', 'c']


def test_a_file_beside_its_gzipped_copy_is_read_once(tmp_path):
  for name in ('dev.txt', 'dev.txt.gz', 'dev-1.txt.gz', 'dev-2.txt'):
    (tmp_path / name).touch()
  found = [os.path.basename(path) for path in documents.find_files(str(tmp_path), 'dev')]
  assert found == ['dev-1.txt.gz', 'dev-2.txt', 'dev.txt']


def test_mistakes_are_answered(tmp_path, config):
  with pytest.raises(UserError, match=r'no file test\*.txt\[.gz\] in .*, which has dev.txt'):
    documents.find_files(config.data_dir, 'test')
  with pytest.raises(UserError, match="data_dir must be an existing folder; saw ''"):
    task_of(LmConfig()).check_corpus()
  (tmp_path / 'data' / 'train-3.txt').write_bytes(b'good\nbad \xff\n')
  with pytest.raises(UserError, match='line 2 of .*train-3.txt is not'):
    train_input(config)
  (tmp_path / 'data' / 'train-3.txt').write_bytes(b'')
  with pytest.raises(UserError, match='train-3.txt has none: remove it'):
    train_input(config)
  with pytest.raises(UserError, match='the text or .* gives .*: bind vocab_size ='):
    vocab_lib.prepare(dataclasses.replace(config, vocab='char', vocab_size=5), str(tmp_path / 'v'), resumed=False)


@pytest.mark.parametrize(
  'values, message',
  [
    (dict(eval_stride=65), 'eval_stride must be at most window=64; saw 65'),
    (dict(batch_tokens=100, num_groups=2), 'saw batch_tokens=100 with 2 rows of 64: use at least 128'),
    (dict(num_kv_heads=3), 'num_kv_heads=3 for num_heads=4: use a divisor'),
    (dict(head_dim=5), 'head_dim=5: use an even one'),
    (dict(vocab='char', documents='page'), 'documents must be one of file, paragraph, line'),
    (
      dict(scan_layers=True, remat='block', num_experts=4, num_layers=3),
      'num_layers must be a multiple of moe_every=2',
    ),
  ],
)
def test_values_that_do_not_fit_are_refused(values, message):
  with pytest.raises(UserError, match=message):
    LmConfig(**values)


def test_characters_of_another_file_are_refused(tmp_path):
  (tmp_path / 'x.json').write_text('[]')
  with pytest.raises(UserError, match='is not a vocabulary of characters'):
    Characters.load(str(tmp_path / 'x.json'))


def test_text_of_no_characters_leaves_no_vocabulary(tmp_path):
  (tmp_path / 'train.txt').write_text('')
  config = LmConfig(data_dir=str(tmp_path), vocab='char', window=8)
  with pytest.raises(UserError, match=r'a corpus must have text; .*train\.txt has none'):
    vocab_lib.prepare(config, str(tmp_path / 'vocab'), resumed=False)
  assert not (tmp_path / 'vocab' / 'characters.json').exists()


def test_pieces_are_learnt_from_a_line_of_any_length(tmp_path):
  words = ' '.join(f'{a}{b}{c}' for a in 'bdfg' for b in 'aeiou' for c in ('lin', 'ren', 'mos'))
  (tmp_path / 'train.txt').write_text(f'{words} ' * 40)
  assert (tmp_path / 'train.txt').stat().st_size > 4192
  config = LmConfig(data_dir=str(tmp_path), vocab='pieces', vocab_size=330, window=8)
  vocab = task_of(vocab_lib.prepare(config, str(tmp_path / 'vocab'), resumed=False)).vocabs
  assert len(vocab.encode('balin goren')) < 11  # as many as without pieces


def test_pieces_without_one_for_a_line_break_are_refused(tmp_path):
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXT.splitlines()),
    model_prefix=str(tmp_path / 'x'),
    vocab_size=30,
    minloglevel=2,
    **{f'{name}_id': i for name, i in SPECIAL.items()},
  )
  config = LmConfig(data_dir=str(tmp_path), vocab=str(tmp_path / 'x.model'), window=8)
  with pytest.raises(UserError, match=r'need one for a line break, <0x0A>, which .*x\.model does not have'):
    vocab_lib.prepare(config, str(tmp_path / 'vocab'), resumed=False)


def test_prompts_fill_a_row_of_every_device(config):
  """A mesh may have more parts of rows than a batch of training has rows."""
  batches = []
  runner = types.SimpleNamespace(row_multiple=16, function=lambda f: lambda batch: batches.append(batch) or 1 / 0)
  with pytest.raises(ZeroDivisionError):
    Continuer(config, task_of(config).vocabs, runner).translate(['line'])
  assert batches[0]['ids'].shape[0] == 16
