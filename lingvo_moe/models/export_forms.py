"""Forms in which a model is exported: graphs for the engine, a function of text, an encoder and a decoding step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from lingvo_moe.core.errors import UserError
from lingvo_moe.models.batches import Batch

if TYPE_CHECKING:
  import tensorflow as tf


class TextFunction(Protocol):
  """Function of text in the graph, from strings to strings, with all that it needs besides weights."""

  name: str  # name of the function
  inputs: Mapping[str, tf.TensorSpec]  # specs of its arguments by name, in order
  # what its inputs and outputs are: {'inputs': {name: meaning}, 'outputs': {name: meaning}}
  about: Mapping[str, Mapping[str, str]]
  resources: Sequence[Any]  # what it reads besides weights, such as tokenisers, for a SavedModel to keep

  def __call__(self, weights: Mapping[str, tf.Tensor], *arguments: tf.Tensor) -> dict[str, tf.Tensor]:
    """Tensors by name, for weights by flat name."""


class DecodingSteps(NamedTuple):
  """Encoder and one step of decoding as functions of flat weights, for static shapes."""

  encode: Callable[[Any, Batch], Any]  # (weights, source) -> cache
  decode_step: Callable[[Any, Batch, Any], Any]  # (weights, inputs, cache) -> (logits, cache)
  source: Batch  # arrays of the right shapes
  inputs: Batch


class EngineGraph(NamedTuple):
  """Function of a model as a graph that the engine runs."""

  function: Callable[[Any, Mapping[str, tf.Tensor]], Mapping[str, tf.Tensor]]  # (nested weights, inputs) -> outputs
  inputs: Mapping[str, tf.TensorSpec]  # by name; 'ids' is one of them; a step over a cache has names in cache_
  experts: str | None = None  # name of another graph with the same calls of experts, of which there is one copy then


class EngineParts(NamedTuple):
  """All that the engine needs of a model besides its weights; see lingvo_moe/addons/engine."""

  graphs: Mapping[str, EngineGraph]  # by name
  files: Mapping[str, bytes]  # by name, such as vocabularies
  settings: Mapping[str, Any]  # values for the manifest


class Exports:
  """Forms of the model of a task. What a subclass leaves out is refused.

  Args:
    task: the task, with its configuration and vocabularies; see tasks/task.py.
  """

  is_of_text = False  # whether it has `text_function` and `decoding_steps`

  def __init__(self, task: Any) -> None:
    self.task = task

  def _refuse(self, what: str) -> NoReturn:
    raise UserError(f'{type(self.task.config).__name__} {what}')

  def text_function(self) -> TextFunction:
    """The model as a function of text, for weights of config.program()."""
    self._refuse('is not exported: only models of translation are')

  def decoding_steps(self, rows: int) -> DecodingSteps:
    """Encoder and decoding step for `rows` lines, for weights of config.program()."""
    self._refuse('is not exported: only models of translation are')

  def engine_parts(self) -> EngineParts:
    """The model for the engine, with weights of config.program(); UserError where the engine cannot compute it."""
    self._refuse('is not exported for the engine, which translates and continues text: use its log directory')
