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
_BYTES |= {'token': 0, 'opaque': 0}

COLLECTIVES = ('all-to-all', 'all-reduce', 'all-gather', 'reduce-scatter', 'collective-permute')

_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{\s*$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$')
_ARRAY = re.compile(r'([a-z]+[a-z0-9]*)\[([0-9,]*)\](?:\{([^}]*)\})?')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_NAME = re.compile(r'%([\w.\-]+)')
_CLOSING = re.compile(r'\)(?=, [\w-]+=)|\)?$')  # the end of the operands, before the attributes
_TILE = re.compile(r'T\(([0-9,*]+)\)')
_CALLED = re.compile(r'(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_INDEX = re.compile(r'index=(\d+)')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WINDOW = re.compile(r'window=\{([^}]*)\}')
_LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
_CONTRACTING = re.compile(r'lhs_contracting_dims=\{([0-9,]*)\}|"lhs_contracting_dimensions":\[([0-9,"]*)\]')
_PRODUCT_CALL = re.compile(r'custom_call_target="__(?:cublas|triton_gemm)')  # of a library, on GPUs
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
    return _BYTES.get(self.dtype, 1 if self.dtype.startswith('f8') else 4)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """Instruction, one line of a computation."""

  name: str  # unique in the module
  opcode: str  # 'fusion', 'dot', 'all-reduce-start', ...
  arrays: tuple[Array, ...]  # its result; several for a tuple
  operands: tuple[Instruction, ...] = dataclasses.field(repr=False)
  called: Mapping[str, Computation] = dataclasses.field(repr=False)  # by their role: calls, body, condition, ...
  op_name: str  # the op it comes from, with name scopes: '.../encoder/layer_01/moe/einsum'; '' if XLA gives none
  attributes: str  # the rest of the line
  is_root: bool = False  # whether it is the result of its computation

  @property
  def inside(self) -> Computation:
    """Computation that a fusion consists of."""
    return self.called['calls']

  @property
  def index(self) -> int:
    """Index of the tuple element that a get-tuple-element takes."""
    return int(_INDEX.search(self.attributes)[1])

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

  @property
  def maker(self) -> Instruction:
    """Instruction that computed the value: itself, or the one found through FORWARDING ones."""
    return self.operands[0].maker if self.opcode in FORWARDING and self.operands else self


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
  """Computation: instructions by name, in the order of execution if the module is scheduled."""

  name: str
  by_name: dict[str, Instruction]
  is_entry: bool = False

  @functools.cached_property
  def instructions(self) -> tuple[Instruction, ...]:
    return tuple(self.by_name.values())

  @property
  def root(self) -> Instruction:
    return next((i for i in self.instructions if i.is_root), self.instructions[-1])

  @property
  def roots(self) -> Sequence[Instruction]:
    """Instructions whose results are those of the computation: the elements of a tuple, or the root."""
    return self.root.operands if self.root.opcode == 'tuple' else [self.root]

  @property
  def parameters(self) -> list[Instruction]:
    """Parameters in the order of their numbers."""
    parameters = (i for i in self.instructions if i.opcode == 'parameter')
    return sorted(parameters, key=lambda i: int(i.attributes.split(')')[0]))


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


def parse(text: str) -> Module:
  """Parses the text of a module, or a fragment of it. XLA writes what is used above what uses it."""
  computations: dict[str, Computation] = {}
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      computation = computations[header[2]] = Computation(header[2], {}, bool(header[1]))
    elif computations and (match := _INSTRUCTION.match(line)):
      instruction = _instruction(*match.groups(), computation.by_name, computations)
      computation.by_name[instruction.name] = instruction
  return Module(computations)


def _instruction(root, name, result, opcode, rest, by_name, computations) -> Instruction:
  arrays = tuple(Array(dtype, tuple(numbers(sizes)), layout) for dtype, sizes, layout in _ARRAY.findall(result))
  # Of a parameter and a constant the brackets hold a number or a value.
  end = 0 if opcode in ('parameter', 'constant') else _CLOSING.search(rest).start()
  operands, attributes = _NAME.findall(rest[:end]), rest[end:]
  called = dict(_CALLED.findall(attributes))
  if branches := _BRANCHES.search(attributes):
    called |= {f'branch {i}': branch.strip().lstrip('%') for i, branch in enumerate(branches[1].split(','))}
  op_name = _OP_NAME.search(attributes)
  return Instruction(
    name,
    opcode,
    arrays,
    operands=tuple(by_name[operand] for operand in operands if operand in by_name),
    called={role: computations[callee] for role, callee in called.items() if callee in computations},
    op_name=re.sub(r'\\(.)', r'\1', op_name[1]) if op_name else '',
    attributes=attributes,
    is_root=bool(root),
  )


def numbers(text: str | None) -> list[int]:
  """Parses '1,2' as [1, 2]; None and '' as []."""
  return [int(n) for n in text.split(',') if n.strip()] if text else []


def op_name(instruction: Instruction) -> str:
  """Op name of an instruction, for its part: its own, or for a fusion that of the largest matrix product in it.

  An instruction that XLA adds without a name, such as a copy, takes the name of its operand.
  """
  if instruction.opcode == 'fusion':
    fused = instruction.inside.instructions
    most, name = max(((flops(inner), op_name(inner)) for inner in fused), default=(0, ''))
    if most:
      return name
    return instruction.op_name or next((inner.op_name for inner in reversed(fused) if inner.op_name), '')
  return instruction.op_name or (instruction.operands[0].maker.op_name if instruction.operands else '')


def traffic(instruction: Instruction) -> int:
  """Bytes that an instruction reads from and writes to a device's main memory, in whole tiles.

  For a tensor that is only sliced, or updated in place, only the slice counts.
  """
  opcode, operands = instruction.opcode, instruction.operands
  if opcode in _FREE or opcode.endswith('-done'):
    return 0
  # The other results of a library's product are its workspace.
  first = opcode == 'copy-start' or _is_product_call(instruction)
  results = instruction.arrays[:1] if first else instruction.results
  if opcode == 'fusion':
    return _fusion_traffic(instruction)
  if opcode in ('dynamic-slice', 'gather'):
    return 2 * _in_hbm(results)
  if opcode == 'dynamic-update-slice' and len(operands) > 1:
    return 2 * _in_hbm(operands[1].arrays)
  return _in_hbm(results) + sum(_in_hbm(operand.arrays) for operand in operands if len(operand.arrays) == 1)


def _fusion_traffic(fusion: Instruction) -> int:
  moved = 0
  for parameter, operand in zip(fusion.inside.parameters, fusion.operands):
    whole = _in_hbm(operand.arrays)
    moved += min(whole, _read(fusion.inside, parameter, whole))
  for array, made in zip(fusion.arrays, fusion.inside.roots):
    if array.in_hbm:
      moved += (made.operands[1].arrays[0] if made.opcode == 'dynamic-update-slice' else array).stored
  return moved


def _read(fused: Computation, value: Instruction, whole: int) -> int:
  """Bytes that a fused computation, or a fusion in it, reads of a value of `whole` bytes; it may take slices."""
  total = 0
  for user in fused.instructions:
    for place in (i for i, operand in enumerate(user.operands) if operand is value):
      if user.opcode in ('dynamic-slice', 'gather') and place == 0:
        total += user.arrays[0].stored
      elif user.opcode == 'bitcast':
        total += _read(fused, user, whole)
      elif user.opcode == 'fusion':
        total += _read(user.inside, user.inside.parameters[place], whole)
      elif user.opcode != 'dynamic-update-slice' or place != 0:
        total += whole
  return total


def _in_hbm(arrays: Sequence[Array]) -> int:
  return sum(array.stored for array in arrays if array.in_hbm)


def flops(instruction: Instruction) -> int:
  """FLOPs of one execution of the products that an instruction is, or that are fused into it; see `products`."""
  return sum(made for made, _ in products(instruction))


def products(instruction: Instruction) -> Iterator[tuple[int, str]]:
  """Yields (FLOPs, type of the operands) of the dots, convolutions and library products of an instruction.

  A convolution counts only products with elements that are neither padding nor dilation, as in XLA's own analysis. The
  TPU compiler writes batched matrix products as convolutions that are mostly padding.
  """
  if instruction.opcode == 'fusion':
    for inner in instruction.inside.instructions:
      yield from products(inner)
  elif instruction.opcode == 'dot' or _is_product_call(instruction):
    of_dot, of_call = _CONTRACTING.search(instruction.attributes).groups()
    lhs = instruction.operands[0].arrays[0]
    contracted = math.prod(lhs.shape[axis] for axis in numbers(of_dot or of_call.replace('"', '')))
    yield 2 * math.prod(instruction.arrays[0].shape) * contracted, lhs.dtype
  elif instruction.opcode == 'convolution':
    yield _convolution_flops(instruction), instruction.operands[0].arrays[0].dtype


def _is_product_call(instruction: Instruction) -> bool:
  return instruction.opcode == 'custom-call' and bool(_PRODUCT_CALL.search(instruction.attributes))


def _convolution_flops(instruction: Instruction) -> int:
  lhs_labels, rhs_labels, out_labels = _LABELS.search(instruction.attributes).groups()
  lhs, rhs, out = (i.arrays[0].shape for i in (*instruction.operands, instruction))
  window = _WINDOW.search(instruction.attributes)
  window = dict(part.split('=') for part in window[1].split()) if window else {}
  total = 2 * out[out_labels.index('b')] * out[out_labels.index('f')] * rhs[rhs_labels.index('i')]
  for axis, kernel in enumerate(window['size'].split('x') if window else ()):
    window_value = lambda key, default, axis=axis: window[key].split('x')[axis] if key in window else default
    total *= _products(
      inputs=lhs[lhs_labels.index(str(axis))],
      outputs=out[out_labels.index(str(axis))],
      kernel=int(kernel),
      stride=int(window_value('stride', 1)),
      pad=int(window_value('pad', '0_0').split('_')[0]),
      lhs_dilation=int(window_value('lhs_dilate', 1)),
      rhs_dilation=int(window_value('rhs_dilate', 1)),
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
