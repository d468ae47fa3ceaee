"""Parity: a small MoE and its dense twin give equal numbers on every mesh, with dropout and gating noise."""

import dataclasses
import functools
import json

import forks
import numpy as np
import pytest

from lingvo_moe.addons.analysis import parity
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import registry
from lingvo_moe.tasks.task import task_of

pytest.importorskip('jax')

pytestmark = pytest.mark.compiled

COMMAND = ['-m', 'lingvo_moe.cli.commands.main', 'parity']
MESHES = ('expert:2', 'expert:4', 'data:2,expert:2', 'expert:2,model:2', 'data:2,expert:2,model:2')
SMALL = {
  'source_vocab_size': 60,
  'target_vocab_size': 50,
  'batch_tokens': 128,
  'max_length': 16,
  'encoder_layers': 1,
  'decoder_layers': 1,
  'moe_every': 1,
  'input_dropout': 0.1,
  'residual_dropout': 0.1,
  'attention_dropout': 0.1,
}
TRAINED = {'optimizer': 'adafactor', 'schedule': 'constant', 'learning_rate': 0.01}
MOE = registry.get('mt.cldr.Tiny')(**SMALL, **TRAINED)
DENSE = dataclasses.replace(MOE, num_experts=0, ff_dim=96, optimizer='adam', learning_rate=1e-4)
SCANNED = dataclasses.replace(
  MOE, encoder_layers=2, decoder_layers=2, scan_layers=True, remat='block', num_groups=8, micro_batches=2
)
# A stack instead of two: half the operations, for what is about layers with experts whatever the stack.
SMALL_LANGUAGE = {'vocab_size': 60, 'batch_tokens': 128, 'num_layers': 1, 'max_new_tokens': 8}
SMALL_LANGUAGE |= {name: value for name, value in SMALL.items() if name.endswith('_dropout')}
LANGUAGE = registry.get('lm.shakespeare.Tiny')(**SMALL_LANGUAGE, **TRAINED)
LANGUAGE_SCANNED = dataclasses.replace(
  LANGUAGE, num_layers=2, scan_layers=True, remat='block', num_groups=8, micro_batches=2
)
MODELS = {'moe': MOE, 'dense': DENSE, 'scanned': SCANNED, 'language': LANGUAGE}
MODELS['language in micro-batches'] = dataclasses.replace(LANGUAGE, micro_batches=2)
MODELS['language by einsum'] = dataclasses.replace(LANGUAGE, dispatch='einsum')
MODELS['dense language'] = dataclasses.replace(LANGUAGE, num_experts=0, optimizer='adam', learning_rate=1e-4)
MODELS['in chunks'] = dataclasses.replace(MOE, capacity_chunks=2)
DROPLESS = {'capacity_factor': None, 'round_capacity_factor': 0.5}  # in several rounds
MODELS['dropless'] = dataclasses.replace(LANGUAGE, **DROPLESS)
OF_SWITCH = {'gate': 'switch', 'init_scale': 0.1, 'router_jitter': 0.1}
REGULARISERS = {'expert_dropout': 0.3, 'ffn_dropout': 0.2, 'expert_output_masking': 0.1, 'router_z_loss_weight': 0.01}
MODELS['regularised'] = dataclasses.replace(LANGUAGE, num_layers=2, moe_every=2, **OF_SWITCH, **REGULARISERS)
MODELS['bfloat16 router'] = dataclasses.replace(LANGUAGE, **OF_SWITCH, router_dtype='bfloat16')
MODELS['scanned, kept'] = dataclasses.replace(SCANNED, remat='none', dispatch='einsum')
GATES = {
  'soft': {},
  'noisy_top_k': {'num_experts': 4},
  'hierarchical': {'num_experts': 16, 'groups_of_experts': 4},
  'switch': {'gate_init_scale': 0.1},
  'top_k': {'choices': 3, 'shared_experts': 1, 'expert': 'swiglu'},
  'expert_choice': {'experts_in': 'encoder', 'expert': 'deep'},
  'by_target': {'gate_tasks': (('de', (10,)), ('fr', (11,))), 'tag_target': True, 'capacity_factor': None},
}
MODELS |= {gate: dataclasses.replace(MOE, gate=gate, **changed) for gate, changed in GATES.items()}
LOSS_FREE = {'router_score': 'sigmoid', 'router_bias_update_rate': 0.01, 'aux_loss_weight': 0.0}
MODELS['loss-free'] = dataclasses.replace(LANGUAGE, gate='top_k', groups_of_experts=4, chosen_groups=2, **LOSS_FREE)
MODELS['loss-free in rounds'] = dataclasses.replace(MODELS['loss-free'], **DROPLESS)
MODELS['loss-free, scanned'] = dataclasses.replace(SCANNED, gate='top_k', **LOSS_FREE)
MODELS['balanced over the batch'] = dataclasses.replace(LANGUAGE_SCANNED, balance_over='batch', aux_loss_weight=0.5)
MODELS['recurrent'] = registry.get('lm.moe_lstm.Tiny')(vocab_size=60, max_new_tokens=8)
MODELS['recurrent, flat, projected'] = dataclasses.replace(
  MODELS['recurrent'], gate='noisy_top_k', groups_of_experts=0, num_experts=4, lstm_dim=24, capacity_factor=2.0
)
MODELS['span corruption'] = registry.get('switch.shakespeare.Tiny')(
  vocab_size=40, batch_tokens=128, encoder_layers=1, moe_every=1, residual_dropout=0.1, attention_dropout=0.1
)
MODELS['shared heads, scanned'] = dataclasses.replace(
  MODELS['dense language'], num_heads=8, num_kv_heads=2, num_layers=2, scan_layers=True
)
MODELS['dropless, scanned'] = dataclasses.replace(SCANNED, **DROPLESS)
# Plain TensorFlow is the one device of these, for which nothing is compiled; it agrees with a mesh of one.
PLAIN = ('moe', 'dense', 'language', 'dense language', 'shared heads, scanned', 'dropless', 'regularised', 'loss-free')
PLAIN += ('bfloat16 router', 'balanced over the batch', 'loss-free in rounds')


@functools.cache
def observed(model, mesh, split_dense=False, split_update=False):
  options = RuntimeOptions(mesh, split_dense, runtime='spmd', split_update=split_update) if mesh else machine.LOCAL
  return parity.observe(MODELS[model], machine.connect(options).make_runtime)


def assert_agree(model, mesh, split_dense=False, tolerance=1e-5, split_update=False):
  one_device = observed(model, '' if mesh and model in PLAIN else 'data:1')
  row = parity.compare(one_device, observed(model, mesh, split_dense, split_update))
  assert row.agrees(tolerance), row
  return row


def slowly(*cases):
  return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


# data:2,expert:2 is fast below, of a language model.
@pytest.mark.parametrize(
  'model, mesh',
  [
    ('moe', 'data:2,expert:2,model:2'),
    *slowly(*(('moe', mesh) for mesh in MESHES[:-1]), *(('dense', mesh) for mesh in MESHES)),
  ],
)
def test_every_mesh_agrees_with_one_device(model, mesh):
  assert_agree(model, mesh)


@pytest.mark.parametrize('model', ['language', *slowly(('language in micro-batches',), ('moe',), ('dense',))])
def test_plain_tensorflow_agrees_with_a_mesh_of_one_device(model):
  assert_agree(model, '')


@pytest.mark.parametrize(
  'mesh, split_update', [('data:2,model:4', True), pytest.param('model:4', False, marks=pytest.mark.slow)]
)
def test_query_heads_that_share_fewer_heads_than_there_are_devices_are_split(mesh, split_update):
  assert_agree('shared heads, scanned', mesh, split_update=split_update)


@pytest.mark.slow
@pytest.mark.parametrize('model, mesh', [('moe', 'node:2,expert:2'), ('in chunks', 'expert:4')])
def test_all_to_alls_in_two_levels_and_in_chunks_agree_and_are_twice_as_many(model, mesh):
  row = parity.compare(observed('moe', 'data:1'), observed(model, mesh))
  assert row.agrees(1e-5), row
  assert row.collectives['all-to-all'] == 2 * 4 * 2


@pytest.mark.parametrize(
  'model, mesh, split_dense', [('language', 'expert:4', False), ('language by einsum', 'data:2,expert:2', True)]
)
def test_either_dispatch_agrees_and_has_as_many_all_to_alls_whether_or_not_dense_weights_are_split(
  model, mesh, split_dense
):
  row = parity.compare(observed('language', ''), observed(model, mesh, split_dense))
  assert row.agrees(1e-5), row
  assert row.collectives['all-to-all'] == 4  # two forward and two backward


@pytest.mark.parametrize(
  'model, mesh',
  [('loss-free in rounds', 'expert:4'), *slowly(('dropless', 'expert:4'), ('dropless', 'data:2,expert:2'))],
)
def test_dropless_training_in_rounds_agrees_with_one_device(model, mesh):
  row = assert_agree(model, mesh)
  # In the loops over rounds: two AllToAlls forward, and going back two to make that again and two of the gradient.
  assert row.collectives['all-to-all'] == 6


@pytest.mark.slow
def test_dropless_training_of_a_scanned_stack_agrees_with_one_device():
  row = assert_agree('dropless, scanned', 'expert:4', tolerance=5e-5)
  assert max(row.objective, row.gradients, row.slots) <= 1e-5


# Those that balance experts in rounds are fast above.
@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['', 'expert:4', 'data:2,expert:2', 'data:2,model:2'])
@pytest.mark.parametrize('model', ['loss-free', 'loss-free, scanned'])
def test_biases_that_balance_experts_agree_with_one_device(model, mesh):
  assert_agree(model, mesh)


@pytest.mark.parametrize('mesh', ['data:2,expert:2', pytest.param('expert:4', marks=pytest.mark.slow)])
def test_a_scanned_stack_in_micro_batches_with_a_balance_loss_over_the_batch_agrees_with_one_device(mesh):
  row = assert_agree('balanced over the batch', mesh)
  # In the loop over the stack: two AllToAlls that tell the choices of the batch, two forward, two to make that again
  # and two of the gradient.
  assert row.collectives['all-to-all'] == 8


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['', 'expert:4', 'data:2,expert:2'])
@pytest.mark.parametrize('gate', GATES)
def test_every_gate_agrees_with_one_device(gate, mesh):
  assert_agree(gate, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
  'model, mesh',
  [
    *(('recurrent', mesh) for mesh in ('', *MESHES)),
    *(('recurrent, flat, projected', mesh) for mesh in ('', 'data:2,expert:2', 'expert:2,model:2')),
  ],
)
def test_a_recurrent_model_agrees_with_one_device(model, mesh):
  assert_agree(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['', 'expert:4', 'data:2,expert:2'])
def test_span_corruption_agrees_with_one_device(mesh):
  row = assert_agree('span corruption', mesh)
  if mesh:
    assert row.collectives['all-to-all'] == 3 * 4


def test_regularisers_and_what_switch_trains_with_agree_with_one_device():
  assert_agree('regularised', 'expert:4')


def test_a_bfloat16_router_agrees_but_for_a_digit_of_its_gradient():
  row = assert_agree('bfloat16 router', 'data:2,expert:2', tolerance=2**-7)  # which has 8 bits
  assert row.objective <= 1e-5 and row.worst.endswith('moe/gate')


def evaluated(model, runtime_of):
  """Cross-entropy, rounds and scores of a batch under a runtime."""
  task, program = task_of(MODELS[model]), MODELS[model].program()
  runtime, score = runtime_of(program), task.inference_programs()['score'].function
  runtime.init()
  both = lambda weights, batch: (
    program.eval_step(weights, batch),
    score(program.model, program.theta(weights), batch),
  )
  metrics, scores = runtime.function(both)(task.random_batch(full=False))
  return metrics['xent'], [float(stats.rounds) for stats in metrics['routing'].values()], scores


@pytest.mark.parametrize('model', ['dropless', pytest.param('dropless, scanned', marks=pytest.mark.slow)])
def test_evaluation_and_scores_in_rounds_are_those_of_the_local_runtime(model):
  xent, _, scores = evaluated(model, machine.connect(machine.LOCAL).make_runtime)
  same_xent, rounds, same_scores = evaluated(
    model, machine.connect(RuntimeOptions('expert:4', runtime='spmd')).make_runtime
  )
  assert all(number > 1 for number in rounds)
  np.testing.assert_allclose(same_xent, xent, rtol=1e-5)
  np.testing.assert_allclose(same_scores, scores, rtol=1e-5)


@pytest.mark.slow
def test_dense_weights_of_a_translation_model_may_be_split():
  assert_agree('moe', 'data:2,expert:2', split_dense=True)


# Of one with shared heads it is fast above.
@pytest.mark.slow
@pytest.mark.parametrize(
  'model, mesh',
  [('dense language', 'data:2,expert:2'), ('moe', 'data:2,expert:2'), ('moe', 'expert:2'), ('dense', 'data:2')],
)
def test_the_update_may_be_split(model, mesh):
  assert_agree(model, mesh, split_update=True)


@pytest.mark.slow
def test_the_update_of_a_scanned_stack_that_keeps_all_may_be_split():
  row = assert_agree('scanned, kept', 'data:2,expert:2', tolerance=5e-5, split_update=True)
  assert max(row.objective, row.gradients, row.slots) <= 1e-5
  assert row.collectives['all-to-all'] == 2 * 4  # nothing is made again


@pytest.mark.slow
@pytest.mark.parametrize('split_dense', [False, True])
def test_a_scanned_translation_model_in_micro_batches_agrees_with_one_device(split_dense):
  # Of a bias that began at zero the weight is all updates, of gradients that rounding changes by this much.
  row = assert_agree('scanned', 'data:2,expert:2', split_dense, tolerance=5e-5)
  assert max(row.objective, row.gradients, row.slots) <= 1e-5
  # In the loop over each stack: two AllToAlls forward, and going back two to make that again and two of the gradient.
  assert row.collectives['all-to-all'] == 2 * 6


def test_the_matrix_is_not_of_nothing():
  steps = observed('moe', '').steps
  kept = [weight_GSR > 0 for s in steps for _, weight_GSR, _ in s['decisions'].values()]
  assert all(0.2 < np.mean(k[..., 1]) < 0.95 for k in kept)  # some second choices are skipped or dropped
  assert all(np.max(np.abs(g)) > 0 for g in steps[0]['grads'].values())
  assert steps[0]['objective'] != steps[2]['objective']
  assert len(np.unique(observed('moe', '').ids)) > 5


SMALL_DENSE = {name: value for name, value in SMALL.items() if name != 'moe_every'} | {'num_experts': 0}


@pytest.mark.parametrize(
  'model, values, all_to_alls',
  [
    ('lm.shakespeare.Tiny', SMALL_LANGUAGE, 4),
    *slowly(('mt.cldr.Tiny', SMALL, 2 * 4), ('mt.cldr.Tiny', SMALL_DENSE, 0)),
  ],
  ids=['language model', 'moe', 'dense'],
)
def test_two_processes_agree(model, values, all_to_alls, tmp_path):
  bindings = [f'--gin_bindings=Tiny.{name} = {value!r}' for name, value in values.items()]
  done = forks.run(
    [*COMMAND, f'--model={model}', '--meshes=data:2,expert:2@2', f'--json={tmp_path}/t.json', *bindings], timeout=600
  )
  assert done.returncode == 0, done.stdout + done.stderr
  row = json.loads((tmp_path / 't.json').read_text())['data:2,expert:2@2']
  assert row['agrees'] and row['gradients'] <= 1e-5 and row['collectives'].get('all-to-all', 0) == all_to_alls


@pytest.mark.slow
def test_the_grid_agrees(tmp_path):
  bindings = [f'--gin_bindings=Tiny.{name} = {value!r}' for name, value in SMALL.items()]
  command = [*COMMAND, '--model=mt.cldr.Tiny', '--grid', f'--json={tmp_path}/t.json', *bindings]
  done = forks.run(command, timeout=3600)
  assert done.returncode == 0, done.stdout + done.stderr
  rows = json.loads((tmp_path / 't.json').read_text())
  assert len(rows) == 10 * 2 * 2 and all(row['agrees'] for row in rows.values())
  assert {'model:2 gather unscanned', 'data:2,expert:2,model:2 einsum scanned'} <= set(rows)


def test_each_step_may_begin_in_the_state_of_a_reference():
  reference = observed('dense language', '')
  nothing = {name: np.zeros_like(w) for name, w in reference.steps[0]['weights'].items()}
  runtime_of = machine.connect(machine.LOCAL).make_runtime
  second_loss = lambda reference: parity.observe(MODELS['dense language'], runtime_of, 2, reference).steps[1][
    'objective'
  ]
  steps = [reference.steps[0] | {'weights': nothing}, *reference.steps[1:]]
  assert second_loss(reference._replace(steps=steps)) == pytest.approx(np.log(60), rel=1e-3)  # all symbols are alike


def an_observation(loss=1.0, grad=(2.0, 4.0), expert=0, margin=0.5, ids=3, score=-1.0):
  decisions = {
    'layer': (np.array([[[expert, 1], [1, 0]]]), np.array([[[0.7, 0.3], [1.0, 0.0]]]), np.array([[margin, 0.9]]))
  }
  told = {
    'objective': loss,
    'grads': {'w': np.array(grad)},
    'weights': {'w': np.ones(2)},
    'slots': {'w/row': np.ones(2)},
  }
  step = {**told, 'decisions': decisions}
  return parity.Observation({'w': np.zeros(2)}, [step], np.array([[[ids, 2]]]), np.array([[score]]), {})


def test_differences_by_hand():
  row = parity.compare(an_observation(), an_observation(loss=1.5, grad=(2.0, 3.0), score=-1.25))
  assert row.objective == 0.5 and row.gradients == 0.25 and row.weights == row.slots == 0 and row.scores == 0.25
  assert row.worst == 'w' and not row.agrees(0.1) and not row.agrees(1.0)  # the score is held to 1e-5 in any case
  assert parity.compare(an_observation(), an_observation()).agrees(0)


def test_a_tiny_gradient_is_held_against_the_largest():
  a, b = (an_observation(grad=(1000.0, 0.0)) for _ in range(2))
  a.steps[0]['grads']['bias'], b.steps[0]['grads']['bias'] = np.array([1e-6]), np.array([2e-6])
  assert parity.compare(a, b).gradients == pytest.approx(1e-6 / (1e-4 * 1000))


def test_an_update_made_of_a_gradient_of_noise_is_held_against_that_gradient():
  def weights_differ_by(gradient, weights):
    a, b = an_observation(grad=gradient), an_observation(grad=gradient)
    b.steps[0]['weights'] = {'w': np.array(weights)}  # in a they went from 0, 0 to 1, 1
    return parity.compare(a, b).weights

  noise = (4.0, 1e-6)
  assert weights_differ_by(noise, (1.0, 0.5)) == pytest.approx(0.5 * 1e-6 / 4)
  assert weights_differ_by(noise, (0.5, 1.0)) == 0.5  # the gradient of this entry is no noise
  assert weights_differ_by((4.0, 2.0), (1.0, 0.5)) == 0.25
  assert weights_differ_by((4.0, 0.0), (1.0, 0.5)) == 0.5  # a gradient of 0 makes no update
  assert weights_differ_by(noise, (1.0, -1.5)) == 2.5  # more than two opposite updates make


def test_a_token_that_goes_elsewhere_is_told_with_its_margin():
  row = parity.compare(an_observation(margin=0.5), an_observation(expert=2))
  assert row.flips == 1 and row.flip_margin == 0.5 and not row.agrees(1)
  assert parity.compare(an_observation(margin=1e-7), an_observation(expert=2)).agrees(0)


def test_what_a_token_that_went_elsewhere_changes_in_later_layers_and_steps_is_not_held_against_them():
  def two_steps_of_two_layers(first, second):
    step = lambda margin, expert: an_observation(margin=margin, expert=expert).steps[0]
    told = []
    for encoder, decoder in (first, second):
      decisions = {
        'decoder/layer_00': step(*decoder)['decisions']['layer'],
        'encoder/layer_00': step(*encoder)['decisions']['layer'],
      }
      told.append({**step(*encoder), 'decisions': decisions})
    return an_observation()._replace(steps=told)

  near, far = 1e-7, 0.5
  a = two_steps_of_two_layers(((near, 0), (far, 0)), ((far, 0), (far, 0)))
  tipped = two_steps_of_two_layers(((near, 2), (far, 2)), ((far, 2), (far, 0)))
  row = parity.compare(a, tipped)
  assert (row.flips, row.flip_margin) == (2, near)
  later = two_steps_of_two_layers(((near, 0), (far, 2)), ((far, 0), (far, 0)))
  assert parity.compare(a, later).flip_margin == far


@pytest.mark.parametrize('kind', ['objective', 'grads', 'weights', 'slots'])
def test_nan_agrees_with_nothing(kind):
  """Of either side or of both; max() would pass over it."""

  def with_nan():
    found = an_observation()
    (step,) = found.steps
    nan = float('nan') if kind == 'objective' else {name: np.full_like(x, np.nan) for name, x in step[kind].items()}
    return found._replace(steps=[step | {kind: nan}])

  for pair in ((with_nan(), an_observation()), (an_observation(), with_nan()), (with_nan(), with_nan())):
    row = parity.compare(*pair)
    assert not row.agrees(1e9)
    assert row.objective == np.inf if kind == 'objective' else row.worst


def test_other_symbols_do_not_agree():
  assert not parity.compare(an_observation(), an_observation(ids=4)).agrees(1)
