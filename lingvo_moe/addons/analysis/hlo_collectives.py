"""Collectives of a compiled program: kind, device groups, bytes and number of executions."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lingvo_moe.addons.analysis import hlo_loops
from lingvo_moe.addons.analysis.hlo import Instruction, Module, numbers

_IOTA = re.compile(r'replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?')
_EXPLICIT = re.compile(r'(?:replica_groups|source_target_pairs)=\{(\{[0-9,{}\s]*\})\}')
_MESH = re.compile(
  r'replica_groups=mesh\[([^\]]*)\]'  # axes
  r'(?:, device_ids=\((?:\[([0-9,]+)\](?:T\(([0-9,]+)\))?|([0-9,]+))\))?'  # a transposed iota, or a list
  r' \{([^}]*)\}'  # the axes that a group spans
)
_AXIS = re.compile(r"('[^']*')(?::\((\d+)\)(\d+))?")


class Collective(NamedTuple):
  """Collective operation of a program."""

  instruction: Instruction
  kind: str  # one of COLLECTIVES
  bytes: int  # that a device sends or receives, whichever is more
  times: int  # number of executions
  groups: np.ndarray | None  # [groups, devices of a group], device numbers; None: all devices are one group
  sources: tuple[str, ...]  # op_name of what it sends, where known

  def groups_of(self, num_devices: int) -> np.ndarray:
    """Groups [groups, devices of a group] among all devices of a program."""
    return np.arange(num_devices)[None] if self.groups is None else self.groups


def collectives(module: Module, rounds: int = 1) -> list[Collective]:
  """Collectives of a module, each once: a pair of start and done counts as its start. See hlo_loops for `rounds`.

  TPU compilers put some into fusions: an all-reduce with the slice that is taken of it, an all-gather with a product.
  GPU compilers concatenate what several send, in a fusion without a name.
  """
  size = lambda arrays: sum(array.bytes for array in arrays)
  listed = []
  for instruction, times in hlo_loops.executed(module, rounds, in_fusions=True):
    if instruction.collective:
      operands = instruction.operands
      # Of an operand that is a whole tuple the collective takes only a part.
      is_part = any(len(operand.arrays) > 1 for operand in operands)
      taken = 0 if is_part else size(array for operand in operands for array in operand.arrays)
      listed.append(
        Collective(
          instruction=instruction,
          kind=instruction.collective,
          bytes=max(taken, size(instruction.results)),
          times=times,
          groups=groups(instruction.attributes),
          sources=tuple(name for operand in operands for name in _names(operand)),
        )
      )
  return listed


def _names(operand: Instruction) -> list[str]:
  """Names of what an operand is, or else of what it is made of."""
  maker = operand.maker
  return [name for source in ([maker] if maker.op_name else maker.operands) if (name := source.maker.op_name)]


def groups(attributes: str) -> np.ndarray | None:
  """Device groups [groups, devices of a group] of a collective, from any of XLA's notations; None if it has none.

  Notations: '{{0,1},{2,3}}', '[2,4]<=[8]', '[4,2]<=[2,4]T(1,0)' and "mesh['a'=2,'b'=4] {'b'}". The groups of a
  permutation are its pairs.
  """
  if match := _IOTA.search(attributes):
    shape, dims, perm = (numbers(match[i]) for i in (1, 2, 3))
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(perm) if perm else ids).reshape(shape)
  if match := _EXPLICIT.search(attributes):
    return np.array([numbers(group) for group in re.findall(r'\{([0-9,\s]+)\}', match[1])])
  if match := _MESH.search(attributes):
    names, sizes = zip(
      *((name.strip(), int(size)) for name, _, size in (a.partition('=') for a in match[1].split(',')))
    )
    reshape, perm, listed = numbers(match[2]), numbers(match[3]), numbers(match[4])
    ids = np.array(listed) if listed else np.arange(math.prod(sizes))
    ids = ids.reshape(reshape).transpose(perm) if perm else ids
    return _along(ids.reshape(sizes), names, match[5])
  return None


def _along(ids: np.ndarray, names: Sequence[str], within: str) -> np.ndarray:
  """Groups along axes of a grid ('a','b') or along factors of them: 'a':(2)4 is a factor 4 below a slower factor 2."""
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
