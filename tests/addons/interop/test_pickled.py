"""Folders whose weights are pickled (pytorch_model.bin), which torch reads where it is installed."""

import json
import os
import shutil
import sys
import types

import numpy as np
import pytest
from imported_model import FIXTURES

from lingvo_moe.addons.interop import importing
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.core.errors import UserError
from lingvo_moe.run.rundir import RunDir


class Hostile:
  """Runs a command where it is unpickled as any other object."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path):
  path = tmp_path / 'folder'
  shutil.copytree(FIXTURES / 't5', path)
  (path / 'model.safetensors').unlink()
  return path


def tensors(torch):
  read = HubFolder(str(FIXTURES / 't5'))
  return {name: torch.from_numpy(read.read(name)) for name in read.tensors}


@pytest.mark.parametrize('zipped', [True, False])
def test_pickled_weights_import_to_the_same_checkpoint(zipped, folder, tmp_path):
  torch = pytest.importorskip('torch')
  torch.save(tensors(torch), folder / 'pytorch_model.bin', _use_new_zipfile_serialization=zipped)
  prints = []
  for source in (folder, FIXTURES / 't5'):
    importing.import_folder(str(source), str(tmp_path / f'run{len(prints)}'))
    prints.append(RunDir(str(tmp_path / f'run{len(prints)}')).checkpoints().fingerprint(0))
  assert prints[0] == prints[1]


def test_shards_of_bfloat16_are_read(folder):
  torch = pytest.importorskip('torch')
  names = {'a.bin': {}, 'b.bin': {}}
  for i, (name, tensor) in enumerate(tensors(torch).items()):
    names['ab'[i % 2] + '.bin'][name] = tensor.to(torch.bfloat16)
  for file, held in names.items():
    torch.save(held, folder / file)
  index = {'weight_map': {name: file for file, held in names.items() for name in held}}
  (folder / 'pytorch_model.bin.index.json').write_text(json.dumps(index))
  read = HubFolder(str(folder))
  for file, held in names.items():
    for name, tensor in held.items():
      assert read.tensors[name] == (file, tuple(tensor.shape), 'BF16')
      np.testing.assert_array_equal(read.read(name).astype(np.float32), tensor.float().numpy())


@pytest.mark.parametrize('zipped', [True, False])
def test_a_hostile_pickle_is_refused_and_runs_nothing(zipped, folder, tmp_path):
  torch = pytest.importorskip('torch')
  hostile = {'shared.weight': Hostile(tmp_path / 'made')}
  torch.save(hostile, folder / 'pytorch_model.bin', _use_new_zipfile_serialization=zipped)
  with pytest.raises(UserError, match=r'must hold tensors by name and nothing else; saw .*T5For.*\.save_pretrained'):
    _ = HubFolder(str(folder)).tensors
  assert not (tmp_path / 'made').exists()


@pytest.mark.parametrize('torch', [None, types.SimpleNamespace(__version__='2.9.1+cpu')])
def test_a_pickle_needs_a_torch_that_reads_it_safely(torch, folder, monkeypatch):
  (folder / 'pytorch_model.bin').touch()
  monkeypatch.setitem(sys.modules, 'torch', torch)
  refused = r'is a pickle.*(torch>=2\.10 .*saw 2\.9\.1|not installed).*\.save_pretrained\(.OTHER.\)'
  with pytest.raises(UserError, match=refused):
    _ = HubFolder(str(folder)).tensors


def test_torch_is_always_told_to_read_weights_alone(folder, monkeypatch):
  asked = []
  load = lambda path, **options: asked.append(options) or {}
  stub = types.SimpleNamespace(__version__='2.10.0', load=load, bfloat16=None, int16=None)
  (folder / 'pytorch_model.bin').touch()
  monkeypatch.setitem(sys.modules, 'torch', stub)
  with pytest.raises(UserError):  # a folder without a tensor
    importing.import_folder(str(folder), str(folder / 'run'))
  assert asked and all(options['weights_only'] is True for options in asked)
