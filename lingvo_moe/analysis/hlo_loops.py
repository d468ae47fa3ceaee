"""How often each instruction of a compiled program is executed.

The entry computation is executed once, the body of a while loop as often as the loop runs, and a fused computation where
its fusion stands. XLA knows how often some loops run. Of others it is worked out from what their conditions compare.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from lingvo_moe.analysis.hlo import HAND_ON
from lingvo_moe.analysis.hlo import Computation
from lingvo_moe.analysis.hlo import Instruction
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.analysis.hlo import element_index

_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":"?(\d+)')


def executions(module: Module) -> dict[str, int]:
  """How often each computation is executed, by name; one that is only applied within an instruction is not listed.

  Every branch of a conditional counts as taken, and a loop of which nobody knows how often it runs, once.
  """
  counts: dict[str, int] = {}

  def visit(computation, times):
    counts[computation.name] = counts.get(computation.name, 0) + times
    for instruction in computation.instructions:
      for role, name in instruction.called.items():
        if name in module.computations and (role != 'to_apply' or instruction.opcode == 'call'):
          trips = trip_count(module, computation, instruction) if role in ('body', 'condition') else 1
          visit(module.computations[name], times * (trips or 1))

  visit(module.entry, 1)
  return counts


def executed(module: Module) -> Iterator[tuple[Computation, Instruction, int]]:
  """(its computation, an instruction, how often it is executed) of all, those within fusions too."""
  for name, times in executions(module).items():
    computation = module.computations[name]
    for instruction in computation.instructions:
      yield computation, instruction, times


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
  if instruction.opcode in (*HAND_ON, 'convert', 'copy-start'):
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
