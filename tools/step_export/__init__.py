"""Export of a program's step to a folder that runs with JAX and NumPy alone, without TensorFlow or this package.

step.stablehlo   (state, batch) -> (state, metrics), as jax.export serialises it
init.stablehlo   (keys) -> state: initial values, of which each device computes its own part
batch.npz        one batch
spec.json        the mesh; the shape, type and sharding of every array; the random key of every initial value
run.py           runs the step a number of times
train.py         trains and evaluates, where tools/train_elsewhere.py has added batches.npz and the files that it reads

One folder serves every platform (see lowering.exported): JAX compiles it for the devices it finds.
Run on CPUs and on a GPU (H200, H100). NOT RUN on a TPU: the tests lower one file for it.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core import errors
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.core.mesh import ACTIVATIONS, Mesh, Sharding
from lingvo_moe.ops import cudnn, xla
from lingvo_moe.program import Program

try:
  import jax
except ImportError as e:
  raise errors.not_installed('exporting needs JAX', e, 'spmd') from None


from lingvo_moe.runtime import lowering

PROGRAMS = ('train', 'eval')


def save(
  folder: str,
  name: str,
  program: Program,
  mesh: Mesh,
  batch: Mapping[str, np.ndarray],
  token_counts: Sequence[str],
  kind: str = 'train',
  flops: int | None = None,
  cudnn_attention: bool = False,
) -> None:
  """Writes the folder. The devices of the mesh need not exist.

  Args:
    folder: path; created if missing.
    name: name of the model, which run.py prints.
    program: program with the step.
    mesh: mesh that the step is to run on.
    batch: batch to write, whose shapes are the step's.
    token_counts: metrics whose sum is the tokens of a step; see task.Config.
    kind: 'train', or 'eval', which leaves the state unchanged.
    flops: of a step by formula, over all devices, for TFLOP/s; None: run.py prints none.
    cudnn_attention: whether attention is cuDNN's, where it has it; the folder then runs on one NVIDIA GPU alone.

  Raises:
    UserError: an unknown kind of step, or a mesh that does not divide the model or the batch, or that has several
      devices, between which attention by cuDNN cannot be divided.
  """
  if cudnn_attention and mesh.num_devices > 1:
    raise UserError(f"cuDNN's attention is for a step of one device; saw --mesh={mesh}: leave either out")
  in_force = cudnn.BACKEND if cudnn_attention else xla.BACKEND
  step = _step(program, kind)
  rows = mesh.spec('B', ACTIVATIONS)
  for x in batch.values():
    mesh.check(x.shape[:1], 'B', rows)
  stored = lambda specs: {
    name: _described(s.shape, s.dtype.as_numpy_dtype, mesh.stored_sharding(s.shape, s.dims, name, s.slot))
    for name, s in specs.items()
  }
  spec = {
    'model': name,
    'program': kind,
    'tokens': list(token_counts),
    'flops': flops,
    'mesh': mesh.axes,
    'state': {
      'step': _described((), np.int32, Sharding(mesh, ())),
      'weights': stored(program.weight_specs),
      'slots': stored(program.slot_specs),
    },
    'batch': {name: _described(x.shape, x.dtype, Sharding(mesh, rows)) for name, x in batch.items()},
    'keys': _keys(program),
  }
  keys = jax.tree.map(lambda key: jax.ShapeDtypeStruct(np.shape(key), np.uint32), spec['keys'], is_leaf=_is_key)
  state, shapes = (jax.tree.map(_shape, spec[part], is_leaf=_is_array) for part in ('state', 'batch'))
  os.makedirs(folder, exist_ok=True)
  for file, content in (
    ('step.stablehlo', bytes(lowering.exported(step, mesh, state, shapes, in_force=in_force).serialize())),
    ('init.stablehlo', bytes(lowering.exported(_init(program), mesh, keys).serialize())),
    ('spec.json', json.dumps(spec).encode()),
  ):
    with open(os.path.join(folder, file), 'wb') as f:
      f.write(content)
  np.savez(os.path.join(folder, 'batch.npz'), **batch)
  for script in ('run.py', 'train.py'):
    shutil.copyfile(os.path.join(os.path.dirname(__file__), script), os.path.join(folder, script))


def save_eval(folder: str, program: Program, mesh: Mesh, batch: Mapping[str, np.ndarray]) -> None:
  """Adds eval.stablehlo: (weights, batch) -> {'xent', 'target_tokens'}, sums over batches of these shapes."""
  for x in batch.values():
    mesh.check(x.shape[:1], 'B', mesh.spec('B', ACTIVATIONS))

  def evaluate(weights, batch):
    metrics = program.eval_step(weights, batch)
    return {name: metrics[name] for name in ('xent', 'target_tokens')}

  weights = {n: jax.ShapeDtypeStruct(s.shape, s.dtype.as_numpy_dtype) for n, s in program.weight_specs.items()}
  with open(os.path.join(folder, 'eval.stablehlo'), 'wb') as f:
    f.write(bytes(lowering.exported(evaluate, mesh, weights, dict(batch)).serialize()))


def _step(program: Program, kind: str) -> Callable:
  """Step function (state, batch) -> (state, scalar metrics)."""
  steps = {
    'train': program.train_step,
    'eval': lambda state, batch: (state, program.eval_step(state['weights'], batch)),
  }
  if kind not in steps:
    raise UserError(f'there is no step {kind!r} to export; {closest(kind, PROGRAMS)}')

  def step(state, batch):
    state, metrics = steps[kind](state, batch)
    return state, {name: x for name, x in metrics.items() if tf.is_tensor(x) and x.shape.rank == 0}

  return step


def _init(program: Program) -> Callable:
  """Function of random keys by name that returns the initial state.

  Keys are arguments because XLA would compute the values at compile time if they were constants.
  """

  def init(keys):
    initial = lambda specs, keys: {
      name: xla_sharding.store(spec.init(keys[name], spec), spec.dims, spec.slot) for name, spec in specs.items()
    }
    return {
      'step': tf.zeros([], tf.int32),
      'weights': initial(program.weight_specs, keys['weights']),
      'slots': initial(program.slot_specs, keys['slots']),
    }

  return init


def _keys(program: Program) -> dict[str, dict]:
  """Random keys of all initial values by name; a vector with a key per layer for the weights of a scanned stack."""
  of = lambda specs: {
    name: weights_lib.initial_key(program.seed, name, s).numpy().tolist() for name, s in specs.items()
  }
  return {'weights': of(program.weight_specs), 'slots': of(program.slot_specs)}


def _described(shape: Sequence[int], dtype: Any, sharding: Sharding) -> dict:
  """Description of an array in spec.json: 'split' has, for each axis of the array, the axes of 'mesh' that split it."""
  mesh, split = sharding
  return {'shape': list(shape), 'dtype': str(np.dtype(dtype)), 'mesh': mesh.factors(split), 'split': split}


def _shape(described: Mapping) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(described['shape'], described['dtype'])


def _is_array(x: Any) -> bool:
  return isinstance(x, dict) and 'split' in x


def _is_key(x: Any) -> bool:
  return isinstance(x, list)
