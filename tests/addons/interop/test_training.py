"""Training of imported models against their own implementation: fixtures of tools/interop_fixtures.py."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from imported_model import FIXTURES, ImportedModel

from lingvo_moe.addons.interop import families
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.runtime.local import LocalRuntime

NAMES = ('marian', 'switch', 'nllb_moe', 'mixtral')
SOON = {('mixtral', 'data:2,expert:2')}  # the others are left to the slow tests
MESHES = [
  pytest.param(name, mesh, marks=[] if (name, mesh) in SOON else [pytest.mark.slow])
  for name in NAMES
  for mesh in ('expert:4', 'data:2,expert:2')
]


class TrainedModel(ImportedModel):
  """An imported model that learns as its own implementation does, from the same batches."""

  def __init__(self, name, out):
    super().__init__(name, out)
    self.training = dict(np.load(FIXTURES / name / 'training.npz'))
    changes = dict(optimizer='adam', schedule='constant', learning_rate=1e-2, label_smoothing=0.0, num_groups=4)
    if name == 'marian':
      changes['freeze'] = 'target_embedding/bias'  # there it is no parameter
    else:
      changes['capacity_factor'] = None
    if name == 'mixtral':
      changes['aux_loss_weight'] = 0.0  # theirs is of all layers together
    self.config = dataclasses.replace(self.config, batch_tokens=16384, **changes)
    self.program = self.config.program()
    self.checkpoints = self.run.checkpoints()

  def batch(self, step):
    """Batch of 4 rows."""
    data = {key: self.training[key][step % 4] for key in ('src', 'mask', 'inputs', 'targets') if key in self.training}
    targets = self.ids(data['targets'])
    ones, positions = np.ones_like(targets), np.broadcast_to(np.arange(targets.shape[1]), targets.shape)
    if 'src' not in data:
      return {'inputs': self.ids(data['inputs']), 'labels': targets, 'segments': ones}
    mask = data['mask'].astype(np.int32)
    source = dict(src_ids=self.ids(data['src']) * mask, src_segments=mask, src_positions=positions * mask)
    target = dict(tgt_inputs=self.ids(data['inputs']), tgt_labels=targets, tgt_segments=ones, tgt_positions=positions)
    return {key: array.astype(np.int32) for key, array in {**source, **target}.items()}

  def losses(self, runtime):
    """Losses of 20 steps of training."""
    runtime.init()
    self.checkpoints.load_weights(runtime, 0)
    return [runtime.train_step(self.batch(step))['objective'] for step in range(20)]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  made = {}

  def get(name):
    if name not in made:
      made[name] = TrainedModel(name, tmp_path_factory.mktemp(name) / 'run')
    return made[name]

  return get


def tensors(batch):
  return {key: tf.constant(array) for key, array in batch.items()}


@pytest.mark.parametrize('name', NAMES)
def test_gradients_are_equal(trained, name):
  one = trained(name)
  specs = one.program.weight_specs
  weights = {
    key: tf.constant(stored[...])
    for key, stored in one.checkpoints.restore(0, {k: s.shape for k, s in specs.items()}).items()
  }
  grads, _ = one.program.gradients(tf.constant(0, tf.int64), weights, tensors(one.batch(0)))
  folder = HubFolder(str(FIXTURES / name))
  entries = {entry.theirs: entry for entry in families.convert(folder).entries}
  compared = 0
  for tensor, (norm, product) in zip(one.training['names'], one.training['grads'], strict=True):
    entry = entries[tensor]
    if not entry.ours:  # biases of keys, which the softmax cancels
      assert norm < 1e-6
      continue
    grad = np.asarray(grads[entry.ours] if entry.expert is None else grads[entry.ours][entry.expert])
    grad = entry.outwards(grad, folder.tensors[tensor].shape, one.symbols).ravel()
    np.testing.assert_allclose(np.linalg.norm(grad), norm, rtol=1e-4, atol=1e-6, err_msg=tensor)
    np.testing.assert_allclose(grad @ np.cos(np.arange(grad.size)), product, rtol=1e-4, atol=1e-6, err_msg=tensor)
    compared += norm > 1e-4
  assert compared > 25


@pytest.mark.parametrize('name', ['switch', 'nllb_moe', 'mixtral'])
def test_experts_and_auxiliary_loss_are_equal(trained, name):
  one = trained(name)
  model = one.model if name == 'mixtral' else one.config.model()  # of all tokens; of each row by itself
  model = dataclasses.replace(model, report_decisions=True)
  _, metrics = model.loss(one.theta, tensors(one.batch(0)))
  ours = [
    np.reshape(decisions.expert_GSR, theirs.shape)
    for decisions, theirs in zip(metrics['decisions'].values(), one.training['experts'], strict=True)
  ]
  np.testing.assert_array_equal(np.stack(ours), one.training['experts'])
  assert len(np.unique(one.training['experts'])) > 2
  choices = one.config.choices if name == 'mixtral' else 1  # theirs is that where experts have equal shares
  np.testing.assert_allclose(metrics['aux_loss'] * choices, np.sum(one.training['aux_loss']), rtol=1e-5)


def test_auxiliary_loss_of_nllb_moe_in_transformers_differs_as_documented(trained):
  """Theirs is 2 L E sum_e c_e w_e of the L encoder layers with experts; GShard's, E sum_e c_e m_e of each layer.

  c_e is the share of first choices, over all layers; w_e the mean weight of the first layer's expert e, after
  normalisation over the chosen two; m_e the mean of the softmax.
  """
  one = trained('nllb_moe')
  model, num_experts = dataclasses.replace(one.model, report_decisions=True), one.config.num_experts
  decisions = model.loss(one.theta, tensors(one.batch(0)))[1]['decisions']
  layers = [layer for name, layer in decisions.items() if name.startswith('encoder')]
  hot_LSRE = np.stack([np.eye(num_experts)[layer.expert_GSR].reshape(-1, 2, num_experts) for layer in layers])
  c_E = hot_LSRE[:, :, 0].mean(axis=(0, 1))
  w_E = np.einsum('SRE,SR->SE', hot_LSRE[0], np.reshape(layers[0].weight_GSR, [-1, 2])).mean(axis=0)
  assert len(layers) == 2
  theirs = 2 * num_experts * c_E @ w_E
  np.testing.assert_allclose(one.training['their_aux_loss'], [theirs, theirs], rtol=1e-5)  # the encoder's, twice


def test_packed_rows_of_marian_are_as_theirs_one_by_one(trained):
  one = trained('marian')
  batch, mask = one.batch(0), one.training['mask'][0] > 0
  packed = {key: array[mask][np.newaxis] for key, array in batch.items()}
  segments = (np.arange(1, 5)[:, np.newaxis] * mask)[mask][np.newaxis].astype(np.int32)
  packed |= {'src_segments': segments, 'tgt_segments': segments}
  logits, _ = one.model.logits(one.theta, tensors(packed))
  np.testing.assert_allclose(logits[0].numpy()[:, one.symbols.firsts()], one.training['alone'], atol=1e-5)


@pytest.mark.parametrize('name', ['marian', 'mixtral', *(pytest.param(x, marks=pytest.mark.slow) for x in NAMES[1:3])])
def test_twenty_steps_of_training_have_the_same_losses(trained, name):
  one = trained(name)
  np.testing.assert_allclose(one.losses(LocalRuntime(one.program)), one.training['losses'], atol=1e-4)


@pytest.mark.compiled
@pytest.mark.parametrize(('name', 'mesh'), MESHES)
def test_training_on_a_mesh_has_the_same_losses(trained, name, mesh):
  spmd = pytest.importorskip('lingvo_moe.runtime.spmd')
  one = trained(name)
  found = one.losses(spmd.SpmdRuntime(one.program, Mesh.parse(mesh)))
  np.testing.assert_allclose(found, one.training['losses'], atol=1e-4)
