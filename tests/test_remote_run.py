"""Runs whose log directory and corpus have a scheme: file://, and a remote file system without rename and append."""

import contextlib
import gzip
import io
import json
import os
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf
from whole_state import WholeState

from lingvo_moe import decoder, trainer, translate
from lingvo_moe.addons.analysis import compare
from lingvo_moe.addons.report import page, reading
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import documents as plain_text
from lingvo_moe.corpora import parallel, text
from lingvo_moe.inputs import token_cache, windows
from lingvo_moe.run import results
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.storage import content_hashes, files, json_files, remote_files
from lingvo_moe.storage.log_directory import LogDirectory
from lingvo_moe.vocab.text_vocab import Bytes

BINDINGS = (
  'Tiny.source_vocab_size = 282',
  'Tiny.target_vocab_size = 280',
  'Tiny.encoder_layers = 1',
  'Tiny.decoder_layers = 1',
  'Tiny.moe_every = 1',
  'Tiny.batch_tokens = 256',
  'Tiny.eval_every = 2',
  'Tiny.keep_checkpoints = 1',
)


class NoAppend(tf.io.gfile.GFile):
  """File of an object store: read whole, or written whole."""

  def __init__(self, name, mode='r'):
    assert mode in ('r', 'rb', 'w', 'wb'), f'{name} is opened by {mode!r}'
    if 'w' in mode and tf.io.gfile.exists(name):
      tf.io.gfile.remove(name)  # ram:// would write at the end of what is there
    super().__init__(name, mode)


@pytest.fixture
def remote(tmp_path, monkeypatch):
  """Folder on TensorFlow's file system in memory, which is allowed no rename and no append."""
  monkeypatch.setattr(tf.io.gfile, 'GFile', NoAppend)
  for name in ('rename', 'copy'):
    monkeypatch.setattr(tf.io.gfile, name, lambda *_, **__: pytest.fail('renamed'))
  return f'ram://{tmp_path.name}/runs/log'


@pytest.fixture(params=['file', 'ram'])
def logdir(request, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'caches'))
  monkeypatch.chdir(tmp_path)
  return f'file://{tmp_path}/runs/log' if request.param == 'file' else request.getfixturevalue('remote')


def write(path, lines):
  data = ''.join(line + '\n' for line in lines).encode()
  files.makedirs(os.path.dirname(path))
  files.write(path, gzip.compress(data) if path.endswith('.gz') else data)


def train(data_dir, logdir, max_steps):
  given = {'model': 'mt.cldr.Tiny', 'data_dir': data_dir, 'gin_bindings': BINDINGS}
  with contextlib.redirect_stderr(io.StringIO()) as said:
    assert trainer.train(trainer.Options(logdir=logdir, max_steps=max_steps, **given)) is None
  return said.getvalue()


def test_a_remote_checkpoint_counts_once_it_is_committed(remote):
  checkpoints = Checkpoints(f'{remote}/checkpoints', keep=1)
  state = lambda step: WholeState(
    {'step': tf.constant(step, tf.int64), 'weights': {'w': tf.fill([3], float(step))}, 'slots': {}}
  )
  prefix = checkpoints.save(state(1))
  checkpoints.note_dev_loss(1, 2.0)
  files.remove(f'{os.path.dirname(prefix)}/committed')  # as if the process had died before
  assert checkpoints.latest() is None and checkpoints.best() is None
  for step in (1, 2, 3):
    checkpoints.save(state(step))
    checkpoints.note_dev_loss(step, 1.0 if step == 2 else 3.0)
    files.makedirs(f'{remote}/checkpoints/step_00000099')
    files.write(f'{remote}/checkpoints/step_00000099/state.index', b'cut short')
    assert 'step_00000099' in files.listdir(f'{remote}/checkpoints')
  assert checkpoints.steps() == [2, 3] and checkpoints.best()[:2] == (2, 1.0)
  assert checkpoints.restore(3, {'w': (3,)})['w'][...].tolist() == [3.0, 3.0, 3.0]
  checkpoints.save(state(4))  # removes what was left behind
  assert set(files.listdir(f'{remote}/checkpoints')) == {'step_00000002', 'step_00000004'}


def test_a_remote_log_is_written_now_and_then_and_when_it_is_closed(remote, monkeypatch):
  path = f'{remote}/train.jsonl'
  with files.append(path) as f:
    f.write('one\n')
    f.flush()
    assert not files.exists(path)
    files.sync(f)
    assert files.read(path) == b'one\n'
  monkeypatch.setattr(remote_files, '_REWRITE_SECONDS', 0.0)
  with files.append(path) as f:
    f.write('two\n')
    f.flush()
    assert files.read(path) == b'one\ntwo\n' == files.open_to_read(path).read()
    f.write('three\n')
  assert files.read(path, 5) == b'one\nt' and files.read(path).endswith(b'three\n')


def test_texts_are_kept_on_a_remote_file_system(remote, monkeypatch):
  path, settings = f'{remote}/scores.unfinished.jsonl', {'beam_size': 4}
  monkeypatch.setattr(results, '_UNFINISHED_SECONDS', 0.0)
  for more in ('abc', 'de'):
    results.UnfinishedTexts(path, 7, settings).update(dict.fromkeys(more, 'text'))
  assert results.UnfinishedTexts(path, 7, settings) == dict.fromkeys('abcde', 'text')


def test_files_of_a_remote_folder(remote):
  files.write(f'{remote}/a/b.json', json_files.dump({'step': 1}))
  assert json_files.read(f'{remote}/a/b.json', 'a step', 'none') == {'step': 1}
  assert (
    files.isdir(f'{remote}/a') and files.listdir(f'{remote}/a') == ['b.json'] and files.listdir(f'{remote}/c') == []
  )
  files.remove(f'{remote}/a/b.json')
  files.remove(f'{remote}/a/b.json')  # nothing to do
  for missing in (lambda path: files.read(path), files.sha256):
    with pytest.raises(FileNotFoundError):
      missing(f'{remote}/a/b.json')


def test_which_paths_are_remote():
  assert [path for path in ('gs://b/c', 'ram://x', 'file:///a', '/a', './x://y', 'a:b') if files.is_remote(path)] == [
    'gs://b/c',
    'ram://x',
  ]
  assert files.plain('file:///a/b') == '/a/b' and files.local_copy_of('/a') == '/a'
  assert RunDir('file:///a').vocab_dir == '/a/vocab' and not RunDir('gs://b/c').cache_dir.startswith('gs:')
  with pytest.raises(UserError, match='a log directory is a path of a file system that is mounted .*; saw .*s3://'):
    RunDir('s3://b/c')


def test_a_remote_corpus_of_folders_is_found_and_read(remote, tmp_path, monkeypatch):
  write(f'{remote}/deu-en/train.deu.gz', ['ä', 'b'])
  write(f'{remote}/deu-en/train.en', ['x', 'y'])
  (pair,) = parallel.find_pairs(f'{remote}/')
  assert (pair.name, pair.source, pair.target) == ('deu-en', 'deu', 'en')
  assert parallel.read_pair(pair) == (['ä', 'b'], ['x', 'y'])
  (back,) = parallel.find_pairs(remote, 'en-deu')
  assert back.source_files == (f'{remote}/deu-en/train.en',) and back.target_files == (f'{remote}/deu-en/train.deu.gz',)
  with pytest.raises(UserError, match=r'no file dev.deu\[.gz\] and dev.en\[.gz\] in ram://'):
    parallel.find_pairs(remote, split='dev')

  monkeypatch.setattr(content_hashes, '_SETTLED_NS', -(10**9))  # as if they had been written long ago
  hashes = lambda: content_hashes.of(pair.source_files + pair.target_files, str(tmp_path), quiet=True)
  first = hashes()
  assert first == [files.sha256(path) for path in pair.source_files + pair.target_files]
  write(pair.target_files[0], ['y', 'x'])  # same size, and the file system keeps no times
  assert hashes()[0] == first[0] and hashes()[1] == files.sha256(pair.target_files[0]) != first[1]


def test_a_remote_corpus_of_plain_files_and_shards_is_found_and_read(remote):
  for number in range(2):
    write(f'{remote}/train-{number}.de.gz', [f'ein {number}'] * 3)
    write(f'{remote}/train-{number}.en', [f'a {number}'] * 3)
  (pair,) = parallel.find_pairs(remote, 'de-en')
  assert parallel.read_pair(pair) == (['ein 0'] * 3 + ['ein 1'] * 3, ['a 0'] * 3 + ['a 1'] * 3)
  for path in pair.source_files + pair.target_files:
    seen = []
    assert sum(map(len, text.line_batches(path, 2, seen.append))) == 3 and sum(seen) == files.size(path)
  files.remove(f'{remote}/train-1.en')
  with pytest.raises(UserError, match=r'both sides of a pair .*; saw ram://.*/train-1.de.gz without train-1.en'):
    parallel.find_pairs(remote, 'de-en')


def test_remote_plain_text_is_found_read_and_tokenised(remote, tmp_path):
  write(f'{remote}/train-1.txt.gz', ['zwei', 'drei'])
  write(f'{remote}/train-0.txt', ['eins'])
  write(f'{remote}/training/train-2.txt', ['in another folder'])
  found = plain_text.find_files(remote, 'train')
  assert found == [f'{remote}/train-0.txt', f'{remote}/train-1.txt.gz']
  assert list(map(plain_text.read, found)) == ['eins\n', 'zwei\ndrei\n']
  texts = windows.open_text(remote, 'train', 'line', Bytes(), str(tmp_path / 'cache'), quiet=True)
  assert [len(tokens) for tokens in texts] == [1, 2]
  with pytest.raises(UserError, match=r'no file dev\*.txt\[.gz\] in ram://.*, which has train-0.txt, train-1.txt.gz'):
    plain_text.find_files(remote, 'dev')


def test_a_remote_cache_of_tokens_is_made_read_and_mended(remote, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(token_cache, '_SHARD_BYTES', 20)
  path = tmp_path / 'train.txt'
  path.write_text('\n'.join(f'line {number}' for number in range(9)))

  def tokenise(parts, progress):
    for part in parts:
      for batch in part.batches(progress):
        yield np.frombuffer(b''.join(batch), np.uint8), np.array([*map(len, batch)])
      yield np.zeros(0), np.zeros(0)

  entry = token_cache.CacheEntry('text', [str(path)], types.SimpleNamespace(size=256, fingerprint='bytes'), tokenise)
  cache = lambda: token_cache.open_entries([entry], f'{remote}/cache', quiet=True)[0]
  lines = lambda: bytes(cache().gather(np.array([8, 1, 7]))[0].astype(np.uint8))
  assert lines() == b'line 8line 1line 7' and cache().file_lines == [9]
  assert not [name for name in files.listdir(cache().folder) if name.endswith('.claim')]
  files.write(f'{cache().folder}/00000.tokens', bytes(36))
  assert lines() == b'line 8line 1line 7' and 'this block is made again' in capsys.readouterr().err


def test_remote_text_that_cannot_be_read_is_refused(remote):
  files.write(f'{remote}/bomb.gz', gzip.compress(b'\n' * (10 << 20)))
  files.write(f'{remote}/cut.gz', gzip.compress(os.urandom(1000))[:-100])
  files.write(f'{remote}/latin1', 'grün\n'.encode('latin1'))
  for name, said in (
    ('bomb.gz', 'may unpack to 100 times its size .*/bomb.gz: see'),
    ('cut.gz', '/cut.gz is damaged or not gzip'),
    ('latin1', 'text must be UTF-8; line 1 of ram://'),
    ('none', '(no such file: ram://.*/none)|(cannot read ram://.*/none: no such file)'),
  ):
    for read in (text.count_lines, plain_text.read):
      with pytest.raises(UserError, match=said):
        read(f'{remote}/{name}')
  for find in (parallel.find_pairs, lambda folder: plain_text.find_files(folder, 'train')):
    with pytest.raises(UserError, match="data_dir must be an existing folder; saw 'ram://"):
      find(f'{remote}/none')
    with pytest.raises(UserError, match="data_dir is a path of a file system that is mounted .*; saw 's3://b/c'"):
      find('s3://b/c')


def test_a_remote_file_is_read_in_parts(remote):
  data = bytes(range(256)) * 10_000
  files.makedirs(remote)
  files.write(f'{remote}/file', data)
  with files.open_to_read(f'{remote}/file') as f:
    assert f.read(3) == data[:3] and f.tell() == 3
    assert f.seek(-5, os.SEEK_END) == len(data) - 5 and f.read() == data[-5:] and f.read() == b''
    f.seek(10)
    assert f.read() == data[10:]
  with pytest.raises(FileNotFoundError):
    files.open_to_read(f'{remote}/none')


def test_results_of_a_remote_run_are_read(remote):
  logdir, decoded = f'{remote}/log', f'{remote}/log/decode/test/step_2'
  write(f'{remote}/corpus/de-en/test.de', ['ein Hund', 'ein Kind'])
  write(f'{remote}/corpus/de-en/test.en', ['a dog', 'a child'])
  write(f'{decoded}/de-en.hyp', ['a dog', 'a cat'])
  values = {'data_dir': f'{remote}/corpus', 'pairs': '', 'split_files': []}
  scores = {'de-en': {'sentences': 2, 'bleu': 50.0, 'chrf': 60.0, 'copy_bleu': 0.0}}
  for path, value in (
    ('config.json', {'model': 'mt.cldr.Tiny', 'values': values}),
    ('train.jsonl', {'step': 2, 'dev_loss': 1.5}),
    ('decode/test/step_2/scores.json', {'step': 2, 'settings': {}, 'pairs': scores, 'mean': {}}),
  ):
    files.write(f'{logdir}/{path}', json_files.dump(value))
  files.makedirs(f'{logdir}/decode/test/step_3')  # begun

  run = LogDirectory.read(f'{logdir}/')
  assert run.name == 'log' and run.decoded_steps('test') == [2] and [line['step'] for line in run.train_log()] == [2]
  (decoded_run,) = compare.read_system(f'{logdir}@2', 'test').runs
  translated = decoded_run.translations['de-en']
  assert (translated.references, translated.lines) == (['a dog', 'a child'], ['a dog', 'a cat'])
  assert 'a cat' in page.page(reading.read([logdir], 'test'))
  with pytest.raises(UserError, match='there is no run in ram://.*/none '):
    LogDirectory.read(f'{remote}/none')


@pytest.mark.slow
def test_a_run_is_trained_resumed_decoded_and_translates(tmp_path, logdir):
  data_dir = logdir.removesuffix('runs/log') + 'corpus'
  for split, lines in (('train.{}.gz', 60), ('dev.{}', 4), ('test.{}', 3)):
    for side in ('xx', 'en'):
      path = os.path.join(files.plain(data_dir), 'xx-en', split.format(side))
      write(path, [f'{side} {"one two three four".split()[i % 4]}' for i in range(lines)])
  train(data_dir, logdir, 2)
  run = RunDir(logdir)
  assert run.finished and run.checkpoints().steps() == [2]

  if files.is_remote(logdir):  # another machine goes on, where one died in the middle of a checkpoint
    shutil.rmtree(tmp_path / 'caches')
    files.write(run.file('checkpoints', 'step_00000003', 'state.index'), b'cut short')
  assert 'going on from step 2' in train(data_dir, logdir, 4)
  lines = [json.loads(line) for line in files.read(run.file('train.jsonl')).decode().splitlines()]
  assert [line['step'] for line in lines if 'dev_loss' in line] == [2, 4]
  assert run.checkpoints().steps() == [4] and run.checkpoints().best()[0] == 4
  assert set(files.listdir(run.file('checkpoints'))) == {'step_00000004'}

  decoder.decode(decoder.Options(logdir, once=True))
  assert files.read(run.file('decode', 'test', 'step_4', 'xx-en.hyp')).count(b'\n') == 3
  assert compare.read_system(logdir, 'test').runs[0].translations['xx-en'].references[:2] == ['en one', 'en two']
  assert 'en two' in page.page(reading.read([logdir], 'test'))
  output = io.StringIO()
  translate.translate(translate.Options(logdir), io.BytesIO(b'xx one\nxx two\n'), output)
  assert len(output.getvalue().splitlines()) == 2
  assert not [name for name in os.listdir(tmp_path) if ':' in name]  # no folder 'ram:'
