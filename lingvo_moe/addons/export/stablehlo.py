"""StableHLO of an encoder and of one step of decoding, with the weights, for JAX and NumPy alone.

encode.stablehlo        (weights, source) -> cache, as jax.export serialises it
decode_step.stablehlo   (weights, inputs, cache) -> (logits, cache)
weights.npz             weights by name
shapes.json             shape and type of every array of source, inputs, cache and logits
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lingvo_moe.core.mesh import Mesh
from lingvo_moe.models.export_forms import DecodingSteps
from lingvo_moe.runtime import lowering


def save(folder: str, steps: DecodingSteps, weights: Mapping[str, np.ndarray]) -> None:
  """Writes the folder for one device of any kind: `steps`, with arrays of the shapes of its arguments, and weights."""
  mesh, path = Mesh.parse('data:1'), pathlib.Path(folder)
  encode = lowering.exported(steps.encode, mesh, dict(weights), steps.source)
  cache = _results(encode)
  decode_step = lowering.exported(steps.decode_step, mesh, dict(weights), steps.inputs, cache)
  path.mkdir(parents=True, exist_ok=True)
  (path / 'encode.stablehlo').write_bytes(encode.serialize())
  (path / 'decode_step.stablehlo').write_bytes(decode_step.serialize())
  np.savez(path / 'weights.npz', **weights)
  described = lambda x: {'shape': list(x.shape), 'dtype': str(x.dtype)}
  shapes = {'source': steps.source, 'inputs': steps.inputs, 'cache': cache, 'logits': _results(decode_step)[0]}
  (path / 'shapes.json').write_text(json.dumps(jax.tree.map(described, shapes), indent=2), encoding='utf-8')


def _results(function: jax.export.Exported) -> Any:
  """Shapes and types of the results, nested as they are."""
  return jax.tree.unflatten(function.out_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in function.out_avals])
