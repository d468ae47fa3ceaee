"""Memory of a compiled program by kind: the state between steps, and the values that live during a step.

XLA allocates all temporaries in one region and reports only its size. Their lifetimes are read from the schedule: a
value lives from the instruction that computes it to the last instruction that uses it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from lingvo_moe.addons.analysis.hlo import Computation, Instruction, Module
from lingvo_moe.addons.analysis.parts import layer_of, phase_of
from lingvo_moe.runtime.chips import Chip, Gpu

if TYPE_CHECKING:
  from lingvo_moe.runtime.aot import Compiled

_ARGUMENT = re.compile(r"\[\\?'(weights|slots)\\?'\]")


@dataclasses.dataclass(frozen=True)
class Memory:
  """Memory of one device in bytes, by kind."""

  weights: int  # with the padding of their tiles
  slots: int  # optimizer slots, with padding
  activations: int  # peak of the values computed forward that are still needed backward
  # All other values that live only within a step: gradients, intermediate values, copies, space lost to fragmentation.
  temporaries: int
  other: int  # the batch, results other than the new state, and machine code
  total: int
  hbm: int | None  # the limit of the compiler, or of JAX on a GPU; None on a CPU


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


def measure(module: Module, compiled: Compiled, chip: Chip | Gpu | None) -> Memory:
  """Memory of a compiled program by kind; the totals are the compiler's own."""
  state = collections.Counter()
  for parameter in module.entry.parameters:
    argument = _ARGUMENT.search(parameter.op_name)
    state[argument[1] if argument else 'batch'] += sum(array.stored for array in parameter.arrays)
  saved = min(_Lives(module.entry).saved(), compiled.temporaries)
  total = compiled.arguments + compiled.outputs - compiled.aliased + compiled.temporaries + compiled.code
  return Memory(
    weights=state['weights'],
    slots=state['slots'],
    activations=saved,
    temporaries=compiled.temporaries - saved,
    other=total - state['weights'] - state['slots'] - compiled.temporaries,
    total=total,
    hbm=int(chip.usable * 2**30) if chip else None,
  )


def largest(module: Module, count: int = 8) -> list[Held]:
  """Largest values in memory at the peak, without arguments."""
  alike: dict[tuple, int] = {}
  for value in sorted(_at_peak(module.entry), key=lambda value: -value.bytes):
    array, op = value.instruction.arrays[value.index], value.instruction.op_name
    key = f'{array.dtype}[{",".join(map(str, array.shape))}]', layer_of(op), op.rpartition('call_tf/')[2]
    alike[key] = alike.get(key, 0) + value.bytes
  return sorted((Held(size, *key) for key, size in alike.items()), key=lambda held: -held.bytes)[:count]


def _at_peak(computation: Computation) -> list[_Value]:
  """Values in memory at the peak, of a computation and of the computation that it calls at that moment."""
  lives, total = _Lives(computation), lambda values: sum(value.bytes for value in values)
  inner: dict[int, list[_Value]] = {}
  for time, instruction in enumerate(computation.instructions):
    if instruction.opcode in ('while', 'call', 'conditional'):  # of several computations that with the highest peak
      inner[time] = max(map(_at_peak, instruction.called.values()), key=total, default=[])
  sizes = [size + total(inner.get(time, ())) for time, size in enumerate(lives.sizes(lives.spans))]
  time = sizes.index(max(sizes))
  return [v for v, (begin, end) in lives.spans.items() if begin <= time <= end] + inner.get(time, [])


class _Lives:
  """Lifetimes of the values of a computation, without its arguments and results."""

  def __init__(self, computation: Computation):
    self._length = len(computation.instructions)
    self.spans: dict[_Value, tuple[int, int]] = {}  # first and last time
    self._backward_end: dict[_Value, int] = {}
    self._named: dict[Instruction, list[_Value]] = {}
    self._forward: set[Instruction] = set()
    for time, instruction in enumerate(computation.instructions):
      used = [value for operand in instruction.operands for value in self._named[operand]]
      # XLA adds instructions without a name: theirs is that of the first named operand.
      op_name = instruction.op_name or next((v.instruction.op_name for v in used if v.instruction.op_name), '')
      is_backward = phase_of(op_name) in ('backward', 'rematerialisation')
      if op_name and not is_backward:
        self._forward.add(instruction)
      for value in used:
        if value in self.spans:
          self.spans[value] = self.spans[value][0], time
        if is_backward:
          self._backward_end[value] = time
      self._named[instruction] = self._values(instruction)
      if instruction.opcode not in ('parameter', 'constant'):
        self.spans |= {v: (time, time) for v in self._named[instruction] if v.instruction is instruction}
    for value in self._named[computation.root]:
      self.spans.pop(value, None)

  def sizes(self, spans: Mapping[_Value, tuple[int, int]]) -> list[int]:
    """Bytes of the live values at each time, from the first and last time of each value."""
    changes = collections.Counter()
    for value, (begin, end) in spans.items():
      changes[begin] += value.bytes
      changes[end + 1] -= value.bytes
    return list(itertools.accumulate(changes[time] for time in range(self._length)))

  def saved(self) -> int:
    """Peak bytes of the values computed forward that are still needed backward."""
    kept = {v: end for v, end in self._backward_end.items() if v in self.spans and v.instruction in self._forward}
    return max(self.sizes({v: (self.spans[v][0], end) for v, end in kept.items()}))

  def _values(self, instruction: Instruction) -> list[_Value]:
    """Arrays of an instruction: its own, or an operand's if it only names it, passes it on or updates it in place."""
    opcode, operands = instruction.opcode, [self._named[operand] for operand in instruction.operands]
    first = operands[0] if operands else []
    instruction_values = [_Value(instruction, index) for index in range(len(instruction.arrays))]
    if opcode == 'tuple':
      return [value for values in operands for value in values]
    if opcode == 'get-tuple-element':
      return first[instruction.index :][:1]
    if opcode in ('bitcast', 'optimization-barrier', 'dynamic-update-slice'):
      return first
    if opcode == 'copy-start':
      return instruction_values[:1]
    if opcode.endswith('-start') and len(instruction.results) < len(instruction_values):
      return instruction_values[len(operands) :][: len(instruction.results)]
    if opcode.endswith('-done'):
      return first[: 1 if opcode == 'copy-done' else len(instruction_values)]
    if opcode == 'while' and len(first) == len(instruction_values):
      return first  # a loop's state stays in place
    if opcode == 'fusion':
      return [self._updated(instruction, value) or value for value in instruction_values]
    return instruction_values

  def _updated(self, fusion: Instruction, value: _Value) -> _Value | None:
    """Operand that a fusion updates in place to make this result; None if there is none."""
    fused = fusion.inside
    roots, parameters = fused.roots, fused.parameters
    made = roots[value.index] if value.index < len(roots) else fused.root
    if made.opcode != 'dynamic-update-slice' or (target := made.operands[0].maker) not in parameters:
      return None
    named = self._named[fusion.operands[parameters.index(target)]]
    return named[0] if len(named) == 1 else None
