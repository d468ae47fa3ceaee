"""Execution counts of the instructions of a compiled program.

The entry computation is executed once, the body of a while loop trip-count times, and a fused computation as often as
its fusion. XLA states the trip count of some loops. For others it is derived from the loop's condition. The number of
rounds of a MoE layer (ops/xla.py) is known only when the program runs: it is an argument here.
"""

import collections
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lingvo_moe.addons.analysis.hlo import FORWARDING, Instruction, Module

_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":"?(\d+)')
_ROUNDS = re.compile(r'/rounds(_\d+)?/')  # name scope of the operations of a round


def executed(module: Module, rounds: int = 1, in_fusions: bool = False) -> Iterator[tuple[Instruction, int]]:
  """Yields (instruction, executions) of all instructions, but for those applied inside an instruction (a reduction's).

  Every branch of a conditional counts as taken, a loop with an unknown trip count as run once, a loop of rounds
  `rounds` times. `in_fusions` adds the instructions inside fusions.
  """
  counts = collections.Counter()

  def visit(computation, times):
    counts[computation] += times
    for instruction in computation.instructions:
      trips = times_run(instruction, rounds) if instruction.opcode == 'while' else 1
      for role, called in instruction.called.items():
        is_run = role != 'to_apply' or instruction.opcode == 'call'
        if is_run and (in_fusions or instruction.opcode != 'fusion'):
          visit(called, times * (1 if trips is None else trips))

  visit(module.entry, 1)
  for computation, times in counts.items():
    for instruction in computation.instructions:
      yield instruction, times


def times_run(loop: Instruction, rounds: int) -> int | None:
  """Trip count of a while loop as in `trip_count`, or `rounds` for a loop of rounds; None if unknown."""
  trips = trip_count(loop)
  if trips is None and (body := loop.called.get('body')):
    # A loop of rounds has operations of that scope in its body.
    return rounds if any(_ROUNDS.search(instruction.op_name) for instruction in body.instructions) else None
  return trips


def trip_count(loop: Instruction) -> int | None:
  """Trip count of a while loop, or an upper bound of it; None if unknown.

  XLA states it for some loops. It is derived for loops that run while a counter, to which each iteration adds a
  constant, is below a limit that is constant or the counter of an earlier loop (as in TensorFlow's gradients of loops).
  """
  if known := _TRIPS.search(loop.attributes):
    return int(known[1])
  if not {'condition', 'body'} <= loop.called.keys():
    return None
  counts = []
  for low, high in _comparisons(loop.called['condition'].root, {}):
    (start, step), (limit, change) = _counter(loop, low), _counter(loop, high)
    if step and change == 0 and None not in (start, limit):
      counts.append(max(0, -(-(limit - start) // step)))
  return min(counts, default=None)


class _Number(NamedTuple):
  """Integer value: a constant, plus the element of the loop's state with index `carried` if that is not None."""

  constant: int
  carried: int | None = None


_Given = Mapping[Instruction, _Number | None]  # values of a fused computation's parameters


def _comparisons(value: Instruction, given: _Given) -> Iterator[tuple[_Number, _Number]]:
  """Yields pairs (low, high) of a condition that is true only if low < high for each; ignores other comparisons."""
  if value.opcode == 'and':
    for operand in value.operands:
      yield from _comparisons(operand, given)
  elif value.opcode == 'fusion':
    yield from _comparisons(value.inside.root, _arguments(value, given))
  elif value.opcode == 'compare':
    low, high = (_number(operand, given) for operand in value.operands)
    if 'direction=GT' in value.attributes:
      low, high = high, low
    if low and high and low.carried is not None and re.search('direction=[LG]T', value.attributes):
      yield low, high


def _arguments(fusion: Instruction, given: _Given) -> _Given:
  numbers = (_number(operand, given) for operand in fusion.operands)
  return dict(zip(fusion.inside.parameters, numbers))


def _number(value: Instruction, given: _Given) -> _Number | None:
  """Value of an integer; None if unknown."""
  if value in given:
    return given[value]
  if value.opcode == 'constant':
    text = value.attributes.split(')')[0]
    return _Number(int(text)) if re.fullmatch(r'-?\d+', text) else None
  if value.opcode == 'get-tuple-element':
    (source,) = value.operands
    if source.opcode == 'parameter':
      return _Number(0, value.index)
    return _final(source, value.index) if source.opcode == 'while' else None
  if value.opcode in (*FORWARDING, 'convert', 'copy-start'):
    return _number(value.operands[0], given)
  if value.opcode == 'add':
    a, b = (_number(operand, given) for operand in value.operands)
    if a and b and None in (a.carried, b.carried):
      return _Number(a.constant + b.constant, b.carried if a.carried is None else a.carried)
  if value.opcode == 'fusion' and len(value.arrays) == 1:
    return _number(value.inside.root, _arguments(value, given))
  return None


def _counter(loop: Instruction, number: _Number) -> tuple[int | None, int | None]:
  """Value of a number in a loop's state before the loop, and the constant that an iteration adds; None if unknown."""
  if number.carried is None:
    return number.constant, 0
  element = lambda state: _number(state.operands[number.carried], {}) if state.opcode == 'tuple' else None
  before, after = element(loop.operands[0]), element(loop.called['body'].root)
  start = before.constant + number.constant if before and before.carried is None else None
  return start, after.constant if after and after.carried == number.carried else None


def _final(loop: Instruction, index: int) -> _Number | None:
  """Value of an element of a loop's state after the loop; None if unknown."""
  (start, step), trips = _counter(loop, _Number(0, index)), trip_count(loop)
  return None if None in (start, step, trips) else _Number(start + step * trips)
