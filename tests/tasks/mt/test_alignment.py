"""Attention of a decoder layer to the source, of which alignments are made, and its guidance in training."""

import dataclasses
import pathlib
import random
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from text_lines import write

from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, text
from lingvo_moe.inputs import pair_caches
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.mt_input import TrainInput
from lingvo_moe.models.batches import ALIGNED
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.tasks.task import task_of
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab
from lingvo_moe.vocab.vocab_training import train_vocab

CONFIG = MtConfig(
  model_dim=16,
  ff_dim=32,
  num_heads=2,
  head_dim=8,
  encoder_layers=2,
  decoder_layers=4,
  num_experts=2,
  source_vocab_size=40,
  target_vocab_size=30,
  batch_tokens=64,
  max_length=16,
)


def test_weights_are_those_by_which_the_layer_attends_in_a_scanned_stack_too():
  batch = task_of(CONFIG).random_batch(full=False)
  scanned = lambda layer: dataclasses.replace(CONFIG, scan_layers=True, remat='block', alignment_layer=layer).program()
  weights = scanned(0).init()['weights']
  flat = {}
  for name, weight in weights.items():
    names = weights_lib.names_by_layer(name, weight.shape[0])
    flat |= {own: weight[i] for i, own in enumerate(names)} if names else {name: weight}
  tensors = {name: tf.constant(x) for name, x in batch.items()}
  attend = lambda p, w: p.model.attention_to_source(p.theta(w), tensors).numpy()
  for layer in range(5):  # 0: the second of four
    weights_BTU = attend(dataclasses.replace(CONFIG, alignment_layer=layer).program(), flat)
    np.testing.assert_allclose(attend(scanned(layer or 2), weights), weights_BTU, atol=1e-6)
    real_BT, is_source_BU = batch['tgt_segments'] > 0, batch['src_segments'] > 0
    np.testing.assert_allclose(weights_BTU.sum(axis=2)[real_BT], 1, atol=1e-5)
    assert not weights_BTU[real_BT][~np.repeat(is_source_BU[:, None], 16, axis=1)[real_BT]].any()


@pytest.fixture(scope='module')
def guided(tmp_path_factory):
  """A corpus whose alignments turn the order of pieces around, its configuration and vocabularies."""
  root = tmp_path_factory.mktemp('guided')
  rng = random.Random(0)
  for pair in ('de-en', 'fr-en'):
    for language in pair.split('-'):
      lines = (f'{language} ' + ' '.join(rng.choices('abcdefgh', k=rng.randint(1, 6))) for _ in range(200))
      write(root / 'data' / pair / f'train.{language}', lines)
  pairs = parallel.find_pairs(str(root / 'data'))
  vocab = train_vocab(pairs, str(root / 'v'), 276, tags=True)
  for pair in pairs:
    sides = [TaggedVocab(vocab).encode(list(text.lines(files))) for _, files in pair.sides]
    with open(root / f'{pair.name}.train.align', 'w') as f:
      for source, target in zip(*sides, strict=True):
        points = [f'{len(source) - 1 - j}-{j}' for j in range(min(len(source), len(target)))]
        f.write('source\ttarget\t' + ' '.join(reversed(points)) + '\n')  # as the decoder writes them
  config = dataclasses.replace(
    CONFIG, data_dir=str(root / 'data'), source_vocab=vocab, target_vocab=vocab, shared_vocab=True, tag_target=True,
    source_vocab_size=276, batch_tokens=160, max_length=40, guided_by=str(root), guided_weight=1.0, num_experts=0,
    learning_rate=0.3, optimizer='adafactor', warmup_steps=10, decoder_layers=2,
  )  # fmt: skip
  return config, (TaggedVocab(vocab),) * 2, str(root / 'cache')


@pytest.mark.parametrize('packing', [False, True])
def test_alignments_of_text_are_places_of_a_batch(guided, packing):
  config, vocabs, cache_dir = guided
  train = TrainInput(dataclasses.replace(config, packing=packing), vocabs, cache_dir, Feed(quiet=True))
  seen = 0
  for step in range(6):
    batch = train.batch(step)
    for row, aligned_T in enumerate(batch[ALIGNED]):
      for segment in range(1, batch['tgt_segments'][row].max() + 1):
        source = np.flatnonzero(batch['src_segments'][row] == segment)[1:-1]  # without the tag and the end
        target = np.flatnonzero(batch['tgt_segments'][row] == segment)
        expected = [source[-1 - j] + 1 if j < min(len(source), len(target) - 1) else 0 for j in range(len(target))]
        assert aligned_T[target].tolist() == expected
        seen += 1
      assert not aligned_T[batch['tgt_segments'][row] == 0].any()
  assert seen > 30 and set(train.keys) == {*batch}


def test_the_objective_has_what_attention_misses_and_training_lowers_it(guided):
  config, vocabs, cache_dir = guided
  train = TrainInput(config, vocabs, cache_dir, Feed(quiet=True))
  batch = {name: tf.constant(x) for name, x in train.batch(0).items()}
  program = config.program()
  runtime = LocalRuntime(program)
  runtime.init()

  def missed():
    theta = program.theta(runtime.state()['weights'])
    attention_BTU = program.model.attention_to_source(theta, batch).numpy()
    places = np.argwhere(batch[ALIGNED].numpy() > 0)
    own = [attention_BTU[b, t, batch[ALIGNED][b, t] - 1] for b, t in places]
    plain = {name: x for name, x in batch.items() if name != ALIGNED}
    (objective, metrics), (without, _) = program.model.loss(theta, batch), program.model.loss(theta, plain)
    tokens = np.count_nonzero(batch['tgt_segments'])
    np.testing.assert_allclose(objective - without, metrics['objective_parts']['alignment'], rtol=1e-3)
    np.testing.assert_allclose(objective - without, -np.log(own).sum() / tokens, rtol=1e-3)
    return np.exp(np.log(own).mean())

  before = missed()
  for step in range(60):
    runtime.train_step(train.batch(step))
  assert missed() > 2 * before


def test_guided_training_runs_encoder_and_decoder_once(guided):
  config, vocabs, cache_dir = guided
  model = config.program().model
  batch = TrainInput(config, vocabs, cache_dir, Feed(quiet=True)).batch(0)

  def products(names):
    specs = {name: tf.TensorSpec(batch[name].shape, batch[name].dtype) for name in names}
    weights = {name: tf.TensorSpec(s.shape) for name, s in weights_lib.flatten(model.weights()).items()}
    loss = lambda weights, batch: model.loss(weights_lib.unflatten(weights), batch, prng.key(0))[0]
    graph = tf.function(loss, autograph=False).get_concrete_function(weights, specs).graph
    return [op.name for op in graph.get_operations() if op.type in ('Einsum', 'MatMul', 'BatchMatMulV2')]

  assert products(batch) == products(batch.keys() - {ALIGNED}) != []


def test_alignments_of_what_is_left_out_are_not_read(guided, tmp_path):
  config, *_ = guided
  vocabs = (TaggedVocab(config.source_vocab),) * 2
  shutil.copytree(config.guided_by, tmp_path, dirs_exist_ok=True)
  long = {language: ' '.join('abcdefgh' * 9) for language in ('de', 'en')}
  for language, line in long.items():
    with open(tmp_path / 'data' / 'de-en' / f'train.{language}', 'a') as f:
      f.write(line + '\n')
  with open(tmp_path / 'de-en.train.align', 'a') as f:
    f.write('900-900\n')
  own = dataclasses.replace(config, data_dir=str(tmp_path / 'data'), guided_by=str(tmp_path))
  assert '1 too long' in str(TrainInput(own, vocabs, str(tmp_path / 'cache'), Feed(quiet=True)).stats)


def test_the_first_of_several_source_pieces_is_taken():
  assert pair_caches._sources('2-0 0-0 1-2') == [3, 0, 2]  # counted from 1; 0 for none
  assert pair_caches._sources(' 0-1\t1-1  0-0 ') == [1, 2] and pair_caches._sources('') == []


def test_alignments_that_do_not_fit_are_refused(guided, tmp_path):
  config, *_ = guided
  lines = (pathlib.Path(config.guided_by) / 'de-en.train.align').read_text().splitlines()
  shutil.copy(pathlib.Path(config.guided_by) / 'fr-en.train.align', tmp_path)
  own = dataclasses.replace(config, guided_by=str(tmp_path))
  make = lambda name: TrainInput(own, (TaggedVocab(own.source_vocab),) * 2, str(tmp_path / name), Feed(quiet=True))
  with pytest.raises(UserError, match=r'de-en.train.align is missing: add it'):
    make('0')
  at = lambda place, line: [*lines[: place - 1], line, *lines[place:]]
  folder = re.escape(str(tmp_path))
  for number, (changed, message) in enumerate(
    [
      (lines[1:], 'must have a line for each of 200; saw 199'),
      (at(6, '0-0 1'), f"such as '0-0 1-2'; saw '0-0 1' in line 6 of {folder}/de-en.train.align"),
      (at(200, '0-01-1'), "saw '0-01-1' in line 200 of"),
      (at(1, 'a\tb\t0p0'), "saw '0p0' in line 1 of"),
      (at(9, '-1-0'), "saw '-1-0' in line 9 of"),
      (at(7, '٠-0'), "saw '٠-0' in line 7 of"),
      (at(17, '70-0'), rf'those of line 17 of {folder}/de-en.train.align are of 71 source and 1 target pieces, where'),
      (at(2, '0-0 0-50'), 'those of line 2 of .* are of 1 source and 51 target pieces, where there are'),
    ]
  ):
    (tmp_path / 'de-en.train.align').write_text('\n'.join(changed) + '\n')
    with pytest.raises(UserError, match=message):  # before the first batch
      make(str(number + 1))
  with pytest.raises(UserError, match='guided_by must be left out with source_sampling'):
    dataclasses.replace(config, target_sampling=(('dropout', 0.1),))
