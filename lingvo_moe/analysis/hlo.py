"""HLO: the text of a compiled program as computations of instructions, with their names, FLOPs and memory traffic."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
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
FORWARDING = ('get-tuple-element', 'bitcast', 'copy', 'copy-done', 'reshape')  # opcodes that pass a value on unchanged
# Instructions that neither compute nor move data: they name existing values, or start what another instruction ends.
_FREE = frozenset(
  ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional', 'call', 'after-all')
  + ('partition-id', 'replica-id', 'optimization-barrier', 'add-dependency', 'domain', 'async-start')
)


class Array(NamedTuple):
  """Type, shape and layout of a result, or of one element of a tuple."""

  dtype: str
  shape: tuple[int, ...]
  layout: str = ''  # '1,0:T(8,128)S(1)': axes from the fastest, tiles, memory space

  @property
  def bytes(self) -> int:
    """Size in bytes without padding."""
    return math.prod(self.shape) * self._item

  @property
  def stored(self) -> int:
    """Size in bytes in memory: TPUs pad the fastest axes to whole tiles."""
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
    """True if it is in the device's main memory (memory space 0) and not in a small fast one."""
    return 'S(' not in self.layout

  @property
  def _item(self) -> int:
    return 0 if self.dtype in _NO_BYTES else _BYTES.get(self.dtype, 1 if self.dtype.startswith('f8') else 4)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """Instruction, one line of a computation."""

  name: str  # unique in the module
  opcode: str  # 'fusion', 'dot', 'all-reduce-start', ...
  arrays: tuple[Array, ...]  # its result; several for a tuple
  operands: tuple[str, ...]  # names of the instructions whose results it takes
  op_name: str  # the op it comes from, with name scopes: '.../encoder/layer_01/moe/einsum'; '' if XLA gives none
  attributes: str  # the rest of the line
  is_root: bool = False  # whether it is the result of its computation

  @property
  def called(self) -> dict[str, str]:
    """Names of the computations that it calls, by their role: calls, body, condition, ..."""
    called = dict(_CALLED.findall(self.attributes))
    if branches := _BRANCHES.search(self.attributes):
      called |= {f'branch {i}': name.strip().lstrip('%') for i, name in enumerate(branches[1].split(','))}
    return called

  @property
  def estimated_cycles(self) -> int:
    """TPU compiler's estimate of the cycles of one execution; 0 if it gives none."""
    estimate = _CYCLES.search(self.attributes)
    return int(estimate[1]) if estimate else 0

  @property
  def collective(self) -> str:
    """Kind of the collective that it is or starts, one of COLLECTIVES; else, and for the end of one, ''."""
    kind = self.opcode.removesuffix('-start')
    return kind if kind in COLLECTIVES else ''

  @property
  def results(self) -> tuple[Array, ...]:
    """Arrays that it produces. The tuple of a collective's start also has its operands and sometimes contexts."""
    n, has_operands = len(self.operands), ('all-gather-start', 'all-to-all-start', 'collective-permute-start')
    return self.arrays[n : 2 * n] if self.opcode in has_operands and len(self.arrays) >= 2 * n else self.arrays


@dataclasses.dataclass(frozen=True)
class Computation:
  """Computation: a list of instructions, in the order of execution if the module is scheduled."""

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
  def roots(self) -> list[Instruction]:
    """Instructions whose results are those of the computation: the elements of a tuple, or the root."""
    root = self.root
    return [self.by_name.get(name, root) for name in root.operands] if root.opcode == 'tuple' else [root]

  @property
  def parameters(self) -> list[Instruction]:
    """Parameters in the order of their numbers."""
    parameters = (i for i in self.instructions if i.opcode == 'parameter')
    return sorted(parameters, key=lambda i: int(i.attributes.split(')')[0]))

  def operands(self, instruction: Instruction) -> list[Instruction]:
    """Operands of an instruction that belong to this computation."""
    return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclasses.dataclass(frozen=True)
class Module:
  """Program: computations by name."""

  computations: Mapping[str, Computation]

  @property
  def entry(self) -> Computation:
    return next(c for c in self.computations.values() if c.is_entry)

  def instructions(self) -> Iterator[Instruction]:
    """All instructions, including those inside fusions."""
    for computation in self.computations.values():
      yield from computation.instructions

  def inside(self, fusion: Instruction) -> Computation:
    """Computation that a fusion consists of."""
    return self.computations[fusion.called['calls']]

  @functools.cached_property
  def fused(self) -> frozenset[str]:
    """Names of the computations inside fusions, whose values are never written to memory."""
    fused, todo = set(), [i.called.get('calls') for i in self.instructions() if i.opcode == 'fusion']
    while todo:
      name = todo.pop()
      if name in self.computations and name not in fused:
        fused.add(name)
        todo += [n for i in self.computations[name].instructions for n in i.called.values()]
    return frozenset(fused)


def parse(text: str) -> Module:
  """Parses the text of a module, or a fragment of it."""
  computations: dict[str, Computation] = {}
  name, is_entry, instructions = '', False, []
  for line in text.splitlines():
    if line.startswith((' ', '\t')):
      if match := _INSTRUCTION.match(line):
        instructions.append(_instruction(*match.groups()))
    elif header := _COMPUTATION.match(line):
      name, is_entry, instructions = header[2], bool(header[1]), []
    elif line.startswith('}') and name:
      computations[name] = Computation(name, tuple(instructions), is_entry)
      name = ''
  return Module(computations)


def flops(computation: Computation, instruction: Instruction) -> int:
  """FLOPs of one execution of a dot or a convolution; 0 for other instructions.

  A convolution counts only products with elements that are neither padding nor dilation, as in XLA's own analysis. The
  TPU compiler writes batched matrix products as convolutions that are mostly padding.
  """
  if instruction.opcode == 'dot':
    (lhs, *_) = computation.operands(instruction)
    axes = numbers(_CONTRACTING.search(instruction.attributes)[1])
    return 2 * math.prod(instruction.arrays[0].shape) * math.prod(lhs.arrays[0].shape[axis] for axis in axes)
  if instruction.opcode == 'convolution':
    return _convolution_flops(instruction, *(i.arrays[0].shape for i in computation.operands(instruction)))
  return 0


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
  """Bytes that an instruction reads from and writes to a device's main memory, in whole tiles.

  For a tensor that is only sliced, or updated in place, only the slice counts.
  """
  if instruction.opcode in _FREE or instruction.opcode.endswith('-done'):
    return 0
  results = instruction.arrays[:1] if instruction.opcode == 'copy-start' else instruction.results
  operands = computation.operands(instruction)
  if instruction.opcode == 'fusion':
    return _fusion_traffic(module, module.inside(instruction), operands, results)
  if instruction.opcode in ('dynamic-slice', 'gather'):
    return 2 * _in_hbm(results)
  if instruction.opcode == 'dynamic-update-slice' and len(operands) > 1:
    return 2 * _in_hbm(operands[1].arrays)
  return _in_hbm(results) + sum(_in_hbm(operand.arrays) for operand in operands if len(operand.arrays) == 1)


def _fusion_traffic(
  module: Module, fused: Computation, operands: Sequence[Instruction], results: Sequence[Array]
) -> int:
  sizes = [_in_hbm(operand.arrays) for operand in operands]
  moved = sum(min(n, _read(module, fused, parameter.name, n)) for parameter, n in zip(fused.parameters, sizes))
  for array, made in zip(results, fused.roots):
    if array.in_hbm:
      in_place = made.opcode == 'dynamic-update-slice' and made.operands[1] in fused.by_name
      moved += fused.by_name[made.operands[1]].arrays[0].stored if in_place else array.stored
  return moved


def _read(module: Module, fused: Computation, name: str, whole: int) -> int:
  """Bytes that a fused computation, or a fusion in it, reads of a value of `whole` bytes; it may take slices."""
  total = 0
  for user in fused.instructions:
    for place in (i for i, operand in enumerate(user.operands) if operand == name):
      if user.opcode in ('dynamic-slice', 'gather') and place == 0:
        total += user.arrays[0].stored
      elif user.opcode == 'bitcast':
        total += _read(module, fused, user.name, whole)
      elif user.opcode == 'fusion':
        inner = module.inside(user)
        total += _read(module, inner, inner.parameters[place].name, whole)
      elif user.opcode != 'dynamic-update-slice' or place != 0:
        total += whole
  return total


def _in_hbm(arrays: Sequence[Array]) -> int:
  return sum(array.stored for array in arrays if array.in_hbm)


def total_flops(module: Module, computation: Computation, instruction: Instruction) -> int:
  """FLOPs of one execution, with those of the instructions fused into it."""
  if instruction.opcode != 'fusion':
    return flops(computation, instruction)
  fused = module.inside(instruction)
  return sum(total_flops(module, fused, inner) for inner in fused.instructions)


def op_name(module: Module, computation: Computation, instruction: Instruction) -> str:
  """Op name of an instruction, for its part: its own, or for a fusion that of the largest matrix product in it.

  An instruction that XLA adds without a name, such as a copy, takes the name of its operand.
  """
  if instruction.opcode == 'fusion':
    fused = module.inside(instruction)
    products = [(total_flops(module, fused, inner), op_name(module, fused, inner)) for inner in fused.instructions]
    most, name = max(products, default=(0, ''))
    if most:
      return name
    if not instruction.op_name:
      return next((inner.op_name for inner in reversed(fused.instructions) if inner.op_name), '')
  if not instruction.op_name and instruction.operands:
    source = maker(computation, instruction.operands[0])
    return source.op_name if source else ''
  return instruction.op_name


def element_index(element: Instruction) -> int:
  """Index of the tuple element that a get-tuple-element takes."""
  return int(re.search(r'index=(\d+)', element.attributes)[1])


def maker(computation: Computation, name: str) -> Instruction | None:
  """Instruction that computed a value, found through FORWARDING ones; None if it is not in this computation."""
  instruction = computation.by_name.get(name)
  while instruction and instruction.opcode in FORWARDING and instruction.operands[0] in computation.by_name:
    instruction = computation.by_name[instruction.operands[0]]
  return instruction


def numbers(text: str | None) -> list[int]:
  """Parses '1,2' as [1, 2]; None and '' as []."""
  return [int(n) for n in text.split(',') if n.strip()] if text else []


def _instruction(root, name, result, opcode, rest) -> Instruction:
  arrays = tuple(Array(dtype, tuple(numbers(sizes)), layout) for dtype, sizes, layout in _ARRAY.findall(result))
  end = 0 if opcode in ('parameter', 'constant') else _closing(rest)  # whose brackets hold a number or a value
  attributes = rest[end:]
  op_name = _OP_NAME.search(attributes)
  op_name = re.sub(r'\\(.)', r'\1', op_name[1]) if op_name else ''
  return Instruction(name, opcode, arrays, tuple(_NAME.findall(rest[:end])), op_name, attributes, bool(root))


def _closing(text: str) -> int:
  """Index of the bracket that closes the one opened just before the text."""
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
  """Number of pairs of output position o and kernel position k along an axis that read an element of the input.

  A pair reads position o * stride + k * rhs_dilation - pad of the input with lhs_dilation - 1 holes between elements.
  An axis may be tens of thousands long, so for each o the pairs are counted by arithmetic: k = k0 modulo a step, within
  a range.
  """
  base = np.arange(outputs) * stride - pad
  common = math.gcd(lhs_dilation, rhs_dilation)
  step = lhs_dilation // common
  k0 = -(base // common) * pow(rhs_dilation // common, -1, step) % step
  low = np.maximum(0, -(base // rhs_dilation))
  high = np.minimum(kernel - 1, ((inputs - 1) * lhs_dilation - base) // rhs_dilation)
  count = (high - k0) // step - (low - k0 + step - 1) // step + 1
  return int(np.sum(np.where(base % common == 0, np.maximum(count, 0), 0)))
