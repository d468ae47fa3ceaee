"""LiteRT graph: a function of arrays whose sizes may change between calls, with one copy of its weights."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lingvo_moe.core import errors, quiet
from lingvo_moe.core.errors import UserError

if TYPE_CHECKING:
  from ai_edge_litert.interpreter import Interpreter

_MESSAGES = re.compile(rb'INFO: ')  # of the runtime
_madvise = ctypes.CDLL(None).madvise
_MAPPINGS = '/proc/self/maps'  # Linux

Shapes = Mapping[str, Sequence[int]]


class TfliteGraph:
  """Graph of a .tflite file, run by XNNPACK. Inputs are written into its own buffers, and results read from them.

  `input` and `output` return views that are valid until the next `resize` or `run`, which refuse to work while one of
  them is held. Resizing takes milliseconds; weights stay packed as they are.
  """

  def __init__(self, path: str, threads: int) -> None:
    self._path, self._interpreter, self._mapped = path, open_file(path, threads), _mapped(path)
    self.release()
    with refused(path):
      signature = self._interpreter.get_signature_runner()
    inputs, outputs = signature.get_input_details(), signature.get_output_details()
    # By name; a size of -1 is one that `resize` gives.
    shapes_of = lambda details: {name: tuple(map(int, entry['shape_signature'])) for name, entry in details.items()}
    self.shapes, self.output_shapes = shapes_of(inputs), shapes_of(outputs)
    self._index = {name: detail['index'] for name, detail in {**inputs, **outputs}.items()}
    self.sizes: Shapes = {}  # the shapes that `resize` gave
    self._room = 0, 0  # rows and numbers of inputs for which there is memory
    self.inputs, self.outputs = list(inputs), list(outputs)  # names

  def resize(self, sizes: Shapes) -> bool:
    """Gives inputs their shapes. If any changes, which it returns, the contents of all inputs are lost."""
    if sizes == self.sizes:
      return False
    rows, numbers = max(shape[0] for shape in sizes.values()), sum(map(math.prod, sizes.values()))
    if rows > self._room[0] or numbers > self._room[1]:
      # The runtime moves all its memory when it needs more. What is not written takes none.
      self._allocate({name: (2 * shape[0], *shape[1:]) for name, shape in sizes.items()})
      self._room = 2 * rows, 2 * numbers
    self._allocate(sizes)
    self.sizes = dict(sizes)
    return True

  def _allocate(self, sizes: Shapes) -> None:
    with refused(self._path), contextlib.nullcontext() if self.sizes else quiet.without_messages(_MESSAGES):
      for name, shape in sizes.items():
        self._interpreter.resize_tensor_input(self._index[name], shape)
      self._interpreter.allocate_tensors()  # the runtime greets once

  def input(self, name: str) -> np.ndarray:
    """View of an input's buffer."""
    return self._interpreter.tensor(self._index[name])()

  output = input

  def write(self, name: str, value: np.ndarray) -> None:
    """Writes an input. One that does not change the outputs, as the time without sinusoids, is not in the file."""
    if name in self.shapes:
      self.input(name)[...] = value

  def run(self) -> None:
    """Computes the outputs of the inputs."""
    with refused(self._path):
      self._interpreter.invoke()

  def release(self) -> None:
    """Takes the file's pages out of memory: weights are packed, and rows of embeddings are read again when needed."""
    for begin, size in self._mapped:
      _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def open_file(path: str, threads: int) -> Interpreter:
  """Interpreter of a .tflite file."""
  try:
    from ai_edge_litert.interpreter import Interpreter
  except ImportError as e:
    raise errors.not_installed('an export for the engine needs ai-edge-litert', e, 'litert') from None
  try:
    return Interpreter(path, num_threads=threads)
  except (ValueError, RuntimeError) as e:
    raise UserError(f'{path} could not be read ({errors.reason(e)}): export the run again') from None


@contextlib.contextmanager
def refused(path: str) -> Iterator[None]:
  """Lets what the runtime refuses be a UserError that names the file."""
  try:
    yield
  except (ValueError, RuntimeError) as e:
    raise UserError(f'{path} does not compute what its export needs ({errors.reason(e)}): export the run again') from e


def _mapped(path: str) -> list[tuple[int, int]]:
  """Addresses and sizes of a file's mappings in this process; none where the system does not list them."""
  if not os.path.exists(_MAPPINGS):
    return []
  with open(_MAPPINGS, encoding='utf-8', errors='replace') as f:
    ranges = re.findall(rf'^(\w+)-(\w+) .* {re.escape(os.path.realpath(path))}$', f.read(), re.MULTILINE)
  return [(int(begin, 16), int(end, 16) - int(begin, 16)) for begin, end in ranges]


def available_threads() -> int:
  """Number of cores that this process may use."""
  return len(os.sched_getaffinity(0))
