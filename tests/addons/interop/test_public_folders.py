"""Folders of public models as they are found: links, shards, tensors that no weight needs, and odd weights."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
import tensorflow as tf
from imported_model import FIXTURES
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.addons.interop import hub_export, importing
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.tasks.task import task_of
from lingvo_moe.text import vocab as core_vocab


@pytest.fixture
def copy(tmp_path):
  def copy(name, change=lambda tensors: None, **config):
    """A fixture's folder with its tensors, and values of config.json, changed."""
    folder = tmp_path / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FIXTURES / name, folder, copy_function=shutil.copyfile)
    tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / 'model.safetensors')
    stated = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(stated | config))
    return folder

  return copy


def to_cache(folder, cache):
  """Moves a folder to the layout of the hub's cache, with its weights in two shards; returns the snapshot."""
  tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  names, weight_map = sorted(tensors), {}
  for number, part in enumerate((names[::2], names[1::2])):
    file = f'model-{number}.safetensors'
    safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / file)
    weight_map |= dict.fromkeys(part, file)
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  blobs, snapshot = cache / 'models--a--b' / 'blobs', cache / 'models--a--b' / 'snapshots' / '0123'
  blobs.mkdir(parents=True)
  snapshot.mkdir(parents=True)
  for number, file in enumerate(sorted(folder.iterdir())):
    file.rename(blobs / str(number))
    (snapshot / file.name).symlink_to(f'../../blobs/{number}')
  return snapshot


def test_a_sharded_folder_in_the_cache_of_the_hub_is_read_through_its_links(copy, tmp_path):
  snapshot = to_cache(copy('t5'), tmp_path / 'cache')
  importing.import_folder(str(snapshot), str(tmp_path / 'run'))
  importing.import_folder(str(FIXTURES / 't5'), str(tmp_path / 'expected'))
  prints = [RunDir(str(tmp_path / name)).checkpoints().fingerprint(0) for name in ('run', 'expected')]
  assert prints[0] == prints[1]
  assert not any(path.is_symlink() for path in (tmp_path / 'run').rglob('*'))


def test_files_that_models_of_a_cache_share_are_read(copy, tmp_path):
  snapshot = to_cache(copy('t5'), tmp_path / 'cache')
  shared = tmp_path / 'cache' / 'blobs' / 'ab' / ('ab' * 32)
  shared.parent.mkdir(parents=True)
  blob = (snapshot / 'model-0.safetensors').resolve()
  blob.rename(shared)
  blob.symlink_to(f'../../blobs/ab/{shared.name}')
  assert {info.file for info in HubFolder(str(snapshot)).tensors.values()} == {
    'model-0.safetensors',
    'model-1.safetensors',
  }


@pytest.mark.parametrize('file', ['config.json', 'model-0.safetensors', 'spiece.model', 'generation_config.json'])
@pytest.mark.parametrize(
  'place',
  ['secret', 'cache/models--x--y/blobs/secret', 'cache/models--a--b/refs/secret', 'cache/blobs/secret'],
)
def test_a_link_to_anywhere_else_is_refused(file, place, copy, tmp_path):
  snapshot = to_cache(copy('t5'), tmp_path / 'cache')
  secret = tmp_path / place
  secret.parent.mkdir(parents=True, exist_ok=True)
  shutil.copyfile(snapshot / file, secret)
  (snapshot / file).unlink()
  (snapshot / file).symlink_to(secret)
  with pytest.raises(UserError, match=f'{file} must be a file of its own, or a link into blobs/ .* leads to .*secret'):
    importing.import_folder(str(snapshot), str(tmp_path / 'run'))
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(('model', 'middle'), [('model', 'snapshots'), ('models--a--b', 'other')])
def test_blobs_beside_a_folder_that_is_no_snapshot_are_not_followed(model, middle, copy, tmp_path):
  folder, blob = tmp_path / model / middle / '0123', tmp_path / model / 'blobs' / 'secret'
  folder.parent.mkdir(parents=True)
  blob.parent.mkdir()
  copy('t5').rename(folder)
  (folder / 'spiece.model').rename(blob)
  (folder / 'spiece.model').symlink_to(blob)
  with pytest.raises(UserError, match='spiece.model must be a file of its own'):
    importing.read(str(folder))


def test_a_link_out_of_a_folder_that_is_no_cache_is_refused(copy, tmp_path):
  folder = copy('t5')
  (folder / 'special_tokens_map.json').symlink_to(tmp_path / 'secret')
  (tmp_path / 'secret').write_text('{}')
  with pytest.raises(UserError, match='special_tokens_map.json must be a file of its own'):
    importing.import_folder(str(folder), str(tmp_path / 'run'))


@pytest.mark.parametrize('file', ['config.json', 'generation_config.json', 'spiece.model', 'model.safetensors'])
def test_a_folder_in_the_place_of_a_file_is_refused(file, copy):
  folder = copy('t5')
  (folder / file).unlink(missing_ok=True)
  (folder / file).mkdir()
  with pytest.raises(UserError, match=r'has (no|neither)'):
    importing.read(str(folder))


@pytest.mark.parametrize(
  'weight_map', [{'a': 'x\0.safetensors'}, {'a\0': 'x'}, {'a': 3}, {'a': '..'}, {'a': ''}, {'a': '../x'}, [], None, 'x']
)
def test_an_index_that_names_no_files_of_its_folder_is_refused(weight_map, copy):
  folder = copy('t5')
  (folder / 'model.safetensors').unlink()
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
  with pytest.raises(UserError, match='must (have a weight_map|name files of its own folder)'):
    importing.read(str(folder))


def test_integers_that_the_graph_does_not_have_are_passed_over(copy, tmp_path):
  version = lambda tensors: tensors.update({'model.encoder.version': np.array([3]), 'flags': np.array([True])})
  folder = copy('marian', version)
  assert importing.read_weights(str(folder)).keys() == importing.read_weights(str(FIXTURES / 'marian')).keys()
  importing.import_folder(str(folder), str(tmp_path / 'run'))
  (tmp_path / 'out').mkdir()
  hub_export.save_hub_folder(str(tmp_path / 'out'), RunDir(str(tmp_path / 'run')), 0)
  assert HubFolder(str(tmp_path / 'out')).tensors == HubFolder(str(FIXTURES / 'marian')).tensors


@pytest.mark.parametrize(
  ('name', 'change', 'message'),
  [
    ('t5', {'other.weight': np.zeros(3, np.float32)}, "a tensor 'other.weight' that is not known"),
    ('t5', {'other.weight': np.zeros(3, np.float64)}, "a tensor 'other.weight' that is not known"),
    ('t5', {'other.weight': np.zeros(3, ml_dtypes.bfloat16)}, "a tensor 'other.weight' that is not known"),
    ('t5', {'shared.weight': np.zeros((96, 8), np.int8)}, "'shared.weight' .* has type I8: types are F32, F16, BF16"),
    ('t5', {'shared.weight': np.zeros((96, 8), np.float64)}, "'shared.weight' .* has type F64"),
    ('m2m100', {'model.encoder.embed_positions.bogus': np.zeros(3, np.float32)}, 'not known'),
    ('nllb_moe', {'model.encoder.layers.1.ffn.router.classifier.bias': np.zeros(4, np.float32)}, 'not known'),
    ('mixtral', {'model.rotary_emb.inv_freq': np.zeros(3, np.float32)}, 'not known'),
  ],
)
def test_any_other_floating_point_tensor_is_refused(name, change, message, copy):
  folder = copy(name, lambda tensors: tensors.update(change))
  with pytest.raises(UserError, match=message):
    importing.read_weights(str(folder))


@pytest.mark.parametrize(
  ('name', 'unused'),
  [
    ('marian', ['model.encoder.embed_tokens.weight', 'lm_head.weight']),
    ('m2m100', ['model.decoder.embed_tokens.weight', 'model.encoder.embed_positions.weights', 'lm_head.weight']),
    ('t5', ['lm_head.weight', 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight']),
    ('t5_v1_1', ['encoder.embed_tokens.weight']),
    ('mixtral', ['model.layers.1.self_attn.rotary_emb.inv_freq']),
  ],
)
def test_tensors_that_the_class_does_not_use_change_nothing(name, unused, copy):
  folder = copy(name, lambda tensors: tensors.update({tensor: np.ones((3, 3), np.float32) for tensor in unused}))
  found, expected = importing.read_weights(str(folder)), importing.read_weights(str(FIXTURES / name))
  assert found.keys() == expected.keys()
  for key, weight in expected.items():
    np.testing.assert_array_equal(found[key], weight)


@pytest.mark.parametrize('dtype', [np.float32, np.float16])
def test_positions_that_marian_reads_are_those_computed_here(dtype, copy):
  # Position 2 of 4 features: sin 2, sin 2/100, cos 2, cos 2/100.
  rows = np.array([[0, 0, 1, 1], [0.8415, 0.01, 0.5403, 1], [0.9093, 0.02, -0.4161, 0.9998]])
  wide = np.zeros((3, 8))
  rates = 10.0 ** -np.arange(4)
  wide[:, :4], wide[:, 4:] = np.sin(np.outer(range(3), rates)), np.cos(np.outer(range(3), rates))
  np.testing.assert_allclose(wide[:, [0, 2, 4, 6]], rows, atol=1e-4)
  put = lambda tensors: tensors.update({'model.encoder.embed_positions.weight': wide.astype(dtype)})
  importing.read_weights(str(copy('marian', put)))
  wide[2, 5] += 0.1
  with pytest.raises(UserError, match='embed_positions.weight.* must have the values that are computed here'):
    importing.read_weights(str(copy('marian', put)))


def test_weights_that_are_not_finite_are_named(copy, tmp_path, capsys):
  bias, table = 'model.encoder.layers.0.self_attn.k_proj.bias', 'model.shared.weight'

  def damage(tensors):
    tensors[bias][0], tensors[table][3, 1] = np.nan, np.inf  # the bias is dropped here, and not there

  importing.import_folder(str(copy('marian', damage)), str(tmp_path / 'run'))
  (line,) = [line for line in capsys.readouterr().err.splitlines() if 'NaN or infinite' in line]
  assert bias in line and table in line and 'fc1' not in line
  importing.import_folder(str(FIXTURES / 'marian'), str(tmp_path / 'other'))
  assert 'NaN' not in capsys.readouterr().err


def test_an_untied_output_of_marian_is_read(copy, tmp_path):
  untie = lambda tensors: tensors.update({'lm_head.weight': 2 * tensors['model.shared.weight']})
  folder = copy('marian', untie, tie_word_embeddings=False)
  importing.import_folder(str(folder), str(tmp_path / 'run'))
  run, logits = RunDir(str(tmp_path / 'run')), []
  for source in (folder, FIXTURES / 'marian'):
    _, imported, config = importing.read(str(source))
    theta = weights_lib.unflatten({k: tf.constant(v) for k, v in importing.read_weights(str(source)).items()})
    ids = np.array([[5, 6, 7]], np.int32)
    place, ones = np.array([[0, 1, 2]], np.int32), np.ones_like(ids)
    batch = dict(src_ids=ids, src_segments=ones, src_positions=place, tgt_inputs=ids, tgt_labels=ids)
    out, _ = config.model().logits(theta, batch | dict(tgt_segments=ones, tgt_positions=place))
    logits.append(out.numpy()[..., imported.symbols.firsts()])
  bias = safetensors.numpy.load_file(folder / 'model.safetensors')['final_logits_bias']
  np.testing.assert_allclose(logits[0] - bias, 2 * (logits[1] - bias), rtol=1e-4, atol=1e-5)
  (tmp_path / 'out').mkdir()
  hub_export.save_hub_folder(str(tmp_path / 'out'), run, 0)
  back, there = HubFolder(str(tmp_path / 'out')), HubFolder(str(folder))
  assert back.tensors == there.tensors
  np.testing.assert_array_equal(back.read('lm_head.weight'), there.read('lm_head.weight'))


def test_pieces_like_tags_of_a_model_without_tags_are_text_in_a_run_and_in_its_exports(copy, tmp_path):
  folder = copy('t5')
  proto = sentencepiece_model_pb2.ModelProto.FromString((folder / 'spiece.model').read_bytes())
  for i, piece in zip((60, 61, 62), ('<2en>', '<2de>', '<@bt>'), strict=True):
    proto.pieces[i].piece, proto.pieces[i].type = piece, proto.SentencePiece.USER_DEFINED
  (folder / 'spiece.model').write_bytes(proto.SerializeToString())
  importing.import_folder(str(folder), str(tmp_path / 'run'))
  _, config = RunDir(str(tmp_path / 'run')).load()
  theirs, own = importing.read(str(folder))[1].symbols.theirs, sentencepiece.SentencePieceProcessor()
  own.LoadFromSerializedProto(proto.SerializeToString())
  task, lines = task_of(config), ['<2en> Am Anfang', 'Der<2de>Zug <@bt>']
  for name, model in task.engine_parts().files.items():
    (tmp_path / name).write_bytes(model)
  for encode in (task.vocabs[0].encode, core_vocab.Vocab(str(tmp_path / 'source.model')).encode):
    found = [[theirs[i] for i in ids] for ids in encode(lines)]
    assert found == own.encode(lines)
    assert 60 in found[0] and {61, 62} <= {*found[1]}
