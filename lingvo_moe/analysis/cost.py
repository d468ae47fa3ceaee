"""Cost estimate of a model's program, compiled: memory, FLOPs, communication and time on some devices.

Times are those of a roofline: every instruction takes as long as its FLOPs or its bytes at the peak of the chip,
whichever is longer; instructions run one after the other; and a collective takes as long as the busiest links of the
torus need for its bytes, and a microsecond per hop. Nothing overlaps and nothing waits: a step can be much faster only
if communication is hidden behind computation, and will be slower in practice.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe import xla_sharding
from lingvo_moe.analysis import hlo
from lingvo_moe.analysis import hlo_collectives
from lingvo_moe.analysis import hlo_loops
from lingvo_moe.analysis import memory
from lingvo_moe.analysis import placements
from lingvo_moe.analysis import torus
from lingvo_moe.analysis.hlo import Array
from lingvo_moe.analysis.hlo import Computation
from lingvo_moe.analysis.hlo import Instruction
from lingvo_moe.analysis.hlo import Module
from lingvo_moe.analysis.parts import PARTS
from lingvo_moe.analysis.parts import PHASES
from lingvo_moe.analysis.parts import layer_of
from lingvo_moe.analysis.parts import part_of
from lingvo_moe.analysis.parts import phase_of
from lingvo_moe.core.errors import UserError
from lingvo_moe.program import Program
from lingvo_moe.runtime import chips
from lingvo_moe.runtime.aot import AotRuntime
from lingvo_moe.runtime.aot import Compiled
from lingvo_moe.runtime.chips import Chip
from lingvo_moe.tasks.task import task_of
from lingvo_moe.tasks.transformer_config import ModelConfig
from lingvo_moe.xla_sharding import Mesh

# 'eval': dev loss; 'score': log-probabilities of given translations; 'encode': the encoder alone; 'decode': flat beam
# search.
PROGRAMS = ('train', 'eval', 'score', 'encode', 'decode')

# Instructions that neither compute nor move data: they name existing values, or start what another instruction ends.
_FREE = frozenset(
  ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional', 'call', 'after-all')
  + ('partition-id', 'replica-id', 'optimization-barrier', 'add-dependency', 'domain', 'async-start')
)


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
class Part:
  """Cost in a step of one part of the model, on one device; seconds are None without a chip."""

  flops: int = 0
  bytes: int = 0
  cycles: int = 0  # by the compiler's estimate, without collectives; 0 if it gives none
  compute_seconds: float | None = None
  collective_seconds: float | None = None

  def __add__(self, other: Part) -> Part:
    both = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return Part(*(None if a is None else a + b for a, b in both))


@dataclasses.dataclass(frozen=True)
class Report:
  """Cost report of a step. Bytes and FLOPs are those of one device, a core or a chip: see chips.py.

  Attributes:
    model: name of the model.
    program: one of PROGRAMS.
    platform: the topology, or 'cpu'.
    mesh: devices by axis.
    weights: number of weights, over all devices.
    devices: number of devices.
    batch_tokens: source positions of a batch, and as many target positions, but for 'encode'; without an encoder all.
    counted: name of what batch_tokens counts, such as 'source tokens'.
    rounds: passes over the experts that a MoE layer is assumed to make where no token is dropped (ops/rounds.py).
    trace_seconds: for TensorFlow and JAX.
    compile_seconds: for XLA.
    program_bytes: size of the compiled program's text, which exists whether the program fits or not.
    code_bytes: size of the machine code.
    memory_per_device: see memory.Memory.
    uncounted_loops: number of loops with an unknown trip count, which count once; loops of rounds are not among them.
    largest: the values that take most memory at its peak, largest first.
    collectives: see CollectiveCost.
    collective_counts: executions in a step by kind.
    moe_all_to_alls: most AllToAlls that a MoE layer makes in a round (in 'decode', of a step).
    flops: multiplications and additions of matrix products.
    flops_share_of_peak: flops / (peak FLOP/s * step_seconds_compiler); None if the compiler estimates no cycles.
    parts: costs by the names of PARTS.
    phases: costs by the names of PHASES, and in each by the names of PARTS.
    placements: collectives with the expert axis placed otherwise on the torus; see placements.py. Empty without a chip.
    step_seconds_roofline: seconds of all parts; None without a chip.
    step_seconds_compiler: seconds by the compiler's estimate of its instructions' cycles, and our collective seconds.
    round_seconds_roofline: seconds by which one more round in every MoE layer lengthens step_seconds_roofline.
    round_seconds_compiler: the same for step_seconds_compiler.
    fits: True if the compiler accepts the program.
    refused: the compiler's message if it does not, else ''.
    advice: settings that would make it fit.
  """

  model: str
  program: str
  platform: str
  mesh: str
  weights: int
  devices: int
  batch_tokens: int
  counted: str
  rounds: int
  trace_seconds: float
  compile_seconds: float
  program_bytes: int
  code_bytes: int
  uncounted_loops: int
  memory_per_device: memory.Memory
  largest: list[memory.Held]
  collectives: list[CollectiveCost]
  collective_counts: dict[str, int]
  moe_all_to_alls: int
  flops: int
  flops_share_of_peak: float | None
  parts: dict[str, Part]
  phases: dict[str, dict[str, Part]]
  placements: list[placements.PlacementCost]
  step_seconds_roofline: float | None
  step_seconds_compiler: float | None
  round_seconds_roofline: float | None
  round_seconds_compiler: float | None
  fits: bool
  refused: str
  advice: list[str]

  @property
  def tokens_per_second(self) -> float | None:
    """Source tokens a second, and as many target tokens but for 'encode', at the best estimate of the time; or None."""
    seconds = self.step_seconds_compiler or self.step_seconds_roofline
    return self.batch_tokens / seconds if seconds else None

  def to_json(self) -> dict[str, Any]:
    """Report as plain values, for JSON."""
    values = dataclasses.asdict(self)
    values['largest'] = [held._asdict() for held in self.largest]
    values['collectives'] = [collective._asdict() for collective in self.collectives]
    values['placements'] = [cost._asdict() for cost in self.placements]
    return values


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
    config: configuration of the model; its batch_tokens (of evaluation: eval_batch_tokens) and max_length are the sizes
      of the batch.
    mesh: mesh of as many devices as the topology has.
    topology: a TPU slice; None for virtual devices of this CPU, for which there are no times.
    program: one of PROGRAMS.
    rounds: passes over the experts that a MoE layer makes where no token is dropped; 1 is perfect balance.
  """
  if program != 'train':
    config = at_inference(config, mesh, program)
  compiled = compile_step(config, mesh, topology, program)
  fields = analyze(compiled, config.program(), mesh, topology, rounds)
  fits = not compiled.refused
  return Report(
    model=name,
    program=program,
    platform=str(topology or 'cpu'),
    mesh=str(mesh),
    batch_tokens=next(iter(task_of(config).batch_shapes(training=program == 'train').values())).size,
    counted=task_of(config).token_counts[0].replace('_', ' '),
    fits=fits,
    refused=compiled.refused,
    advice=[] if fits else advice(config, mesh, fields['memory_per_device'], fields['largest'], program),
    **fields,
  )


def at_inference(config: ModelConfig, mesh: Mesh, program: str, batch_tokens: int = 0) -> ModelConfig:
  """Configuration with which a program other than 'train' is compiled; batch_tokens 0: the model's eval_batch_tokens."""
  tokens = batch_tokens or config.eval_batch_tokens or config.batch_tokens
  if program == 'eval':
    return dataclasses.replace(config, eval_batch_tokens=tokens)
  # As in decoding.Translator: results at inference do not depend on the number of groups.
  groups = mesh.size(mesh.spec('G', xla_sharding.ACTIVATIONS)[0])
  return dataclasses.replace(config, num_groups=groups, micro_batches=1, eval_batch_tokens=tokens)


def compile_step(config: ModelConfig, mesh: Mesh, topology: chips.Topology | None, program: str = 'train') -> Compiled:
  """Compiles a program of a model from shapes alone; see `estimate`."""
  runtime = AotRuntime(config.program(), mesh, topology)
  if program == 'train':
    return runtime.train(task_of(config).batch_shapes())
  found = task_of(config).inference_programs()
  if program not in found:
    raise UserError(f'{type(config).__name__} has no --program={program}: use train, {", ".join(found)}')
  chosen, model, theta = found[program], runtime.program.model, runtime.program.theta
  call = lambda weights, batch: chosen.function(model, theta(weights), batch)
  return runtime.function(call, chosen.batch, by_rows=chosen.by_rows)


def analyze(
  compiled: Compiled, program: Program, mesh: Mesh, topology: chips.Topology | None, rounds: int = 1
) -> dict[str, Any]:
  """Fields of a Report that follow from the compiled program."""
  module, chip = hlo.parse(compiled.text), topology.chip if topology else None
  costs = _collectives(module, compiled, mesh, chip, rounds)
  phases = _phases(module, costs, chip, rounds)
  parts = _of_all_phases(phases)
  counts = collections.Counter()
  for cost in costs:
    counts[cost.kind] += cost.count
  flops = sum(part.flops for part in parts.values())
  roofline, estimated = _seconds(parts, costs, chip)
  more_costs = _collectives(module, compiled, mesh, chip, rounds + 1)
  more_parts = _of_all_phases(_phases(module, more_costs, chip, rounds + 1))
  more_roofline, more_estimated = _seconds(more_parts, more_costs, chip)
  loops = ((c, i) for c, i, _ in hlo_loops.executed(module) if i.opcode == 'while')
  return {
    'weights': sum(spec.size for spec in program.weight_specs.values()),
    'devices': mesh.num_devices,
    'rounds': rounds,
    'trace_seconds': compiled.trace_seconds,
    'compile_seconds': compiled.compile_seconds,
    'program_bytes': len(compiled.text),
    'code_bytes': compiled.code,
    'uncounted_loops': sum(hlo_loops.times_run(module, c, i, rounds) is None for c, i in loops),
    'memory_per_device': memory.measure(module, compiled, chip),
    'largest': memory.largest(module),
    'collectives': costs,
    'collective_counts': dict(counts),
    'moe_all_to_alls': _moe_all_to_alls(module),
    'flops': flops,
    'flops_share_of_peak': flops / (chip.flops * estimated) if estimated else None,
    'parts': parts,
    'phases': phases,
    'placements': _placements(module, compiled, mesh, topology, rounds) if topology else [],
    'step_seconds_roofline': roofline,
    'step_seconds_compiler': estimated,
    'round_seconds_roofline': more_roofline - roofline if roofline else None,
    'round_seconds_compiler': more_estimated - estimated if estimated else None,
  }


def _seconds(
  parts: Mapping[str, Part], costs: Sequence[CollectiveCost], chip: Chip | None
) -> tuple[float | None, float | None]:
  """Seconds of a step (by the roofline, at the compiler's estimate of cycles), with the collectives in both."""
  if chip is None:
    return None, None
  communication = sum(cost.seconds for cost in costs)
  computing = sum(part.compute_seconds for part in parts.values())
  cycles = sum(part.cycles for part in parts.values())
  return computing + communication, cycles / chip.clock + communication if chip.clock and cycles else None


def _placements(
  module: Module, compiled: Compiled, mesh: Mesh, topology: chips.Topology, rounds: int
) -> list[placements.PlacementCost]:
  return placements.costs(hlo_collectives.collectives(module, rounds), mesh, topology, compiled.devices)


def _moe_all_to_alls(module: Module) -> int:
  """Most AllToAlls of a MoE layer, each counted once however often the loops around it run."""
  found = hlo_collectives.collectives(module)
  layers = collections.Counter(_layer(collective) for collective in found if collective.kind == 'all-to-all')
  return max((count for layer, count in layers.items() if layer.endswith('/moe')), default=0)


def _layer(collective: hlo_collectives.Collective) -> str:
  layers = {layer_of(name) for name in collective.sources or [collective.instruction.op_name]}
  return next(iter(layers)) if len(layers) == 1 else f'{len(layers)} layers'


def _of_all_phases(phases: Mapping[str, Mapping[str, Part]]) -> dict[str, Part]:
  """Costs by part, summed over phases."""
  return {name: sum((phases[phase][name] for phase in PHASES[1:]), phases[PHASES[0]][name]) for name in PARTS}


def _phases(
  module: Module, costs: Sequence[CollectiveCost], chip: Chip | None, rounds: int
) -> dict[str, dict[str, Part]]:
  """Costs by phase and part. What the compiler rematerialises by itself has instructions named '...remat...'."""
  phases = {phase: {name: Part() for name in PARTS} for phase in PHASES}
  if chip:
    for phase, parts in phases.items():
      for name, part in parts.items():
        alike = (cost.seconds for cost in costs if (cost.phase, cost.part) == (phase, name))
        part.compute_seconds, part.collective_seconds = 0.0, sum(alike)
  for computation, instruction, times in _top_level(module, rounds):
    op_name = _op_name(module, computation, instruction)
    phase = 'rematerialisation' if '.remat' in instruction.name else phase_of(op_name)
    part = phases[phase][part_of(op_name)]
    flops, moved = _flops(module, computation, instruction), traffic(module, computation, instruction)
    part.flops += times * flops
    part.bytes += times * moved
    part.cycles += times * instruction.estimated_cycles
    if chip:
      part.compute_seconds += times * max(flops / chip.flops, moved / chip.hbm_bandwidth)
  return phases


def traffic(module: Module, computation: Computation, instruction: Instruction) -> int:
  """Bytes that an instruction reads from and writes to a device's main memory, in whole tiles.

  For a tensor that is only sliced, or updated in place, only the slice counts.
  """
  if instruction.opcode in _FREE or instruction.opcode.endswith('-done'):
    return 0
  results = instruction.arrays[:1] if instruction.opcode == 'copy-start' else instruction.results
  operands = computation.operands(instruction)
  if instruction.opcode == 'fusion':
    return _fusion_traffic(module, module.computations[instruction.called['calls']], operands, results)
  if instruction.opcode in ('dynamic-slice', 'gather'):
    return 2 * _in_hbm(results)
  if instruction.opcode == 'dynamic-update-slice' and len(operands) > 1:
    return 2 * _in_hbm(operands[1].arrays)
  return _in_hbm(results) + sum(_in_hbm(operand.arrays) for operand in operands if len(operand.arrays) == 1)


def _fusion_traffic(
  module: Module, fused: Computation, operands: Sequence[Instruction], results: Sequence[Array]
) -> int:
  moved = sum(
    min(_in_hbm(operand.arrays), _read(module, fused, parameter.name, _in_hbm(operand.arrays)))
    for parameter, operand in zip(fused.parameters, operands)
  )
  root = fused.root
  roots = [fused.by_name.get(name, root) for name in root.operands] if root.opcode == 'tuple' else [root]
  for array, made in zip(results, roots):
    if array.in_hbm:
      in_place = made.opcode == 'dynamic-update-slice' and made.operands[1] in fused.by_name
      moved += fused.by_name[made.operands[1]].arrays[0].stored if in_place else array.stored
  return moved


def _read(module: Module, fused: Computation, name: str, whole: int) -> int:
  """Bytes that a fused computation reads of one of its values, `whole` bytes large: slices of it, in inner fusions too."""
  total = 0
  for user in fused.instructions:
    for place, operand in enumerate(user.operands):
      if operand != name:
        continue
      if user.opcode in ('dynamic-slice', 'gather') and place == 0:
        total += user.arrays[0].stored
      elif user.opcode == 'bitcast':
        total += _read(module, fused, user.name, whole)
      elif user.opcode == 'fusion':
        inner = module.computations[user.called['calls']]
        total += _read(module, inner, inner.parameters[place].name, whole)
      elif user.opcode != 'dynamic-update-slice' or place != 0:
        total += whole
  return total


def _in_hbm(arrays: Sequence[Array]) -> int:
  return sum(array.stored for array in arrays if array.in_hbm)


def _top_level(module: Module, rounds: int) -> Iterator[tuple[Computation, Instruction, int]]:
  """Yields (computation, instruction, executions), without the instructions inside fusions and without collectives."""
  for computation, instruction, times in hlo_loops.executed(module, rounds):
    if computation.name not in module.fused and not instruction.collective:
      yield computation, instruction, times


def _flops(module: Module, computation: Computation, instruction: Instruction) -> int:
  """FLOPs of one execution, with those of the instructions fused into it."""
  if instruction.opcode != 'fusion':
    return hlo.flops(computation, instruction)
  fused = module.computations[instruction.called['calls']]
  return sum(_flops(module, fused, inner) for inner in fused.instructions)


def _op_name(module: Module, computation: Computation, instruction: Instruction) -> str:
  """Op name of an instruction, for its part: its own, or for a fusion that of the largest matrix product in it.

  An instruction that XLA adds without a name, such as a copy, takes the name of its operand.
  """
  if instruction.opcode == 'fusion':
    fused = module.computations[instruction.called['calls']]
    products = [(_flops(module, fused, inner), _op_name(module, fused, inner)) for inner in fused.instructions]
    flops, op_name = max(products, default=(0, ''))
    if flops:
      return op_name
    if not instruction.op_name:
      return next((inner.op_name for inner in reversed(fused.instructions) if inner.op_name), '')
  if not instruction.op_name and instruction.operands:
    maker = hlo.maker(computation, instruction.operands[0])
    return maker.op_name if maker else ''
  return instruction.op_name


def _collectives(
  module: Module, compiled: Compiled, mesh: Mesh, chip: Chip | None, rounds: int
) -> list[CollectiveCost]:
  alike: dict[tuple, list] = {}
  for collective in hlo_collectives.collectives(module, rounds):
    groups = collective.groups_of(mesh.num_devices)
    axes = axes_of(groups, mesh)
    layer, part = _layer(collective), _collective_part(collective, axes)
    phase = 'update' if part == 'optimiser' else phase_of(collective.instruction.op_name)
    asynchronous = collective.instruction.opcode.endswith('-start')
    key = collective.kind, collective.bytes, axes, layer, part, phase, asynchronous
    seconds = torus.seconds(collective.kind, collective.bytes, groups, compiled.devices, chip) if chip else None
    entry = alike.setdefault(key, [0, 0.0])
    entry[0] += collective.times
    entry[1] = entry[1] + collective.times * seconds if chip else None
  return [
    CollectiveCost(kind, count, size, axes, layer, part, phase, seconds, asynchronous)
    for (kind, size, axes, layer, part, phase, asynchronous), (count, seconds) in alike.items()
  ]


def _collective_part(collective: hlo_collectives.Collective, axes: Sequence[str]) -> str:
  """Part of a collective: that of its op name, but for two cases.

  A sum of gradients (and of statistics with them) over devices with different data counts as 'optimiser'. An AllToAll
  in a MoE layer is between groups and experts, whatever op it is named after, and counts as 'dispatch/combine'.
  """
  op_name = collective.instruction.op_name
  is_sum = collective.kind in ('all-reduce', 'reduce-scatter') and 'model' not in axes
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
