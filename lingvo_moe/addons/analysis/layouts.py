"""Layouts: arrangements of a model on N devices, and a search for the cheapest by the cost of its compiled program.

A layout is a mesh, and whether devices store parts of weights that they share. Its name says what is split: the rows of
the batch (DP, data parallelism), experts (EP, expert parallelism), hidden features and heads (MP, model parallelism),
as in figure 9 of Switch Transformers (Fedus et al., arXiv 2101.03961), or layers (PP, pipeline parallelism). ZeRO-3, EP
and EP+MP are r = 0, r = 1 and r = N / E of Tutel (Hwang et al., arXiv 2206.03382), and 2DH is EP with its AllToAll in
two levels.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lingvo_moe.addons.analysis import cost
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.core.mesh import ACTIVATIONS, Mesh
from lingvo_moe.runtime import chips
from lingvo_moe.tasks.model_config import ModelConfig
from lingvo_moe.tasks.task import task_of

NAMES = {
  'DP': ('data',),
  'ZeRO-3': ('data',),
  'MP': ('model',),
  'DP+MP': ('data', 'model'),
  'EP': ('expert',),
  'EP+DP': ('data', 'expert'),
  '2DH': ('node', 'expert'),
  '2DH+DP': ('data', 'node', 'expert'),
  'EP+MP': ('expert', 'model'),
  'EP+MP+DP': ('data', 'expert', 'model'),
  'EP+ES': ('expert', 'hidden'),
  'EP+ES+DP': ('data', 'expert', 'hidden'),
  'DP/EP': ('data',),
  'DP/EP+ES': ('data',),
  'PP': ('stage',),
  'PP+DP': ('stage', 'data'),
  'PP+EP': ('stage', 'expert'),
}  # -> axes of the mesh; after '/' is the layout in which weights are stored
CHUNKS = (2, 4)  # values of capacity_chunks that are tried


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
  """Layout with its cost, or with the reason why it was refused."""

  layout: Layout
  chunks: int = 1  # capacity_chunks of the model
  report: cost.Report | None = None  # None if it was refused before it was compiled
  refused: str = ''  # why the model cannot have this layout; '' if it can
  seconds: float | None = None  # of a step, at the best estimate; None without a topology
  bytes: int = 0  # that a device sends or receives in the collectives of a step

  @property
  def cost(self) -> float:
    """Seconds where they are known, else bytes."""
    return self.bytes if self.seconds is None else self.seconds

  def to_json(self) -> dict[str, Any]:
    """Candidate as plain values, for JSON."""
    counts = self.report.collective_counts if self.report else {}
    values = {name: getattr(self, name) for name in ('chunks', 'refused', 'seconds', 'bytes')}
    return {'layout': self.layout.name, 'flags': self.layout.flags, **values, 'collective_counts': counts}


def layouts(devices: int, experts: bool, names: Sequence[str] = (), scanned: bool = False) -> list[Layout]:
  """All layouts of N devices that are among `names`, by default of NAMES.

  Each axis that a name lists has at least 2 devices. Experts are split only with `experts`, layers only if `scanned`.

  Raises:
    UserError: an unknown name, or no layout of these names.
  """
  if unknown := next((name for name in names if name not in NAMES), ''):
    raise UserError(f'there is no layout {unknown!r}; {closest(unknown, NAMES)}')
  divisors = [n for n in range(2, devices + 1) if devices % n == 0]
  meshes = lambda axes, **how: [
    Mesh(tuple(zip(axes, sizes, strict=True)), **how)
    for sizes in itertools.product(divisors, repeat=len(axes))
    if math.prod(sizes) == devices
  ]
  layouts = [
    Layout(name, mesh)
    for name, axes in NAMES.items()
    if name in (names or NAMES)
    and (experts or ('expert' not in axes and '/' not in name))
    and (scanned or 'stage' not in axes)
    for storage in (meshes(NAMES[name.partition('/')[2]]) if '/' in name else [None])
    for mesh in meshes(axes, split_dense=name == 'ZeRO-3', storage=storage)
  ]
  if not layouts:
    raise UserError(
      f'{devices} devices have no layout of {", ".join(names or NAMES)}: each axis of a mesh has at least 2 devices, '
      'and experts and scanned layers are split only where a model has some'
    )
  return layouts


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
  """Compiles a program of a model under each layout, and with chunks of slots where these could be the cheapest.

  The arguments are those of cost.estimate, and:

  Args:
    candidates: the layouts.
    topology: TPUs or GPUs, for which there are times; None for virtual devices of this CPU, where layouts are compared
      by the bytes of their collectives.
    batch_tokens: of a program other than 'train'; 0: the model's.
    progress: is called with a line before each layout is compiled.

  Returns:
    Candidates: the cheapest first, and those that were refused last.
  """

  def estimated(layout: Layout, chunks: int) -> Candidate:
    progress(f'{layout.name} {layout.flags}' + (f' in {chunks} chunks' if chunks > 1 else ''))
    chunked = dataclasses.replace(config, capacity_chunks=chunks) if chunks > 1 else config
    try:
      if program != 'train':
        chunked = cost.for_program(chunked, layout.mesh, program, batch_tokens)
      _check(chunked, layout.mesh, topology, program)
      report = cost.estimate(name, chunked, layout.mesh, topology, program, rounds)
    except UserError as e:
      return Candidate(layout, chunks, refused=str(e))
    moved = sum(c.count * c.bytes for c in report.collectives)
    return Candidate(layout, chunks, report, report.refused, pipelined_seconds(report, chunks), moved)

  tried = [estimated(layout, config.capacity_chunks) for layout in candidates]
  fitting = sorted((c for c in tried if not c.refused), key=lambda c: c.cost)
  # Chunks are worth a try in training with a capacity, where AllToAlls can overlap.
  may_chunk = program == 'train' and config.slots_factor is not None and config.capacity_chunks == 1
  for whole in list(fitting) if topology and may_chunk else ():
    for chunks in CHUNKS if asynchronous_exchanges(whole.report) else ():
      # The least that chunks of this layout could take, as their AllToAlls take no less than whole ones.
      if pipelined_seconds(whole.report, math.inf) < min(c.cost for c in fitting):
        fitting += [c for c in [estimated(whole.layout, chunks)] if not c.refused]
  return sorted(fitting, key=lambda c: c.cost) + [c for c in tried if c.refused]


def pipelined_seconds(report: cost.Report, chunks: float) -> float | None:
  """Seconds of a step, where the AllToAlls of a chunk of slots overlap with the experts' computation of another.

  Of n chunks the first to be sent and the last to be computed overlap with nothing, so in each phase the shorter of
  both times is hidden but for 1 / n of it. This is the most that can be hidden, and counts only AllToAlls that the
  compiler made asynchronous. With one chunk nothing is hidden.
  """
  seconds = report.step_seconds_compiler or report.step_seconds_roofline
  if seconds is None:
    return None
  hidden = 0.0
  for phase, parts in report.phases.items():
    exchange = sum(c.seconds for c in asynchronous_exchanges(report) if c.phase == phase)
    hidden += min(exchange, parts['experts'].compute_seconds)
  return seconds - hidden * (1 - 1 / chunks)


def asynchronous_exchanges(report: cost.Report) -> list[cost.CollectiveCost]:
  """AllToAlls of MoE layers with which the compiler can overlap computation."""
  return [c for c in report.collectives if c.asynchronous and (c.kind, c.part) == ('all-to-all', 'dispatch/combine')]


def _check(config: ModelConfig, mesh: Mesh, topology: chips.Topology | None, kind: str) -> None:
  """Raises UserError, before any compilation, if the mesh does not divide the batch or its devices hold too little."""
  rows = len(next(iter(task_of(config).batch_shapes(training=kind == 'train').values())))
  parts = config.micro_batches if mesh.size(['stage']) == 1 else 1  # a pipeline takes the whole batch
  mesh.check((rows // parts,), 'B', mesh.spec('B', ACTIVATIONS))
  program = config.program()
  state = {'weights': program.weight_specs} | ({'optimizer slots': program.slot_specs} if kind == 'train' else {})
  stored = sum(
    spec.size * spec.dtype.size // mesh.stored_sharding(spec.shape, spec.dims, name, spec.slot).parts
    for specs in state.values()
    for name, spec in specs.items()
  )
  if topology and stored > topology.chip.usable * 2**30:
    raise UserError(
      f'{" and ".join(state)} take {stored / 2**30:.4g} GiB of a device, which has {topology.chip.usable:.4g}'
    )
