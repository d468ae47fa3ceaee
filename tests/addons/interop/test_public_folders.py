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
from lingvo_moe.vocab import vocab as core_vocab


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
    ('m2m100', ['model.encoder.embed_positions.weights']),
    ('t5', ['decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight']),
    ('mixtral', ['model.layers.1.self_attn.rotary_emb.inv_freq']),
  ],
)
def test_tensors_that_the_class_does_not_use_change_nothing(name, unused, copy):
  folder = copy(name, lambda tensors: tensors.update({tensor: np.ones((3, 3), np.float32) for tensor in unused}))
  found, expected = importing.read_weights(str(folder)), importing.read_weights(str(FIXTURES / name))
  assert found.keys() == expected.keys()
  for key, weight in expected.items():
    np.testing.assert_array_equal(found[key], weight)


FAIRSEQ = ['model.encoder.embed_tokens.weight', 'model.decoder.embed_tokens.weight']
T5 = ['encoder.embed_tokens.weight', 'decoder.embed_tokens.weight']
TIED = [
  ('marian', 'model.shared.weight', [*FAIRSEQ, 'lm_head.weight']),
  ('m2m100', 'model.shared.weight', [*FAIRSEQ, 'lm_head.weight']),
  ('nllb_moe', 'model.shared.weight', [*FAIRSEQ, 'lm_head.weight']),
  ('t5', 'shared.weight', [*T5, 'lm_head.weight']),
  ('t5_v1_1', 'shared.weight', T5),
  ('switch', 'shared.weight', [*T5, 'lm_head.weight']),
]


@pytest.mark.parametrize(('name', 'table', 'copies'), TIED)
def test_a_tied_table_is_read_by_any_of_its_names_and_by_several(name, table, copies, copy):
  """Of the kind: a tensor of several names is one tensor, whichever of them a release writes."""
  expected = importing.read_weights(str(FIXTURES / name))
  for names in [[copy] for copy in copies] + [[table, *copies]]:
    rename = lambda tensors, names=names: tensors.update(dict.fromkeys(names, tensors.pop(table)))
    found = importing.read_weights(str(copy(name, rename)))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_an_export_has_the_name_of_a_tied_table_that_the_folder_had(copy, tmp_path):
  rename = lambda tensors: tensors.update({T5[1]: tensors.pop('shared.weight')})
  folder = copy('t5', rename)
  importing.import_folder(str(folder), str(tmp_path / 'run'))
  (tmp_path / 'out').mkdir()
  hub_export.save_hub_folder(str(tmp_path / 'out'), RunDir(str(tmp_path / 'run')), 0)
  back, there = HubFolder(str(tmp_path / 'out')), HubFolder(str(folder))
  assert back.tensors == there.tensors
  np.testing.assert_array_equal(back.read(T5[1]), there.read(T5[1]))


@pytest.mark.parametrize(('name', 'table', 'copies'), TIED)
def test_copies_of_a_tied_table_that_differ_are_refused(name, table, copies, copy):
  """transformers 4 drops one of them, and transformers 5 reads both."""
  for other in copies:
    for change in (lambda of: of + np.eye(*of.shape, dtype=np.float32), lambda of: of[:-1]):
      folder = copy(name, lambda tensors, change=change, other=other: tensors.update({other: change(tensors[table])}))
      with pytest.raises(UserError, match=f"'{other}' must be '{table}' again, as its configuration ties them"):
        importing.read_weights(str(folder))


def logits_of(folder, name):
  """Logits of every symbol there, by the ids there of a fixture's expected.npz."""
  _, imported, config = importing.read(str(folder))
  expected, here = dict(np.load(FIXTURES / name / 'expected.npz')), imported.symbols.firsts()
  theta = weights_lib.unflatten({k: tf.constant(v) for k, v in importing.read_weights(str(folder)).items()})
  place = lambda x: np.broadcast_to(np.arange(x.shape[1]), x.shape)
  ids = lambda key: np.array(here)[expected[key]]
  batch = dict(
    src_ids=ids('src') * expected['mask'], src_segments=expected['mask'], src_positions=place(expected['mask'])
  )
  batch |= dict(tgt_inputs=ids('inputs'), tgt_labels=ids('targets'), tgt_segments=np.ones_like(expected['targets']))
  batch = {key: tf.constant(x, tf.int32) for key, x in (batch | dict(tgt_positions=place(expected['inputs']))).items()}
  found, _ = config.model().logits(theta, batch)
  return found.numpy()[..., here], expected['logits']


OF_5 = {'tie_word_embeddings': True, 'transformers_version': '5.24.0'}


def test_an_untied_t5_that_transformers_5_saved_keeps_its_own_output(copy, tmp_path):
  """Of the kind: a key has the meaning of the release that wrote it. There ties are always stated, and never made."""
  folder = copy('t5_v1_1', **OF_5, scale_decoder_outputs=False)
  found, expected = logits_of(folder, 't5_v1_1')
  np.testing.assert_allclose(found, expected, atol=1e-5)
  importing.import_folder(str(folder), str(tmp_path / 'run'))
  (tmp_path / 'out').mkdir()
  hub_export.save_hub_folder(str(tmp_path / 'out'), RunDir(str(tmp_path / 'run')), 0)
  assert HubFolder(str(tmp_path / 'out')).tensors == HubFolder(str(folder)).tensors
  found, _ = logits_of(tmp_path / 'out', 't5_v1_1')
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
  ('name', 'values', 'tied', 'scaled'),
  [
    ('t5', {}, True, True),
    ('t5', {**OF_5, 'scale_decoder_outputs': True}, True, True),
    ('t5', {**OF_5, 'scale_decoder_outputs': False}, True, False),
    ('t5_v1_1', {}, False, False),
    ('t5_v1_1', {**OF_5, 'scale_decoder_outputs': True}, False, True),
    ('t5', {'architectures': ['MT5ForConditionalGeneration'], 'model_type': 'mt5', **OF_5}, True, False),
    (
      't5',
      {'architectures': ['MT5ForConditionalGeneration'], 'model_type': 'mt5', 'tie_word_embeddings': True},
      True,
      True,
    ),
    ('t5_v1_1', {'architectures': ['MT5ForConditionalGeneration'], 'model_type': 'mt5', **OF_5}, False, False),
    ('switch', OF_5, True, True),
  ],
)
def test_ties_and_scale_of_t5_are_those_of_the_release_that_wrote_them(name, values, tied, scaled, copy):
  config = importing.read(str(copy(name, **values)))[2]
  assert (config.tied_output, config.logit_scale) == (tied, 8**-0.5 if scaled else 1.0)


def test_nllb_moe_of_transformers_5_is_refused(copy):
  with pytest.raises(UserError, match=r'NLLB-MoE of transformers 5 .* make it 4.57.1'):
    importing.read(str(copy('nllb_moe', transformers_version='5.0.0')))


def test_a_model_of_the_form_of_madlad_is_read(copy, tmp_path):
  """<s> pads, the decoder begins with <unk>, the table has another name, and there is no room for sentinels."""
  rename = lambda tensors: tensors.update({T5[1]: tensors.pop('shared.weight')})
  folder = copy('t5_v1_1', rename, pad_token_id=1, eos_token_id=2, decoder_start_token_id=0)
  proto = sentencepiece_model_pb2.ModelProto.FromString((folder / 'spiece.model').read_bytes())
  kinds = proto.SentencePiece
  for i, (piece, kind) in enumerate((('<unk>', kinds.UNKNOWN), ('<s>', kinds.CONTROL), ('</s>', kinds.CONTROL))):
    proto.pieces[i].piece, proto.pieces[i].type = piece, kind
  spec = proto.trainer_spec
  spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = 0, 1, 2, -1
  (folder / 'spiece.model').write_bytes(proto.SerializeToString())
  (folder / 'tokenizer_config.json').write_text(json.dumps({'pad_token': '<s>', 'additional_special_tokens': []}))
  found, expected = logits_of(folder, 't5_v1_1')
  np.testing.assert_allclose(found, expected, atol=1e-5)
  importing.import_folder(str(folder), str(tmp_path / 'run'))
  _, config = RunDir(str(tmp_path / 'run')).load()
  theirs, own = importing.read(str(folder))[1].symbols.theirs, sentencepiece.SentencePieceProcessor()
  own.LoadFromSerializedProto(proto.SerializeToString())
  lines = ['Wo ist der Bahnhof?', 'Am Ω.']
  assert [[theirs[i] for i in ids] for ids in task_of(config).vocabs[0].encode(lines)] == own.encode(lines)
  assert 3 not in config.masked_symbols and 1 in config.masked_symbols  # a target may have an unknown symbol


ADDED = {
  'tokenizer_config.json': {'added_tokens_decoder': {'95': {'content': '[NEW]', 'special': False}}},
  'added_tokens.json': {'[NEW]': 95},
  'tokenizer.json': {'added_tokens': [{'id': 95, 'content': '[NEW]', 'lstrip': True}]},
  'special_tokens_map.json': {'additional_special_tokens': [{'content': '[NEW]'}]},
}
NAMES = ('marian', 't5', 't5_v1_1', 'switch', 'm2m100', 'nllb_moe', 'mixtral')


def add(folder, file, values):
  stated = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
  both = {k: {**stated[k], **v} for k, v in values.items() if isinstance(v, dict) and isinstance(stated.get(k), dict)}
  (folder / file).write_text(json.dumps({**stated, **values, **both}))


@pytest.mark.parametrize('file', ADDED)
@pytest.mark.parametrize('name', NAMES)
def test_a_token_that_was_added_to_a_tokeniser_is_refused(name, file, copy, tmp_path):
  """Of the kind: what the public tokeniser reads of a text before SentencePiece is read alike here, or refused."""
  folder = copy(name)
  add(folder, file, ADDED[file])
  with pytest.raises(UserError, match=r"adds '\[NEW\]' \(id (95|-1)\) to its tokeniser") as raised:
    importing.import_folder(str(folder), str(tmp_path / 'run'))
  assert '\n' not in str(raised.value) and not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'values',
  [{'pad_token': '[PAD]'}, {'extra_special_tokens': {'image': '[IMG]'}}, {'extra_special_tokens': ['[A]']}],
)
def test_special_tokens_of_other_names_are_added_tokens_too(values, copy):
  folder = copy('mixtral')
  add(folder, 'tokenizer_config.json', values)
  with pytest.raises(UserError, match=r"adds '\[(PAD|IMG|A)\]'"):
    importing.read(str(folder))


def test_a_known_symbol_under_another_id_is_refused(copy):
  folder = copy('t5')
  add(folder, 'added_tokens.json', {'<extra_id_0>': 5})
  with pytest.raises(UserError, match=r"adds '<extra_id_0>' \(id 5\)"):
    importing.read(str(folder))


@pytest.mark.parametrize(
  ('name', 'symbols'),
  [
    ('marian', {'</s>': 0, '<unk>': 1, '>>deu<<': 2}),
    ('t5', {'<pad>': 0, '</s>': 1, '<unk>': 2, '<extra_id_3>': None, '<extra_id_0>': None}),
    ('m2m100', {'<s>': 0, '<pad>': 1, '</s>': 2, '<unk>': 3, '__af__': None, '__zu__': None}),
    ('nllb_moe', {'<s>': 0, '<pad>': 1, '</s>': 2, '<unk>': 3, 'deu_Latn': None, '<mask>': None}),
    ('mixtral', {'<unk>': 0, '<s>': 1, '</s>': 2}),
  ],
)
def test_symbols_that_a_vocabulary_has_by_itself_are_no_added_tokens(name, symbols, copy):
  folder = copy(name)
  before = importing.read(str(folder))[1]
  here = {piece: i for i, piece in enumerate(importing.pieces(str(folder)))}
  found = lambda symbol: here.get(symbol, here.get(f'<2{symbol.strip("_<>")}>'))
  ids = {symbol: before.symbols.theirs[found(symbol)] if i is None else i for symbol, i in symbols.items()}
  add(folder, 'added_tokens.json', ids)
  add(folder, 'tokenizer.json', {'added_tokens': [{'id': i, 'content': symbol} for symbol, i in ids.items()]})
  add(folder, 'special_tokens_map.json', {'additional_special_tokens': [*ids], 'eos_token': '</s>'})
  after = importing.read(str(folder))[1]
  assert after.vocabularies == before.vocabularies and after.symbols == before.symbols


def test_a_language_that_was_added_to_nllb_is_one(copy):
  folder = copy('nllb_moe')
  size = json.loads((folder / 'config.json').read_text())['vocab_size']
  add(folder, 'tokenizer_config.json', {'added_tokens_decoder': {str(size - 1): {'content': 'gsw_Latn'}}})
  assert '<2gsw_Latn>' in importing.pieces(str(folder))


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
  for name, model in task.exports.engine_parts().files.items():
    (tmp_path / name).write_bytes(model)
  for encode in (task.vocabs[0].encode, core_vocab.Vocab(str(tmp_path / 'source.model')).encode):
    found = [[theirs[i] for i in ids] for ids in encode(lines)]
    assert found == own.encode(lines)
    assert 60 in found[0] and {61, 62} <= {*found[1]}
