"""Reads the text of a compiled program: computations of one instruction a line, with their shapes, names and FLOPs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's16': 2, 'u16': 2, 's64': 8, 'u64': 8, 'f64': 8}
_NO_BYTES = ('token', 'opaque')

COLLECTIVES = ('all-to-all', 'all-reduce', 'all-gather', 'reduce-scatter', 'collective-permute')

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{\s*$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$')
_ARRAY = re.compile(r'([a-z]+[a-z0-9]*)\[([0-9,]*)\](?:\{([^}]*)\})?')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_NAME = re.compile(r'%([\w.\-]+)')
_TILE = re.compile(r'T\(([0-9,*]+)\)')
_CALLED = re.compile(r'(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WINDOW = re.compile(r'window=\{([^}]*)\}')
_LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
_CONTRACTING = re.compile(r'lhs_contracting_dims=\{([0-9,]*)\}')
HAND_ON = ('get-tuple-element', 'bitcast', 'copy', 'copy-done', 'reshape')


class Array(NamedTuple):
  """The shape of a result, or of one element of a tuple."""

  dtype: str
  shape: tuple[int, ...]
  layout: str = ''  # '1,0:T(8,128)S(1)': axes from the fastest, tiles, memory space

  @property
  def bytes(self) -> int:
    """Without padding."""
    return math.prod(self.shape) * self._item

  @property
  def stored(self) -> int:
    """Bytes in memory: TPUs pad the fastest axes to whole tiles."""
    order, _, rest = self.layout.partition(':')
    tile = _TILE.search(rest)
    if not tile:
      return self.bytes
    slowest_first = [self.shape[int(axis)] for axis in reversed(order.split(','))] if order else [1]
    sizes = [1 if n == '*' else int(n) for n in tile[1].split(',')]
    padded = [1] * (len(sizes) - len(slowest_first)) + slowest_first
    for i, n in enumerate(reversed(sizes), 1):
      padded[-i] = -(-padded[-i] // n) * n
    return math.prod(padded) * self._item

  @property
  def in_hbm(self) -> bool:
    """Whether it is in the device's main memory (0) and not in a small fast one."""
    return 'S(' not in self.layout

  @property
  def _item(self) -> int:
    return 0 if self.dtype in _NO_BYTES else _BYTES.get(self.dtype, 1 if self.dtype.startswith('f8') else 4)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """A line of a computation.

  Attributes:
    name: unique in the module.
    opcode: 'fusion', 'dot', 'all-reduce-start', ...
    arrays: its result; several for a tuple.
    operands: names of the instructions it takes.
    op_name: what made it, by name scopes: '.../encoder/layer_01/moe/einsum'; '' if XLA does not say.
    attributes: the rest of the line.
    is_root: whether it is its computation's result.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  op_name: str
  attributes: str
  is_root: bool = False

  @property
  def called(self) -> dict[str, str]:
    """Computations by the role they have for it: calls, body, condition, ..."""
    found = dict(_CALLED.findall(self.attributes))
    branches = _BRANCHES.search(self.attributes)
    if branches:
      found.update({f'branch {i}': name.strip().lstrip('%') for i, name in enumerate(branches[1].split(','))})
    return found

  @property
  def estimated_cycles(self) -> int:
    """The TPU compiler's estimate of one execution; 0 where it gives none."""
    estimate = _CYCLES.search(self.attributes)
    return int(estimate[1]) if estimate else 0

  @property
  def collective(self) -> str:
    """Which of COLLECTIVES it is, or begins; '' for none. (The end of one that was begun is none.)"""
    kind = self.opcode.removesuffix('-start')
    return kind if kind in COLLECTIVES else ''

  @property
  def results(self) -> tuple[Array, ...]:
    """The arrays that come out of it: what begins a collective also carries its operands and, perhaps, contexts."""
    n = len(self.operands)
    if self.opcode in ('all-gather-start', 'collective-permute-start') and len(self.arrays) >= 2 * n:
      return self.arrays[n : 2 * n]
    return self.arrays


@dataclasses.dataclass(frozen=True)
class Computation:
  """Instructions in the order in which they are executed, where the module is scheduled."""

  name: str
  instructions: tuple[Instruction, ...]
  is_entry: bool = False

  @functools.cached_property
  def by_name(self) -> Mapping[str, Instruction]:
    return {i.name: i for i in self.instructions}

  @property
  def root(self) -> Instruction:
    return next((i for i in self.instructions if i.is_root), self.instructions[-1])

  @property
  def parameters(self) -> list[Instruction]:
    """By their number."""
    found = [i for i in self.instructions if i.opcode == 'parameter']
    return sorted(found, key=lambda i: int(i.attributes.split(')')[0]))

  def operands(self, instruction: Instruction) -> list[Instruction]:
    """The instructions that one takes, as far as they are of this computation."""
    return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclasses.dataclass(frozen=True)
class Module:
  """A program."""

  computations: Mapping[str, Computation]

  @property
  def entry(self) -> Computation:
    return next(c for c in self.computations.values() if c.is_entry)

  def instructions(self) -> Iterator[Instruction]:
    """All of them, those within fusions too."""
    for computation in self.computations.values():
      yield from computation.instructions

  @functools.cached_property
  def fused(self) -> frozenset[str]:
    """Names of the computations that are parts of one instruction, whose values never leave it."""
    fusions = (i for i in self.instructions() if i.opcode == 'fusion')
    found, todo = set(), [i.called.get('calls') for i in fusions]
    while todo:
      name = todo.pop()
      if name in self.computations and name not in found:
        found.add(name)
        todo += [n for i in self.computations[name].instructions for n in i.called.values()]
    return frozenset(found)


def parse(text: str) -> Module:
  """The module that some text, or a fragment of it, describes."""
  computations: dict[str, Computation] = {}
  name, is_entry, instructions = '', False, []
  for line in text.splitlines():
    if not line.startswith((' ', '\t')):
      header = _COMPUTATION.match(line)
      if header:
        name, is_entry, instructions = header[2], bool(header[1]), []
      elif line.startswith('}') and name:
        computations[name] = Computation(name, tuple(instructions), is_entry)
        name = ''
      continue
    match = _INSTRUCTION.match(line)
    if match:
      instructions.append(_instruction(*match.groups()))
  return Module(computations)


def flops(computation: Computation, instruction: Instruction) -> int:
  """Multiplications and additions of one execution of a dot or a convolution; 0 for all else.

  Of a convolution only those that XLA's own analysis counts: with elements that are neither padding nor dilation. TPUs'
  compiler writes batched matrix products as convolutions that are mostly padding.
  """
  if instruction.opcode == 'dot':
    (lhs, *_) = computation.operands(instruction)
    axes = numbers(_CONTRACTING.search(instruction.attributes)[1])
    return 2 * math.prod(instruction.arrays[0].shape) * math.prod(lhs.arrays[0].shape[axis] for axis in axes)
  if instruction.opcode == 'convolution':
    return _convolution_flops(instruction, *(i.arrays[0].shape for i in computation.operands(instruction)))
  return 0


def element_index(element: Instruction) -> int:
  """Which element of a tuple a get-tuple-element takes."""
  return int(re.search(r'index=(\d+)', element.attributes)[1])


def maker(computation: Computation, name: str) -> Instruction | None:
  """The instruction that computed a value, behind those that only hand it on; None if it is not of this computation."""
  instruction = computation.by_name.get(name)
  while instruction and instruction.opcode in HAND_ON and instruction.operands[0] in computation.by_name:
    instruction = computation.by_name[instruction.operands[0]]
  return instruction


def numbers(text: str | None) -> list[int]:
  """'1,2' -> [1, 2]; none of no text."""
  return [int(n) for n in text.split(',') if n.strip()] if text else []


def _instruction(root, name, result, opcode, rest) -> Instruction:
  end = _closing(rest)
  arrays = tuple(Array(dtype, tuple(numbers(sizes)), layout) for dtype, sizes, layout in _ARRAY.findall(result))
  if opcode in ('parameter', 'constant'):
    operands, attributes = (), rest  # what stands in brackets is a number or a value
  else:
    operands, attributes = tuple(_NAME.findall(rest[:end])), rest[end:]
  op_name = _OP_NAME.search(attributes)
  return Instruction(name, opcode, arrays, operands, op_name[1] if op_name else '', attributes, bool(root))


def _closing(text: str) -> int:
  """Where the bracket that stands open before the text is closed."""
  depth = 1
  for match in re.finditer(r'[()]', text):
    depth += 1 if match[0] == '(' else -1
    if not depth:
      return match.start()
  return len(text)


def _convolution_flops(instruction: Instruction, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> int:
  lhs_labels, rhs_labels, out_labels = _LABELS.search(instruction.attributes).groups()
  out = instruction.arrays[0].shape
  window = _WINDOW.search(instruction.attributes)
  window = dict(part.split('=') for part in window[1].split()) if window else {}
  total = 2 * out[out_labels.index('b')] * out[out_labels.index('f')] * rhs[rhs_labels.index('i')]
  for axis, kernel in enumerate(window['size'].split('x') if window else ()):
    of = lambda key, default, axis=axis: window[key].split('x')[axis] if key in window else default
    total *= _products(
      inputs=lhs[lhs_labels.index(str(axis))],
      outputs=out[out_labels.index(str(axis))],
      kernel=int(kernel),
      stride=int(of('stride', 1)),
      pad=int(of('pad', '0_0').split('_')[0]),
      lhs_dilation=int(of('lhs_dilate', 1)),
      rhs_dilation=int(of('rhs_dilate', 1)),
    )
  return total


def _products(inputs, outputs, kernel, stride, pad, lhs_dilation, rhs_dilation) -> int:
  """Pairs of output and kernel position, o and k, along an axis that meet an element of the input.

  They meet at o * stride + k * rhs_dilation - pad of an input with lhs_dilation - 1 holes between elements. An axis may
  be tens of thousands long, so pairs are counted for each o by arithmetic, as k = k0 modulo some step, within a range.
  """
  base = np.arange(outputs) * stride - pad
  common = math.gcd(lhs_dilation, rhs_dilation)
  step = lhs_dilation // common
  k0 = -(base // common) * pow(rhs_dilation // common, -1, step) % step
  low = np.maximum(0, -(base // rhs_dilation))
  high = np.minimum(kernel - 1, ((inputs - 1) * lhs_dilation - base) // rhs_dilation)
  count = (high - k0) // step - (low - k0 + step - 1) // step + 1
  return int(np.sum(np.where(base % common == 0, np.maximum(count, 0), 0)))
