"""Where the memory of a compiled program goes: what is kept between steps, and what lives while one is made.

XLA lays out all temporaries in one region and tells its size only. What is in it is read from the schedule: a value
lives from the instruction that makes it to the last that uses it.
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
from lingvo_moe.runtime.chips import Chip

if TYPE_CHECKING:
  from lingvo_moe.runtime.aot import Compiled

_ARGUMENT = re.compile(r"\[\\?'(weights|slots)\\?'\]")
_BACKWARD = 'gradient_tape'
_NAMES_A_VALUE = frozenset(('bitcast', 'tuple', 'get-tuple-element', 'optimization-barrier'))
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one device.

  Attributes:
    weights: with the padding of their tiles.
    slots: of the optimiser; likewise.
    activations: the most that values made forward and still needed backward take at once.
    temporaries: the rest of what lives only within a step: gradients, the values between two instructions, copies, and
      what fragments leave unused.
    other: the batch, what is returned beside the new state, and machine code.
    total: of these.
    hbm: what the compiler allows; None on a CPU.
  """

  weights: int
  slots: int
  activations: int
  temporaries: int
  other: int
  total: int
  hbm: int | None


class Held(NamedTuple):
  """A value that is in memory when most is."""

  bytes: int
  shape: str
  layer: str
  op: str


class _Value(NamedTuple):
  """One array that an instruction makes."""

  instruction: Instruction
  index: int

  @property
  def bytes(self) -> int:
    array = self.instruction.arrays[self.index]
    return array.stored if array.in_hbm else 0


def measure(module: Module, compiled: Compiled, chip: Chip | None) -> Memory:
  """The memory of a compiled program; the sums are the compiler's own."""
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
  """The largest values that live when most is in memory, arguments aside."""
  values = sorted(_at_peak(module, module.entry), key=lambda value: -value.bytes)
  alike: dict[tuple, int] = {}
  for value in values:
    array, op = value.instruction.arrays[value.index], value.instruction.op_name
    key = f'{array.dtype}[{",".join(map(str, array.shape))}]', layer_of(op), op.rpartition('call_tf/')[2]
    alike[key] = alike.get(key, 0) + value.bytes
  held = [Held(size, *key) for key, size in alike.items()]
  return sorted(held, key=lambda h: -h.bytes)[:count]


def _at_peak(module: Module, computation: Computation) -> list[_Value]:
  """What lives when most does, in a computation and in those that it calls at that moment."""
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
  """At the peak of the largest of the computations that are called."""
  found = [
    _at_peak(module, module.computations[name]) for name in instruction.called.values() if name in module.computations
  ]
  return max(found, key=lambda values: sum(value.bytes for value in values), default=[])


class _Lives:
  """When each value of a computation is made and last used. Arguments and what is returned are not its own."""

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
    """(time, bytes that live then) of every instruction."""
    length = len(self._computation.instructions)
    return _sweep([(begin, self.ends[v], v.bytes) for v, begin in self.begins.items()], length)

  def at(self, time: int) -> list[_Value]:
    return [v for v, begin in self.begins.items() if begin <= time <= self.ends[v]]

  def saved(self) -> int:
    """The most bytes at once of values made forward that are still needed backward."""
    spans = [
      (begin, self._backward_end[v], v.bytes)
      for v, begin in self.begins.items()
      if v in self._backward_end and self._forward[v.instruction.name]
    ]
    return max((size for _, size in _sweep(spans, len(self._computation.instructions))), default=0)

  def _visit(self, time: int, instruction: Instruction) -> None:
    used = [value for name in instruction.operands for value in self._named.get(name, ())]
    op_name = self._op_name(instruction, used)
    is_backward = _BACKWARD in op_name
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
    """Its own or, of what XLA adds without a name, that of what it is made of."""
    return instruction.op_name or next((v.instruction.op_name for v in used if v.instruction.op_name), '')

  def _values(self, instruction: Instruction) -> list[_Value]:
    """The arrays that a name stands for: its own, or others' that it only names, passes on or updates in place."""
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
      return of(0)  # what a loop carries stays where it is
    if instruction.opcode == 'fusion':
      return [self._updated(instruction, value) or value for value in own]
    return own

  def _updated(self, instruction: Instruction, value: _Value) -> _Value | None:
    """The operand that a fusion's result takes the place of, where it is one that is updated in place."""
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
  """(time, bytes then) at each of some times, of spans (first time, last time, bytes)."""
  changes = collections.Counter()
  for begin, end, size in spans:
    changes[begin] += size
    changes[end + 1] -= size
  size = 0
  for time in range(length):
    size += changes[time]
    yield time, size
