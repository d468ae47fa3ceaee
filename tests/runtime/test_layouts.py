"""Layouts on 8 devices: equal numbers, the collectives of the compiled programs, and one checkpoint for all."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.addons.analysis import cost, hlo, hlo_collectives, parts
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import registry
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend, xla
from lingvo_moe.run import warm_start
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.tasks.mt.mt_task import TranslationTask

jax = pytest.importorskip('jax')
spmd = pytest.importorskip('lingvo_moe.runtime.spmd')
lowering = pytest.importorskip('lingvo_moe.runtime.lowering')

pytestmark = pytest.mark.compiled

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent.parent / 'docs' / 'meshes.md'
M, H, E, G, T = 16, 32, 8, 8, 8
ROWS = 16
KINDS = ('all-gather', 'all-reduce', 'all-to-all')
TOKENS = ROWS * T
MOE = MoE(model_dim=M, hidden_dim=H, num_experts=E, num_groups=G, dispatch='einsum')
DENSE_BYTES = 4 * (2 * M * H + H + M)  # weights and biases of the dense layer
GATE_BYTES = 4 * M * E
EXPERT_BYTES = 4 * 2 * E * M * H
BO_BYTES = 4 * M
SPLIT_BYTES = DENSE_BYTES - BO_BYTES  # that have an axis H
SLOTS_BYTES = 4 * 2 * TOKENS * M  # slots for both choices of every token


class Layers(NamedTuple):
  """Dense feed-forward and MoE layer, with the loss and gradients of both."""

  moe: MoE

  def specs(self):
    return weights_lib.flatten({'ffn': FeedForward(M, H).weights(), 'moe': self.moe.weights()})

  def gradients(self, weights, x_BTM):
    """Loss, outputs and the gradients of the weights, sharded as weights are stored."""
    specs = self.specs()
    weights = {name: xla_sharding.store(w, specs[name].dims) for name, w in weights.items()}
    with tf.GradientTape() as tape:
      tape.watch(weights)
      gathered = {name: xla_sharding.gather(w, specs[name].dims) for name, w in weights.items()}
      theta = weights_lib.unflatten(gathered)
      x_BTM = xla_sharding.shard(x_BTM, 'BTM')
      x_BTM += FeedForward(M, H)(theta['ffn'], x_BTM)
      with tf.name_scope('moe'):
        y_BTM, _ = self.moe(theta['moe'], x_BTM, tf.zeros(x_BTM.shape[:2]), prng.key(0))
      loss = tf.reduce_sum(y_BTM * tf.sin(tf.reshape(tf.range(tf.cast(tf.size(y_BTM), tf.float32)), y_BTM.shape)))
    grads = tape.gradient(loss, weights)
    return loss, y_BTM, {name: xla_sharding.store(grad, specs[name].dims) for name, grad in grads.items()}


@functools.cache
def arguments(moe, rows=ROWS):
  rng = np.random.default_rng(0)
  weights = {n: rng.standard_normal(s.shape).astype(np.float32) for n, s in Layers(moe).specs().items()}
  return weights, rng.standard_normal([rows, T, M]).astype(np.float32)


@functools.cache
def on_one_device(moe):
  with backend.use(xla.BACKEND):
    traced = tf.function(Layers(moe).gradients, autograph=False)
    return tf.nest.map_structure(lambda x: x.numpy(), traced(*tf.nest.map_structure(tf.constant, arguments(moe))))


@functools.cache
def compiled(moe, mesh, split_dense=False, rows=ROWS):
  mesh, layers = Mesh.parse(mesh, split_dense), Layers(moe)
  lowered = lowering.Lowering(None, mesh, spmd.connect(mesh))
  stored = {name: lowered.stored(name, spec) for name, spec in layers.specs().items()}
  jitted = jax.jit(
    lowering.traced(layers.gradients, mesh),
    in_shardings=(stored, lowered.rows),
    out_shardings=(lowered.whole, lowered.rows, stored),
  )
  return jitted.lower(*arguments(moe, rows)).compile()


def module_of(*args, **kwargs):
  return hlo.parse(compiled(*args, **kwargs).as_text())


def collectives_of(moe, mesh, split_dense=False):
  """(executions, bytes) by kind and mesh axes."""
  found = collections.defaultdict(lambda: [0, 0])
  for collective in hlo_collectives.collectives(module_of(moe, mesh, split_dense)):
    parsed = Mesh.parse(mesh)
    entry = found[collective.kind, ','.join(cost.axes_of(collective.groups_of(parsed.num_devices), parsed))]
    entry[0] += collective.times
    entry[1] += collective.times * collective.bytes
  return {key: tuple(value) for key, value in found.items()}


def assert_equal_numbers(moe, mesh, split_dense=False):
  got = compiled(moe, mesh, split_dense)(*arguments(moe))
  for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(on_one_device(moe)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * np.max(np.abs(b)))


# Bytes on one device, forward and backward, if nothing were split.
SUMS = 4 * TOKENS * M + 2 * SLOTS_BYTES  # partial sums over H: of the dense layer forward; of the experts both ways
LOSS = 4

# By layout: the mesh, whether --split_dense, and the collectives worked out by hand: (kind, axes) -> (count, bytes).
# Gradients are FastMoE's three kinds: of the dense layer and the gate, summed over the world (all axes that split the
# batch); of experts, summed over the axis data alone (data-parallel); and with no copies of experts, not at all (none).
LAYOUTS = {
  'DP': ('data:8', False, {('all-reduce', 'data'): (1, DENSE_BYTES + GATE_BYTES + EXPERT_BYTES + LOSS)}),
  'MP': ('model:8', False, {('all-reduce', 'model'): (2, SUMS)}),
  'DP+MP': (
    'data:2,model:4',
    False,
    {
      ('all-reduce', 'model'): (2, SUMS // 2),
      ('all-reduce', 'data'): (1, SPLIT_BYTES // 4 + BO_BYTES + GATE_BYTES + EXPERT_BYTES // 4 + LOSS),
    },
  ),
  'EP+DP': (
    'data:2,expert:4',
    False,
    {
      ('all-to-all', 'expert'): (4, 4 * SLOTS_BYTES // 8),
      ('all-reduce', 'data'): (1, EXPERT_BYTES // 4),
      ('all-reduce', 'data,expert'): (1, DENSE_BYTES + GATE_BYTES + LOSS),
    },
  ),
  'EP+MP+DP': (
    'data:2,expert:2,model:2',
    False,
    {
      ('all-to-all', 'expert'): (4, 4 * SLOTS_BYTES // 4),
      ('all-reduce', 'model'): (2, SUMS // 4),
      ('all-reduce', 'data'): (1, EXPERT_BYTES // 4),
      ('all-reduce', 'data,expert'): (1, SPLIT_BYTES // 2 + BO_BYTES + GATE_BYTES + LOSS),
    },
  ),
  'ZeRO-3': (
    'data:8',
    True,
    {
      # Every weight with an axis M is gathered; the bias of the hidden layer has none.
      ('all-gather', 'data'): (6, DENSE_BYTES - 4 * H + GATE_BYTES + EXPERT_BYTES),
      ('all-reduce', 'data'): (1, DENSE_BYTES + GATE_BYTES + EXPERT_BYTES + LOSS),
    },
  ),
  'EP': (
    'expert:8',
    False,
    {
      ('all-to-all', 'expert'): (4, 4 * SLOTS_BYTES // 8),
      ('all-reduce', 'expert'): (1, DENSE_BYTES + GATE_BYTES + LOSS),
    },
  ),
  'EP+MP': (
    'expert:4,model:2',
    False,
    {
      ('all-to-all', 'expert'): (4, 4 * SLOTS_BYTES // 4),
      ('all-reduce', 'model'): (2, SUMS // 4),
      ('all-reduce', 'expert'): (1, SPLIT_BYTES // 2 + BO_BYTES + GATE_BYTES + LOSS),
    },
  ),
  # No token is sent: experts are gathered, forward for backward too, and their gradients summed. Nothing else is split.
  'DP/EP': (
    'data:8/expert:8',
    False,
    {
      ('all-gather', 'data'): (2, EXPERT_BYTES),
      ('all-reduce', 'data'): (1, DENSE_BYTES + GATE_BYTES + EXPERT_BYTES + LOSS),
    },
  ),
  # All 8 devices have rows of their own. Of 2 experts a device has the slots of all groups, and half of the features:
  # tokens and the gradients of outputs are gathered over `hidden`, outputs and the gradients of tokens summed.
  'EP+ES': (
    'expert:4,hidden:2',
    False,
    {
      ('all-to-all', 'expert'): (4, 4 * SLOTS_BYTES // 8),
      ('all-gather', 'hidden'): (2, 2 * SLOTS_BYTES // 4),
      ('all-reduce', 'hidden'): (1, 2 * SLOTS_BYTES // 4),
      ('all-reduce', 'expert,hidden'): (1, DENSE_BYTES + GATE_BYTES + LOSS),
    },
  ),
  'EP+ES+DP': (
    'data:2,expert:2,hidden:2',
    False,
    {
      ('all-to-all', 'expert'): (4, 4 * SLOTS_BYTES // 8),
      ('all-gather', 'hidden'): (4, 4 * SLOTS_BYTES // 4),  # both for the products and for the gradients of weights
      ('all-reduce', 'hidden'): (1, 2 * SLOTS_BYTES // 4),
      ('all-reduce', 'data'): (1, EXPERT_BYTES // 4),
      ('all-reduce', 'data,expert,hidden'): (1, DENSE_BYTES + GATE_BYTES + LOSS),
    },
  ),
}


SLOW = ('DP+MP', 'EP+MP', 'EP+ES+DP')  # in the fast tests, EP+MP+DP and an expert on several devices


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS]
)
def test_a_layout_gives_the_numbers_of_one_device_with_the_collectives_worked_out_by_hand(name):
  mesh, split_dense, expected = LAYOUTS[name]
  assert_equal_numbers(MOE, mesh, split_dense)
  assert collectives_of(MOE, mesh, split_dense) == expected


def test_the_tables_of_the_docs_have_every_layout_with_these_collectives():
  lines = [line for line in DOCUMENT.read_text(encoding='utf-8').splitlines() if line.startswith('| ')]
  rows = [[cell.strip() for cell in line[1:-1].split('|')] for line in lines]
  flags = {row[0].split(' (')[0]: row[1] for row in rows if row[1].startswith('`--mesh=')}
  counts = {row[0]: dict(zip(KINDS, row[1:])) for row in rows if len(row) == 1 + len(KINDS) and row[0] in LAYOUTS}
  for name, (mesh, split_dense, expected) in LAYOUTS.items():
    assert flags.pop(name) == f'`--mesh={mesh}{" --split_dense" if split_dense else ""}`'
    said = dict.fromkeys(KINDS, '')
    for (kind, axes), (count, _) in sorted(expected.items()):
      said[kind] += f'{", " if said[kind] else ""}{count} over {axes.replace(",", " and ")}'
    assert counts.pop(name) == said
  assert not flags and not counts


def test_an_expert_may_be_on_several_devices():
  few = dataclasses.replace(MOE, num_experts=4)
  assert_equal_numbers(few, 'expert:4,model:2')
  held = compiled(few, 'expert:4,model:2').input_shardings[0][0]['moe/wi'].shard_shape((4, M, H))
  assert held == (1, M, H // 2)  # half of one expert
  held = compiled(few, 'expert:4,hidden:2').input_shardings[0][0]
  assert held['moe/wi'].shard_shape((4, M, H)) == (1, M, H // 2)
  assert held['ffn/wi'].shard_shape((M, H)) == (M, H)  # hidden features of dense layers are whole
  held = compiled(MOE, 'data:2,expert:2,model:2').input_shardings[0][0]['moe/wi'].shard_shape((E, M, H))
  assert held == (4, M, H // 2)  # halves of four


@pytest.mark.parametrize('way', ['einsum', pytest.param('gather', marks=pytest.mark.slow)])
def test_all_to_all_in_two_levels_has_groups_within_nodes_and_between_them(way):
  moe = dataclasses.replace(MOE, dispatch=way)
  assert_equal_numbers(moe, 'node:2,expert:4')
  found = [c for c in hlo_collectives.collectives(module_of(moe, 'node:2,expert:4')) if c.kind == 'all-to-all']
  groups = collections.Counter(str(c.groups.tolist()) for c in found)
  assert groups == {'[[0, 1, 2, 3], [4, 5, 6, 7]]': 4, '[[0, 4], [1, 5], [2, 6], [3, 7]]': 4}
  assert {c.bytes for c in found} == {SLOTS_BYTES // 8}  # each level moves every slot once
  # To the experts within nodes first, and from the experts between them first.
  order = [('dispatch' in c.instruction.op_name, c.groups.shape[1]) for c in found if _is_forward(c.instruction)]
  assert order == [(True, 4), (True, 2), (False, 2), (False, 4)]


@pytest.mark.parametrize('way, chunks', [('einsum', 2), ('gather', 3)])
def test_chunks_of_slots_have_all_to_alls_that_do_not_wait_for_each_other(way, chunks):
  moe = dataclasses.replace(MOE, dispatch=way, capacity_chunks=chunks)  # 4 slots: 2 + 2, or 2 + 2 + none
  assert_equal_numbers(moe, 'expert:4')
  for ours, theirs in zip(*(tf.nest.flatten(on_one_device(m)) for m in (moe, MOE)), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5 * np.max(np.abs(theirs)))
  module = module_of(moe, 'expert:4')
  for forward in (True, False):
    exchanges = [i for i in module.entry.instructions if i.collective == 'all-to-all' and _is_forward(i) == forward]
    waits_for = [sum(other in _ancestors(i) for other in exchanges) for i in exchanges]
    # The one to the experts waits for none, and the one back for that of its own chunk.
    assert sorted(waits_for) == [0] * chunks + [1] * chunks


def _is_forward(instruction):
  return 'gradient_tape' not in instruction.op_name


def _ancestors(instruction):
  """Instructions on which one depends."""
  found, left = set(), list(instruction.operands)
  while left:
    operand = left.pop()
    if operand not in found:
      found.add(operand)
      left += operand.operands
  return found


def test_the_product_of_experts_has_one_shape_for_any_number_of_devices():
  shapes = {}
  for devices in (2, 8):  # 2 experts and 2 rows a device
    layer = dataclasses.replace(MOE, num_experts=2 * devices, num_groups=devices)
    module = module_of(layer, f'expert:{devices}', rows=2 * devices)
    products = [i for i in module.instructions() if i.opcode == 'dot' and 'experts' == parts.part_of(i.op_name)]
    shapes[devices] = sorted(array.shape for i in products for array in i.arrays)
  # A device's 2 experts have 16 slots of 16 tokens a group in all, forward and backward. No axis counts devices.
  hidden, outputs = (2, 16, H), (2, 16, M)
  assert shapes[2] == sorted([hidden, outputs, hidden, outputs, (2, M, H), (2, H, M)])
  assert shapes[8] == shapes[2]


# A whole model, in the tests below.
MODEL = registry.get('mt.cldr.Tiny')(
  source_vocab_size=60,
  target_vocab_size=50,
  batch_tokens=128,
  max_length=16,
  encoder_layers=1,
  decoder_layers=1,
  moe_every=1,
  num_groups=8,
  num_heads=8,
  head_dim=4,
)


def runtime_on(mesh, split_dense=False):
  return machine.connect(RuntimeOptions(mesh, split_dense, runtime='spmd')).make_runtime(MODEL.program())


def losses_of(runtime, seeds):
  return [float(runtime.train_step(TranslationTask(MODEL).random_batch(seed, full=False))['loss']) for seed in seeds]


@functools.cache
def losses_on_one_device():
  runtime = runtime_on('data:1')
  runtime.init()
  return losses_of(runtime, range(4))


@pytest.mark.slow
@pytest.mark.parametrize('name', LAYOUTS)
def test_a_checkpoint_goes_on_under_any_layout(name, tmp_path):
  before, after = list(LAYOUTS)[list(LAYOUTS).index(name) - 1], name
  first, second = (runtime_on(*LAYOUTS[layout][:2]) for layout in (before, after))
  first.init()
  assert losses_of(first, range(2)) == pytest.approx(losses_on_one_device()[:2], rel=1e-5)
  checkpoints = Checkpoints(str(tmp_path))
  checkpoints.save(first)
  warm_start.resume(second, checkpoints, 2)
  assert losses_of(second, range(2, 4)) == pytest.approx(losses_on_one_device()[2:], rel=1e-5)


@pytest.mark.slow
def test_the_layout_may_change_between_two_steps():
  first = runtime_on('expert:4,model:2')
  first.init()
  layouts = [
    first,
    first.under(Mesh.parse('data:2,expert:4')),
    first.under(Mesh.parse('data:8')),
    first.under(Mesh.parse('node:2,expert:4')),
  ]
  held = lambda: {w.sharding for w in first.state()['weights'].values()}
  stored = held()
  found = [losses_of(runtime, [seed])[0] for seed, runtime in enumerate(layouts)]
  assert found == pytest.approx(losses_on_one_device(), rel=1e-5)
  assert held() == stored and first.step == layouts[2].step == 4


def test_weights_are_stored_once_whatever_the_mesh_of_a_step():
  storage = Mesh.parse('expert:4,model:2')
  specs, weights = Layers(MOE).specs(), arguments(MOE)[0]
  mesh = dataclasses.replace(Mesh.parse('data:2,expert:4'), storage=storage)
  lowered = lowering.Lowering(None, mesh, spmd.connect(mesh))
  stored = {name: lowered.stored(name, spec) for name, spec in specs.items()}
  assert stored['moe/wi'].shard_shape((E, M, H)) == (E // 4, M, H // 2)
  jitted = jax.jit(
    lowering.traced(Layers(MOE).gradients, mesh),
    in_shardings=(stored, lowered.rows),
    out_shardings=(lowered.whole, lowered.rows, stored),
  )
  for a, b in zip(
    tf.nest.flatten(jitted(weights, arguments(MOE)[1])), tf.nest.flatten(on_one_device(MOE)), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * np.max(np.abs(b)))


def test_meshes_that_share_weights_have_as_many_devices():
  with pytest.raises(UserError, match='saw expert:4/data:2 of 4 and 2 devices: use meshes of one size'):
    dataclasses.replace(Mesh.parse('expert:4'), storage=Mesh.parse('data:2'))
