"""A run trained from an export, with neither TensorFlow nor this package, has the weights that the trainer gives it."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import forks
import numpy as np
import pytest
import reversed_corpus
import tensorflow as tf

from lingvo_moe import trainer
from lingvo_moe.core.errors import UserError
from lingvo_moe.models.batches import padded
from lingvo_moe.run.rundir import RunDir

pytest.importorskip('jax')
batches = pytest.importorskip('step_export.batches')
pytestmark = pytest.mark.compiled

TOOL = pathlib.Path(__file__).resolve().parents[2] / 'tools' / 'train_elsewhere.py'
SIZES = (
  'source_vocab_size=300',
  'target_vocab_size=300',
  'max_length=48',
  'batch_tokens=192',
  'num_groups=4',
  'encoder_layers=1',
  'decoder_layers=1',
  'moe_every=1',
  'eval_sentences=4',
  'eval_every=2',
  'residual_dropout=0.1',
  'packing=True',
)
FALLING = ('schedule=warmup_linear', 'warmup_steps=1', 'learning_rate=4e-5')
# None in place of a module is an ImportError for whoever imports it.
ALONE = (
  'import runpy, sys; sys.modules.update(tensorflow=None, lingvo_moe=None); sys.path.insert(0, "."); '
  'runpy.run_path("train.py", run_name="__main__")'
)


def train(corpus, logdir, max_steps, *settings):
  """Trains the tiny model on this machine."""
  given = {'model': 'mt.cldr.Tiny', 'data_dir': str(corpus), 'set': [*SIZES, *settings]}
  trainer.train(trainer.Options(logdir=str(logdir), max_steps=max_steps, **given))


def tool(*arguments, **options):
  return forks.run([TOOL, *map(str, arguments)], timeout=300, **options)


def state_of(logdir, step):
  """Weights and optimizer slots of a checkpoint."""
  reader = tf.train.load_checkpoint(RunDir(str(logdir)).checkpoints().path(step))
  return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_trained_alike(logdir, other, step):
  """Two runs have the same state, but for rounding, and the same dev losses up to a step."""
  expected, found = state_of(other, step), state_of(logdir, step)
  assert found.keys() == expected.keys() and any(name.startswith('slots/') for name in found)
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
  losses = [
    [checkpoints.evaluation(s) for s in checkpoints.steps() if 0 < s <= step]
    for checkpoints in (RunDir(str(path)).checkpoints() for path in (logdir, other))
  ]
  for one, theirs in zip(*losses, strict=True):
    assert one.step == theirs.step and one.dev_text == theirs.dev_text
    assert one.dev_loss == pytest.approx(theirs.dev_loss, rel=1e-5)
    assert one.evaluated_after == theirs.evaluated_after


@pytest.fixture(scope='module')
def root(tmp_path_factory, one_trace):
  """Folder of a corpus and of the runs 'here' and 'longer', trained to step 3, and 'begun', at step 0."""
  root = tmp_path_factory.mktemp('elsewhere')
  (root / 'corpus').mkdir()
  corpus = reversed_corpus.write(root / 'corpus', held_out=8)
  train(corpus, root / 'here', 3)
  shutil.copytree(root / 'here', root / 'longer')
  train(corpus, root / 'begun', 0, *FALLING)
  return root


def elsewhere(folder, *arguments):
  return subprocess.run(
    [sys.executable, '-c', ALONE, *arguments], cwd=folder, capture_output=True, text=True, timeout=300
  )


def test_a_run_that_begins_is_trained_elsewhere_to_the_same_state_at_a_rate_that_falls_to_0_at_its_end(root):
  train(root / 'corpus', root / 'whole', 3, *FALLING)
  tool(f'--logdir={root}/begun', f'--out={root}/export', '--steps=3', check=True)
  assert not (root / 'export' / 'state.npz').exists()
  done = elsewhere(root / 'export', '--keep=1')
  assert done.returncode == 0 and 'step 3: loss ' in done.stdout, done.stderr
  tool(f'--logdir={root}/begun', f'--take={root}/export', check=True)
  checkpoints = RunDir(f'{root}/begun').checkpoints()
  assert checkpoints.steps() == [0, 1, 2, 3]
  assert [checkpoints.evaluation(step) is not None for step in (1, 2, 3)] == [False, True, True]
  moved = lambda step, name='encoder/layer_00/attention/wq': state_of(root / 'begun', step)[name]
  assert np.abs(moved(3) - moved(2)).max() > 0  # the last rate is a third of the first
  (root / 'begun' / 'checkpoints' / 'step_00000001').rename(root / 'kept')
  assert_trained_alike(root / 'begun', root / 'whole', 3)
  (root / 'cut').mkdir()
  (root / 'cut' / 'state_00000007.npz').write_bytes((root / 'export' / 'state_00000003.npz').read_bytes()[:999])
  cut = tool(f'--logdir={root}/begun', f'--take={root}/cut')
  assert cut.returncode == 1 and 'cannot be read' in cut.stderr and 'Traceback' not in cut.stderr, cut.stderr
  again = tool(f'--logdir={root}/begun', f'--take={root}/export')
  assert again.returncode == 1 and 'has a checkpoint of step 2 already' in again.stderr, again.stderr


def test_a_run_goes_on_elsewhere_is_killed_there_and_comes_back(root):
  tool(f'--logdir={root}/here', f'--out={root}/later', '--steps=5', check=True)
  assert elsewhere(root / 'later', '1').returncode == 0  # a kill between two states leaves as much
  done = elsewhere(root / 'later', '3')
  assert done.returncode == 0 and 'going on from step 4, state_00000004.npz' in done.stdout, done.stderr
  tool(f'--logdir={root}/here', f'--take={root}/later', check=True)
  train(root / 'corpus', root / 'here', 8)
  train(root / 'corpus', root / 'longer', 6)
  train(root / 'corpus', root / 'longer', 8)
  assert_trained_alike(root / 'here', root / 'longer', 8)
  best = [RunDir(str(root / name)).checkpoints().best() for name in ('here', 'longer')]
  assert best[0].step == best[1].step


def test_training_elsewhere_keeps_the_best_and_ends_when_it_has_no_patience_left(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'path', [str(TOOL.parent / 'step_export'), *sys.path])
  elsewhere = pytest.importorskip('train')
  monkeypatch.setattr(elsewhere, 'FOLDER', tmp_path)
  (tmp_path / 'state_copy.npz').touch()  # no state of a step
  for step in (10, 20, 25, 30, 40, 50):
    (tmp_path / f'state_{step:08d}.npz').touch()
  losses = [[10, 1.5], [20, 1.2], [30, 1.2], [40, 1.4], [50, 1.3]]
  of_run = {'keep_checkpoints': 1, 'keep_every': 15, 'patience': 3, 'best': None, 'evaluated_after': 0}
  elsewhere.drop_old(of_run, losses, kept=[25])
  assert list(elsewhere.states()) == [20, 25, 30, 50]  # the best, asked for, every 15, the newest
  assert elsewhere.out_of_patience(of_run, losses)
  assert not elsewhere.out_of_patience(of_run, losses[:4])
  assert not elsewhere.out_of_patience(of_run | {'patience': 0}, losses)
  before = of_run | {'best': 1.1, 'evaluated_after': 1}
  assert elsewhere.out_of_patience(before, losses[:2]) and not elsewhere.out_of_patience(before, losses[:1])


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    ((), 'either --out or --take is given'),
    (('--out=OUT', '--take=OUT'), 'either --out or --take is given'),
    (('--take=NOTHING',), 'has state_<step>.npz, which train.py writes; saw none'),
    (('--out=begun',), 'an export goes to a new directory'),
  ],
)
def test_mistakes_are_told(root, arguments, said):
  done = tool(f'--logdir={root}/begun', *arguments, cwd=root)
  assert done.returncode == 1 and said in done.stderr, done.stderr


def test_batches_of_several_shapes_are_refused(tmp_path):
  batch = lambda length: padded([[5, 6, 2]], 2, length).as_source() | padded([[7, 2]], 2, length).as_target()
  with pytest.raises(UserError, match='saw rows of 8 and 8, 16 and 16 tokens: begin a run with packing=True'):
    batches.save(str(tmp_path / 'batches.npz'), [batch(8), batch(16)], 0, 2)
  with pytest.raises(UserError, match='saw arrays .*tgt_loss_factors'):
    batches.save(str(tmp_path / 'batches.npz'), [batch(8) | {'tgt_loss_factors': np.ones([2, 8])}], 0, 1)
  assert not list(tmp_path.iterdir())
