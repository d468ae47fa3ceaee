"""Backend: how a machine computes the operations of reference.py. One is in force at a time, set while a runtime traces.

Layers, tasks and searches call `ops.linear(...)`; the backend in force decides which function that is. No backend in
force means the reference. Runtimes set one as they set the mesh (`xla_sharding.use`).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

F = TypeVar('F', bound=Callable)


@dataclasses.dataclass(frozen=True)
class Backend:
  """A set of overrides of the reference, and what the machine can do.

  Attributes:
    name: for messages.
    overrides: functions by the name of the operation they replace, with the same arguments and results to rounding.
    dispatcher: what `dispatch = 'auto'` of a MoE layer means: a name of layers/dispatch.py.
    open_shapes: whether sizes may be known only when the program runs. XLA needs them while it compiles.
    sub_batches: into how many sub-batches rows are divided that a traced program computes side by side.
    parallel_calls: how many calls of map_rows run at once.
  """

  name: str
  overrides: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
  dispatcher: str = 'einsum'
  open_shapes: bool = True
  sub_batches: int = 1
  parallel_calls: int = 1


REFERENCE = Backend('reference')

_current: contextvars.ContextVar[Backend] = contextvars.ContextVar('backend', default=REFERENCE)


def current() -> Backend:
  """The backend in force."""
  return _current.get()


@contextlib.contextmanager
def use(backend: Backend) -> Iterator[None]:
  """Puts a backend in force for what is traced within."""
  token = _current.set(backend)
  try:
    yield
  finally:
    _current.reset(token)


def operation(reference: F) -> F:
  """A function that calls the override of the backend in force, or else `reference` itself."""
  name = reference.__name__

  @functools.wraps(reference)
  def call(*args, **kwargs):
    return current().overrides.get(name, reference)(*args, **kwargs)

  return call
