"""Layouts: arrangements of a model on N devices, and a search for the cheapest by the cost of its compiled program.

A layout is a mesh, and whether devices store parts of weights that they share. Its name says what is split: the rows of
the batch (DP, data parallelism), experts (EP, expert parallelism), hidden features and heads (MP, model parallelism), as
in figure 9 of Switch Transformers (Fedus et al., arXiv 2101.03961). ZeRO-3, EP and EP+MP are r = 0, r = 1 and
r = N / E of Tutel (Hwang et al., arXiv 2206.03382).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lingvo_moe import xla_sharding
from lingvo_moe.analysis import cost
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import closest
from lingvo_moe.program import Program
from lingvo_moe.runtime import chips
from lingvo_moe.tasks.task import task_of
from lingvo_moe.tasks.transformer_config import ModelConfig
from lingvo_moe.xla_sharding import Mesh

NAMES = {
  'DP': ('data',),
  'ZeRO-3': ('data',),
  'MP': ('model',),
  'DP+MP': ('data', 'model'),
  'EP': ('expert',),
  'EP+DP': ('data', 'expert'),
  'EP+MP': ('expert', 'model'),
  'EP+MP+DP': ('data', 'expert', 'model'),
}  # -> axes of the mesh
CHUNKS = (2, 4)  # values of capacity_chunks that are tried with the cheapest mesh


class Layout(NamedTuple):
  """Layout: its name in NAMES, and its mesh."""

  name: str
  mesh: Mesh

  @property
  def flags(self) -> str:
    """Flags with which a job has this layout."""
    return f'--mesh={self.mesh}{" --split_dense" if self.mesh.split_dense else ""}'


@dataclasses.dataclass(frozen=True)
class Candidate:
  """Layout with its cost, or with the reason why it was refused.

  Attributes:
    layout: the layout.
    chunks: capacity_chunks of the model.
    report: its cost; None if it was refused before it was compiled.
    refused: why the model cannot have this layout; '' if it can.
    seconds: of a step, at the best estimate; None without a topology.
    bytes: that a device sends or receives in the collectives of a step.
  """

  layout: Layout
  chunks: int = 1
  report: cost.Report | None = None
  refused: str = ''
  seconds: float | None = None
  bytes: int = 0

  @property
  def cost(self) -> float:
    """Seconds where they are known, else bytes."""
    return self.bytes if self.seconds is None else self.seconds

  def to_json(self) -> dict[str, Any]:
    """Candidate as plain values, for JSON."""
    counts = self.report.collective_counts if self.report else {}
    values = {name: getattr(self, name) for name in ('chunks', 'refused', 'seconds', 'bytes')}
    return {'layout': self.layout.name, 'flags': self.layout.flags, **values, 'collective_counts': counts}


def layouts(devices: int, experts: bool, names: Sequence[str] = ()) -> list[Layout]:
  """All layouts of N devices; each axis that a name lists has at least 2 devices.

  Args:
    devices: N.
    experts: whether the model has experts; without them, layouts that split experts are left out.
    names: those of NAMES that are wanted; () for all.

  Raises:
    UserError: an unknown name, or no layout of these names.
  """
  for name in names:
    if name not in NAMES:
      raise UserError(f'there is no layout {name!r}; {closest(name, NAMES)}')
  found = [
    Layout(name, Mesh(tuple(zip(axes, sizes, strict=True)), split_dense=name == 'ZeRO-3'))
    for name, axes in NAMES.items()
    if name in (names or NAMES) and (experts or 'expert' not in axes)
    for sizes in _factorisations(devices, len(axes))
  ]
  if not found:
    raise UserError(
      f'{devices} devices have no layout of {", ".join(names or NAMES)}: each axis of a mesh has at least 2 devices, and '
      'experts are split only where a model has some'
    )
  return found


def _factorisations(n: int, count: int) -> Iterator[tuple[int, ...]]:
  """Ways to write n as a product of `count` numbers of at least 2, in order."""
  if count == 1:
    if n > 1:
      yield (n,)
    return
  for first in range(2, n // 2 + 1):
    if n % first == 0:
      yield from ((first, *rest) for rest in _factorisations(n // first, count - 1))


def choose(
  name: str,
  config: ModelConfig,
  candidates: Sequence[Layout],
  topology: chips.Topology | None = None,
  program: str = 'train',
  batch_tokens: int = 0,
  rounds: int = 1,
  progress: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
  """Compiles a program of a model under each layout; then tries chunks of slots with the cheapest.

  Args:
    name: name of the model.
    config: configuration of the model.
    candidates: the layouts.
    topology: a TPU slice, for which there are times; None for virtual devices of this CPU, where layouts are compared by
      the bytes of their collectives.
    program: one of cost.PROGRAMS.
    batch_tokens: of a program other than 'train'; 0: the model's.
    rounds: see cost.estimate.
    progress: is called with a line before each layout is compiled.

  Returns:
    Candidates: the cheapest first, and those that were refused last.
  """

  def estimated(layout: Layout, chunks: int) -> Candidate:
    progress(f'{layout.name} {layout.flags}' + (f' in {chunks} chunks' if chunks > 1 else ''))
    here = dataclasses.replace(config, capacity_chunks=chunks) if chunks > 1 else config
    try:
      if program != 'train':
        here = cost.at_inference(here, layout.mesh, program, batch_tokens)
      _check(here, layout.mesh, topology, program)
      report = cost.estimate(name, here, layout.mesh, topology, program, rounds)
    except UserError as e:
      return Candidate(layout, chunks, refused=str(e))
    moved = sum(c.count * c.bytes for c in report.collectives)
    return Candidate(layout, chunks, report, report.refused, pipelined_seconds(report, chunks), moved)

  found = [estimated(layout, config.capacity_chunks) for layout in candidates]
  fitting = sorted((c for c in found if not c.refused), key=lambda c: c.cost)
  if fitting and topology and _may_chunk(config, program, fitting[0]):
    fitting += [c for c in (estimated(fitting[0].layout, chunks) for chunks in CHUNKS) if not c.refused]
  return sorted(fitting, key=lambda c: c.cost) + [c for c in found if c.refused]


def pipelined_seconds(report: cost.Report, chunks: int) -> float | None:
  """Seconds of a step, where the AllToAlls of a chunk of slots overlap with the experts' computation of another.

  Of n chunks the first to be sent and the last to be computed overlap with nothing, so in each phase the shorter of both
  times is hidden but for 1 / n of it. This is the most that can be hidden, and counts only AllToAlls that the compiler
  made asynchronous. With one chunk nothing is hidden.
  """
  seconds = report.step_seconds_compiler or report.step_seconds_roofline
  if seconds is None:
    return None
  hidden = 0.0
  for phase, parts in report.phases.items():
    exchange = sum(c.seconds for c in asynchronous_exchanges(report) if c.phase == phase)
    hidden += min(exchange, parts['experts'].compute_seconds)
  return seconds - hidden * (chunks - 1) / chunks


def asynchronous_exchanges(report: cost.Report) -> list[cost.CollectiveCost]:
  """AllToAlls of MoE layers with which the compiler can overlap computation."""
  return [c for c in report.collectives if c.asynchronous and (c.kind, c.part) == ('all-to-all', 'dispatch/combine')]


def _may_chunk(config: ModelConfig, program: str, candidate: Candidate) -> bool:
  """Whether chunks of slots are worth a try: in training with a capacity, where AllToAlls can overlap."""
  trains = program == 'train' and config.capacity_factor is not None and config.capacity_chunks == 1
  return trains and bool(asynchronous_exchanges(candidate.report))


def _check(config: ModelConfig, mesh: Mesh, topology: chips.Topology | None, program: str) -> None:
  """Raises UserError, before anything is compiled, if the mesh does not divide the batch or its devices hold too little."""
  rows = len(next(iter(task_of(config).batch_shapes(training=program == 'train').values())))
  mesh.check((rows // config.micro_batches,), 'B', mesh.spec('B', xla_sharding.ACTIVATIONS))
  if topology:
    held, room = _stored_bytes(config.program(), mesh, program), topology.chip.usable * 2**30
    if held > room:
      raise UserError(
        f'weights{" and optimizer slots" if program == "train" else ""} take {held / 2**30:.4g} GiB of a device, which '
        f'has {topology.chip.usable:.4g}'
      )


def _stored_bytes(program: Program, mesh: Mesh, kind: str) -> int:
  """Bytes of the state on one device."""
  total = 0
  for specs in (program.weight_specs, program.slot_specs) if kind == 'train' else (program.weight_specs,):
    for name, spec in specs.items():
      parts = math.prod(mesh.size(names) for names in mesh.stored_spec(spec.shape, spec.dims, name))
      total += spec.size * spec.dtype.size // parts
  return total
