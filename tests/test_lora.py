"""Runs with LoRA adapters: they begin as their base, train adapters alone, and are exported merged."""

import contextlib
import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
import tiny_config
from imported_model import FIXTURES
from text_lines import write
from whole_state import WholeState

import lingvo_moe
from lingvo_moe import trainer
from lingvo_moe.addons.interop import hub_export, importing
from lingvo_moe.cli.commands import export
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.ops import backend
from lingvo_moe.run import averaging
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.mt.mt_task import TranslationTask

pytestmark = pytest.mark.usefixtures('one_trace')

BASE = tiny_config.make(encoder_layers=2, num_experts=4, num_groups=4, capacity_factor=None, second_choice='always')
CHANGES = {'lora_rank': 4, 'lora_matrices': 'wq,moe/w?,table', 'optimizer': 'adam', 'schedule': 'constant'}
LORA = dataclasses.replace(BASE, **CHANGES, learning_rate=1e-2)
SCANNED = {'scan_layers': True, 'remat': 'block'}


def tensors(seed):
  return {name: tf.constant(ids) for name, ids in TranslationTask(BASE).random_batch(seed).items()}


def test_it_begins_as_its_base():
  begun, base = LORA.program().init()['weights'], BASE.program().init()['weights']
  assert sum(name.startswith('lora/') for name in begun) == 2 * (4 + 6 + 2)
  for name, weight in base.items():
    np.testing.assert_array_equal(begun[name], weight)
  loss = lambda config, weights: config.program().eval_step(weights, tensors(3))['loss']
  assert loss(LORA, begun) == loss(BASE, base)


@pytest.mark.parametrize('optimizer, numbers', [('adam', 2), ('adafactor', 1)])
def test_optimizer_slots_are_those_of_adapters(optimizer, numbers):
  program = dataclasses.replace(LORA, optimizer=optimizer).program()
  adapters = sum(spec.size for name, spec in program.weight_specs.items() if name.startswith('lora/'))
  assert sum(spec.size for spec in program.slot_specs.values()) == numbers * adapters
  assert set(program.trained_specs) == {name for name in program.weight_specs if name.startswith('lora/')}


def trained(runtime):
  """Losses of three steps, and the weights before and after."""
  runtime.init()
  arrays = lambda: {name: np.array(value) for name, value in runtime.state()['weights'].items()}
  before = arrays()
  return [runtime.train_step(TranslationTask(BASE).random_batch(seed))['loss'] for seed in (1, 2, 3)], before, arrays()


@pytest.mark.parametrize(
  'kind, changes', [('auto', {'optimizer': 'adafactor', 'learning_rate': 1.0}), ('reference', {})]
)
def test_adapters_alone_are_trained(kind, changes):
  config = dataclasses.replace(LORA, encoder_layers=1, **changes)
  _, before, after = trained(LocalRuntime(config.program(), backend=kind))
  for name in before:
    assert np.array_equal(before[name], after[name]) != name.startswith('lora/'), name


def test_gradients_are_those_of_the_chain_rule_through_the_product():
  program, weights = LORA.program(), LORA.program().init()['weights']
  weights = {n: w + tf.cast(n.endswith('/b'), tf.float32) * 0.1 for n, w in weights.items()}
  base = dataclasses.replace(BASE, **{name: CHANGES[name] for name in ('optimizer', 'schedule')}).program()
  merged = program.lora.merged(weights)
  with backend.use(backend.REFERENCE):
    ours, _ = program.gradients(tf.constant(0, tf.int64), weights, tensors(1))
    of_base, _ = base.gradients(tf.constant(0, tf.int64), merged, tensors(1))
  name = 'encoder/layer_01/moe/wi'
  a, b = (weights[f'lora/{name}/{letter}'] for letter in 'ab')
  scale = LORA.lora_alpha / LORA.lora_rank
  np.testing.assert_allclose(
    ours[f'lora/{name}/a'], scale * tf.einsum('EMH,ERH->EMR', of_base[name], b), rtol=1e-4, atol=1e-6
  )
  np.testing.assert_allclose(
    ours[f'lora/{name}/b'], scale * tf.einsum('EMR,EMH->ERH', a, of_base[name]), rtol=1e-4, atol=1e-6
  )


@pytest.mark.compiled
@pytest.mark.parametrize(
  'changes', [{'encoder_layers': 1}, pytest.param({**SCANNED, 'optimizer': 'adafactor'}, marks=pytest.mark.slow)]
)
def test_a_mesh_trains_as_one_device(changes):
  spmd = pytest.importorskip('lingvo_moe.runtime.spmd')
  config = dataclasses.replace(LORA, **changes)
  local, _, ours = trained(LocalRuntime(config.program()))
  losses, before, after = trained(spmd.SpmdRuntime(config.program(), Mesh.parse('data:2,expert:2')))
  np.testing.assert_allclose(losses, local, rtol=1e-5)
  for name in after:
    np.testing.assert_allclose(after[name], ours[name], atol=2e-3, err_msg=name)
    assert np.array_equal(before[name], after[name]) != name.startswith('lora/'), name


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'lora_matrices': 'wx'}, "lora_matrices: 'wx' is the end of the name of no matrix"),
    ({'freeze': 'encoder'}, 'freeze must be left out with lora_rank; saw .*: adapters alone are trained'),
  ],
)
def test_impossible_adapters_are_refused(changes, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(LORA, **changes)


def test_slices_of_stored_weights_are_merged(tmp_path):
  program = LORA.program()
  state = program.init()
  random = lambda name, w: tf.random.stateless_normal(w.shape, [1, len(name)])
  weights = {n: random(n, w) if n.startswith('lora/') else w for n, w in state['weights'].items()}
  checkpoints = Checkpoints(str(tmp_path), 1, constant=program.constant)
  for step in range(3):
    checkpoints.save(WholeState({**state, 'step': tf.constant(step), 'weights': weights}))
  assert checkpoints.steps() == [0, 2] and set(checkpoints.merged(2, LORA)) == set(BASE.program().weight_specs)
  merged = program.lora.merged(weights)
  for name, index in (
    ('encoder/layer_01/moe/wi', np.s_[1:3, 2:9, 4:]),
    ('decoder/layer_00/attention/wq', np.s_[3:, 1:]),
  ):
    stored = checkpoints.merged(2, LORA)[name]
    np.testing.assert_allclose(stored[...], merged[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stored[index], merged[name].numpy()[index], rtol=1e-5, atol=1e-6)
  shutil.rmtree(tmp_path / 'step_00000000')
  with pytest.raises(UserError, match='has no tensor .*: of a run with adapters, step_00000000/state beside it has'):
    checkpoints.merged(2, LORA)


# A run from an import to exports.

SETTINGS = ['lora_rank=3', 'lora_matrices="attention/w?,ffn/w?"', 'optimizer="adam"', 'schedule="constant"']
SETTINGS += ['learning_rate=0.01', 'batch_tokens=512', 'eval_every=2', 'keep_checkpoints=1', 'max_length=32']
LINES = ['Wo ist der Bahnhof?', 'Ein Hund läuft.', 'Er trinkt jeden Morgen Kaffee.']


def train(logdir, corpus, steps, **options):
  with contextlib.redirect_stderr(io.StringIO()) as said:
    trainer.train(trainer.Options(logdir=str(logdir), data_dir=str(corpus), max_steps=steps, **options))
  return said.getvalue()


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """Folder of a corpus, and of the run 'run' of four steps, which was interrupted after two."""
  root = tmp_path_factory.mktemp('lora')
  folder = root / 'corpus' / 'eng-deu'
  for split, count in (('train', 12), ('dev', 2)):
    for language in ('eng', 'deu'):
      write(folder / f'{split}.{language}', LINES * count)
  importing.import_folder(str(FIXTURES / 'marian'), str(root / 'run'), SETTINGS)
  train(root / 'run', root / 'corpus', 2)
  train(root / 'run', root / 'corpus', 4)
  return root


def names_in(root, step):
  return {name for name, _ in tf.train.list_variables(RunDir(str(root / 'run')).checkpoints().path(step))}


def test_checkpoints_have_adapters_and_leave_the_base_to_that_of_step_0(root):
  assert RunDir(str(root / 'run')).checkpoints().steps()[0] == 0
  first, last = names_in(root, 0), names_in(root, 4)
  assert not [name for name in last if not name.startswith(('lora/', 'slots/lora/', 'step'))]
  assert {name for name in last if name.startswith('lora/')} == {name for name in first if name.startswith('lora/')}
  assert 'encoder/layer_00/attention/wq' in first
  assert RunDir(str(root / 'run')).load()[1].target_vocab.endswith('target.model')  # another than that of the source


def test_an_interrupted_run_goes_on_to_the_same_adapters(root, tmp_path):
  importing.import_folder(str(FIXTURES / 'marian'), str(tmp_path / 'run'), SETTINGS)
  train(tmp_path / 'run', root / 'corpus', 4)
  fingerprint = lambda folder: RunDir(str(folder / 'run')).checkpoints().fingerprint(4)
  assert fingerprint(tmp_path) == fingerprint(root)


def scores(path, **options):
  model = lingvo_moe.load(str(path), **options)
  return [score.log_prob for score in model.score([(line, LINES[0]) for line in LINES], 'deu')]


def test_exports_are_merged(root, tmp_path):
  expected, before = scores(root / 'run', step=4), scores(root / 'run', step=0)
  assert np.abs(np.subtract(expected, before)).min() > 0.1
  decoded = root / 'run' / 'decode' / 'test' / 'step_4'
  decoded.mkdir(parents=True)
  of_pair = dict(sentences=3, bleu=12.3, chrf=45.6, bleu_signature='BLEU|nrefs:1', chrf_signature='chrF2|nrefs:1')
  (decoded / 'scores.json').write_text(json.dumps({'pairs': {'eng-deu': of_pair}}))
  for kind in ('huggingface', 'safetensors', 'litert'):
    weights = {'weights': 'float32'} if kind == 'litert' else {}
    export.export(export.Options(str(root / 'run'), step=4, out=str(tmp_path / kind), format=kind, **weights))
    card = (tmp_path / kind / 'README.md').read_text()
    assert card.startswith('---\nlicense:  # fill in') and 'language: ["deu", "eng"]' in card
    for line in (
      '| imported from | marian |',
      '| eng-deu | 3 | 12.3 | 45.6 |',
      '    BLEU|nrefs:1',
      'eng-deu (36 examples)',
    ):
      assert line in card, line
    assert '| merged LoRA adapters | attention/w?,ffn/w? of rank 3 |' in card and str(tmp_path) not in card
  importing.import_folder(str(tmp_path / 'huggingface'), str(tmp_path / 'again'))
  np.testing.assert_allclose(scores(tmp_path / 'again'), expected, atol=1e-4)
  np.testing.assert_allclose(scores(tmp_path / 'litert'), expected, atol=1e-4)
  assert not [n for n in safetensors.numpy.load_file(tmp_path / 'safetensors' / 'model.safetensors') if 'lora' in n]


def test_a_new_run_takes_merged_weights_and_the_values_of_its_source(root, tmp_path):
  expected = scores(root / 'run', step=4)
  source = str(root / 'run' / 'checkpoints' / 'step_00000004')
  with pytest.raises(UserError, match='lora_rank adapts weights that were trained; saw a new run'):
    train(tmp_path / 'new', root / 'corpus', 0, model='mt.opus.Base', set=['lora_rank=2'])
  said = train(tmp_path / 'new', root / 'corpus', 0, init_from=source, set=['lora_rank=0'])
  assert 'a new run of mt.opus.Base with the values of --init_from' in said and 'not taken' not in said
  np.testing.assert_allclose(scores(tmp_path / 'new'), expected, atol=1e-4)
  hub_export.require(RunDir(str(tmp_path / 'new')))  # its form is that of its source
  with pytest.raises(UserError, match='moe/gate is not in .* and would stay random: add it to lora_matrices'):
    train(
      tmp_path / 'moe', root / 'corpus', 1, init_from=source, set=['num_experts=2', 'expert=swish', 'expert_bias=True']
    )
  with pytest.raises(UserError, match='saw a new run of initial ones'):
    train(tmp_path / 'moe', root / 'corpus', 1)
  said = train(tmp_path / 'again', root / 'corpus', 0, init_from=source, set=['lora_rank=2'])
  assert RunDir(str(tmp_path / 'again')).load()[1].lora_rank == 2
  np.testing.assert_allclose(scores(tmp_path / 'again', step=0), expected, atol=1e-4)


def test_an_average_has_all_weights(root, tmp_path):
  run = RunDir(str(root / 'run'))
  assert run.checkpoints().steps() == [0, 4]
  with pytest.raises(UserError, match=r'after step 0 are to be averaged, but it has 1 \(4\)'):  # 0 is the base
    averaging.choose_steps(run, last=2)
  averaging.average(run, [4], str(tmp_path / 'average'))
  np.testing.assert_array_equal(scores(tmp_path / 'average'), scores(root / 'run', step=4))
  hub_export.require(RunDir(str(tmp_path / 'average')))
