"""The sharding lint: silent on every model, and not on planted mistakes."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import pytest

from lingvo_moe import runtime_flags
from lingvo_moe.analysis import lint
from lingvo_moe.analysis.lint import Annotated
from lingvo_moe.core import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.mt.random_batch import random_batch
from lingvo_moe.xla_sharding import Mesh

pytest.importorskip('jax')

TOOL = pathlib.Path(__file__).resolve().parent.parent.parent / 'tools' / 'lint_sharding.py'
MESH = 'data:2,expert:2'
LIMIT = 600  # bytes


def shortened(name):
  """Tiny model reduced to one pair of layers a stack, which has every kind of layer once."""
  config = registry.get(name)()
  layers = max(1, config.moe_every)
  return dataclasses.replace(
    config,
    source_vocab_size=60,
    target_vocab_size=50,
    max_length=16,
    batch_tokens=16 * config.num_groups,
    encoder_layers=layers,
    decoder_layers=layers,
  )


def different_tinies():
  """Names of the tiny models that, once shortened, differ in more than their training."""
  kept = {}
  for name in registry.names():
    if name.endswith('Tiny') and registry.get(name)().num_groups % 4 == 0:
      kept.setdefault(repr(shortened(name).task()), name)
  return sorted(kept.values())


def findings(config, plant='', mesh=MESH):
  batch = random_batch(config)
  annotated = lint.annotations(config.program(), Mesh.parse(mesh), batch)
  assert annotated
  with lint.planted(plant):
    program = runtime_flags.Choice('spmd', mesh).make(config.program()).train_program(batch)
  return lint.read(program.as_text(), annotated, LIMIT)


@pytest.mark.parametrize('name', different_tinies())
def test_no_tiny_model_holds_whole_what_the_rules_split(name):
  assert findings(shortened(name)) == []


@pytest.mark.parametrize('dispatch', ['einsum', 'gather'])
@pytest.mark.parametrize('plant, what', [('topk', 'all-gathered'), ('unsharded', 'whole on every device')])
def test_a_planted_mistake_is_found_in_the_layers_that_made_it(plant, what, dispatch):
  config = shortened('mt.cldr.Tiny')
  config = dataclasses.replace(config, encoder_layers=1, decoder_layers=1, moe_every=1, batch_tokens=128)
  found = findings(dataclasses.replace(config, dispatch=dispatch), plant)
  assert {f.layer for f in found} == {'encoder/layer_00/moe', 'decoder/layer_00/moe'}
  assert what in {f.what for f in found}


def test_an_unknown_plant_is_told():
  with pytest.raises(UserError, match="no plant 'top_k'; closest: topk"), lint.planted('top_k'):
    pass


HLO = """
ENTRY %main {
  %p = f32[8,4]{1,0} parameter(0), metadata={op_name="jit(f)/encoder/layer_01/moe/x"}
  %a = f32[8,4]{1,0} add(%p, %p), metadata={op_name="jit(f)/encoder/layer_01/moe/add"}
  %b = f32[4,4]{1,0} add(%q, %q), metadata={op_name="jit(f)/encoder/layer_01/moe/add"}
  %c = f32[8,4]{1,0} add(%p, %p), metadata={op_name="jit(f)/encoder/layer_00/ffn/add"}
  %d = (f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%r), metadata={op_name="jit(f)/gradient_tape/decoder/layer_03/attention/mul"}
  %e = f32[64,64]{1,0} all-gather(%s), metadata={op_name="jit(f)/weights/XlaSharding"}
}
"""


def test_findings_by_hand():
  annotated = [Annotated('encoder/layer_01/moe', (8, 4), (4, 4))]
  found = lint.read(HLO, annotated, limit=100)
  assert [(f.layer, f.what, f.shape) for f in found] == [
    ('encoder/layer_01/moe', 'whole on every device', (8, 4)),
    ('decoder/layer_03/attention', 'all-gathered', (8, 4)),
  ]
  assert str(found[0]).startswith('encoder/layer_01/moe: [8,4] (0.000122 MiB) is whole on every device, at jit(f)/')
  assert lint.read(HLO, annotated, limit=128) == []


def test_a_shape_that_is_also_a_part_of_a_weight_is_no_finding():
  annotated = [Annotated('encoder/layer_01/moe', (8, 4), (4, 4)), Annotated('outside the layers', (16, 4), (4, 8))]
  assert [f.layer for f in lint.read(HLO, annotated, limit=100)] == ['decoder/layer_03/attention']


def test_the_command_fails_on_a_plant():
  sizes = ('source_vocab_size = 60', 'target_vocab_size = 50', 'max_length = 16', 'batch_tokens = 128')
  layers = ('encoder_layers = 1', 'decoder_layers = 1', 'moe_every = 1')
  bindings = [f'--gin_bindings=Tiny.{binding}' for binding in (*sizes, *layers)]
  done = subprocess.run(
    [sys.executable, TOOL, '--model=mt.cldr.Tiny', f'--mesh={MESH}', '--plant=topk', *bindings],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 1 and 'encoder/layer_00/moe: ' in done.stdout, done.stdout + done.stderr
