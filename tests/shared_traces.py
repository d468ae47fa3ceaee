"""Traces shared by the local runtimes of a module of tests: a job of a few steps spends most of its time on tracing.

Runtimes keep variables of their own. A trace of one runtime is called with the variables of another whose program,
backend and traced function are equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from lingvo_moe.ops import backend as backend_lib
from lingvo_moe.runtime.local import LocalRuntime


@contextlib.contextmanager
def shared() -> Iterator[None]:
  """Shares traces while it is open; programs that XLA compiles, for static shapes, are not shared."""
  traces: dict[Any, _Trace] = {}
  usual = LocalRuntime._traced

  def traced(self, f, backend, jit=False):
    if jit:
      return usual(self, f, backend, jit)

    def call(batch):
      nonlocal trace
      batch = {name: tf.convert_to_tensor(x) for name, x in batch.items()}
      if trace is None:
        specs = {name: tf.TensorSpec([None] * len(x.shape), x.dtype) for name, x in batch.items()}
        key = (_key(f), _key(backend), repr(sorted(specs.items())))
        if key not in traces:
          traces[key] = _Trace(self, f, backend, specs)
        trace = traces[key]
      return trace(self, batch)

    trace: _Trace | None = None
    return call

  with mock.patch.object(LocalRuntime, '_traced', traced):
    yield


@contextlib.contextmanager
def untraced() -> Iterator[None]:
  """Calls programs without tracing while it is open, for those that run once."""
  tf.config.run_functions_eagerly(True)
  try:
    yield
  finally:
    tf.config.run_functions_eagerly(False)


class _Trace:
  """Traced function of a batch that reads and assigns the variables of whatever runtime it is called with."""

  def __init__(self, runtime: LocalRuntime, f: Callable[[dict], Any], backend: backend_lib.Backend, specs: dict):
    def with_backend(batch):
      with backend_lib.use(backend):
        return f(batch)

    # What is traced refers to the variables and objects of this runtime, which must stay.
    self._kept = (runtime, f)
    traced = tf.function(functools.partial(with_backend), autograph=False, input_signature=[specs])
    self._function = traced.get_concrete_function()
    paths = {id(variable.handle): path for path, variable in _variables(runtime).items()}
    self._captures = [(paths.get(id(x)), x) for x in self._function.captured_inputs]

  def __call__(self, runtime: LocalRuntime, batch: dict[str, tf.Tensor]) -> Any:
    variables = _variables(runtime)
    self._function.set_external_captures([variables[path].handle if path else x for path, x in self._captures])
    return self._function(batch)


def _variables(runtime: LocalRuntime) -> dict[tuple[str, str], tf.Variable]:
  by_kind = {
    'weights': runtime._weights,
    'copies': runtime._copies,
    'slots': runtime._slots,
    'step': {'': runtime._step},
  }
  return {(kind, name): v for kind, of_kind in by_kind.items() for name, v in of_kind.items()}


def _key(x: Any, read: tuple[str, ...] = ()) -> Any:
  """What decides how x is traced: of functions, code and closure; of other objects, the attributes that are read."""
  if isinstance(x, LocalRuntime):
    return type(x), repr(x.program)
  if isinstance(x, types.FunctionType):
    cells = [cell.cell_contents for cell in x.__closure__ or ()]
    return x.__code__, repr(x.__defaults__), *(_key(cell, x.__code__.co_names) for cell in cells)
  if isinstance(x, types.MethodType):
    return _key(x.__func__), _key(x.__self__, x.__func__.__code__.co_names)
  if dataclasses.is_dataclass(x) or isinstance(x, (str, int, float, bool, tuple, types.NoneType)):
    return re.sub(r"\b(data_dir|pairs|\w*vocab)='[^']*'", '', repr(x))  # names of text, which no program reads
  attributes = vars(x) if hasattr(x, '__dict__') else {}
  if any(name in dir(type(x)) for name in read) or not any(name in attributes for name in read):
    return id(x)  # kept in the trace's closure, so that no other object gets the same
  return type(x), *((name, _key(attributes[name])) for name in read if name in attributes)
