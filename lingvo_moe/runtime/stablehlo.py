"""StableHLO of an encoder and of one step of decoding, with the weights, for JAX and NumPy alone.

encode.stablehlo        (weights, source) -> cache, as jax.export serialises it
decode_step.stablehlo   (weights, inputs, cache) -> (logits, cache)
weights.npz             weights by name
shapes.json             shape and type of every array of source, inputs, cache and logits
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lingvo_moe.runtime import lowering
from lingvo_moe.tasks.task import DecodingSteps
from lingvo_moe.xla_sharding import Mesh


def save(folder: str, steps: DecodingSteps, weights: Mapping[str, np.ndarray]) -> None:
  """Writes the folder, for one device of any kind.

  Args:
    folder: path; created if missing.
    steps: the functions, and arrays of the shapes of their arguments.
    weights: arrays by flat name.
  """
  mesh = Mesh.parse('data:1')
  encode = lowering.exported(steps.encode, mesh, dict(weights), steps.source)
  cache = _results(encode)
  decode_step = lowering.exported(steps.decode_step, mesh, dict(weights), steps.inputs, cache)
  logits, _ = _results(decode_step)
  os.makedirs(folder, exist_ok=True)
  for name, function in (('encode', encode), ('decode_step', decode_step)):
    with open(os.path.join(folder, f'{name}.stablehlo'), 'wb') as f:
      f.write(bytes(function.serialize()))
  np.savez(os.path.join(folder, 'weights.npz'), **weights)
  described = lambda x: {'shape': list(x.shape), 'dtype': str(x.dtype)}
  shapes = {'source': steps.source, 'inputs': steps.inputs, 'cache': cache, 'logits': logits}
  with open(os.path.join(folder, 'shapes.json'), 'w', encoding='utf-8') as f:
    json.dump(jax.tree.map(described, shapes), f, indent=2)


def _results(function: jax.export.Exported) -> Any:
  """Shapes and types of the results, nested as they are."""
  return jax.tree.unflatten(function.out_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in function.out_avals])
