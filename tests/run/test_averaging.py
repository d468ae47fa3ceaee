"""Averages of checkpoints: NumPy's mean, in a run of its own that decodes, and nothing left of what goes wrong."""

import os
import pathlib
import random
import shutil

import forks
import numpy as np
import pytest
import reversed_corpus
import tensorflow as tf
import tiny_config
from whole_state import WholeState

from lingvo_moe import decoder
from lingvo_moe.addons.analysis import translations
from lingvo_moe.config import configuration, registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import averaging, checkpoint, warm_start
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.storage import json_files
from lingvo_moe.storage.log_directory import LogDirectory
from lingvo_moe.tasks.mt.mt_task import TranslationTask

pytestmark = pytest.mark.usefixtures('one_trace')

COMMAND = ['-m', 'lingvo_moe.cli.commands.main', 'average']
SHAPES = {'decoder/layer_01/moe/wi': (3, 4, 5), 'decoder/norm/scale': (7,), 'encoder/bias': ()}
MODEL = 'mt.cldr.Tiny'


def weights_at(step, shapes=None):
  rng = np.random.default_rng(step)
  return {name: np.float32(rng.normal(0, 10.0**step, shape)) for name, shape in (shapes or SHAPES).items()}


def save(run, step, shapes=None):
  weights = weights_at(step, shapes)
  slots = {f'{name}/moment': np.ones_like(value) for name, value in weights.items()}
  state = {'step': tf.constant(step, tf.int64), 'weights': weights, 'slots': slots}
  run.checkpoints(keep=9).save(WholeState(state))


@pytest.fixture
def run(tmp_path):
  """Checkpoints of steps 1 to 4 with a configuration and a vocabulary that nobody reads."""
  run = RunDir(str(tmp_path / 'run'))
  os.makedirs(run.vocab_dir)
  pathlib.Path(run.config_file).write_text('{"model": "m"}')
  pathlib.Path(run.vocab_dir, 'source.model').write_text('pieces')
  for step in range(1, 5):
    save(run, step)
    run.checkpoints(keep=9).note_dev_loss(step, 1.0 + step)
  return run


def read_all(prefix):
  reader = tf.train.load_checkpoint(prefix)
  return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.mark.parametrize('part_bytes', [16, 40, 100, 1 << 20])
def test_it_is_numpys_mean_rounded_once_however_small_the_parts(run, tmp_path, part_bytes, monkeypatch):
  monkeypatch.setattr(checkpoint, 'PART_BYTES', part_bytes)
  out = RunDir(str(tmp_path / 'out'))
  assert averaging.average(run, [1, 2, 4], out.path) == 4
  found = read_all(out.checkpoints().path(4))
  assert found.keys() == {'step', *SHAPES} and found['step'] == 4
  for name in SHAPES:
    expected = np.mean([weights_at(step)[name] for step in (1, 2, 4)], axis=0, dtype=np.float64).astype(np.float32)
    assert found[name].dtype == np.float32
    np.testing.assert_array_equal(found[name], expected, err_msg=name)
  left = os.listdir(os.path.dirname(out.checkpoints().path(4)))
  assert all(name.startswith('state.') for name in left)


def test_blocks_are_small_and_make_up_the_whole():
  for shape in ((3, 4, 5), (7,), (), (6, 2), (1, 1, 9)):
    for most in (1, 4, 5, 11, 20, 59, 60, 100):
      filled = np.zeros(shape, int)
      for index in checkpoint.blocks(shape, most):
        filled[index] += 1
        assert filled[index].size <= max(most, shape[-1] if shape else 1)
        assert all(part.stop <= size for part, size in zip(index, shape, strict=True))
      assert (filled == 1).all(), (shape, most)


def test_the_mean_of_one_checkpoint_is_that_checkpoint(run, tmp_path):
  averaging.average(run, [3], str(tmp_path / 'out'))
  found = read_all(RunDir(str(tmp_path / 'out')).checkpoints().path(3))
  for name, value in weights_at(3).items():
    np.testing.assert_array_equal(found[name], value)


def test_the_run_is_left_alone_and_the_average_is_a_finished_run_of_its_own(run, tmp_path):
  before = sorted(str(path) for path in pathlib.Path(run.path).rglob('*'))
  out = RunDir(str(tmp_path / 'out'))
  averaging.average(run, [3, 4], out.path)
  assert sorted(str(path) for path in pathlib.Path(run.path).rglob('*')) == before
  assert (run.checkpoints().latest(), run.checkpoints().best()[:2]) == (4, (1, 2.0))
  assert sorted(os.listdir(out.path)) == ['averaged.json', 'checkpoints', 'config.json', 'finished.json', 'vocab']
  assert out.finished and out.checkpoints().steps() == [4] and out.checkpoints().best() is None
  assert json_files.parse(pathlib.Path(out.file('averaged.json')).read_text()) == {'steps': [3, 4], 'of': '../run'}
  assert pathlib.Path(out.vocab_dir, 'source.model').read_text() == 'pieces'


def test_the_weights_that_a_run_begins_with_are_in_no_average(run):
  save(run, 0)
  assert averaging.choose_steps(run, last=4) == [1, 2, 3, 4]
  with pytest.raises(UserError, match=r'the last 5 checkpoints .* after step 0 .* but it has 4 \(1, 2, 3, 4\)'):
    averaging.choose_steps(run, last=5)
  with pytest.raises(UserError, match='an average is of trained weights; saw step 0, .* leave it out'):
    averaging.choose_steps(run, steps=[0, 2])


def test_a_run_that_only_begins_has_nothing_to_average(tmp_path):
  begun = RunDir(str(tmp_path / 'begun'))
  os.makedirs(begun.path)
  pathlib.Path(begun.config_file).write_text('{"model": "m"}')
  save(begun, 0)
  with pytest.raises(UserError, match=r'the last 1 .* but it has 0 \(none\)'):  # also of --exponential
    averaging.choose_steps(begun, last=1)


def test_steps_are_the_last_or_those_given_and_a_missing_one_is_told(run):
  assert averaging.choose_steps(run, last=2) == [3, 4]
  assert averaging.choose_steps(run, steps=[4, 1]) == [1, 4]
  with pytest.raises(UserError, match='run has no checkpoint of step 5, 9; there: 1, 2, 3, 4'):
    averaging.choose_steps(run, steps=[1, 9, 5])
  with pytest.raises(UserError, match=r'the last 5 checkpoints .* but it has 4 \(1, 2, 3, 4\)'):
    averaging.choose_steps(run, last=5)
  with pytest.raises(UserError, match='every step counts once'):
    averaging.choose_steps(run, steps=[1, 1])


@pytest.mark.parametrize('optimizer', ['adafactor', pytest.param('adam', marks=pytest.mark.slow)])
def test_the_moving_average_is_that_of_the_weights_of_all_steps_also_after_an_interruption(tmp_path, optimizer):
  config = tiny_config.make(optimizer=optimizer, freeze='source_embedding', average_decay=0.5)
  run = RunDir(str(tmp_path / 'run'))
  os.makedirs(run.vocab_dir)
  configuration.save(MODEL, config, run.config_file)
  runtime, seen = LocalRuntime(config.program()), []
  runtime.init()
  for step in range(1, 5):
    if step == 3:  # goes on in another process
      run.checkpoints().save(WholeState(runtime.state()))
      runtime = LocalRuntime(config.program())
      warm_start.resume(runtime, run.checkpoints(), 2)
    runtime.train_step(TranslationTask(config).random_batch(step))
    seen.append({name: np.array(value) for name, value in runtime.state()['weights'].items()})
  run.checkpoints().save(WholeState(runtime.state()))

  for step in (2, 4):
    out = RunDir(str(tmp_path / f'out{step}'))
    averaging.take_moving_average(run, step, out.path)
    found = read_all(out.checkpoints().path(step))
    assert found.keys() == {'step', *seen[0]}
    shares = 0.5 ** np.arange(step, 0, -1)
    for name in seen[0]:
      expected = np.average([weights[name] for weights in seen[:step]], axis=0, weights=shares)
      np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-7, err_msg=name)
    note = json_files.parse(pathlib.Path(out.file('averaged.json')).read_text())
    assert note == {'steps': [step], 'average_decay': 0.5, 'of': '../run'}
  name = 'target_embedding/table'
  assert not np.allclose(found[name], seen[-1][name], rtol=1e-3)


def test_a_run_without_a_moving_average_is_told_how_to_keep_one(run, tmp_path):
  configuration.save(MODEL, registry.get(MODEL)(), run.config_file)
  with pytest.raises(UserError, match='keeps no moving average: .*--set average_decay=0.999'):
    averaging.take_moving_average(run, 4, str(tmp_path / 'out'))


@pytest.mark.parametrize(
  ('shapes', 'seen'),
  [
    ({**SHAPES, 'encoder/bias': (2,)}, r"'encoder/bias' has shape \(\) at step 4, but has shape \(2,\) at step 5"),
    ({**SHAPES, 'more': (2,)}, r"'more' is not there at step 4, but has shape \(2,\) at step 5"),
  ],
)
def test_checkpoints_of_two_models_are_refused(run, tmp_path, shapes, seen):
  save(run, 5, shapes)
  with pytest.raises(UserError, match=seen):
    averaging.average(run, [4, 5], str(tmp_path / 'out'))
  assert sorted(os.listdir(tmp_path)) == ['run']


def test_a_damaged_checkpoint_is_told_and_nothing_half_written_is_left(run, tmp_path):
  path = pathlib.Path(run.checkpoints().path(2) + '.data-00000-of-00001')
  good = path.read_bytes()
  at = good.index(weights_at(2)['decoder/norm/scale'].tobytes())
  path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
  with pytest.raises(UserError, match='step_00000002/state is damaged or cut short'):
    averaging.average(run, [1, 2], str(tmp_path / 'out'))
  path.write_bytes(good[:at])
  with pytest.raises(UserError, match='step_00000002/state is damaged or cut short'):
    averaging.average(run, [1, 2], str(tmp_path / 'out'))
  assert sorted(os.listdir(tmp_path)) == ['run']


def test_an_output_that_exists_is_refused_and_one_left_by_a_kill_is_replaced(run, tmp_path):
  with pytest.raises(UserError, match='exists: an average goes to a new directory'):
    averaging.average(run, [1, 2], run.path)
  os.makedirs(tmp_path / '.partial_out' / 'checkpoints')
  averaging.average(run, [1, 2], str(tmp_path / 'out'))
  assert sorted(os.listdir(tmp_path)) == ['out', 'run']


def test_a_place_that_cannot_be_written_is_told(run, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='could not be written'):
    averaging.average(run, [1, 2], str(tmp_path / 'file' / 'out'))


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A real run with two checkpoints, neither of them trained."""
  root = tmp_path_factory.mktemp('corpus')
  targets = reversed_corpus.draw(random.Random(0), 200, ['one', 'two', 'three', 'four'])
  reversed_corpus.write_lines(root / 'xx-en', 'train', targets)
  reversed_corpus.write_lines(root / 'xx-en', 'test', targets[:3])
  run = RunDir(str(tmp_path_factory.mktemp('run') / 'log'))
  sizes = dict(
    source_vocab_size=275, target_vocab_size=272, max_length=16, encoder_layers=1, decoder_layers=1, moe_every=1
  )
  config = run.begin(MODEL, configuration.resolve(MODEL, data_dir=str(root), **sizes))
  for step in (1, 2):
    program = LocalRuntime(config.program()).program
    state = program.init()
    noisy = {name: w + 0.1 * step for name, w in state['weights'].items()}
    run.checkpoints().save(WholeState({**state, 'step': tf.constant(step, tf.int64), 'weights': noisy}))
  return run


def test_as_typed_it_decodes_by_its_step_and_training_does_not_go_on_from_it(trained, tmp_path):
  logdir = str(tmp_path / 'log')
  shutil.copytree(trained.path, logdir)
  done = forks.run([*COMMAND, f'--logdir={logdir}/', '--last=2'])
  assert done.returncode == 0, done.stderr
  out = RunDir(logdir + '_average')
  assert done.stdout == (
    f'{out.path}: the mean of steps 1, 2 of {logdir}, as step 2\nlingvo-moe decode {out.path} --split=test --step=2\n'
  )
  decoder.decode(decoder.Options(logdir=out.path, step=2))
  assert os.path.exists(out.file('decode', 'test', 'step_2', 'scores.json'))
  decoder.decode(decoder.Options(logdir=out.path))  # waits for no other
  read = LogDirectory.read(out.path)
  assert read.averaged['steps'] == [1, 2] and read.decoded_steps('test') == [2]
  assert translations.read(read, 'test', 2)['xx-en'].counted().shape[0] == 3
  config = out.load_config()
  runtime = LocalRuntime(config.program())
  out.checkpoints().load_weights(runtime, 2)
  for name, value in runtime.state()['weights'].items():
    a, b = (read_all(trained.checkpoints().path(step)) for step in (1, 2))
    np.testing.assert_array_equal(value, np.float32((np.float64(a[name]) + b[name]) / 2), err_msg=name)
  with pytest.raises(UserError, match="no tensor 'slots/"):
    warm_start.resume(runtime, out.checkpoints(), 2)
  assert warm_start.find(out.path) == out.checkpoints().path(2)
  assert checkpoint.shapes(out.checkpoints().path(2)).keys() == {'step', *runtime.program.weight_specs}


@pytest.mark.parametrize(
  ('flags', 'answer'),
  [
    (['--last=1', '--steps=1'], 'what to average is given either as --last=4 or as --steps=1000,2000'),
    ([], 'what to average is given either'),
    (['--steps=1,b'], "--steps are numbers with commas between, e.g. --steps=1000,2000; saw 'b'"),
    (['--last=2'], 'nowhere: there is no such directory'),
  ],
)
def test_a_mistake_gets_one_line_and_status_1(tmp_path, flags, answer):
  done = forks.run([*COMMAND, f'--logdir={tmp_path}/nowhere', *flags])
  assert done.returncode == 1 and not done.stdout and answer in done.stderr
  assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith('error: ')
