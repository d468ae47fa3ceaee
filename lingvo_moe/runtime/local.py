"""Local runtime, one CPU or GPU with plain TensorFlow: a tf.function reads and assigns variables with the state."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from lingvo_moe.core import host_memory, progress
from lingvo_moe.core.errors import UserError
from lingvo_moe.ops import backend as backend_lib
from lingvo_moe.ops import cpu, gpu, xla
from lingvo_moe.ops.backend import REFERENCE, Backend
from lingvo_moe.program import Program
from lingvo_moe.runtime.runtime import Batch, Function, Runtime
from lingvo_moe.runtime.slices import Slice, named_slots


def to_numpy(metrics) -> dict:
  """Copies nested metrics from the device to numpy."""
  return tf.nest.map_structure(lambda t: t.numpy() if tf.is_tensor(t) else t, metrics)


def check_fits(program: Program) -> None:
  """Raises UserError if weights and optimizer slots alone are larger than the memory; GPUs are left to try."""
  specs = [*program.weight_specs.values(), *program.slot_specs.values()]
  needed = sum(spec.size * spec.dtype.size for spec in specs)
  memory = host_memory.size()
  if needed > memory and not tf.config.list_physical_devices('GPU'):
    count = sum(spec.size for spec in program.weight_specs.values())
    raise UserError(
      f'a model must fit into memory; saw {count:,} weights, which take {needed / 2**30:,.0f} GiB with their optimizer '
      f'slots, and {memory / 2**30:,.0f} GiB of memory: make it smaller (sizes are those of lingvo-moe models '
      '--model=NAME), or train it on a mesh'
    )


class LocalRuntime(Runtime):
  """Runtime of a Program on one device.

  A step is traced once for batches of all shapes, so buckets of many lengths cost one trace. With `jit` XLA compiles
  the train step, once per shape; without, on a CPU, it compiles only the updates of large weights.

  On a CPU, weights that the model uses in bfloat16 have a copy in it, which the update writes: a step casts none.

  `backend` is 'auto', the backend for the machine (see ops/), or 'reference', plain TensorFlow throughout.
  """

  def __init__(self, program: Program, jit: bool = False, backend: str = 'auto'):
    self.program = program
    training, self._inference = _backends(backend, jit)
    self._has_copies = training.updates_in_place and training.bfloat16
    self._step: tf.Variable | None = None
    self._weights: dict[str, tf.Variable] = {}
    self._copies: dict[str, tf.Variable] = {}
    self._slots: dict[str, tf.Variable] = {}
    self._train = self._traced_step(self._train_step, training, jit)
    self._eval = self._traced_step(self._eval_step, self._inference)

  @property
  def note(self) -> str | None:
    """Sentence for the user if the machine computes in another type than the model says; else None."""
    if self._inference.bfloat16 or tf.bfloat16 not in self.program.used_dtypes.values():
      return None
    return (
      "activation_dtype='bfloat16' is computed in float32: this processor has no units for bfloat16, of "
      f'{", ".join(cpu.BFLOAT16_UNITS)}. --backend=reference computes in bfloat16 all the same'
    )

  @property
  def step(self) -> int:
    return int(self._step)

  def init(self) -> None:
    # Eager: each of the many small operations runs once, and tracing takes 20 times as long.
    self._adopt(self.program.init())

  def load(self, state: Mapping) -> None:
    whole = lambda values: {name: value[...] for name, value in values.items()}
    slots = whole(state.get('slots', {}))
    self._adopt({'step': state['step'][...], 'weights': whole(state['weights']), 'slots': slots})

  def state(self) -> dict:
    return {name: self._read(kind) for name, kind in self._variables().items() if name != 'copies'}

  def slices(self) -> Iterator[Slice]:
    state = self.state()
    for name, value in {'step': state['step'], **state['weights'], **named_slots(state['slots'])}.items():
      yield Slice(name, tuple(value.shape), (0,) * len(value.shape), value)

  def not_finite(self) -> str | None:
    return next((n for n, w in self._weights.items() if not bool(tf.reduce_all(tf.math.is_finite(w)))), None)

  def train_step(self, batch: Batch) -> dict:
    return to_numpy(self._train(batch))

  def eval_step(self, batch: Batch) -> dict:
    return to_numpy(self._eval(batch))

  def function(self, f: Callable[[dict, dict], Any]) -> Function:
    traced = self._traced(lambda batch: f(self._used(), batch), self._inference)
    return lambda batch: to_numpy(traced(batch))

  def _traced_step(self, f: Callable[[dict], Any], backend: Backend, jit: bool = False) -> Function:
    """Traced step of a Program; of batches with fewer rows than it has parts another one, as no part may be empty."""
    in_parts = self._traced(f, backend, jit)
    if backend.sub_batches == 1:
      return in_parts
    whole = self._traced(f, dataclasses.replace(backend, sub_batches=1), jit)
    return lambda batch: (whole if len(next(iter(batch.values()))) < backend.sub_batches else in_parts)(batch)

  def _traced(self, f: Callable[[dict], Any], backend: Backend, jit: bool = False) -> Function:
    """Traced function of a batch that runs f under a backend; f may read and assign the state.

    It is traced once for the names and types of a batch, with all sizes dynamic unless it is compiled.
    """
    traced, seen = None, set()

    def with_backend(batch):
      with backend_lib.use(backend):
        return f(batch)

    def call(batch):
      nonlocal traced
      if traced is None:
        specs = {name: tf.TensorSpec([None] * len(x.shape), x.dtype) for name, x in batch.items()}
        options = {'jit_compile': True} if jit else {'input_signature': [specs]}
        # A partial, as TensorFlow counts tracings by code: our functions, of one code, would look like one retraced
        # often.
        traced = tf.function(functools.partial(with_backend), autograph=False, **options)
      shapes = tuple(x.shape for x in batch.values()) if jit else ()
      first = shapes not in seen
      seen.add(shapes)
      with progress.doing(lambda: 'compiling') if first else contextlib.nullcontext():
        return traced({name: tf.convert_to_tensor(x) for name, x in batch.items()})

    return call

  def _variables(self):
    return {'step': self._step, 'weights': self._weights, 'slots': self._slots, 'copies': self._copies}

  def _read(self, variables):
    return tf.nest.map_structure(lambda v: v.value(), variables)

  def _used(self):
    """Weights in the types in which the model uses them."""
    return self._read({**self._weights, **self._copies})

  def _adopt(self, state):
    if self._step is None:
      variable = lambda value, name: tf.Variable(value, trainable=False, name=name)
      self._step = variable(tf.cast(state['step'], tf.int64), 'step')
      self._weights = {name: variable(value, name) for name, value in state['weights'].items()}
      self._slots = {name: variable(value, f'slots/{name}') for name, value in state['slots'].items()}
      self._copies = {
        name: variable(tf.cast(self._weights[name], dtype), f'copies/{name}')
        for name, dtype in self.program.used_dtypes.items()
        if self._has_copies and dtype != self._weights[name].dtype
      }
    else:
      self._assign(state)

  def _assign(self, state):
    self._step.assign(tf.cast(state['step'], tf.int64))
    for variables, values in ((self._weights, state['weights']), (self._slots, state['slots'])):
      for name, value in values.items():
        if value is not variables[name]:
          variables[name].assign(value)
    for name, copy in self._copies.items():
      copy.assign(tf.cast(self._weights[name], copy.dtype))

  def _train_step(self, batch):
    variables, in_place = self._variables(), backend_lib.current().updates_in_place
    state, metrics = self.program.train_step(variables if in_place else self._read(variables), batch)
    if not in_place:
      self._assign(state)
    return metrics

  def _eval_step(self, batch):
    return self.program.eval_step(self._used(), batch)


def _backends(name: str, jit: bool) -> tuple[Backend, Backend]:
  """Backends of the train step and of inference."""
  if name == 'reference':
    return REFERENCE, REFERENCE
  if tf.config.get_visible_devices('GPU'):
    return xla.BACKEND if jit else gpu.BACKEND, gpu.BACKEND
  inference = cpu.backend(training=False)
  compiled = dataclasses.replace(xla.BACKEND, bfloat16=inference.bfloat16)
  return compiled if jit else cpu.backend(training=True), inference
