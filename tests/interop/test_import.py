"""Imported models against their own implementation: fixtures of tools/interop_fixtures.py."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from imported_model import FIXTURES, ImportedModel

import lingvo_moe
from lingvo_moe.commands import export
from lingvo_moe.core.errors import UserError
from lingvo_moe.interop.hub_folder import TYPES, HubFolder
from lingvo_moe.run import hub_export, importing
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.task import task_of
from lingvo_moe.tasks.vocab import EOS

TRANSLATION = ('marian', 't5', 't5_v1_1', 'switch')
FC1 = 'model.encoder.layers.0.fc1.weight'
LIMIT = 12  # symbols of an answer in the fixtures
ALL = (*TRANSLATION, 'mixtral')


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
  return functools.cache(lambda name: ImportedModel(name, tmp_path_factory.mktemp(name) / 'run'))


def batch_of(one):
  mask, targets = one.expected['mask'], one.ids(one.expected['targets'])
  position = lambda x: np.broadcast_to(np.arange(x.shape[1]), x.shape)
  arrays = dict(
    src_ids=one.ids(one.expected['src']) * mask,
    src_segments=mask,
    src_positions=position(mask) * mask,
    tgt_inputs=one.ids(one.expected['inputs']),
    tgt_labels=targets,
    tgt_segments=np.ones_like(targets),
    tgt_positions=position(targets),
  )
  return {name: tf.constant(array, tf.int32) for name, array in arrays.items()}


@pytest.mark.parametrize('name', TRANSLATION)
def test_encoder_output_logits_and_loss_are_equal(imported, name):
  one, mask = imported(name), imported(name).expected['mask'][..., None]
  batch = batch_of(one)
  memory, _ = one.model.encode(one.theta, batch)
  np.testing.assert_allclose(memory * mask, one.expected['encoder'] * mask, atol=1e-5)
  logits, _ = one.model.logits(one.theta, batch)
  np.testing.assert_allclose(logits.numpy()[..., one.symbols.firsts()], one.expected['logits'], atol=1e-5)
  metrics = one.model.loss(one.theta, batch)[1]
  np.testing.assert_allclose(metrics['xent'] / metrics['target_tokens'], one.expected['loss'], rtol=1e-5)


def test_packed_rows_are_as_rows_by_themselves(imported):
  one = imported('t5')
  batch = {name: array.numpy() for name, array in batch_of(one).items()}
  lengths = one.expected['mask'].sum(1)
  side = lambda name: np.concatenate([batch[name][row, :n] for row, n in enumerate(lengths)])[None]
  packed = {name: side(name) for name in ('src_ids', 'src_positions')}
  packed['src_segments'] = np.concatenate([np.full(n, row + 1) for row, n in enumerate(lengths)])[None]
  memory, _ = one.model.encode(one.theta, {name: tf.constant(array, tf.int32) for name, array in packed.items()})
  expected = np.concatenate([one.expected['encoder'][row, :n] for row, n in enumerate(lengths)])
  np.testing.assert_allclose(memory[0], expected, atol=1e-5)


@pytest.mark.parametrize(('search', 'beam_size'), [('greedy', 1), ('beam', 4)])
@pytest.mark.parametrize('name', TRANSLATION)
def test_greedy_and_beam_search_give_the_same_symbols(imported, name, search, beam_size):
  one = imported(name)
  batch = {key: array for key, array in batch_of(one).items() if key.startswith('src')}
  # Theirs neither counts the log-probability of the end at the limit nor has to end there: of answers that reach it,
  # all but the last two symbols are those of one of our best.
  changes = dict(beam_size=beam_size, length_norm_alpha=0.0, decode_ratio=0.0, decode_extra=LIMIT + 1)
  config = dataclasses.replace(one.config, **changes)
  found = inference.search(one.model, one.theta, batch, config, n_best=beam_size)
  compared = 0
  for row, expected in enumerate(one.expected[search]):
    theirs = one.ids(expected[1:]).tolist()
    if EOS in theirs[: LIMIT - 1]:
      theirs = theirs[: theirs.index(EOS) + 1]
      assert found.ids_BWT.numpy()[row, 0, : found.lengths_BW.numpy()[row, 0]].tolist() == theirs
    else:
      theirs = theirs[: LIMIT - 2]
      assert theirs in found.ids_BWT.numpy()[row, :, : LIMIT - 2].tolist()
    compared += len(theirs)
  assert compared > 8


def test_language_model_is_equal(imported):
  one = imported('mixtral')
  ids = one.ids(one.expected['ids'])
  batch = {'inputs': tf.constant(ids), 'segments': tf.ones_like(ids)}
  logits, _ = one.model.logits(one.theta, batch)
  np.testing.assert_allclose(logits.numpy()[..., one.symbols.firsts()], one.expected['logits'], atol=1e-5)


@pytest.mark.parametrize('name', ALL)
def test_text_has_the_same_ids(imported, name):
  one = imported(name)
  vocabs = task_of(one.config).vocabs
  vocab = vocabs[0] if isinstance(vocabs, tuple) else vocabs
  for line, theirs in zip(one.lines['lines'], one.lines['ids'], strict=True):
    ours = vocab.encode([line])[0] if name != 'mixtral' else vocab.encode(line).tolist()
    expected = [one.symbols.theirs[i] for i in ours]
    special = {'marian': (1, 1), 'mixtral': (1, 0)}.get(name, (0, 1))
    assert expected == theirs[special[0] : len(theirs) - special[1]], line


@pytest.mark.parametrize('name', ALL)
def test_export_of_an_import_is_the_folder_and_imports_to_the_same_checkpoint(imported, name, tmp_path):
  one = imported(name)
  hub_export.save_hub_folder(str(tmp_path), one.run, 0)
  there, back = HubFolder(str(FIXTURES / name)), HubFolder(str(tmp_path))
  assert back.tensors == there.tensors
  for tensor in there.tensors:
    if not tensor.endswith('k_proj.bias'):  # which softmax cancels
      np.testing.assert_array_equal(back.read(tensor), there.read(tensor))
  importing.import_folder(str(tmp_path), str(tmp_path / 'again'))
  assert RunDir(str(tmp_path / 'again')).checkpoints().fingerprint(0) == one.run.checkpoints().fingerprint(0)


@pytest.mark.parametrize('name', TRANSLATION)
def test_the_engine_without_tensorflow_translates_as_the_import(imported, name, tmp_path):
  one, out = imported(name), str(tmp_path / 'out')
  export.export(export.Options(logdir=one.run.path, out=out, format='litert', weights='float32'))
  lines, target = one.lines['lines'][:4], 'deu' if name == 'marian' else None
  assert lingvo_moe.load(out).translate(lines, target) == lingvo_moe.load(one.run.path).translate(lines, target)


@pytest.mark.parametrize('dtype', ['F16', 'BF16'])
def test_types_of_a_folder_are_kept(dtype, tmp_path, monkeypatch):
  folder = tmp_path / 'folder'
  shutil.copytree(FIXTURES / 't5', folder)
  read = HubFolder(str(folder))
  as_type = {tensor: read.read(tensor).astype(TYPES[dtype]) for tensor in read.tensors}
  safetensors.numpy.save_file(as_type, folder / 'model.safetensors')
  importing.import_folder(str(folder), str(tmp_path / 'run'))
  monkeypatch.setattr(hub_export, '_SHARD_BYTES', 1000)
  (tmp_path / 'out').mkdir()
  hub_export.save_hub_folder(str(tmp_path / 'out'), RunDir(str(tmp_path / 'run')), 0)
  back = HubFolder(str(tmp_path / 'out'))
  assert (tmp_path / 'out' / 'model.safetensors.index.json').exists()
  for tensor, value in as_type.items():
    assert back.tensors[tensor].dtype == dtype
    np.testing.assert_array_equal(back.read(tensor).view(np.int16), value.view(np.int16))


def test_a_scanned_run_is_imported_and_exported_layer_by_layer(imported, tmp_path):
  source, out = str(FIXTURES / 'marian'), tmp_path / 'run'
  importing.import_folder(source, str(out), ['scan_layers=True', "remat='block'"])
  run = RunDir(str(out))
  assert run.load()[1].scan_layers and json.loads((out / 'imported.json').read_text())['of'] == source
  assert run.checkpoints().fingerprint(0) == imported('marian').run.checkpoints().fingerprint(0)
  (tmp_path / 'hub').mkdir()
  (tmp_path / 'ours').mkdir()
  hub_export.save_hub_folder(str(tmp_path / 'hub'), run, 0)
  hub_export.save_weights(str(tmp_path / 'ours'), run, 0)
  assert HubFolder(str(tmp_path / 'hub')).tensors == HubFolder(source).tensors
  names = {name for name, _ in tf.train.list_variables(run.checkpoints().path(0))} - {'step'}
  assert safetensors.numpy.load_file(tmp_path / 'ours' / 'model.safetensors').keys() == names


def test_a_value_that_the_folder_gives_cannot_be_set(tmp_path):
  with pytest.raises(UserError, match='num_heads of an imported model is 2; saw --set num_heads=4: leave it out'):
    importing.import_folder(str(FIXTURES / 't5'), str(tmp_path / 'run'), ['num_heads=4'])


@pytest.mark.parametrize('damage', [[['F32'], 2], ['F33', 2], ['F32', -2], [], 'F32'])
def test_a_damaged_note_of_an_import_is_refused(imported, damage, tmp_path):
  shutil.copytree(imported('marian').run.path, tmp_path / 'run')
  path = tmp_path / 'run' / 'imported.json'
  path.write_text(json.dumps({'tensors': {'model.shared.weight': damage}}))
  with pytest.raises(UserError, match='tensors.* must be .*a type and sizes.*: import it again'):
    hub_export.save_hub_folder(str(tmp_path), RunDir(str(tmp_path / 'run')), 0)


def _rewrite(folder, change):
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  change(tensors)
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')


def _config(folder, **changes):
  config = json.loads((folder / 'config.json').read_text()) | changes
  (folder / 'config.json').write_text(json.dumps(config))


def _pickle(folder):
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


def _index(folder):
  (folder / 'model.safetensors').unlink()
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'a': '../t5/model.safetensors'}}))


def _cut(folder):
  whole = (folder / 'model.safetensors').read_bytes()
  (folder / 'model.safetensors').write_bytes(whole[:-100])


@pytest.mark.parametrize(
  ('damage', 'message'),
  [
    (lambda f: _config(f, architectures=['BertModel']), "can be imported .*; saw 'BertModel'"),
    (
      lambda f: _rewrite(f, lambda t: t.pop('model.encoder.layers.0.fc1.bias')),
      "no tensor 'model.encoder.layers.0.fc1",
    ),
    (lambda f: _rewrite(f, lambda t: t.update(other=np.zeros(3, np.float32))), "a tensor 'other' that is not known"),
    (
      lambda f: _config(f, encoder_ffn_dim=13, decoder_ffn_dim=13),
      r'has shape \[12, 8\], which does not fit its config',
    ),
    (lambda f: _config(f, decoder_ffn_dim=13), 'decoder_ffn_dim'),
    (lambda f: _config(f, activation_function='quick_gelu'), 'quick_gelu'),
    (
      lambda f: _rewrite(f, lambda t: t.update({FC1: np.ascontiguousarray(t[FC1].T)})),
      r"fc1.weight' has shape \[8, 12\], which does not fit",
    ),
    (_pickle, 'pytorch_model.bin, a pickle, which may run code'),
    (_cut, 'is damaged or cut short'),
    (_index, 'must name files of its own folder'),
    (lambda f: (f / 'vocab.json').unlink(), 'has no vocab.json'),
    (lambda f: (f / 'source.spm').write_bytes(b'text'), 'source.spm is not a SentencePiece model'),
    (lambda f: (f / 'config.json').write_text('{'), 'config.json is not JSON'),
  ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(damage, message, tmp_path):
  folder = tmp_path / 'folder'
  shutil.copytree(FIXTURES / 'marian', folder)
  damage(folder)
  with pytest.raises(UserError, match=message):
    importing.import_folder(str(folder), str(tmp_path / 'run'))
  assert sorted(p.name for p in tmp_path.iterdir()) == ['folder']
