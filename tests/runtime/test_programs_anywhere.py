"""Programs that SpmdRuntime makes, lowered and compiled for devices that are not there: a TPU's, and GPUs.

The runtime has four virtual devices of the CPU. Whatever it lowers is lowered for other devices instead, and a program
that returns zeros takes its place.
"""

from __future__ import annotations

import dataclasses
import time
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tiny_config

from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.layers.gates.table import GATES
from lingvo_moe.runtime.chips import Topology
from lingvo_moe.tasks.task import task_of

jax = pytest.importorskip('jax')
spmd = pytest.importorskip('lingvo_moe.runtime.spmd')
lowering = pytest.importorskip('lingvo_moe.runtime.lowering')
aot = pytest.importorskip('lingvo_moe.runtime.aot')

pytestmark = pytest.mark.compiled

MESH = Mesh.parse('data:2,expert:2')
PLATFORMS = ('tpu', 'cuda')
OPTIONS = {
  'hierarchical': {'groups_of_experts': 4, 'num_experts': 16},
  'expert_choice': {'experts_in': 'encoder'},
  'by_target': {'capacity_factor': None, 'tag_target': True, 'gate_tasks': (('de', (5,)), ('en', (6,)))},
  'by_pair': {'capacity_factor': None},
}  # of gates
GATED = dict.fromkeys(('expert_choice', 'soft', 'by_target', 'by_pair'), 'translation')  # no causal decoder, or by tags
ENCODER_DECODER = {'train', 'eval', 'score', 'encode', 'decode'}
PROGRAMS = {
  'translation': ENCODER_DECODER,
  'language model': ENCODER_DECODER - {'encode'},
  'denoising': ENCODER_DECODER,
}
SMALL = {'num_layers': 1, 'model_dim': 16, 'ff_dim': 16, 'num_heads': 2, 'head_dim': 8, 'batch_tokens': 256}
STACKS = {'encoder_layers': 1, 'decoder_layers': 1, 'moe_every': 1, 'eval_batch_tokens': 256}
CONFIGS = {
  'translation': tiny_config.make(num_groups=4),
  'language model': registry.get('lm.shakespeare.MoE8E')(**SMALL, window=16, eval_batch_tokens=256),
  'denoising': registry.get('switch.shakespeare.Tiny')(**STACKS),
}
# Every program of a task has one of these; the other gates have training and evaluation alone.
OF_TASKS = {'translation': 'by_target', 'language model': 'hierarchical', 'denoising': 'soft'}


def gated(name, gate):
  return dataclasses.replace(CONFIGS[name], gate=gate, **OPTIONS.get(gate, {}))


class Program(NamedTuple):
  """Stands in for a program that a runtime lowers and compiles: returns zeros."""

  seconds: float
  results: Any  # shapes and types
  out_shardings: Any  # on the devices of the CPU

  def lower(self):
    return self

  def compile(self):
    zeros = lambda: jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), self.results)
    return lambda *_: jax.jit(zeros, out_shardings=self.out_shardings)()


def elsewhere(monkeypatch, platforms=(), topology=''):
  """List of the programs that runtimes make from now on, lowered for platforms and compiled for a topology."""
  staged, seen = lowering.staged, []
  devices = np.array(aot.devices_of(Topology.parse(topology))) if topology else None

  def stand_in(f, mesh, *arguments, **options):
    begun, here = time.perf_counter(), options['out_shardings']
    if topology:
      there = lambda x: moved(x.sharding) if isinstance(x, jax.Array) else None  # no array: the key of initial values
      arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there(x)), arguments)
      options['out_shardings'] = jax.tree.map(moved, here)
    program = staged(f, mesh, *arguments, **options)
    for platform in platforms:
      program.lower(lowering_platforms=(platform,))
    if topology:
      program.lower().compile()
    seen.append(Program(time.perf_counter() - begun, program.out_info, here))
    return seen[-1]

  def moved(sharding):
    of_topology = jax.sharding.Mesh(devices.reshape(sharding.mesh.devices.shape), sharding.mesh.axis_names)
    return jax.sharding.NamedSharding(of_topology, sharding.spec)

  monkeypatch.setattr(lowering, 'staged', stand_in)
  return seen


def run_all(config, seen):
  """Makes every program of a task; returns (number of programs, seconds), by kind."""
  program, task, counts = config.program(), task_of(config), {}

  def note(name):
    counts[name] = len(seen), round(sum(one.seconds for one in seen), 1)
    seen.clear()

  runtime = spmd.SpmdRuntime(program, MESH)
  runtime.init()
  note('init')
  runtime.train_step(task.random_batch())
  note('train')
  inference = task.inference_programs()
  runtime.eval_step(inference.pop('eval').batch)
  note('eval')
  for name, (function, batch, _) in inference.items():
    runtime.function(lambda weights, batch, f=function: f(program.model, program.theta(weights), batch))(batch)
    note(name)
  assert runtime.not_finite() is None
  return counts


def check(name, counts):
  """Every kind of program of a task was made once, and more than one of initial values."""
  print(f'{name}: (programs, seconds) {counts}')
  assert counts.pop('init')[0] > 1
  assert {program for program, (count, _) in counts.items() if count == 1} == PROGRAMS[name]


@pytest.mark.parametrize('name, gate', OF_TASKS.items())
def test_programs_of_every_task_lower_for_tpus_and_gpus(name, gate, monkeypatch):
  check(name, run_all(gated(name, gate), elsewhere(monkeypatch, PLATFORMS)))


@pytest.mark.parametrize(
  'gate', [pytest.param(g, marks=pytest.mark.slow) if g in OF_TASKS.values() else g for g in GATES]
)
def test_training_and_evaluation_lower_for_tpus_and_gpus_with_every_gate(gate, monkeypatch):
  config = gated(GATED.get(gate, 'language model'), gate)
  seen, task, program = elsewhere(monkeypatch, PLATFORMS), task_of(config), config.program()
  runtime = spmd.SpmdRuntime(program, MESH)
  zeros = lambda specs: {name: np.zeros(spec.shape, spec.dtype.as_numpy_dtype) for name, spec in specs.items()}
  runtime.load({'step': np.array(0), 'weights': zeros(program.weight_specs), 'slots': zeros(program.slot_specs)})
  runtime.train_step(task.random_batch())
  runtime.eval_step(task.inference_programs()['eval'].batch)
  assert len(seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize('name', CONFIGS)
def test_programs_of_every_task_compile_for_a_tpu(name, monkeypatch):
  pytest.importorskip('libtpu', reason='compiling for TPUs needs libtpu: pip install -e ".[test]"')
  check(name, run_all(CONFIGS[name], elsewhere(monkeypatch, topology='v5e:2x2')))


def test_a_program_that_has_operations_of_the_cpu_alone_does_not_lower():
  """The check of the tests above: TensorFlow's wheel lowers directly for no TPU."""
  with pytest.raises(Exception, match='XLA_TPU_JIT'):
    jax.jit(lowering.traced(tf.sin, MESH)).trace(np.ones(2, np.float32)).lower(lowering_platforms=('tpu',))


@pytest.mark.parametrize('capability, refused', [('7.5', True), ('8.0', False), ('gfx90a', False)])
def test_bfloat16_is_refused_on_gpus_without_it(capability, refused):
  gpu = types.SimpleNamespace(platform='gpu', device_kind='Tesla T4', compute_capability=capability)
  program = tiny_config.make(activation_dtype='bfloat16').program()
  if refused:
    with pytest.raises(UserError, match='bfloat16 on Tesla T4 of 7.5: use --set activation_dtype=float32$'):
      lowering.check_types(program, [gpu])
  else:
    lowering.check_types(program, [gpu])
  lowering.check_types(tiny_config.make().program(), [gpu])


def test_gpus_are_hidden_from_tensorflow(monkeypatch):
  hidden = []
  monkeypatch.setattr(tf.config, 'set_visible_devices', lambda *devices: hidden.append(devices))
  spmd.connect(MESH)
  assert hidden == [([], 'GPU')]
