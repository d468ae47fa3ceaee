"""Export of graphs for lingvo_moe/engine: files of LiteRT (TensorFlow Lite), with a manifest of all that they need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.engine import manifest
from lingvo_moe.layers.gates.gate import is_gate_weight
from lingvo_moe.ops import backend as backend_lib
from lingvo_moe.ops import litert
from lingvo_moe.program import Program
from lingvo_moe.tasks.task import EngineParts, Graph


def save(
  folder: str,
  program: Program,
  parts: EngineParts,
  weights: Mapping[str, np.ndarray],
  about: Mapping[str, Any],
  kind: str = 'int8',
) -> None:
  """Writes each graph as <name>.tflite, the other files of a model, requirements.txt and manifest.json.

  Args:
    folder: path of a folder that is there.
    program: the model.
    parts: its graphs, files and settings.
    weights: float32 arrays by flat name.
    about: what else the manifest says: the model's name, its checkpoint.
    kind: 'int8' or 'float32'. With int8, matrices have a scale for each output, and activations are quantised row by
      row as the engine runs, so that a row's result does not depend on other rows. Gates and norms stay float32.
  """
  contents = {f'{name}.tflite': _convert(program, graph, weights, kind) for name, graph in parts.graphs.items()}
  contents |= {**parts.files, manifest.REQUIREMENTS_FILE: '\n'.join(manifest.REQUIREMENTS).encode() + b'\n'}
  for name, data in contents.items():
    with open(os.path.join(folder, name), 'wb') as f:
      f.write(data)
  manifest.write(folder, {**about, 'weights': kind, **parts.settings}, list(contents))


def _convert(program: Program, graph: Graph, weights: Mapping[str, np.ndarray], kind: str) -> bytes:
  """Bytes of a LiteRT file of a graph with its weights."""
  module = tf.Module()
  module.weights = {name: tf.Variable(value, trainable=False) for name, value in weights.items()}

  def run(**inputs):
    # The converter quantises constants. Those of gates are multiplied by what is 1.0 only when the graph runs.
    one = tf.cast(tf.reduce_max(inputs['ids']) >= 0, tf.float32)
    used = lambda name, value: value * one if is_gate_weight(name.rpartition('/')[2]) else value
    theta = program.theta({name: used(name, v.value()) for name, v in module.weights.items()})
    with backend_lib.use(litert.BACKEND):
      return graph.function(theta, inputs)

  module.run = tf.function(run, autograph=False)
  concrete = module.run.get_concrete_function(
    **{name: tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in graph.inputs.items()}
  )
  converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
  converter.optimizations = [tf.lite.Optimize.DEFAULT] if kind == 'int8' else []
  try:
    return converter.convert()
  except Exception as e:  # the converter has errors of many kinds
    raise UserError(
      f'the model could not be converted for LiteRT ({errors.reason(e)}): use --format=saved_model'
    ) from None
