"""Graph in stages: experts compute between them, each for the rows of the tokens that chose it.

Stage i ends where the experts of a layer begin, and stage i + 1 begins where they end. A graph without experts has one.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable

import numpy as np

from lingvo_moe.addons.engine.graph import Shapes, TfliteGraph, open_file, refused
from lingvo_moe.core.errors import UserError

# Outputs of a stage, [G, S, M], [G, S, R] twice and [B, T, M], and inputs of the next.
TO_EXPERTS = ('to_tokens', 'to_experts', 'to_weights', 'to_residual')
FROM_EXPERTS = ('from_experts', 'from_residual')
# Outputs of a decoder of one hypothesis a row, [F, V]; of a beam, [F, ...] of all hypotheses, and [B, 2 W] of rows.
OF_ONE = ('logits', 'probs')
OF_BEAM = ('best', 'symbols', 'log_z', 'logits')
CONTINUATIONS = ('next_log_probs', 'next_symbols', 'next_parents')


def file_of_stage(name: str, number: int) -> str:
  return f'{name}_{number}.tflite' if number else f'{name}.tflite'


def file_of_experts(name: str, number: int) -> str:
  return f'{name}_experts_{number}.tflite'


def load(folder: str, name: str, threads: int, experts: Callable[[str], ExportedExperts]) -> StagedGraph:
  """The graph of this name in an export, with packed weights; its experts are its own, or else the decoder's."""
  files_of = lambda path_of: list(itertools.takewhile(os.path.exists, map(path_of, itertools.count())))
  stages = files_of(lambda number: os.path.join(folder, file_of_stage(name, number)))
  of_layers = files_of(lambda number: os.path.join(folder, file_of_experts(name, number)))
  of_layers = of_layers or files_of(lambda number: os.path.join(folder, file_of_experts('decoder', number)))
  stages, of_layers = [TfliteGraph(path, threads) for path in stages], [experts(path) for path in of_layers]
  for i, stage in enumerate(stages):
    is_last, following = i == len(stages) - 1, stages[i + 1 :]
    fits = is_last != ({*TO_EXPERTS} <= {*stage.outputs}) and (i > 0) == ({*FROM_EXPERTS} <= {*stage.inputs})
    if not fits or (not is_last and (i >= len(of_layers) or not of_layers[i].fits(stage, following[0]))):
      raise _mixed(os.path.join(folder, file_of_stage(name, i)), 'it does not fit the stages and experts beside it')
  graph = StagedGraph(stages, of_layers)
  graph.resize({name: tuple(max(size, 1) for size in shape) for name, shape in graph.shapes.items()})
  graph.release()
  return graph


def check(folder: str, name: str, decoder: StagedGraph, other: StagedGraph, width: int, symbols: int) -> None:
  """Raises UserError unless a decoder makes a step of `width` hypotheses and `symbols` symbols, and `other` serves it.

  The other one is an encoder, whose results the decoder reads, or a reader of prompts, which writes its cache.
  """
  memory = {name: shape for name, shape in decoder.shapes.items() if name.startswith('memory_')}
  new = {n.replace('cache_', 'new_', 1): shape for n, shape in decoder.shapes.items() if n.startswith('cache_')}
  output_shapes = decoder.output_shapes
  results = {name: shape for name, shape in output_shapes.items() if name.startswith('new_')}
  given = {name: shape for name, shape in other.output_shapes.items() if name != 'segments'}  # see search.encode
  wrong = {
    'its inputs are others': not {'ids', 'live', 'mask', *(['log_probs'] if width > 1 else [])} <= {*decoder.shapes}
    or not new,
    'its results are others': not {*((*OF_BEAM, *CONTINUATIONS) if width > 1 else OF_ONE)} <= {*output_shapes}
    or not _alike(new, results),
    f'it has no {width} hypotheses': decoder.shapes.get('ids', ())[1:] != (width,),
    f'it has no {symbols} symbols': math.prod(output_shapes.get('logits', ())[1:]) != symbols,
    'the graph beside it gives other arrays': not _alike(memory or new, given) or other.inputs != ['ids'],
  }
  for problem, is_so in wrong.items():
    if is_so:
      raise _mixed(os.path.join(folder, file_of_stage(name, 0)), problem)


def _alike(wanted: Shapes, given: Shapes) -> bool:
  """Whether arrays [B, N, U, K] have the same names, and heads and features too as far as they are known."""
  return wanted.keys() == given.keys() and all(
    len(given[name]) == 4 and all(a == b or -1 in (a, b) for a, b in zip(shape[1::2], given[name][1::2], strict=True))
    for name, shape in wanted.items()
  )


def _mixed(path: str, problem: str) -> UserError:
  return UserError(f'{path} is of another export ({problem}): copy the whole folder again, or export the run again')


class ExportedExperts:
  """Experts of a layer, in one file of LiteRT; one caller at a time computes."""

  def __init__(self, path: str, threads: int) -> None:
    interpreter = open_file(path, threads)
    with refused(path):
      count = len(interpreter.get_signature_list())
      self._experts = [interpreter.get_signature_runner(str(e)) for e in range(count)]
    self._path, self._lock = path, threading.Lock()

  def fits(self, before: TfliteGraph, behind: TfliteGraph) -> bool:
    """Whether it takes the rows of the stage before, and gives those of the one behind."""
    rows = [runner.get_input_details().get('rows', {'shape_signature': [0]}) for runner in self._experts]
    sizes = {int(details['shape_signature'][-1]) for details in rows}
    residuals = {before.output_shapes['to_residual'][1:], behind.shapes.get('from_residual', ())[1:]}
    tokens = {before.output_shapes['to_tokens'][-1], behind.shapes.get('from_experts', (0,))[-1]}
    return sizes == tokens and len(residuals) == 1

  def __call__(self, tokens_GSM: np.ndarray, expert_GSR: np.ndarray, weight_GSR: np.ndarray) -> np.ndarray:
    """Weighted sum [F, M], for each token, of the outputs of the experts of weight above 0."""
    tokens_FM, expert_FR, weight_FR = (x.reshape(-1, x.shape[-1]) for x in (tokens_GSM, expert_GSR, weight_GSR))
    token_X, rank_X = np.nonzero(weight_FR > 0)
    expert_X, weight_X1 = expert_FR[token_X, rank_X], weight_FR[token_X, rank_X][:, np.newaxis]
    order_X = np.argsort(expert_X, kind='stable')
    ends_E = np.bincount(expert_X, minlength=len(self._experts)).cumsum()
    outputs_FM = np.zeros_like(tokens_FM)
    with self._lock, refused(self._path):
      for expert, expert_rows in zip(self._experts, np.split(order_X, ends_E[:-1]), strict=True):
        if len(expert_rows):
          outputs_FM[token_X[expert_rows]] += (
            weight_X1[expert_rows] * expert(rows=tokens_FM[token_X[expert_rows]])['outputs']
          )
    return outputs_FM


class StagedGraph:
  """Graph of several stages, which is used as a TfliteGraph is; an input of several stages is written by `write`."""

  def __init__(self, stages: list[TfliteGraph], experts: list[ExportedExperts]) -> None:
    self._stages, self._experts = stages, experts
    outer_names = lambda names, between: [name for name in dict.fromkeys(names) if name not in between]
    self.inputs = outer_names((name for stage in stages for name in stage.inputs), FROM_EXPERTS)
    self.outputs = outer_names((name for stage in stages for name in stage.outputs), TO_EXPERTS)
    self.shapes = {name: shape for stage in stages for name, shape in stage.shapes.items() if name in self.inputs}
    self.output_shapes = {n: shape for stage in stages for n, shape in stage.output_shapes.items() if n in self.outputs}
    self._stage_of = {name: stage for stage in reversed(stages) for name in (*stage.inputs, *stage.outputs)}
    self.sizes: Shapes = {}

  def resize(self, sizes: Shapes) -> bool:
    if sizes == self.sizes:
      return False
    for stage in self._stages:
      input_shapes = {name: shape for name, shape in sizes.items() if name in stage.inputs}
      for name in set(FROM_EXPERTS) & set(stage.inputs):
        input_shapes[name] = (*sizes['ids'], stage.shapes[name][-1])  # of G * S = B * T tokens
      stage.resize(input_shapes)
    self.sizes = dict(sizes)
    return True

  def write(self, name: str, value: np.ndarray) -> None:
    for stage in self._stages:
      stage.write(name, value)

  def input(self, name: str) -> np.ndarray:
    """View of the buffer of an input, in the first stage that has it, or of an output."""
    return self._stage_of[name].input(name)

  output = input

  def release(self) -> None:
    for stage in self._stages:
      stage.release()

  def run(self) -> None:
    for stage, experts, following in zip(self._stages, self._experts, self._stages[1:]):
      stage.run()
      *of_choices, residual_BTM = map(stage.output, TO_EXPERTS)
      following.write('from_residual', residual_BTM)
      following.write('from_experts', experts(*of_choices).reshape(residual_BTM.shape))
      del of_choices, residual_BTM  # views, of which none may be held by the next run
    self._stages[-1].run()
