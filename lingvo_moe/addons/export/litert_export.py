"""Export of graphs for the engine (addons/engine): files of LiteRT (TensorFlow Lite), with a manifest of all they need.

A graph with experts is cut before and after each layer of them, as each expert takes the rows of the tokens that chose
it. Its parts, stages, are files, and so are the experts of a layer; addons/engine/stages.py runs them.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.addons.engine import manifest, stages
from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.gates.gate import is_gate_weight
from lingvo_moe.models.export_forms import EngineGraph, EngineParts
from lingvo_moe.ops import backend as backend_lib
from lingvo_moe.ops import litert
from lingvo_moe.program import Program

Tensors = Mapping[str, tf.Tensor]


def save(
  folder: str,
  program: Program,
  parts: EngineParts,
  weights: Mapping[str, np.ndarray],
  about: Mapping[str, Any],
  kind: str = 'int8',
) -> None:
  """Writes the files of each graph, the other files of a model, requirements.txt and manifest.json.

  Args:
    folder: path of a folder that is there.
    program: the model.
    parts: its graphs, files and settings.
    weights: float32 arrays by flat name.
    about: what else the manifest says: the model's name, its checkpoint.
    kind: 'int8' or 'float32'. With int8, matrices have a scale for each output, and activations are quantised row by
      row as the engine runs, so that a row's result does not depend on other rows. Gates and norms stay float32.
  """
  contents = {**parts.files, manifest.REQUIREMENTS_FILE: '\n'.join(manifest.REQUIREMENTS).encode() + b'\n'}
  for name, graph in parts.graphs.items():
    contents |= _files(name, program, graph, weights, kind)
  for name, data in contents.items():
    with open(os.path.join(folder, name), 'wb') as f:
      f.write(data)
  manifest.write(folder, {**about, 'weights': kind, **parts.settings}, list(contents))


def _files(
  name: str, program: Program, graph: EngineGraph, weights: Mapping[str, np.ndarray], kind: str
) -> dict[str, bytes]:
  """Files of a graph with its weights, by name."""
  calls: list[litert.ExpertsCall] = []
  name_of = {}  # of a tensor that stands for a weight of experts, of which no stage has any
  of_experts = {weight for weight in weights if program.weight_specs[weight].dims.startswith('E')}
  variables = {n: tf.Variable(value, trainable=False) for n, value in weights.items() if n not in of_experts}
  scaled = {}
  for n in variables:
    if kind == 'int8' and program.weight_specs[n].dims == 'VM':
      scale_V1 = np.maximum(np.abs(weights[n]).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
      scaled[n] = [tf.Variable(x, trainable=False) for x in (weights[n] / scale_V1, scale_V1)]
  step = any(input_name.startswith('cache_') for input_name in graph.inputs)

  def run(*arguments):
    inputs = dict(zip(graph.inputs, arguments, strict=True))
    # The converter quantises constants. Some are therefore multiplied by what is 1.0 only when the graph runs.
    one = tf.cast(tf.reduce_max(inputs['ids']) >= 0, tf.float32)
    used = lambda weight, value: value * one if is_gate_weight(weight.rpartition('/')[2]) else value
    values = {weight: used(weight, v.value()) for weight, v in variables.items()}
    values |= {n: tf.compat.v1.placeholder(tf.float32, [1, *weights[n].shape[1:]]) for n in of_experts}  # of one
    name_of.update({values[weight].ref(): weight for weight in of_experts})
    tables = {values[n].ref(): litert.ScaledTable(rows.value(), scale * one) for n, (rows, scale) in scaled.items()}
    with backend_lib.use(litert.without_experts(calls, step, tables)):
      return dict(graph.function(program.theta(values), inputs))

  traced_graph = tf.compat.v1.wrap_function(run, [tf.TensorSpec(s.shape, s.dtype, n) for n, s in graph.inputs.items()])
  inputs = dict(zip(graph.inputs, traced_graph.inputs))  # then the weights
  files, parts = {}, _stages(inputs, traced_graph.structured_outputs, calls)
  for number, (given, wanted) in enumerate(parts):
    files[stages.file_of_stage(name, number)] = _stage(traced_graph.prune(list(given.values()), wanted), given, kind)
  for number, call in enumerate([] if graph.experts else calls[: len(parts) - 1]):
    used = [ref for ref in _ancestors([call.of_rows_1SM]) if ref in name_of]
    expert = _function([call.rows_1SM, *(ref.deref() for ref in used)], call.of_rows_1SM)
    expert_weights = [weights[name_of[ref]] for ref in used]
    files[stages.file_of_experts(name, number)] = _experts(expert, expert_weights, call.rows_1SM.shape[-1], kind)
  return files


def _stage(function: Callable[..., Tensors], given: Tensors, kind: str) -> bytes:
  """Bytes of a LiteRT file of a function of these tensors."""
  run = tf.function(lambda **inputs: function(*(inputs[name] for name in given)), autograph=False)
  concrete = run.get_concrete_function(**{name: tf.TensorSpec(x.shape, x.dtype, name) for name, x in given.items()})
  module = tf.Module()
  module.weights = list(concrete.variables)
  return _converted(tf.lite.TFLiteConverter.from_concrete_functions([concrete], module), kind)


def _stages(inputs: Tensors, outputs: Tensors, calls: Sequence[litert.ExpertsCall]) -> list[tuple[Tensors, Tensors]]:
  """Inputs and outputs of the parts of a graph between calls of experts, by name; see addons/engine/stages.py."""
  ancestors = {name: _ancestors([x]) for name, x in outputs.items()}
  number = {name: sum(call.outputs_GSM.ref() in known for call in calls) for name, known in ancestors.items()}
  wanted = [{name: outputs[name] for name in outputs if number[name] == i} for i in range(max(number.values()) + 1)]
  cuts = [{}]
  for stage, call in zip(wanted[:-1], calls):
    fields = call.tokens_GSM, call.expert_GSR, call.weight_GSR, call.residual_BTM
    stage |= dict(zip(stages.TO_EXPERTS, fields, strict=True))
    cuts.append(dict(zip(stages.FROM_EXPERTS, (call.outputs_GSM, call.residual_BTM), strict=True)))
  graph_parts = []
  for cut, stage in zip(cuts, wanted, strict=True):
    needed = _ancestors(stage.values(), {x.ref() for x in cut.values()})
    graph_parts.append(({n: x for n, x in {**inputs, **cut}.items() if x.ref() in needed}, stage))
  return graph_parts


def _ancestors(tensors: Iterable[tf.Tensor], known: Iterable = ()) -> set:
  """References of the tensors from which these are computed, and of these, without those before what is known."""
  references, waiting = set(), list(tensors)
  while waiting:
    tensor = waiting.pop()
    if tensor.ref() not in references:
      references.add(tensor.ref())
      if tensor.ref() not in known:
        waiting += tensor.op.inputs
  return references


def _function(inputs: Sequence[tf.Tensor], output: tf.Tensor) -> Callable[..., tf.Tensor]:
  """Function of these tensors of a graph, which holds no variables; that of `prune` would hold all of the graph."""
  graph_def = tf.compat.v1.graph_util.extract_sub_graph(output.graph.as_graph_def(), [output.op.name])
  names = [tensor.name for tensor in inputs]
  return lambda *values: tf.graph_util.import_graph_def(graph_def, dict(zip(names, values)), [output.name])[0]


def _experts(expert: Callable[..., tf.Tensor], weights: Sequence[np.ndarray], model_dim: int, kind: str) -> bytes:
  """Bytes of a LiteRT file with a signature for each expert of a layer, from its rows to its outputs.

  Args:
    expert: function of the rows [1, S, M] of one expert, and of its weights [1, ...].
    weights: those of all experts, [E, ...].
    model_dim: features of a row.
    kind: as in `save`.
  """
  module = tf.Module()
  module.weights = [[tf.Variable(w[e : e + 1], trainable=False) for w in weights] for e in range(len(weights[0]))]
  rows = tf.TensorSpec([None, model_dim], name='rows')

  def signature(expert_weights):
    run = lambda rows: {'outputs': expert(rows[tf.newaxis], *(weight.value() for weight in expert_weights))[0]}
    return tf.function(run, autograph=False).get_concrete_function(rows)

  signatures = {str(e): signature(expert_weights) for e, expert_weights in enumerate(module.weights)}
  with tempfile.TemporaryDirectory() as folder:
    tf.saved_model.save(module, folder, signatures)
    return _converted(tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=list(signatures)), kind)


def _converted(converter: tf.lite.TFLiteConverter, kind: str) -> bytes:
  converter.optimizations = [tf.lite.Optimize.DEFAULT] if kind == 'int8' else []
  try:
    return converter.convert()
  except Exception as e:  # the converter has errors of many kinds
    raise UserError(
      f'the model could not be converted for LiteRT ({errors.reason(e)}): use --format=saved_model'
    ) from None
