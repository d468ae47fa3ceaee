"""All jobs on the tiny sibling of a giant, on a mesh of four devices: training, dev loss, translations and scores."""

import numpy as np
import pytest
import reversed_corpus
from text_lines import records

from lingvo_moe import decoder, trainer
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.run.rundir import RunDir

pytest.importorskip('jax')

MODEL = 'mt.m4.MoE128E12LTiny'
SMALL = {
  'source_vocab_size': 282,
  'target_vocab_size': 280,
  'max_length': 32,
  'boundaries': (32,),  # one shape of batch, one program each
  'batch_tokens': 512,
  'eval_every': 3,
}
BINDINGS = [f'MoE128E12LTiny.{name} = {value!r}' for name, value in SMALL.items()]
MESH = RuntimeOptions('expert:4', runtime='spmd')


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  return reversed_corpus.write(tmp_path_factory.mktemp('corpus'), held_out=12)


def options(logdir, corpus):
  given = {'model': MODEL, 'data_dir': str(corpus), 'max_steps': 3, 'gin_bindings': BINDINGS}
  return trainer.Options(logdir=str(logdir), **given)


@pytest.fixture(scope='module')
def run(corpus, tmp_path_factory):
  """A run of three steps on four devices, with an evaluation at the end."""
  logdir = tmp_path_factory.mktemp('giant') / 'log'
  assert trainer.train(options(logdir, corpus), MESH) is None
  return RunDir(str(logdir))


def decoded(run, runtime_options, name, score):
  decoder.decode(decoder.Options(logdir=run.path, once=True, score=score, overwrite=True), runtime_options)
  with open(run.file('decode', 'test', 'step_3', name), encoding='utf-8') as f:
    return f.read().splitlines()


@pytest.mark.slow
def test_a_tiny_giant_trains_and_evaluates_on_a_mesh_as_on_one_device(run, corpus, tmp_path):
  trainer.train(options(tmp_path, corpus))
  on_mesh, here = records(run.file('train.jsonl')), records(tmp_path / 'train.jsonl')
  for name in ('loss', 'dev_loss'):
    got, want = ([line[name] for line in lines if name in line] for lines in (on_mesh, here))
    assert len(got) == (3 if name == 'loss' else 1)
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.slow
def test_a_tiny_giant_translates_on_a_mesh_as_on_one_device(run):
  on_mesh = decoded(run, MESH, 'xx-en.hyp', score=False)
  assert len(on_mesh) == 12 and any(on_mesh)
  assert on_mesh == decoded(run, machine.LOCAL, 'xx-en.hyp', score=False)


@pytest.mark.slow
def test_a_tiny_giant_scores_on_a_mesh_as_on_one_device(run):
  on_mesh, here = (
    np.array(decoded(run, chosen, 'xx-en.scores', score=True), float) for chosen in (MESH, machine.LOCAL)
  )
  assert len(on_mesh) == 12 and np.all(on_mesh < 0)
  np.testing.assert_allclose(on_mesh, here, rtol=1e-5)
