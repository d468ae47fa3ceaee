"""Manifest of an export: each of its values is of its kind or refused by name, and so is each file."""

import itertools
import os

import pytest

from lingvo_moe.addons.engine import manifest
from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files, json_files

OF_ALL = {
  'model': 'mt.cldr.Tiny',
  'step': 250,
  'checkpoint': 'step 250',
  'weights': 'int8',
  'beam_size': 4,
  'length_norm_alpha': 0.8,
  'length_norm_k': 5.0,
  'early_stopping': 'heuristic',
  'repetition_penalty': 1.2,
  'no_repeat_ngram_size': 3,
  'max_length': 32,
  'sample_temperature': 1.0,
  'top_k': 0,
  'top_p': 1.0,
  'sample_seed': 0,
}
SETTINGS = {
  'language': {**OF_ALL, 'task': 'language', 'vocab': 'characters.json', 'search': 'sample', 'max_new_tokens': 30},
  'translation': {
    **OF_ALL,
    'task': 'translation',
    'search': 'beam',
    'mbr_samples': 32,
    'decode_ratio': 2.0,
    'decode_extra': 10,
    'batch_tokens': 512,
    'num_experts': 4,
    'layers': 1,
    'several_sentences': 0.0,
    'long_line': 21.0,
    'tags': {'de': 5},
    'tagged': True,
    'pairs': [['de', 'en']],
    'gate_pairs': [['de', 'en']],
    'tag_sides': 'source',
    'begin': 1,
  },
}
FILES = {
  'language': ('decoder.tflite', 'reader.tflite', 'characters.json'),
  'translation': (
    *('decoder.tflite', 'single.tflite', 'encoder.tflite', 'decoder_1.tflite'),
    *('source.model', 'target.model'),
  ),
}
MISSING = object()
ODD = (None, True, 'x', -1, 1.5, 10**12, 1e12, float('nan'), float('inf'), [], {}, [[]], {'a': 'b'}, MISSING)
OPTIONAL = {'num_experts', 'layers', 'several_sentences', 'long_line'}


@pytest.fixture
def folder(tmp_path):
  """Function that writes an export of a task, whose files hold their names."""

  def make(task):
    for name in FILES[task]:
      (tmp_path / name).write_text(name)
    manifest.write(str(tmp_path), SETTINGS[task], FILES[task])
    return str(tmp_path)

  return make


def rewrite(folder, **values):
  path = os.path.join(folder, 'manifest.json')
  changed = {**json_files.read(path), **values}
  files.write(path, json_files.dump({name: value for name, value in changed.items() if value is not MISSING}))


@pytest.mark.parametrize('task', SETTINGS)
def test_a_value_that_is_missing_or_of_another_kind_is_refused_by_name(folder, task):
  path = folder(task)
  about = json_files.read(os.path.join(path, 'manifest.json'))
  assert manifest.read(path) == about
  for name, odd in itertools.product(about, ODD):
    numbers = {int, float} if type(about[name]) is float else {type(about[name])}
    fits = type(odd) in numbers or (odd in (None, MISSING) and name in OPTIONAL)
    fits = (fits and odd not in ([[]], {'a': 'b'}, -1, 10**12)) or (name, odd) == ('step', 10**12)
    rewrite(path, **{name: odd})
    try:
      manifest.read(path)
      assert fits and odd == odd, (name, odd)
    except UserError as e:
      assert '\n' not in str(e) and (name == 'vocab' or name in str(e)), (name, odd, e)
    rewrite(path, **{name: about[name]})


@pytest.mark.parametrize(
  'values, message',
  [
    ({'beam_size': 10**9}, "'beam_size' must be an integer from 1 to 1024; saw 1000000000"),
    ({'beam_size': 1025}, "'beam_size' must be an integer from 1 to 1024; saw 1025"),
    ({'beam_size': 0}, "'beam_size' must be an integer from 1 to 1024; saw 0"),
    ({'max_length': 2}, "'max_length' must be an integer from 3 to 1000000; saw 2"),
    ({'files': []}, r"'files' must be an object, each value a string; saw \[\]"),
    ({'files': {}}, 'must name all files of an export; saw none of .*decoder.tflite'),
    ({'decode_ratio': 1e9}, "'decode_ratio' must be a number from 0 to 1000; saw 1000000000.0"),
    ({'several_sentences': 1.5}, "'several_sentences' must be a number from 0 to 1 or null; saw 1.5"),
    ({'top_p': 0}, "'top_p' must be a number from 1e-06 to 1; saw 0"),
    ({'pairs': [['de', 'en', 'fr']]}, "'pairs' must be a list, each item a pair of strings"),
    ({'pairs': [['de', 1]]}, "'pairs' must be a list, each item a pair of strings"),
    ({'task': 'x'}, "'task' must be 'language' or 'translation'; saw 'x'"),
    ({'version': 0}, "'version' must be an integer from 1"),
    (
      {'version': 2},
      f'has version 2, and this version of lingvo_moe reads {manifest.VERSION}: install the version that wrote it',
    ),
    (
      {'version': manifest.VERSION + 1},
      f'has version {manifest.VERSION + 1}, and this version of lingvo_moe reads {manifest.VERSION}: ',
    ),
    ({'format': ['x'] * 100}, r"is not the manifest of an export \(format \['x',"),
  ],
)
def test_absurd_values_are_refused(folder, values, message):
  path = folder('translation')
  rewrite(path, **values)
  with pytest.raises(UserError, match=message):
    manifest.read(path)


def test_files_are_those_of_the_manifest_in_the_folder_itself(folder, tmp_path):
  path = folder('translation')
  hashes = manifest.read(path)['files']
  outside = tmp_path.parent / 'outside'
  outside.write_text('x')
  rewrite(path, files={**hashes, '../outside': files.sha256(str(outside))})
  with pytest.raises(UserError, match='outside, which manifest.json names, is missing'):
    manifest.read(path)
  rewrite(path, files={name: own for name, own in hashes.items() if name != 'decoder_1.tflite'})
  with pytest.raises(UserError, match='must name all files of an export; saw none of .*decoder_1.tflite'):
    manifest.read(path)  # which would be run
  rewrite(path, files=hashes)
  (tmp_path / 'source.model').write_text('other')
  with pytest.raises(UserError, match='source.model was changed since it was exported'):
    manifest.read(path)
