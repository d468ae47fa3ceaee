"""Reads the text of a compiled program: instructions with their shapes and FLOPs, collectives with their groups, and
how often each is executed.

XLA prints a module as computations of one instruction a line. The entry computation is executed once; the body of a
while loop as often as its trip count says, where XLA knows it; a fused computation where its fusion stands.
"""

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
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":"?(\d+)')
_WINDOW = re.compile(r'window=\{([^}]*)\}')
_LABELS = re.compile(r'dim_labels=(\w+)_(\w+)->(\w+)')
_CONTRACTING = re.compile(r'lhs_contracting_dims=\{([0-9,]*)\}')
_IOTA = re.compile(r'replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?')
_EXPLICIT = re.compile(r'(?:replica_groups|source_target_pairs)=\{(\{[0-9,{}\s]*\})\}')
_MESH = re.compile(
  r'replica_groups=mesh\[([^\]]*)\]'  # axes
  r'(?:, device_ids=\((?:\[([0-9,]+)\](?:T\(([0-9,]+)\))?|([0-9,]+))\))?'  # a transposed iota, or a list
  r' \{([^}]*)\}'  # the axes that a group spans
)
_AXIS = re.compile(r"('[^']*')(?::\((\d+)\)(\d+))?")
_HAND_ON = ('get-tuple-element', 'bitcast', 'copy', 'copy-done', 'reshape')


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
  def executions(self) -> dict[str, int]:
    """How often each computation is executed, by name; one that is only applied within an instruction is not listed.

    Every branch of a conditional counts as taken, and a loop of which nobody knows how often it runs, once.
    """
    counts: dict[str, int] = {}

    def visit(computation, times):
      counts[computation.name] = counts.get(computation.name, 0) + times
      for instruction in computation.instructions:
        for role, name in instruction.called.items():
          if name in self.computations and (role != 'to_apply' or instruction.opcode == 'call'):
            trips = trip_count(self, computation, instruction) if role in ('body', 'condition') else 1
            visit(self.computations[name], times * (trips or 1))

    visit(self.entry, 1)
    return counts

  def executed(self) -> Iterator[tuple[Computation, Instruction, int]]:
    """(its computation, an instruction, how often it is executed) of all, those within fusions too."""
    for name, times in self.executions.items():
      computation = self.computations[name]
      for instruction in computation.instructions:
        yield computation, instruction, times

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


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
  """How often a while loop of a computation runs at most; None if that cannot be told.

  XLA says so of some loops. Of others it is worked out: they run while a number that each round adds to is below another
  that is a constant, or was counted by a loop before (as in TensorFlow's gradients of loops).
  """
  known = _TRIPS.search(loop.attributes)
  if known:
    return int(known[1])
  condition, body = (module.computations.get(loop.called.get(role, '')) for role in ('condition', 'body'))
  if not condition or not body:
    return None
  counts = []
  for low, high in _comparisons(module, condition, condition.root.name, {}):
    start, step, limit = _initial(module, computation, loop, low), _step(module, body, low), high.constant
    if high.carried is not None and _step(module, body, high) == 0:
      limit = _initial(module, computation, loop, high)
    if start is not None and step and limit is not None:
      counts.append(max(0, -(-(limit - start) // step)))
  return min(counts, default=None)


class _Number(NamedTuple):
  """An integer that may be known: a constant, and the element of a loop's state that it is added to, if any."""

  constant: int
  carried: int | None = None


def _comparisons(module, computation, name, given) -> Iterator[tuple[_Number, _Number]]:
  """Pairs of which the first must be below the second for a condition to hold; others are left out."""
  instruction = computation.by_name.get(name)
  if instruction is None:
    return
  if instruction.opcode == 'and':
    for operand in instruction.operands:
      yield from _comparisons(module, computation, operand, given)
  elif instruction.opcode == 'fusion':
    fused = module.computations[instruction.called['calls']]
    values = {p.name: _number(module, computation, n, given) for p, n in zip(fused.parameters, instruction.operands)}
    yield from _comparisons(module, fused, fused.root.name, values)
  elif instruction.opcode == 'compare':
    low, high = (_number(module, computation, operand, given) for operand in instruction.operands)
    if low and high and low.carried is not None and 'direction=LT' in instruction.attributes:
      yield low, high
    elif low and high and high.carried is not None and 'direction=GT' in instruction.attributes:
      yield high, low


def _number(module, computation, name, given) -> _Number | None:
  """What is known of an integer, `given` being what is known of the parameters of a fused computation."""
  instruction = computation.by_name.get(name)
  if instruction is None:
    return None
  if name in given:
    return given[name]
  of = lambda operand: _number(module, computation, operand, given)
  if instruction.opcode == 'constant':
    text = instruction.attributes.split(')')[0]
    return _Number(int(text)) if re.fullmatch(r'-?\d+', text) else None
  if instruction.opcode == 'get-tuple-element':
    index, source = element_index(instruction), computation.by_name.get(instruction.operands[0])
    if source and source.opcode == 'parameter':
      return _Number(0, index)
    return _final(module, computation, source, index) if source and source.opcode == 'while' else None
  if instruction.opcode in (*_HAND_ON, 'convert', 'copy-start'):
    return of(instruction.operands[0])
  if instruction.opcode == 'add':
    a, b = map(of, instruction.operands)
    if a and b and None in (a.carried, b.carried):
      return _Number(a.constant + b.constant, b.carried if a.carried is None else a.carried)
  if instruction.opcode == 'fusion' and len(instruction.arrays) == 1:
    fused = module.computations[instruction.called['calls']]
    values = {p.name: of(operand) for p, operand in zip(fused.parameters, instruction.operands)}
    return _number(module, fused, fused.root.name, values)
  return None


def _initial(module, computation, loop, number: _Number) -> int | None:
  """A number of a loop's state before it begins."""
  state = computation.by_name.get(loop.operands[0])
  if state is None or state.opcode != 'tuple':
    return None
  found = _number(module, computation, state.operands[number.carried], {})
  return found.constant + number.constant if found and found.carried is None else None


def _step(module, body, number: _Number) -> int | None:
  """What a round adds to a number of the loop's state."""
  if body.root.opcode != 'tuple':
    return None
  found = _number(module, body, body.root.operands[number.carried], {})
  return found.constant if found and found.carried == number.carried else None


def _final(module, computation, loop, index: int) -> _Number | None:
  """An element of a loop's state when it is over."""
  number = _Number(0, index)
  start = _initial(module, computation, loop, number)
  step = _step(module, module.computations[loop.called['body']], number)
  trips = trip_count(module, computation, loop) if start is not None and step is not None else None
  return _Number(start + step * trips) if trips is not None else None


def element_index(element: Instruction) -> int:
  """Which element of a tuple a get-tuple-element takes."""
  return int(re.search(r'index=(\d+)', element.attributes)[1])


class Collective(NamedTuple):
  """A collective operation of the program."""

  instruction: Instruction
  kind: str  # one of COLLECTIVES
  bytes: int  # a device takes or gives, whichever is more
  times: int  # executed
  groups: np.ndarray | None  # [groups, devices of a group], device numbers; None: all devices are one group
  sources: tuple[str, ...]  # op_name of each tensor that goes in, as far as known


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
    axes = _numbers(_CONTRACTING.search(instruction.attributes)[1])
    return 2 * math.prod(instruction.arrays[0].shape) * math.prod(lhs.arrays[0].shape[axis] for axis in axes)
  if instruction.opcode == 'convolution':
    return _convolution_flops(instruction, *(i.arrays[0].shape for i in computation.operands(instruction)))
  return 0


def collectives(module: Module) -> list[Collective]:
  """All of them, each once: one that is begun and ended by two instructions counts at its beginning."""
  found = []
  for computation, instruction, times in module.executed():
    if instruction.collective:
      operands = computation.operands(instruction)
      size = lambda arrays: sum(array.bytes for array in arrays)
      taken = size(array for operand in operands for array in operand.arrays)
      if any(len(operand.arrays) > 1 for operand in operands):
        taken = 0  # a tuple as a whole, which is more than what is taken of it
      sources = [maker(computation, name) for name in instruction.operands]
      found.append(
        Collective(
          instruction=instruction,
          kind=instruction.collective,
          bytes=max(taken, size(instruction.results)),
          times=times,
          groups=groups(instruction.attributes),
          sources=tuple(source.op_name for source in sources if source and source.op_name),
        )
      )
  return found


def groups(attributes: str) -> np.ndarray | None:
  """The device groups [groups, devices of a group] of a collective in any of XLA's notations; None where it has none.

  '{{0,1},{2,3}}', '[2,4]<=[8]', '[4,2]<=[2,4]T(1,0)' and "mesh['a'=2,'b'=4] {'b'}". Of a permutation: its pairs.
  """
  if match := _IOTA.search(attributes):
    shape, dims, perm = (_numbers(match[i]) for i in (1, 2, 3))
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(perm) if perm else ids).reshape(shape)
  if match := _EXPLICIT.search(attributes):
    return np.array([_numbers(group) for group in re.findall(r'\{([0-9,\s]+)\}', match[1])])
  if match := _MESH.search(attributes):
    names, sizes = zip(
      *((name.strip(), int(size)) for name, _, size in (a.partition('=') for a in match[1].split(',')))
    )
    reshape, perm, listed = _numbers(match[2]), _numbers(match[3]), _numbers(match[4])
    ids = np.array(listed) if listed else np.arange(math.prod(sizes))
    ids = ids.reshape(reshape).transpose(perm) if perm else ids
    return _along(ids.reshape(sizes), names, match[5])
  return None


def _along(ids: np.ndarray, names: Sequence[str], within: str) -> np.ndarray:
  """Groups along some axes of a grid: 'a', or a factor of one: 'a':(2)4 are 4 of it, of which each has 2 of the rest above."""
  parts = [(name, int(before or 1), int(size or 0)) for name, before, size in _AXIS.findall(within)]
  sizes, inside, outside = [], [], []
  for name, n in zip(names, ids.shape, strict=True):
    spans = [(before, before * size if size else n) for axis, before, size in parts if axis == name]
    cuts = sorted({1, n, *(cut for span in spans for cut in span)})
    for low, high in zip(cuts[:-1], cuts[1:]):
      is_inside = any(first <= low and high <= last for first, last in spans)
      (inside if is_inside else outside).append(len(sizes))
      sizes.append(high // low)
  size = math.prod(sizes[i] for i in inside)
  return ids.reshape(sizes).transpose(outside + inside).reshape(-1, size)


def _instruction(root, name, result, opcode, rest) -> Instruction:
  end = _closing(rest)
  arrays = tuple(Array(dtype, tuple(_numbers(sizes)), layout) for dtype, sizes, layout in _ARRAY.findall(result))
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


def maker(computation: Computation, name: str) -> Instruction | None:
  """The instruction that computed a value, behind those that only hand it on; None if it is not of this computation."""
  instruction = computation.by_name.get(name)
  while instruction and instruction.opcode in _HAND_ON and instruction.operands[0] in computation.by_name:
    instruction = computation.by_name[instruction.operands[0]]
  return instruction


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


def _numbers(text: str | None) -> list[int]:
  return [int(n) for n in text.split(',') if n.strip()] if text else []
