"""Graph in stages: experts compute between them, each for the rows of the tokens that chose it.

Stage i ends where the experts of a layer begin, and stage i + 1 begins where they end. A graph without experts has one.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable

import numpy as np

from lingvo_moe.engine.graph import Graph, Shapes, open_file

# Outputs of a stage, [G, S, M], [G, S, R] twice and [B, T, M], and inputs of the next.
TO_EXPERTS = ('to_tokens', 'to_experts', 'to_weights', 'to_residual')
FROM_EXPERTS = ('from_experts', 'from_residual')


def file_of_stage(name: str, number: int) -> str:
  return f'{name}_{number}.tflite' if number else f'{name}.tflite'


def file_of_experts(name: str, number: int) -> str:
  return f'{name}_experts_{number}.tflite'


def load(folder: str, name: str, threads: int, experts: Callable[[str], Experts]) -> StagedGraph:
  """The graph of this name in an export, with packed weights; its experts are its own, or else the decoder's."""
  files_of = lambda path_of: list(itertools.takewhile(os.path.exists, map(path_of, itertools.count())))
  stages = files_of(lambda number: os.path.join(folder, file_of_stage(name, number)))
  of_layers = files_of(lambda number: os.path.join(folder, file_of_experts(name, number)))
  of_layers = of_layers or files_of(lambda number: os.path.join(folder, file_of_experts('decoder', number)))
  stages = [Graph(path, threads) for path in stages]
  graph = StagedGraph(stages, [experts(path) for path in of_layers[: len(stages) - 1]])
  graph.resize({name: tuple(max(size, 1) for size in shape) for name, shape in graph.shapes.items()})
  graph.release()
  return graph


class Experts:
  """Experts of a layer, in one file of LiteRT; one caller at a time computes."""

  def __init__(self, path: str, threads: int) -> None:
    interpreter = open_file(path, threads)
    self._experts = [interpreter.get_signature_runner(str(e)) for e in range(len(interpreter.get_signature_list()))]
    self._lock = threading.Lock()

  def __call__(self, tokens_GSM: np.ndarray, expert_GSR: np.ndarray, weight_GSR: np.ndarray) -> np.ndarray:
    """Weighted sum [F, M], for each token, of the outputs of the experts of weight above 0."""
    tokens_FM, expert_FR, weight_FR = (x.reshape(-1, x.shape[-1]) for x in (tokens_GSM, expert_GSR, weight_GSR))
    token_X, rank_X = np.nonzero(weight_FR > 0)
    expert_X, weight_X1 = expert_FR[token_X, rank_X], weight_FR[token_X, rank_X][:, np.newaxis]
    order_X = np.argsort(expert_X, kind='stable')
    ends_E = np.bincount(expert_X, minlength=len(self._experts)).cumsum()
    outputs_FM = np.zeros_like(tokens_FM)
    with self._lock:
      for expert, own in zip(self._experts, np.split(order_X, ends_E[:-1]), strict=True):
        if len(own):
          outputs_FM[token_X[own]] += weight_X1[own] * expert(rows=tokens_FM[token_X[own]])['outputs']
    return outputs_FM


class StagedGraph:
  """Graph of several stages, which is used as a Graph is; an input of several stages is written by `write`."""

  def __init__(self, stages: list[Graph], experts: list[Experts]) -> None:
    self._stages, self._experts = stages, experts
    own = lambda names, between: [name for name in dict.fromkeys(names) if name not in between]
    self.inputs = own((name for stage in stages for name in stage.inputs), FROM_EXPERTS)
    self.outputs = own((name for stage in stages for name in stage.outputs), TO_EXPERTS)
    self.shapes = {name: shape for stage in stages for name, shape in stage.shapes.items() if name in self.inputs}
    self._stage_of = {name: stage for stage in reversed(stages) for name in (*stage.inputs, *stage.outputs)}
    self.sizes: Shapes = {}

  def resize(self, sizes: Shapes) -> None:
    for stage in self._stages:
      own = {name: shape for name, shape in sizes.items() if name in stage.inputs}
      for name in set(FROM_EXPERTS) & set(stage.inputs):
        own[name] = (*sizes['ids'], stage.shapes[name][-1])  # of G * S = B * T tokens
      stage.resize(own)
    self.sizes = dict(sizes)

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
