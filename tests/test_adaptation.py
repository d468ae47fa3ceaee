"""Adaptation of a run to another language: shared pieces keep their embeddings, and what is frozen stays bit-equal."""

import contextlib
import dataclasses
import io
import re

import numpy as np
import pytest
import tensorflow as tf
import tiny_config
from text_lines import records

from lingvo_moe import trainer
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.cldr import corpus as cldr_corpus
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.mt.mt_task import TranslationTask
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

pytestmark = pytest.mark.usefixtures('one_trace')

MODEL = tiny_config.MODEL
SMALL = tiny_config.make(freeze='encoder, source_embedding', num_experts=4)
SIZES = (
  'Tiny.source_vocab_size = 500',
  'Tiny.target_vocab_size = 330',
  'Tiny.encoder_layers = 1',
  'Tiny.decoder_layers = 1',
  'Tiny.moe_every = 1',
  'Tiny.num_experts = 4',
  'Tiny.eval_every = 1000',
  'Tiny.eval_sentences = 20',
  'Tiny.warmup_steps = 10',
)


def train(corpus, logdir, max_steps, *bindings, **values):
  """Trains the tiny model; returns what it said."""
  given = {'model': MODEL, 'data_dir': str(corpus), 'gin_bindings': [*SIZES, *bindings], **values}
  with contextlib.redirect_stderr(io.StringIO()) as said:
    trainer.train(trainer.Options(logdir=str(logdir), max_steps=max_steps, **given))
  return said.getvalue()


def weights_of(logdir, step):
  reader = tf.train.load_checkpoint(RunDir(str(logdir)).checkpoints().path(step))
  return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """Folder of a corpus, of the run 'first' of German and French, and of 'second', which adds Dutch to it."""
  root = tmp_path_factory.mktemp('adapted')
  cldr_corpus.make_corpus(str(root / 'corpus'), ['de', 'fr', 'nl'], 1, 300, progress=False)
  train(root / 'corpus', root / 'first', 2, "Tiny.pairs = 'de-en,fr-en'")
  new = ("Tiny.pairs = 'nl-en,de-en'", "Tiny.weights = {'nl-en': 3}", "Tiny.freeze = 'encoder'")
  told = train(root / 'corpus', root / 'second', 0, *new, init_from=str(root / 'first'))
  told += train(root / 'corpus', root / 'second', 30, *new)  # goes on from step 0, whose dev loss it computes first
  (root / 'told.txt').write_text(told)
  return root


def vocab(logdir, side):
  read = TaggedVocab(str(logdir / 'vocab' / f'{side}.model'))
  return read.pieces(range(read.size))


@pytest.mark.long('the first test of the file makes its corpus and trains its two runs')
@pytest.mark.parametrize('side', ['source', 'target'])
def test_rows_of_shared_pieces_are_copied_and_new_ones_begin_as_usual(root, side):
  name = f'{side}_embedding/table'
  there, here = weights_of(root / 'first', 2)[name], weights_of(root / 'second', 0)[name]
  theirs, ours = vocab(root / 'first', side), vocab(root / 'second', side)
  config = RunDir(str(root / 'second')).load()[1]
  initial = weights_lib.initialize({name: config.program().weight_specs[name]}, config.seed)[name].numpy()
  shared = [piece in theirs for piece in ours]
  assert ours != theirs and 270 < sum(shared) < len(ours)
  for i, piece in enumerate(ours):
    np.testing.assert_array_equal(here[i], there[theirs.index(piece)] if shared[i] else initial[i], err_msg=piece)
  assert (
    f'{name} belongs to another vocabulary, but {sum(shared)} of its {len(ours)} rows are'
    in (root / 'told.txt').read_text()
  )


def test_what_is_frozen_stays_bit_equal_and_the_rest_learns_the_new_language(root):
  first, begun, ended = weights_of(root / 'first', 2), weights_of(root / 'second', 0), weights_of(root / 'second', 30)
  encoder = [name for name in begun if name.startswith('encoder/')]
  assert len(encoder) > 8
  for name in encoder:
    np.testing.assert_array_equal(first[name], begun[name], err_msg=name)
    np.testing.assert_array_equal(ended[name], begun[name], err_msg=name)
  assert not [name for name in ended if name.startswith('slots/encoder/')]
  for name in ('source_embedding/table', 'target_embedding/table', 'decoder/layer_00/moe/wi'):
    assert np.any(ended[name] != begun[name]), name
  lines = records(root / 'second' / 'train.jsonl')
  before, after = (line['dev_loss_by_pair']['nl-en'] for line in lines if 'dev_loss' in line)
  assert after < before - 0.3, (before, after)


def test_the_trainer_says_what_an_epoch_is_and_how_long_it_takes(root):
  told = (root / 'told.txt').read_text()
  assert 'trained to step 0 (max_steps); dev was not measured' in told
  assert re.search(r'an epoch, as many examples as the corpus has, is about \d+ steps; max_steps=30 makes \d', told)
  assert re.search(r'steps a second here: an epoch takes about .*, and the 7 steps that are left about', told)


def trained(runtime):
  """Weights before and after two steps on random ids."""
  runtime.init()
  arrays = lambda: {name: np.array(value) for name, value in runtime.state()['weights'].items()}
  before = arrays()
  for seed in (1, 2):
    runtime.train_step(TranslationTask(SMALL).random_batch(seed))
  return before, arrays()


RUNTIMES = {
  'auto': lambda program: LocalRuntime(program),
  'reference': lambda program: LocalRuntime(program, backend='reference'),
  'spmd': lambda program: machine.connect(RuntimeOptions('data:2', False, runtime='spmd')).make_runtime(program),
}


SCANNED = {'num_groups': 4, 'encoder_layers': 2, 'scan_layers': True, 'remat': 'block', 'micro_batches': 2}


@pytest.mark.parametrize(
  'how, changes',
  [
    ('auto', {}),
    ('reference', {'optimizer': 'adafactor', 'clip_norm': 0.0}),
    pytest.param('spmd', {}, marks=pytest.mark.compiled),
    pytest.param('auto', {'optimizer': 'adafactor', 'clip_norm': 0.0}, marks=pytest.mark.slow),
    pytest.param('spmd', {'optimizer': 'adafactor', **SCANNED}, marks=pytest.mark.slow),
  ],
)
def test_every_runtime_leaves_what_is_frozen_bit_equal(how, changes):
  if how == 'spmd':
    pytest.importorskip('jax')
  config = dataclasses.replace(SMALL, **changes)
  before, after = trained(RUNTIMES[how](config.program()))
  for name in before:
    same = np.array_equal(before[name], after[name])
    assert same == name.startswith(('encoder/', 'source_embedding/')), name


@pytest.mark.parametrize(
  'freeze, message',
  [
    ('encodr', "freeze: 'encodr' is no part of the weights; closest: encoder"),
    ('encoder,decoder,source_embedding,target_embedding', 'freeze must be less than all of the model; saw'),
  ],
)
def test_impossible_parts_are_refused(freeze, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(SMALL, freeze=freeze)
