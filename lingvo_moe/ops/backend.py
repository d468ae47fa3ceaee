"""Backend: overrides of the operations of reference.py for a machine, set by a runtime while it traces.

Layers, tasks and searches call `ops.linear(...)`; the backend in force decides which function that is. Where none is
set, the reference is in force. Runtimes set one as they set the mesh (`xla_sharding.use`).
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import tensorflow as tf

from lingvo_moe.core import progress

F = TypeVar('F', bound=Callable)


@dataclasses.dataclass(frozen=True)
class Backend:
  """Overrides of the reference, and the capabilities of a machine."""

  name: str  # name of the backend
  # functions by the name of the operation they replace, with the same arguments and results to rounding
  overrides: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
  # name in layers/dispatch.py of the dispatcher that `dispatch = 'auto'` of a MoE layer stands for
  dispatcher: str = 'einsum'
  open_shapes: bool = True  # whether sizes may be known only when the program runs. XLA needs them while it compiles.
  sub_batches: int = 1  # number of sub-batches that a traced program computes side by side
  # sub-batches of results that were joined while a program is traced, by the result; see cpu/sub_batches.py
  joined: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)
  parallel_calls: int = 1  # number of calls of the function of map_rows that run at once
  # whether a runtime that holds the weights updates them in place (optim/cpu/in_place.py)
  updates_in_place: bool = False
  # number of weights of one shape that an optimizer updates at once at most; see Optimizer.update_alike
  updates_at_once: int = 1
  # whether the machine has units for bfloat16; without, activations are float32 whatever a model says
  bfloat16: bool = True


REFERENCE = Backend('reference')

_current: contextvars.ContextVar[Backend] = contextvars.ContextVar('backend', default=REFERENCE)


def current() -> Backend:
  return _current.get()


@contextlib.contextmanager
def use(backend: Backend) -> Iterator[None]:
  """Sets the backend in force for everything traced within, and says what is traced (progress.doing)."""
  token = _current.set(backend)
  graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
  try:
    with progress.doing(functools.partial(_traced_last, graph)) if graph else contextlib.nullcontext():
      yield
  finally:
    _current.reset(token)


def _traced_last(graph: tf.Graph) -> str:
  """Part of the model that a graph's newest operation is of: 'tracing decoder/layer_03'."""
  operations = graph.get_operations()  # takes less than a millisecond
  inside = operations and operations[-1].type != 'Placeholder'  # which is a weight, by the name of its reader
  scopes = operations[-1].name.split('/')[:-1] if inside else []
  is_gradient = scopes[:1] == ['gradient_tape']
  where = '/'.join(scopes[is_gradient:][:2])
  return ' '.join(filter(None, ['tracing', 'gradients of' * is_gradient, where]))


def operation(reference: F) -> F:
  """Function that calls the override of the backend in force, or `reference` itself if there is none."""
  name = reference.__name__

  @functools.wraps(reference)
  def call(*args, **kwargs):
    return current().overrides.get(name, reference)(*args, **kwargs)

  return call
