"""The sharding lint: silent on every model, and not on planted mistakes."""

import collections
import dataclasses

import forks
import pytest

from lingvo_moe.addons.analysis import hlo, lint
from lingvo_moe.addons.analysis.lint import Annotated
from lingvo_moe.cli import machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.config import registry
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.tasks.task import task_of

pytest.importorskip('jax')

pytestmark = pytest.mark.compiled

COMMAND = ['-m', 'lingvo_moe.cli.commands.main', 'lint']
MESH = 'data:2,expert:2'


def shortened(name):
  """Tiny model reduced to one pair of layers a stack, which has every kind of layer once."""
  config = registry.get(name)()
  sizes = {
    'source_vocab_size': 60,
    'target_vocab_size': 50,
    'vocab_size': 60,
    'max_length': 16,
    'window': 16,
    'inputs_length': 16,
    'batch_tokens': 16 * config.num_groups,
  }
  own = {field.name for field in dataclasses.fields(config)}
  return with_layers(dataclasses.replace(config, **{name: sizes[name] for name in own & sizes.keys()}))


def with_layers(config):
  """A model with one block a stack."""
  stacks = [name for name in ('encoder_layers', 'decoder_layers', 'num_layers') if hasattr(config, name)]
  return dataclasses.replace(config, **dict.fromkeys(stacks, max(1, getattr(config, 'moe_every', 1))))


def different_tinies():
  """Names of the tiny models that, once shortened, differ in more than their training."""
  kept = {}
  for name in registry.names():
    if name.endswith('Tiny') and registry.get(name)().num_groups % 4 == 0:
      kept.setdefault(repr(shortened(name).model()), name)
  return sorted(kept.values())


def program(config, plant='', mesh=MESH):
  """Text of the partitioned train step."""
  with lint.planted(plant):
    return (
      machine.connect(RuntimeOptions(mesh, runtime='spmd'))
      .make_runtime(config.program())
      .train_program(task_of(config).random_batch())
      .as_text()
    )


def findings(config, plant='', mesh=MESH, text=None):
  batch = task_of(config).random_batch()
  annotated = lint.annotations(config.program(), Mesh.parse(mesh), batch)
  assert annotated
  return lint.read(text or program(config, plant, mesh), annotated, lint.default_limit(batch, config.micro_batches))


def collectives(text):
  """Collectives of a program: how many of each kind, and of which shape."""
  return collections.Counter((i.collective, i.arrays) for i in hlo.parse(text).instructions() if i.collective)


def listed_with_experts():
  """Names of the models with experts that are small enough for a CPU, one of each set of equal sizes."""
  kept = {}
  for name in registry.names():
    config = registry.get(name)()
    if config.num_experts and weights_lib.count(config.model().weights()) < 100e6:
      sizes = 'num_experts', 'model_dim', 'ff_dim', 'batch_tokens', 'max_length', 'scan_layers', 'gate'
      kept.setdefault(tuple(getattr(config, size, None) for size in sizes), name)
  return sorted(kept.values())


def one_block(config):
  """A model in its own sizes, with one block a stack and groups that four devices divide."""
  return dataclasses.replace(with_layers(config), num_groups=max(4, config.num_groups))


FAST = ('lm.grok.Grok1Tiny',)  # scanned; the others are slow, or without dense layers below
LANGUAGE = shortened('lm.shakespeare.Tiny')


@pytest.mark.parametrize(
  'name', [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in different_tinies()]
)
def test_no_tiny_model_holds_whole_what_the_rules_split(name):
  assert findings(shortened(name)) == []


def test_nor_does_one_with_a_gate_of_groups_in_pairs_of_scanned_layers():
  changes = {'gate': 'hierarchical', 'num_experts': 16, 'groups_of_experts': 4, 'dispatch': 'einsum'}
  changes |= {'scan_layers': True, 'num_layers': 2, 'moe_every': 2}  # dense layers, as in mt.m4
  assert findings(dataclasses.replace(LANGUAGE, **changes)) == []


def test_nor_does_one_of_two_stacks_with_experts_in_every_layer():
  assert findings(with_layers(dataclasses.replace(shortened('mt.cldr.Tiny'), moe_every=1))) == []


@pytest.mark.parametrize('dispatch', ['einsum', 'gather'])
@pytest.mark.parametrize('plant, what', [('topk', 'all-gathered'), ('unsharded', 'whole on every device')])
def test_a_planted_mistake_is_found_in_the_layers_that_made_it(plant, what, dispatch):
  found = findings(dataclasses.replace(LANGUAGE, batch_tokens=128, dispatch=dispatch), plant)
  assert {f.layer for f in found} == {'decoder/layer_00/moe'}
  assert what in {f.what for f in found}


def test_the_default_limit_of_every_listed_model_is_below_what_the_plants_leave_whole():
  for name in registry.names():
    config = registry.get(name)()
    batch = task_of(config).batch_shapes()
    limit = lint.default_limit(batch, config.micro_batches)
    tokens = next(iter(batch.values())).size // config.micro_batches
    assert 0 < limit < 4 * tokens * 2, name  # topk gathers a number for each choice of each token
    if config.num_experts:  # unsharded gathers the experts' weights, or leaves the slots of all experts whole
      assert limit < 4 * min(config.num_experts * config.model_dim * config.ff_dim, 2 * tokens * config.model_dim), name


@pytest.mark.slow
@pytest.mark.parametrize('plant', ['', *lint.PLANTS])
@pytest.mark.parametrize('name', listed_with_experts())
def test_every_listed_model_is_clean_and_its_plants_are_found(name, plant):
  config = one_block(registry.get(name)())
  text = program(config, plant, 'expert:4')
  found = findings(config, mesh='expert:4', text=text)
  layers = {f.layer.partition('/')[0] for f in found if f.layer.endswith('/moe')}
  stacks = getattr(config, 'experts_in', 'decoder')
  with_experts = {'encoder', 'decoder'} if stacks == 'both' else {stacks}
  if plant and not found:
    # XLA may split everything in spite of a plant, by the annotations that are left: then nothing more is communicated.
    assert collectives(text) == collectives(program(config, mesh='expert:4'))
  else:
    assert layers == (with_experts if plant else set()), found
  assert plant or found == []


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, mesh, changed',
  [('mt.multi30k.MoE8E', 'data:2', {'batch_tokens': 768}), ('mt.m4mini.Tiny', MESH, {'capacity_factor': 4.0})],
)
def test_merged_axes_that_look_like_another_tensor_are_no_finding(name, mesh, changed):
  assert findings(dataclasses.replace(one_block(registry.get(name)()), **changed), mesh=mesh) == []


def test_an_unknown_plant_is_told():
  with pytest.raises(UserError, match="no plant 'top_k'; closest: topk"), lint.planted('top_k'):
    pass


HLO = """
ENTRY %main {
  %p = f32[8,4]{1,0} parameter(0), metadata={op_name="jit(f)/encoder/layer_01/moe/x"}
  %a = f32[8,4]{1,0} add(%p, %p), metadata={op_name="jit(f)/encoder/layer_01/moe/add"}
  %b = f32[4,4]{1,0} add(%q, %q), metadata={op_name="jit(f)/encoder/layer_01/moe/add"}
  %c = f32[8,4]{1,0} add(%p, %p), metadata={op_name="jit(f)/encoder/layer_00/ffn/add"}
  %d = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%r), \
metadata={op_name="jit(f)/gradient_tape/decoder/layer_03/attention/mul"}
  %e = f32[64,64]{1,0} all-gather(%s), metadata={op_name="jit(f)/weights/XlaSharding"}
}
"""


def test_findings_by_hand():
  annotated = [Annotated('encoder/layer_01/moe', 'feed-forward', (8, 4), (4, 4))]
  found = lint.read(HLO, annotated, limit=100)
  assert [(f.layer, f.what, f.shape) for f in found] == [
    ('encoder/layer_01/moe', 'whole on every device', (8, 4)),
    ('decoder/layer_03/attention', 'all-gathered', (8, 4)),
  ]
  assert str(found[0]).startswith('encoder/layer_01/moe: [8,4] (0.000122 MiB) is whole on every device, at jit(f)/')
  assert lint.read(HLO, annotated, limit=128) == []


def test_a_long_vector_summed_over_devices_is_found_where_no_weight_is_one():
  summed = (
    '%f = f32[64]{0} all-reduce(%g), metadata={op_name="jit(f)/gradient_tape/encoder/layer_01/moe/gating/ScatterNd"}'
  )
  at = lambda text: [(f.layer, f.what) for f in lint.read(f'ENTRY %main {{\n  {text}\n}}\n', [], limit=100)]
  assert at(summed) == [('encoder/layer_01/moe', 'scattered over all tokens and all-reduced')]
  assert at(summed.replace('moe/gating', 'attention/projection')) == []  # a bias
  assert at(summed.replace('[64]{0}', '[8,8]{1,0}')) == []  # the weight of a gate
  assert at(summed.replace('[64]', '[16]')) == []  # below the limit
  assert at(summed.replace('ScatterNd', 'Sum')) == []  # the loads of experts, or what XLA sums with them


def test_a_shape_that_is_also_a_part_of_a_weight_is_no_finding():
  annotated = [
    Annotated('encoder/layer_01/moe', 'feed-forward', (8, 4), (4, 4)),
    Annotated('outside the layers', 'other', (16, 4), (4, 8)),
  ]
  assert [f.layer for f in lint.read(HLO, annotated, limit=100)] == ['decoder/layer_03/attention']


def test_a_shape_that_merges_axes_of_a_part_in_the_same_place_is_no_finding():
  whole = Annotated('encoder/layer_01/moe', 'experts', (8, 4), (4, 4))
  layers = lambda part, role: [
    f.layer for f in lint.read(HLO, [whole, whole._replace(role=role, part=part)], limit=100)
  ]
  found_all = ['encoder/layer_01/moe', 'decoder/layer_03/attention']
  assert layers((2, 4, 4), 'experts') == ['decoder/layer_03/attention']  # [2, 4, 4] merges to [2 * 4, 4]
  assert layers((4, 4, 2), 'experts') == ['decoder/layer_03/attention']  # in any order
  assert layers((2, 4, 4), 'gating') == found_all  # elsewhere in the layer
  assert layers((16, 2), 'experts') == found_all  # as many elements, but 16 is no factor of 8


def documented(flag=''):
  """The command in the tool's help, with or without its optional flag."""
  said = forks.run([*COMMAND, '--help'], timeout=60).stdout
  line = said.splitlines()[0].removeprefix('lingvo-moe lint ')
  command, optional = line.removesuffix(']').split(' [')
  assert optional == '--plant=topk'
  return [*COMMAND, *command.split(), *([optional] if flag else [])]


def test_the_documented_command_finds_the_plant():
  shallow = [f'--set={field}=1' for field in ('encoder_layers', 'decoder_layers', 'moe_every')]
  done = forks.run([*documented('--plant=topk'), *shallow], timeout=300)
  assert done.returncode == 1, done.stdout + done.stderr
  assert 'encoder/layer_00/moe: ' in done.stdout and 'decoder/layer_00/moe: ' in done.stdout


@pytest.mark.slow
def test_the_documented_command_finds_nothing_without_the_plant():
  done = forks.run(documented(), timeout=300)
  assert done.returncode == 0 and 'no tensors above' in done.stdout, done.stdout + done.stderr


def test_a_plant_in_a_model_without_experts_is_refused():
  command = [*COMMAND, '--model=mt.cldr.Dense', f'--mesh={MESH}', '--plant=topk']
  done = forks.run(command, timeout=300)
  assert done.returncode == 1 and 'mt.cldr.Dense has none: name another --model' in done.stderr, done.stderr


@pytest.mark.parametrize('axis', ['stage', 'hidden'])
def test_programs_that_gather_by_design_are_refused(axis):
  done = forks.run([*COMMAND, '--model=mt.cldr.Tiny', f'--mesh={axis}:2'])
  assert done.returncode == 1 and f'leave out {axis}' in done.stderr
