"""Execution counts of the instructions of a compiled program.

The entry computation is executed once, the body of a while loop trip-count times, and a fused computation as often as
its fusion. XLA states the trip count of some loops. For others it is derived from the loop's condition. The number of
rounds of a MoE layer (ops/rounds.py) is known only when the program runs: it is an argument here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from lingvo_moe.analysis.hlo import FORWARDING, Computation, Instruction, Module, element_index

_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":"?(\d+)')
_ROUNDS = re.compile(r'/rounds(_\d+)?/')  # name scope of the operations of a round


def executions(module: Module, rounds: int = 1) -> dict[str, int]:
  """Number of executions of each computation by name, but for those applied inside an instruction (a reduction's).

  Every branch of a conditional counts as taken, a loop with an unknown trip count as run once, a loop of rounds
  `rounds` times.
  """
  counts: dict[str, int] = {}

  def visit(computation, times):
    counts[computation.name] = counts.get(computation.name, 0) + times
    for instruction in computation.instructions:
      for role, name in instruction.called.items():
        if name in module.computations and (role != 'to_apply' or instruction.opcode == 'call'):
          in_loop = role in ('body', 'condition')
          trips = times_run(module, computation, instruction, rounds) if in_loop else 1
          visit(module.computations[name], times * (1 if trips is None else trips))

  visit(module.entry, 1)
  return counts


def times_run(module: Module, computation: Computation, loop: Instruction, rounds: int) -> int | None:
  """Trip count of a while loop as in `trip_count`, or `rounds` for a loop of rounds; None if unknown."""
  trips = trip_count(module, computation, loop)
  if trips is None and (body := module.computations.get(loop.called.get('body', ''))):
    # A loop of rounds has operations of that scope in its body.
    return rounds if any(_ROUNDS.search(instruction.op_name) for instruction in body.instructions) else None
  return trips


def executed(module: Module, rounds: int = 1) -> Iterator[tuple[Computation, Instruction, int]]:
  """Yields (computation, instruction, executions) of all instructions, including those inside fusions."""
  for name, times in executions(module, rounds).items():
    computation = module.computations[name]
    for instruction in computation.instructions:
      yield computation, instruction, times


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
  """Trip count of a while loop, or an upper bound of it; None if unknown.

  XLA states it for some loops. It is derived for loops that run while a counter, to which each iteration adds a
  constant, is below a limit that is constant or the counter of an earlier loop (as in TensorFlow's gradients of loops).
  """
  if known := _TRIPS.search(loop.attributes):
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
  """Integer value: a constant, plus the element of the loop's state with index `carried` if that is not None."""

  constant: int
  carried: int | None = None


def _comparisons(module, computation, name, given) -> Iterator[tuple[_Number, _Number]]:
  """Yields pairs (low, high) of a condition that is true only if low < high for each; ignores other comparisons."""
  instruction = computation.by_name.get(name)
  if instruction is None:
    return
  if instruction.opcode == 'and':
    for operand in instruction.operands:
      yield from _comparisons(module, computation, operand, given)
  elif instruction.opcode == 'fusion':
    fused = module.inside(instruction)
    yield from _comparisons(module, fused, fused.root.name, _arguments(module, computation, instruction, given))
  elif instruction.opcode == 'compare':
    low, high = (_number(module, computation, operand, given) for operand in instruction.operands)
    if 'direction=GT' in instruction.attributes:
      low, high = high, low
    if low and high and low.carried is not None and re.search('direction=[LG]T', instruction.attributes):
      yield low, high


def _arguments(module, computation, fusion, given) -> dict[str, _Number | None]:
  """Values of the parameters of a fused computation, by name."""
  names = (parameter.name for parameter in module.inside(fusion).parameters)
  return {name: _number(module, computation, operand, given) for name, operand in zip(names, fusion.operands)}


def _number(module, computation, name, given) -> _Number | None:
  """Value of a named integer, None if unknown; `given` has the values of a fused computation's parameters."""
  instruction = computation.by_name.get(name)
  if instruction is None or name in given:
    return given.get(name) if instruction else None
  of = lambda operand: _number(module, computation, operand, given)
  if instruction.opcode == 'constant':
    text = instruction.attributes.split(')')[0]
    return _Number(int(text)) if re.fullmatch(r'-?\d+', text) else None
  if instruction.opcode == 'get-tuple-element':
    index, source = element_index(instruction), computation.by_name.get(instruction.operands[0])
    if source and source.opcode == 'parameter':
      return _Number(0, index)
    return _final(module, computation, source, index) if source and source.opcode == 'while' else None
  if instruction.opcode in (*FORWARDING, 'convert', 'copy-start'):
    return of(instruction.operands[0])
  if instruction.opcode == 'add':
    a, b = map(of, instruction.operands)
    if a and b and None in (a.carried, b.carried):
      return _Number(a.constant + b.constant, b.carried if a.carried is None else a.carried)
  if instruction.opcode == 'fusion' and len(instruction.arrays) == 1:
    fused = module.inside(instruction)
    return _number(module, fused, fused.root.name, _arguments(module, computation, instruction, given))
  return None


def _initial(module, computation, loop, number: _Number) -> int | None:
  """Value of a number in a loop's state before the loop; None if unknown."""
  state = computation.by_name.get(loop.operands[0])
  if state is None or state.opcode != 'tuple':
    return None
  value = _number(module, computation, state.operands[number.carried], {})
  return value.constant + number.constant if value and value.carried is None else None


def _step(module, body, number: _Number) -> int | None:
  """Constant that an iteration adds to a number in the loop's state; None if unknown."""
  if body.root.opcode != 'tuple':
    return None
  value = _number(module, body, body.root.operands[number.carried], {})
  return value.constant if value and value.carried == number.carried else None


def _final(module, computation, loop, index: int) -> _Number | None:
  """Value of an element of a loop's state after the loop; None if unknown."""
  number = _Number(0, index)
  start = _initial(module, computation, loop, number)
  step = _step(module, module.computations[loop.called['body']], number)
  trips = trip_count(module, computation, loop) if start is not None and step is not None else None
  return _Number(start + step * trips) if trips is not None else None
