"""Cost estimate of a model's program, compiled: memory, FLOPs, communication and time on some devices.

Times are those of a roofline: every instruction takes as long as its FLOPs or its bytes at the peak of the chip,
whichever is longer; instructions run one after the other; and a collective takes as long as the busiest links of the
torus, or the NVLinks of a GPU, need for its bytes, and a microsecond per hop. Nothing overlaps and nothing waits: a
step can be much faster only if communication is hidden behind computation, and will be slower in practice.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.addons.analysis import hlo, hlo_collectives, hlo_loops, memory, torus
from lingvo_moe.addons.analysis.hlo import Module
from lingvo_moe.addons.analysis.hlo_collectives import Collective
from lingvo_moe.addons.analysis.parts import PARTS, PHASES, layer_of, part_of, phase_of
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import ACTIVATIONS, Mesh
from lingvo_moe.ops.remat import POLICIES
from lingvo_moe.program import Program
from lingvo_moe.runtime import chips
from lingvo_moe.runtime.aot import AotRuntime, Compiled
from lingvo_moe.runtime.chips import Chip, Gpu
from lingvo_moe.tasks.model_config import ModelConfig
from lingvo_moe.tasks.task import task_of

# 'eval': dev loss; 'score': log-probabilities of given translations; 'encode': the encoder alone; 'decode': flat beam
# search.
PROGRAMS = ('train', 'eval', 'score', 'encode', 'decode')


class CollectiveCost(NamedTuple):
  """Cost of the collectives of one kind, size, layer and phase."""

  kind: str
  count: int  # executions in a step
  bytes: int  # that a device sends or receives in each, whichever is more
  axes: tuple[str, ...]  # mesh axes that its groups span
  layer: str
  part: str
  phase: str
  seconds: float | None  # of all executions; None without a chip
  asynchronous: bool = False  # whether the compiler has it start and end in two operations, with others between them


@dataclasses.dataclass
class PartCost:
  """Cost in a step of one part of the model, on one device; seconds are None without a chip."""

  flops: int = 0
  bytes: int = 0
  cycles: int = 0  # by the compiler's estimate, without collectives; 0 if it gives none
  compute_seconds: float | None = None
  collective_seconds: float | None = None
  kernels: int = 0  # executions of operations that move data, but for collectives

  def __add__(self, other: PartCost) -> PartCost:
    both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return PartCost(*(None if a is None else a + b for a, b in both))


@dataclasses.dataclass(frozen=True)
class Report:
  """Cost report of a step. Bytes and FLOPs are those of one device, a core or a chip: see chips.py.

  Times are None without a chip, and those of a TPU's compiler also where it estimates no cycles.
  """

  model: str
  program: str  # one of PROGRAMS
  platform: str  # the topology, or 'cpu'
  mesh: str  # devices by axis
  weights: int  # number of weights, over all devices
  devices: int
  # Source positions of a batch, and as many target positions, but for 'encode'; without an encoder all.
  batch_tokens: int
  counted: str  # name of what batch_tokens counts, such as 'source tokens'
  rounds: int  # passes over the experts that a MoE layer is assumed to make where no token is dropped (ops/xla.py)
  trace_seconds: float  # for TensorFlow and JAX
  compile_seconds: float  # for XLA
  program_bytes: int  # size of the compiled program's text, which exists whether the program fits or not
  code_bytes: int  # size of the machine code
  uncounted_loops: int  # with an unknown trip count, which count once; loops of rounds are not among them
  memory_per_device: memory.Memory
  largest: list[memory.Held]  # the values that take most memory at its peak, largest first
  collectives: list[CollectiveCost]
  collective_counts: dict[str, int]  # executions in a step by kind
  bubble: float  # share of a pipeline's ticks in which a stage has no micro-batch; 0 without stages
  moe_all_to_alls: int  # most AllToAlls that a MoE layer makes in a round (in 'decode', of a step)
  flops: int  # multiplications and additions of matrix products
  flops_share_of_peak: float | None  # flops / (peak FLOP/s * step_seconds_compiler)
  parts: dict[str, PartCost]  # by the names of PARTS
  phases: dict[str, dict[str, PartCost]]  # by the names of PHASES, and in each by the names of PARTS
  placements: list[torus.PlacementCost]  # of the expert axis on the torus; empty without a chip
  step_seconds_roofline: float | None  # of all parts
  # By the compiler's estimate of cycles, or of a GPU at a share of its peaks (Gpu.reached); and our collective seconds.
  step_seconds_compiler: float | None
  round_seconds_roofline: float | None  # by which one more round in every MoE layer lengthens step_seconds_roofline
  round_seconds_compiler: float | None  # the same for step_seconds_compiler
  fits: bool  # whether the compiler accepts the program
  refused: str  # why it does not, else ''
  advice: list[str]  # settings that would make it fit

  @property
  def tokens_per_second(self) -> float | None:
    """Source tokens a second, and as many target tokens but for 'encode', at the best estimate of the time; or None."""
    seconds = self.step_seconds_compiler or self.step_seconds_roofline
    return self.batch_tokens / seconds if seconds else None

  def seconds_of(self, phase: str) -> float | None:
    """Roofline seconds of a phase, one of PHASES; None without a chip."""
    parts = self.phases[phase].values()
    timed = self.step_seconds_roofline is not None
    return sum(part.compute_seconds + part.collective_seconds for part in parts) if timed else None

  def to_json(self) -> dict[str, Any]:
    """Report as plain values, for JSON."""
    rows = {name: [row._asdict() for row in getattr(self, name)] for name in ('largest', 'collectives', 'placements')}
    return {**dataclasses.asdict(self), **rows}


def estimate(
  name: str,
  config: ModelConfig,
  mesh: Mesh,
  topology: chips.Topology | None = None,
  program: str = 'train',
  rounds: int = 1,
) -> Report:
  """Estimates the cost of a program of a model, which it compiles for a mesh.

  Args:
    name: name of the model, for the report.
    config: configuration of the model, whose batch_tokens (of evaluation: eval_batch_tokens) and max_length are used.
    mesh: mesh of as many devices as the topology has.
    topology: TPUs or GPUs; None for virtual devices of this CPU, for which there are no times.
    program: one of PROGRAMS.
    rounds: passes over the experts that a MoE layer makes where no token is dropped; 1 is perfect balance.
  """
  if program != 'train':
    config = for_program(config, mesh, program)
  compiled = compile_step(config, mesh, topology, program)
  fields = analyze(compiled, config.program(), mesh, topology, rounds)
  fits = not compiled.refused
  return Report(
    model=name,
    program=program,
    platform=str(topology or 'cpu'),
    mesh=str(mesh),
    batch_tokens=next(iter(task_of(config).batch_shapes(training=program == 'train').values())).size,
    bubble=bubble(config, mesh) if program == 'train' else 0.0,
    counted=task_of(config).token_counts[0].replace('_', ' '),
    fits=fits,
    refused=compiled.refused,
    advice=[] if fits else advice(config, mesh, fields['memory_per_device'], fields['largest'], program),
    **fields,
  )


def choose_remat(
  name: str,
  config: ModelConfig,
  mesh: Mesh,
  topology: chips.Topology | None = None,
  progress: Callable[[str], None] = lambda policy: None,
) -> dict[str, Report]:
  """Reports of the train step by policy of remat.POLICIES: those that fit first, the fastest of them first.

  Arguments are those of `estimate`; `progress` is called with each policy before its program is compiled. Without a
  topology, programs are compared by their FLOPs.
  """
  if not hasattr(config, 'remat'):
    raise UserError(f'{name} has no layers to rematerialise: leave out --choose_remat')
  reports = {}
  for policy in POLICIES:
    progress(policy)
    reports[policy] = estimate(name, dataclasses.replace(config, remat=policy), mesh, topology)
  cost = lambda report: report.step_seconds_compiler or report.step_seconds_roofline or report.flops
  return dict(sorted(reports.items(), key=lambda item: (not item[1].fits, cost(item[1]))))


def bubble(config: ModelConfig, mesh: Mesh) -> float:
  """Share of a pipeline's ticks in which a stage has no micro-batch, which `cost` counts like the others."""
  waiting = mesh.size(['stage']) - 1
  return waiting / (config.pipeline_repeats * config.micro_batches + waiting)


def for_program(config: ModelConfig, mesh: Mesh, program: str, batch_tokens: int = 0) -> ModelConfig:
  """Configuration to compile a program other than 'train' with; batch_tokens 0: the model's eval_batch_tokens."""
  if program == 'eval':
    return dataclasses.replace(config, eval_batch_tokens=batch_tokens or config.eval_batch_tokens)
  groups = mesh.size(mesh.spec('G', ACTIVATIONS)[0])
  return config.for_inference(groups, batch_tokens=batch_tokens)


def compile_step(config: ModelConfig, mesh: Mesh, topology: chips.Topology | None, program: str = 'train') -> Compiled:
  """Compiles a program of a model from shapes alone; see `estimate`."""
  runtime = AotRuntime(config.program(), mesh, topology)
  if program == 'train':
    return runtime.train(task_of(config).batch_shapes())
  known = task_of(config).inference_programs()
  if program not in known:
    raise UserError(f'{type(config).__name__} has no --program={program}: use train, {", ".join(known)}')
  chosen, model, theta = known[program], runtime.program.model, runtime.program.theta
  call = lambda weights, batch: chosen.function(model, theta(weights), batch)
  return runtime.function(call, chosen.batch, by_rows=chosen.by_rows)


def analyze(
  compiled: Compiled, program: Program, mesh: Mesh, topology: chips.Topology | None, rounds: int = 1
) -> dict[str, Any]:
  """Fields of a Report that follow from the compiled program."""
  module, chip = hlo.parse(compiled.text), topology.chip if topology else None
  places = np.array([device.coords for device in compiled.devices]) if chip else None
  step, longer = (_Step(module, places, mesh, chip, n) for n in (rounds, rounds + 1))
  counts = collections.Counter()
  for cost in step.costs:
    counts[cost.kind] += cost.count
  flops = sum(part.flops for part in step.parts.values())
  roofline, estimated = step.roofline, step.estimated
  loops = (i for i, _ in hlo_loops.executed(module) if i.opcode == 'while')
  return {
    'weights': sum(spec.size for spec in program.weight_specs.values()),
    'devices': mesh.num_devices,
    'rounds': rounds,
    'trace_seconds': compiled.trace_seconds,
    'compile_seconds': compiled.compile_seconds,
    'program_bytes': len(compiled.text),
    'code_bytes': compiled.code,
    'uncounted_loops': sum(hlo_loops.times_run(loop, rounds) is None for loop in loops),
    'memory_per_device': memory.measure(module, compiled, chip),
    'largest': memory.largest(module),
    'collectives': step.costs,
    'collective_counts': dict(counts),
    'moe_all_to_alls': _moe_all_to_alls(step.collectives),
    'flops': flops,
    'flops_share_of_peak': flops / (chip.flops * estimated) if estimated else None,
    'parts': step.parts,
    'phases': step.phases,
    'placements': torus.placement_costs(step.collectives, mesh, topology, places) if topology else [],
    'step_seconds_roofline': roofline,
    'step_seconds_compiler': estimated,
    'round_seconds_roofline': longer.roofline - roofline if roofline else None,
    'round_seconds_compiler': longer.estimated - estimated if estimated else None,
  }


class _Step:
  """Costs of a compiled step, whose MoE layers make `rounds` rounds; without a chip there are no seconds.

  `places` [devices, axes] are the coordinates of the devices on the torus, in the order of the program.
  """

  def __init__(self, module: Module, places: np.ndarray | None, mesh: Mesh, chip: Chip | Gpu | None, rounds: int):
    self.collectives = hlo_collectives.collectives(module, rounds)
    self.costs = _collective_costs(self.collectives, places, mesh, chip)
    self.phases = _phases(module, self.costs, chip, rounds)
    phases = self.phases.values()
    self.parts = {name: functools.reduce(operator.add, (phase[name] for phase in phases)) for name in PARTS}
    parts, cycles = self.parts.values(), sum(part.cycles for part in self.parts.values())
    communication = sum(cost.seconds for cost in self.costs) if chip else None
    # Seconds of the step, with its collectives: at least, and by the estimate of step_seconds_compiler.
    self.roofline = sum(part.compute_seconds for part in parts) + communication if chip else None
    self.estimated = cycles / chip.clock + communication if chip and chip.clock and cycles else None
    if isinstance(chip, Gpu):
      self.estimated = (self.roofline - communication) / chip.reached + communication


def _collective_costs(
  collectives: Sequence[Collective], places: np.ndarray | None, mesh: Mesh, chip: Chip | Gpu | None
) -> list[CollectiveCost]:
  """Costs of the collectives; those of one kind, size, layer and phase are added up."""
  alike: dict[CollectiveCost, tuple[int, float]] = {}
  for collective in collectives:
    kind, times, size = collective.kind, collective.times, collective.bytes
    groups, op_name = collective.groups_of(mesh.num_devices), collective.instruction.op_name
    axes = axes_of(groups, mesh)
    part = _collective_part(collective, axes)
    phase = 'update' if part == 'optimiser' else phase_of(op_name)
    asynchronous = collective.instruction.opcode.endswith('-start')
    key = CollectiveCost(kind, 0, size, axes, _layer(collective), part, phase, None, asynchronous)
    count, seconds = alike.get(key, (0, 0.0))
    spent = times * torus.seconds(kind, size, groups, places, chip) if chip else 0.0
    alike[key] = count + times, seconds + spent
  return [key._replace(count=n, seconds=seconds if chip else None) for key, (n, seconds) in alike.items()]


def _phases(
  module: Module, collectives: Sequence[CollectiveCost], chip: Chip | Gpu | None, rounds: int
) -> dict[str, dict[str, PartCost]]:
  """Costs by phase and part. What the compiler rematerialises by itself has instructions named '...remat...'."""
  timed = (0.0, 0.0) if chip else (None, None)
  phases = {phase: {name: PartCost(0, 0, 0, *timed) for name in PARTS} for phase in PHASES}
  for cost in collectives if chip else ():
    phases[cost.phase][cost.part].collective_seconds += cost.seconds
  for instruction, times in hlo_loops.executed(module, rounds):
    if instruction.collective:
      continue
    op_name, products, moved = hlo.op_name(instruction), list(hlo.products(instruction)), hlo.traffic(instruction)
    phase = 'rematerialisation' if '.remat' in instruction.name else phase_of(op_name)
    part = phases[phase][part_of(op_name)]
    part.flops += times * sum(made for made, _ in products)
    part.bytes += times * moved
    part.kernels += times * (moved > 0)
    part.cycles += times * instruction.estimated_cycles
    if chip:
      multiplying = sum(made / chip.peak(dtype) for made, dtype in products)
      part.compute_seconds += times * max(multiplying, moved / chip.hbm_bandwidth)
  return phases


def _moe_all_to_alls(collectives: Sequence[Collective]) -> int:
  """Most AllToAlls of a MoE layer, each counted once however often the loops around it run."""
  layers = collections.Counter(_layer(c) for c in collectives if c.kind == 'all-to-all')
  return max((count for layer, count in layers.items() if layer.endswith('/moe')), default=0)


def _layer(collective: Collective) -> str:
  layers = {layer_of(name) for name in collective.sources or [collective.instruction.op_name]}
  return next(iter(layers)) if len(layers) == 1 else f'{len(layers)} layers'


def _collective_part(collective: Collective, axes: Sequence[str]) -> str:
  """Part of a collective: that of its op name, but for two cases.

  A sum of gradients (and of statistics with them) over devices with different data counts as 'optimiser'. An AllToAll
  in a MoE layer is between groups and experts, whatever op it is named after, and counts as 'dispatch/combine'.
  """
  op_name = collective.instruction.op_name
  partial = 'model' in axes or (axes == ('hidden',) and part_of(op_name) == 'experts')  # sums over hidden features
  is_sum = collective.kind in ('all-reduce', 'reduce-scatter') and not partial
  if is_sum and any('gradient_tape/' in name for name in (op_name, *collective.sources)):
    return 'optimiser'
  if collective.kind == 'all-to-all' and '/moe/' in op_name:
    return 'dispatch/combine'
  return part_of(op_name)


def axes_of(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
  """Mesh axes along which the devices of a group differ."""
  places = np.stack(np.unravel_index(groups[0], mesh.shape or (1,)))
  return tuple(name for (name, _), along in zip(mesh.axes, places) if len(set(along.tolist())) > 1)


def advice(
  config: ModelConfig, mesh: Mesh, used: memory.Memory, largest: Sequence[memory.Held], program: str = 'train'
) -> list[str]:
  """Settings that would reduce the memory of a program that does not fit, most likely to help first.

  Settings that the configuration already has are left out.
  """
  gib = lambda n: f'{n / 2**30:.3g} GiB'
  held, made = used.weights + used.slots, used.activations + used.temporaries
  work, state = [], []
  if program == 'train':
    if not getattr(config, 'scan_layers', True):
      work.append('scan_layers = True: one block at a time is in memory, of forward and backward')
    if getattr(config, 'remat', 'block') != 'block':
      work.append(f"remat = 'block': only the inputs of blocks are kept; activations take {gib(used.activations)}")
    work.append(f'micro_batches = {2 * config.micro_batches}: half as many rows at a time')
  if config.activation_dtype == 'float32':
    work.append("activation_dtype = 'bfloat16': half the bytes of most activations")
  if config.num_experts and any('/moe/' in value.op for value in largest):
    if program in ('train', 'eval'):
      work.append(f'num_groups = {2 * config.num_groups}: smaller groups make smaller masks [G, S, X]')
    if program != 'train':
      work.append(
        f'round_capacity_factor = {config.round_capacity_factor / 2:g}: fewer slots at a time, in more rounds'
      )
  if program == 'decode' and config.beam_size > 1:
    work.append(f'beam_size = {config.beam_size // 2}: keys and values of fewer hypotheses')
  tokens = config.batch_tokens if program == 'train' else config.eval_batch_tokens or config.batch_tokens
  work.append(f'--batch_tokens={tokens // 2}: half the batch')
  work.append(f'a larger topology; activations and temporaries take {gib(made)}')
  if not mesh.split_dense and held > made / 20:
    state.append(f'--split_dense: a device stores a part of the dense weights; weights and slots take {gib(held)}')
  if used.hbm and held > used.hbm / 4:
    return state + work
  return work + state
