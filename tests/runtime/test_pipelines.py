"""Pipelines on meshes with an axis stage: equal numbers, no weight gathered, and a program constant in depth."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.addons.analysis import cost, hlo, hlo_collectives, parity
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.layers.pipeline import Pipeline
from lingvo_moe.tasks.task import task_of

jax = pytest.importorskip('jax')
spmd = pytest.importorskip('lingvo_moe.runtime.spmd')
lowering = pytest.importorskip('lingvo_moe.runtime.lowering')

pytestmark = pytest.mark.compiled

SMALL = {
  'source_vocab_size': 60,
  'target_vocab_size': 50,
  'batch_tokens': 256,
  'max_length': 16,
  'encoder_layers': 2,
  'decoder_layers': 2,
  'moe_every': 1,
  'num_groups': 8,
}
SCANNED = {'micro_batches': 2, 'scan_layers': True, 'remat': 'block'}
SCANNED |= {'input_dropout': 0.1, 'residual_dropout': 0.1, 'attention_dropout': 0.1}
DENSE = {'num_experts': 0, 'ff_dim': 96, 'optimizer': 'adam', 'learning_rate': 1e-4}
MOE = registry.get('mt.cldr.Tiny')(**SMALL, **SCANNED, optimizer='adafactor', schedule='constant', learning_rate=0.01)
LANGUAGE = registry.get('lm.shakespeare.Tiny')(
  vocab_size=60, batch_tokens=256, num_groups=8, max_new_tokens=8, schedule='constant', **SCANNED
)
MODELS = {
  'moe': MOE,
  'dense': dataclasses.replace(MOE, **DENSE),
  'circular': dataclasses.replace(MOE, encoder_layers=4, decoder_layers=4, pipeline_repeats=2),
  'pairs of layers': dataclasses.replace(MOE, moe_every=2, encoder_layers=4, decoder_layers=4, micro_batches=4),
  'regularised': dataclasses.replace(
    MOE, expert_dropout=0.3, ffn_dropout=0.2, expert_output_masking=0.1, router_z_loss_weight=0.01, capacity_chunks=2
  ),
  'noisy_top_k': dataclasses.replace(MOE, gate='noisy_top_k', num_experts=4),
  'language model': LANGUAGE,
  'dense language model': dataclasses.replace(LANGUAGE, **DENSE),
  'circular language model': dataclasses.replace(LANGUAGE, num_layers=4, pipeline_repeats=2),
  'T(96L)': registry.get('mt.m4.T96LTiny')(micro_batches=4, pipeline_repeats=2),
}


# Plain TensorFlow is the one device of these, for which nothing is compiled.
PLAIN = ('moe', 'circular language model')


@functools.cache
def observed(model, mesh, split_update=False, equal_states=False):
  """Observation of a model, and the text of its train step if that is of a mesh."""
  options = RuntimeOptions(mesh, runtime='spmd', split_update=split_update) if mesh else machine.LOCAL
  made, connected = [], machine.connect(options)
  runtime_of = lambda program: made.append(connected.make_runtime(program)) or made[-1]
  observation = parity.observe(MODELS[model], runtime_of, reference=one_device(model) if equal_states else None)
  batch = task_of(MODELS[model]).random_batch(full=False)
  return observation, made[0].train_program(batch).as_text() if mesh else ''


def one_device(model):
  return observed(model, '' if model in PLAIN else 'data:1')[0]


SLOWLY = [
  ('moe', 'stage:2,expert:2'),
  ('moe', 'stage:2,model:2'),
  ('moe', 'data:2,stage:2'),
  ('language model', 'stage:2,expert:2'),
  ('dense', 'stage:2'),
  ('dense', 'stage:2,data:2'),
  ('circular', 'stage:2'),
  ('circular', 'stage:2,data:2'),
  ('pairs of layers', 'stage:2,expert:2'),
  ('regularised', 'stage:2,data:2'),
  ('noisy_top_k', 'stage:2'),
]
CASES = [('moe', 'stage:2,data:2'), *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOWLY)]


@pytest.mark.parametrize('model, mesh', CASES)
def test_a_pipeline_agrees_with_one_device(model, mesh):
  """Losses, gradients, weights, decisions and translations, with dropout, noise and padding."""
  row = parity.compare(one_device(model), observed(model, mesh)[0])
  assert row.agrees(1e-5), row


@pytest.mark.parametrize(
  'model, mesh, split_update',
  [
    ('circular language model', 'stage:2,expert:2', True),
    pytest.param('circular language model', 'stage:2', False, marks=pytest.mark.slow),
    pytest.param('dense language model', 'stage:2,data:2', True, marks=pytest.mark.slow),
    pytest.param('T(96L)', 'stage:2,data:2', False, marks=pytest.mark.slow),
  ],
)
def test_a_pipeline_agrees_in_every_step_from_equal_states(model, mesh, split_update):
  """From states that differ by rounding, a ReLU may open for one token on one side alone (docs/verify_meshes.md)."""
  observation, text = observed(model, mesh, split_update, equal_states=True)
  row = parity.compare(one_device(model), observation)
  assert row.agrees(1e-5), row
  if split_update:  # over the devices of a stage
    axis = mesh.partition(',')[2].partition(':')[0]
    found = [(axes, shapes) for kind, axes, _, shapes in collectives_of(hlo.parse(text), mesh) if kind == 'all-gather']
    gathered = {shape for axes, shapes in found if axes == (axis,) for shape in shapes}
    assert (60, 32) in gathered and any(shape[0] == 2 for shape in gathered)  # updated: the embedding, and stacks


@functools.cache
def program_of(config, mesh):
  runtime = machine.connect(RuntimeOptions(mesh, runtime='spmd')).make_runtime(config.program())
  return hlo.parse(runtime.train_program(task_of(config).random_batch(full=False)).as_text())


def collectives_of(program, mesh):
  """(kind, mesh axes, executions, shapes) of each collective of a train step."""
  parsed = Mesh.parse(mesh)
  for c in hlo_collectives.collectives(program):
    axes = cost.axes_of(c.groups_of(parsed.num_devices), parsed)
    yield c.kind, axes, c.times, [array.shape for array in c.instruction.results]


def test_no_weight_is_gathered_and_gradients_are_summed_once():
  stacked = [spec.shape for spec in MOE.program().weight_specs.values() if spec.dims.startswith('L')]
  weights = {shape[1:] for shape in stacked if len(shape) > 2}
  permuted = 0
  mesh = 'stage:2,data:2'
  for kind, axes, times, shapes in collectives_of(hlo.parse(observed('moe', mesh)[1]), mesh):
    if kind == 'collective-permute':
      assert axes == ('stage',) and times == MOE.micro_batches + 1  # once a tick
      permuted += len(shapes)
    else:  # rows of a batch and statistics are gathered over stages, gradients summed over data
      assert kind in ('all-gather', 'all-reduce') and times == 1, (kind, axes, times, shapes)
      assert kind != 'all-gather' or not any(s[-len(w) :] == w for s in shapes for w in weights), shapes
  # Of the encoder once forward and once backward; the decoder also passes back the gradient of the encoder output.
  assert permuted == 2 + 3


def test_any_number_of_stages_passes_values_by_collective_permutes_alone():
  mesh, schedule = Mesh.parse('stage:4,data:2'), Pipeline(4, 2, micro_batches=4, num_groups=8, repeats=1, blocks=4)
  lowered = lowering.Lowering(None, mesh, spmd.connect(mesh))
  places = lowered.sharding((('stage', 'data'),))
  both_ways = lambda x_ZI: tf.tanh(schedule.passed(x_ZI, 1)) + schedule.passed(x_ZI, -1)
  jitted = jax.jit(lowering.traced(both_ways, mesh), in_shardings=places, out_shardings=places)
  x_ZI = np.random.default_rng(0).standard_normal((8, 3, 5)).astype(np.float32)
  program = jitted.lower(x_ZI).compile()
  found = [c.kind for c in hlo_collectives.collectives(hlo.parse(program.as_text()))]
  assert found == ['collective-permute'] * 2
  np.testing.assert_allclose(program(x_ZI), np.tanh(np.roll(x_ZI, 2, axis=0)) + np.roll(x_ZI, -2, axis=0), atol=1e-6)


def test_the_program_does_not_grow_with_depth():
  dense = MODELS['dense language model']
  instructions = lambda config: len(list(program_of(config, 'stage:2').instructions()))
  deep = dataclasses.replace(dense, num_layers=8)
  assert instructions(deep) <= instructions(dense)


def test_cost_counts_the_bubble():
  assert cost.bubble(MOE, Mesh.parse('stage:2')) == 1 / 3
  assert cost.bubble(MODELS['circular'], Mesh.parse('stage:2,data:2')) == 1 / 5
  assert cost.bubble(MOE, Mesh.parse('expert:2')) == 0


@pytest.mark.parametrize(
  'changes, mesh, text',
  [
    ({'scan_layers': False, 'remat': 'none'}, 'stage:2', 'splits the layers of scanned stacks; .* scan_layers = True'),
    ({'encoder_layers': 3}, 'stage:2', r'axis L \(layers of a scanned stack\) has size 3, .* 2 devices of mesh axis'),
    ({'micro_batches': 8}, 'stage:2,data:2', 'micro_batches=8: axis G .* has size 1'),
    ({'pipeline_repeats': 2}, 'stage:2', 'in each of pipeline_repeats=2; saw a stack of 2 blocks'),
    ({'capacity_factor': None}, 'stage:2', 'a pipeline drops tokens that find no room'),
    ({'gate': 'noisy_top_k', 'num_experts': 4}, 'stage:2,data:2', 'of all groups together, .* saw data:2'),
  ],
)
def test_what_a_pipeline_cannot_do_is_refused(changes, mesh, text):
  with pytest.raises(UserError, match=text):
    program_of(dataclasses.replace(MOE, **changes), mesh)
