"""Local runtime, one CPU or GPU with plain TensorFlow: the state is in variables that a tf.function reads and assigns."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.ops import backend as backend_lib
from lingvo_moe.ops import cpu
from lingvo_moe.ops import gpu
from lingvo_moe.ops import xla
from lingvo_moe.ops.backend import REFERENCE
from lingvo_moe.ops.backend import Backend
from lingvo_moe.optim.cpu.in_place import InPlaceUpdates
from lingvo_moe.program import Program
from lingvo_moe.runtime.pieces import Piece
from lingvo_moe.runtime.pieces import WholeState


def to_numpy(metrics) -> dict:
  """Copies nested metrics from the device to numpy."""
  return tf.nest.map_structure(lambda t: t.numpy() if tf.is_tensor(t) else t, metrics)


def check_fits(program: Program) -> None:
  """Raises UserError if weights and optimizer slots alone are larger than the memory; GPUs are left to try."""
  specs = [*program.weight_specs.values(), *program.slot_specs.values()]
  needed, there = sum(spec.size * spec.dtype.size for spec in specs), _memory()
  if needed > there and not tf.config.list_physical_devices('GPU'):
    count = sum(spec.size for spec in program.weight_specs.values())
    raise UserError(
      f'a model must fit into memory; saw {count:,} weights, which take {needed / 2**30:,.0f} GiB with their optimizer '
      f'slots, and {there / 2**30:,.0f} GiB of memory: make it smaller (sizes are those of lingvo-moe models '
      '--model=NAME), or train it on a mesh'
    )


def _memory() -> int:
  """Bytes of memory of this machine."""
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


class LocalRuntime:
  """Runtime of a Program on one device.

  A step is traced once for batches of all shapes, so buckets of many lengths cost one trace. With `jit` XLA compiles the
  train step, once per shape; without, on a CPU, it compiles only the updates of large weights.

  Args:
    program: program to run.
    jit: see above.
    backend: 'auto', the backend for the machine (see ops/); or 'reference', plain TensorFlow throughout.
  """

  process_index = 0
  process_count = 1
  feed_index = 0
  feed_count = 1
  row_multiple = 1

  def __init__(self, program: Program, jit: bool = False, backend: str = 'auto'):
    self.program = program
    training, inference = _backends(backend, jit)
    self._updates = InPlaceUpdates(program.optimizer) if training.updates_in_place else None
    self._inference = inference
    self._step: tf.Variable | None = None
    self._weights: dict[str, tf.Variable] = {}
    self._slots: dict[str, tf.Variable] = {}
    self._train = self._traced(self._train_step, training, jit)
    self._eval = self._traced(self._eval_step, inference)

  @property
  def step(self) -> int:
    return int(self._step)

  def init(self) -> None:
    """Sets the state to initial values."""
    # Eager: each of the many small operations runs once, and tracing takes 20 times as long.
    self._adopt(self.program.init())

  def load(self, state: Mapping) -> None:
    """Sets the state to given values, which have a shape and can be sliced; optimizer slots may be missing."""
    whole = lambda values: {name: value[...] for name, value in values.items()}
    self._adopt(
      {'step': state['step'][...], 'weights': whole(state['weights']), 'slots': whole(state.get('slots', {}))}
    )

  def state(self) -> dict:
    """Current state, a nest of tensors."""
    return self._read_state()

  def weights(self) -> dict[str, tf.Variable]:
    """Variables of the weights by name, for reading only."""
    return self._weights

  def pieces(self) -> Iterator[Piece]:
    """Pieces of the state, to be saved."""
    return WholeState(self.state()).pieces()

  def gather(self, value: int) -> list[int]:
    """Values of all processes; here there is one."""
    return [value]

  def agree(self, flag: bool) -> bool:
    """Agreement of all processes on a flag; here there is one process."""
    return flag

  def not_finite(self) -> str | None:
    """Name of a weight with an infinite or NaN element; None if there is none."""
    return next((n for n, w in self._weights.items() if not bool(tf.reduce_all(tf.math.is_finite(w)))), None)

  def train_step(self, batch: Mapping[str, np.ndarray]) -> dict:
    """Makes one update; returns metrics as numpy values."""
    return to_numpy(self._train(batch))

  def train_steps(self, batches: Sequence[Mapping[str, np.ndarray]]) -> list[dict]:
    """Makes an update per batch, one after the other; returns the metrics of each."""
    return [self.train_step(batch) for batch in batches]

  def eval_step(self, batch: Mapping[str, np.ndarray]) -> dict:
    """Metrics of a batch at inference, as numpy values."""
    return to_numpy(self._eval(batch))

  def function(self, f: Callable[[dict, dict], Any]) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """Function of a batch that calls f(weights, batch) with the current weights, and returns numpy values."""
    traced = self._traced(lambda batch: f(self._read(self._weights), batch), self._inference)
    return lambda batch: to_numpy(traced(batch))

  def _traced(
    self, f: Callable[[dict], Any], backend: Backend, jit: bool = False
  ) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """Traced function of a batch that runs f under a backend; f may read and assign the state."""

    def with_backend(batch):
      with backend_lib.use(backend):
        return f(batch)

    return _AnyShape(with_backend, jit)

  def _variables(self):
    return {'step': self._step, 'weights': self._weights, 'slots': self._slots}

  def _read_state(self):
    return self._read(self._variables())

  def _read(self, variables):
    return tf.nest.map_structure(lambda v: v.value(), variables)

  def _adopt(self, state):
    if self._step is None:
      variable = lambda value, name: tf.Variable(value, trainable=False, name=name)
      self._step = variable(tf.cast(state['step'], tf.int64), 'step')
      self._weights = {name: variable(value, name) for name, value in state['weights'].items()}
      self._slots = {name: variable(value, f'slots/{name}') for name, value in state['slots'].items()}
    else:
      self._assign(state)

  def _assign(self, state):
    self._step.assign(tf.cast(state['step'], tf.int64))
    for variables, values in ((self._weights, state['weights']), (self._slots, state['slots'])):
      for name, value in values.items():
        if value is not variables[name]:
          variables[name].assign(value)

  def _train_step(self, batch):
    if self._updates is None:
      state, metrics = self.program.train_step(self._read_state(), batch)
      self._assign(state)
      return metrics
    program, variables = self.program, self._variables()
    step = self._step.value()
    grads, metrics = program.gradients(step, self._read(self._weights), batch, sparse=True)
    with tf.name_scope('update'):
      rate = program.schedule(step)
      norm = self._updates.apply(grads, variables, program.trained_specs, step, rate, program.clip_norm)
      self._step.assign_add(1)
    return {**metrics, 'grad_norm': norm, 'learning_rate': rate}

  def _eval_step(self, batch):
    return self.program.eval_step(self._read(self._weights), batch)


def _backends(name: str, jit: bool) -> tuple[Backend, Backend]:
  """Backends of the train step and of inference."""
  if name == 'reference':
    return REFERENCE, REFERENCE
  if tf.config.get_visible_devices('GPU'):
    return xla.BACKEND if jit else gpu.BACKEND, gpu.BACKEND
  return xla.BACKEND if jit else cpu.backend(training=True), cpu.backend(training=False)


class _AnyShape:
  """Function of a batch, traced once for its names and types, with all sizes dynamic unless it is compiled."""

  def __init__(self, function: Callable[[dict], Any], jit: bool):
    self._function = function
    self._jit = jit
    self._traced = None

  def __call__(self, batch: Mapping[str, np.ndarray | tf.Tensor]):
    if self._traced is None:
      specs = {name: tf.TensorSpec([None] * len(x.shape), x.dtype) for name, x in batch.items()}
      options = {'jit_compile': True} if self._jit else {'input_signature': [specs]}
      # A partial, as TensorFlow counts tracings by code: our functions, of one code, would look like one retraced often.
      self._traced = tf.function(functools.partial(self._function), autograph=False, **options)
    return self._traced({name: tf.convert_to_tensor(x) for name, x in batch.items()})
