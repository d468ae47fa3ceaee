"""Runs whose log directory has a scheme: file://, and a remote file system without rename and append."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal

import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from lingvo_moe import decoder
from lingvo_moe import trainer
from lingvo_moe import translate
from lingvo_moe.core import files
from lingvo_moe.core import json_files
from lingvo_moe.core import remote_files
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.checkpoint import Checkpoints
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.pieces import WholeState

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


def train(tmp_path, logdir, max_steps):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  given = {'model': 'mt.cldr.Tiny', 'data_dir': f'file://{tmp_path}/corpus', 'gin_bindings': [*BINDINGS]}
  said = io.StringIO()
  try:
    with contextlib.redirect_stderr(said), flagsaver.flagsaver(logdir=logdir, max_steps=max_steps, **given):
      assert trainer.main([]) is None
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
  return said.getvalue()


def test_a_remote_checkpoint_counts_once_it_is_committed(remote):
  checkpoints = Checkpoints(f'{remote}/checkpoints', keep=1)
  state = lambda step: WholeState(
    {'step': tf.constant(step, tf.int64), 'weights': {'w': tf.fill([3], float(step))}, 'slots': {}}
  )
  prefix = checkpoints.save(state(1), dev_loss=2.0)
  files.remove(f'{os.path.dirname(prefix)}/committed')  # as if the process had died before
  assert checkpoints.latest() is None and checkpoints.best() is None
  for step in (1, 2, 3):
    checkpoints.save(state(step), dev_loss=1.0 if step == 2 else 3.0)
    files.write(f'{remote}/checkpoints/step_00000099/state.index', b'cut short')
  assert checkpoints.steps() == [2, 3] and checkpoints.best() == (2, 1.0)
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


def test_files_of_a_remote_folder(remote):
  files.write(f'{remote}/a/b.json', json_files.dump({'step': 1}))
  assert json_files.read(f'{remote}/a/b.json', 'a step', 'none') == {'step': 1}
  assert (
    files.isdir(f'{remote}/a') and files.listdir(f'{remote}/a') == ['b.json'] and files.listdir(f'{remote}/c') == []
  )
  files.remove(f'{remote}/a/b.json')
  for missing in (lambda path: files.read(path), files.sha256, files.remove):
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


@pytest.mark.slow
def test_a_run_is_trained_resumed_decoded_and_translates(tmp_path, logdir):
  pair = tmp_path / 'corpus' / 'xx-en'
  pair.mkdir(parents=True)
  for split, lines in (('train', 60), ('dev', 4), ('test', 3)):
    for side in ('xx', 'en'):
      (pair / f'{split}.{side}').write_text(
        ''.join(f'{side} {"one two three four".split()[i % 4]}\n' for i in range(lines))
      )
  train(tmp_path, logdir, 2)
  run = RunDir(logdir)
  assert run.finished and run.checkpoints().steps() == [2]

  if files.is_remote(logdir):  # another machine goes on, where one died in the middle of a checkpoint
    shutil.rmtree(tmp_path / 'caches')
    files.write(run.file('checkpoints', 'step_00000003', 'state.index'), b'cut short')
  assert 'going on from step 2' in train(tmp_path, logdir, 4)
  lines = [json.loads(line) for line in files.read(run.file('train.jsonl')).decode().splitlines()]
  assert [line['step'] for line in lines if 'dev_loss' in line] == [2, 4]
  assert run.checkpoints().steps() == [4] and run.checkpoints().best()[0] == 4
  assert set(files.listdir(run.file('checkpoints'))) == {'step_00000004'}

  decoder.decode(decoder.Options(logdir, once=True))
  assert files.read(run.file('decode', 'test', 'step_4', 'xx-en.hyp')).count(b'\n') == 3
  output = io.StringIO()
  translate.translate(translate.Options(logdir), io.BytesIO(b'xx one\nxx two\n'), output)
  assert len(output.getvalue().splitlines()) == 2
  assert not [name for name in os.listdir(tmp_path) if ':' in name]  # no folder 'ram:'
