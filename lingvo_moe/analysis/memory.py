"""Memory of a compiled program by kind: the state between steps, and the values that live during a step.

XLA allocates all temporaries in one region and reports only its size. Their lifetimes are read from the schedule: a
value lives from the instruction that computes it to the last instruction that uses it.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from lingvo_moe.analysis import hlo
from lingvo_moe.analysis.hlo import Computation
from lingvo_moe.analysis.hlo import Instruction
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.analysis.parts import layer_of
from lingvo_moe.analysis.parts import phase_of
from lingvo_moe.runtime.chips import Chip

if TYPE_CHECKING:
  from lingvo_moe.runtime.aot import Compiled

_ARGUMENT = re.compile(r"\[\\?'(weights|slots)\\?'\]")
_BACKWARD = ('backward', 'rematerialisation')
_NAMES_A_VALUE = frozenset(('bitcast', 'tuple', 'get-tuple-element', 'optimization-barrier'))
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Memory:
  """Memory of one device in bytes, by kind.

  Attributes:
    weights: weights, with the padding of their tiles.
    slots: optimizer slots, with padding.
    activations: peak of the values computed forward that are still needed backward.
    temporaries: all other values that live only within a step: gradients, intermediate values, copies, and space lost
      to fragmentation.
    other: the batch, results other than the new state, and machine code.
    total: sum of these.
    hbm: the compiler's limit; None on a CPU.
  """

  weights: int
  slots: int
  activations: int
  temporaries: int
  other: int
  total: int
  hbm: int | None


class Held(NamedTuple):
  """Value that is in memory at the peak; equal ones of a layer are added up."""

  bytes: int
  shape: str
  layer: str
  op: str


class _Value(NamedTuple):
  """Array that an instruction computes: element `index` of its result."""

  instruction: Instruction
  index: int

  @property
  def bytes(self) -> int:
    array = self.instruction.arrays[self.index]
    return array.stored if array.in_hbm else 0


def measure(module: Module, compiled: Compiled, chip: Chip | None) -> Memory:
  """Memory of a compiled program by kind; the totals are the compiler's own."""
  kept = collections.Counter()
  for parameter in module.entry.parameters:
    argument = _ARGUMENT.search(parameter.op_name)
    kept[argument[1] if argument else 'batch'] += sum(array.stored for array in parameter.arrays)
  saved = min(_Lives(module, module.entry).saved(), compiled.temporaries)
  total = compiled.arguments + compiled.outputs - compiled.aliased + compiled.temporaries + compiled.code
  return Memory(
    weights=kept['weights'],
    slots=kept['slots'],
    activations=saved,
    temporaries=compiled.temporaries - saved,
    other=total - kept['weights'] - kept['slots'] - compiled.temporaries,
    total=total,
    hbm=int(chip.usable * 2**30) if chip else None,
  )


def largest(module: Module, count: int = _SHOWN) -> list[Held]:
  """Largest values in memory at the peak, without arguments."""
  values = sorted(_at_peak(module, module.entry), key=lambda value: -value.bytes)
  alike: dict[tuple, int] = {}
  for value in values:
    array, op = value.instruction.arrays[value.index], value.instruction.op_name
    key = f'{array.dtype}[{",".join(map(str, array.shape))}]', layer_of(op), op.rpartition('call_tf/')[2]
    alike[key] = alike.get(key, 0) + value.bytes
  held = [Held(size, *key) for key, size in alike.items()]
  return sorted(held, key=lambda h: -h.bytes)[:count]


def _at_peak(module: Module, computation: Computation) -> list[_Value]:
  """Values in memory at the peak, of a computation and of the computations that it calls at that moment."""
  lives = _Lives(module, computation)
  best, most = None, -1
  inner = {time: _of_called(module, i) for time, i in enumerate(computation.instructions) if _calls(i)}
  for time, size in lives.sizes():
    size += sum(value.bytes for value in inner.get(time, ()))
    if size > most:
      best, most = time, size
  return lives.at(best) + inner.get(best, []) if best is not None else []


def _calls(instruction: Instruction) -> bool:
  return instruction.opcode in ('while', 'call', 'conditional')


def _of_called(module: Module, instruction: Instruction) -> list[_Value]:
  """Values in memory at the peak of a called computation, the one with the highest peak."""
  found = [
    _at_peak(module, module.computations[name]) for name in instruction.called.values() if name in module.computations
  ]
  return max(found, key=lambda values: sum(value.bytes for value in values), default=[])


class _Lives:
  """Lifetimes of the values of a computation, without its arguments and results."""

  def __init__(self, module: Module, computation: Computation):
    self._module, self._computation = module, computation
    self._named: dict[str, list[_Value]] = {}
    self.begins: dict[_Value, int] = {}
    self.ends: dict[_Value, int] = {}
    self._backward_end: dict[_Value, int] = {}
    self._forward: dict[str, bool] = {}
    for time, instruction in enumerate(computation.instructions):
      self._visit(time, instruction)
    for value in self._named.get(computation.root.name, ()):
      self.begins.pop(value, None)

  def sizes(self) -> Iterable[tuple[int, int]]:
    """Yields (time, bytes of the live values) for every instruction."""
    length = len(self._computation.instructions)
    return _sweep([(begin, self.ends[v], v.bytes) for v, begin in self.begins.items()], length)

  def at(self, time: int) -> list[_Value]:
    return [v for v, begin in self.begins.items() if begin <= time <= self.ends[v]]

  def saved(self) -> int:
    """Peak bytes of the values computed forward that are still needed backward."""
    spans = [
      (begin, self._backward_end[v], v.bytes)
      for v, begin in self.begins.items()
      if v in self._backward_end and self._forward[v.instruction.name]
    ]
    return max((size for _, size in _sweep(spans, len(self._computation.instructions))), default=0)

  def _visit(self, time: int, instruction: Instruction) -> None:
    used = [value for name in instruction.operands for value in self._named.get(name, ())]
    op_name = self._op_name(instruction, used)
    is_backward = phase_of(op_name) in _BACKWARD
    self._forward[instruction.name] = bool(op_name) and not is_backward
    for value in used:
      self.ends[value] = time
      if is_backward:
        self._backward_end[value] = time
    self._named[instruction.name] = self._values(instruction)
    if instruction.opcode not in ('parameter', 'constant'):
      for value in self._named[instruction.name]:
        if value.instruction is instruction:
          self.begins[value] = self.ends[value] = time

  def _op_name(self, instruction: Instruction, used: list[_Value]) -> str:
    """Op name of an instruction; for one that XLA adds without a name, that of its first named operand."""
    return instruction.op_name or next((v.instruction.op_name for v in used if v.instruction.op_name), '')

  def _values(self, instruction: Instruction) -> list[_Value]:
    """Arrays of an instruction: its own, or an operand's if it only names it, passes it on or updates it in place."""
    of = lambda i: self._named.get(instruction.operands[i], []) if i < len(instruction.operands) else []
    own = [_Value(instruction, index) for index in range(len(instruction.arrays))]
    if instruction.opcode == 'tuple':
      return [value for i in range(len(instruction.operands)) for value in of(i)]
    if instruction.opcode == 'get-tuple-element':
      index = hlo.element_index(instruction)
      return of(0)[index : index + 1]
    if instruction.opcode in _NAMES_A_VALUE or instruction.opcode == 'dynamic-update-slice':
      return of(0)
    if instruction.opcode == 'copy-start':
      return own[:1]
    if instruction.opcode == 'copy-done':
      return of(0)[:1]
    if instruction.opcode.endswith('-start') and len(instruction.results) < len(own):
      return own[len(instruction.operands) :][: len(instruction.results)]
    if instruction.opcode.endswith('-done'):
      return of(0)[: len(own)]
    if instruction.opcode == 'while' and len(of(0)) == len(own):
      return of(0)  # a loop's state stays in place
    if instruction.opcode == 'fusion':
      return [self._updated(instruction, value) or value for value in own]
    return own

  def _updated(self, instruction: Instruction, value: _Value) -> _Value | None:
    """Operand that a fusion updates in place to make this result; None if there is none."""
    fused = self._module.computations[instruction.called['calls']]
    root = fused.root
    if root.opcode == 'tuple' and value.index < len(root.operands):
      root = fused.by_name.get(root.operands[value.index], root)
    if root.opcode != 'dynamic-update-slice':
      return None
    target = hlo.maker(fused, root.operands[0])
    parameters = fused.parameters
    if target in parameters:
      named = self._named.get(instruction.operands[parameters.index(target)], [])
      return named[0] if len(named) == 1 else None
    return None


def _sweep(spans: Iterable[tuple[int, int, int]], length: int) -> Iterable[tuple[int, int]]:
  """Yields (time, bytes) for each time below `length`, from spans (first time, last time, bytes)."""
  changes = collections.Counter()
  for begin, end, size in spans:
    changes[begin] += size
    changes[end + 1] -= size
  size = 0
  for time in range(length):
    size += changes[time]
    yield time, size
