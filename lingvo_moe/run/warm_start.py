"""First state of a run: its own last checkpoint, or weights of another run (--init_from)."""

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.layers.gates.gate import is_gate_weight
from lingvo_moe.layers.lora import is_adapter, part
from lingvo_moe.run import checkpoint, imported_form
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.run.process_group import ProcessGroup
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime import slices
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.storage import files, json_files, log_directory
from lingvo_moe.tasks.task import Task, task_of

_Load = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Any]]  # of tensors in a checkpoint, by their shapes


def note(run: RunDir, source: str) -> None:
  """Notes in a log directory which weights its run begins with, should it end before its first checkpoint."""
  if run.checkpoints().steps():
    return
  prefix = find(source)
  files.write(run.file(log_directory.INIT_FROM), json_files.dump({'source': files.absolute(prefix)}))
  imported_form.keep(run, run_around(prefix))


def noted(run: RunDir) -> str:
  """Text that `note` wrote; '' if none."""
  path, way_out = run.file(log_directory.INIT_FROM), 'give --init_from, or another --logdir'
  read = json_files.read_if_any(path, 'what the trainer wrote', way_out, source=json_files.TEXT)
  return read['source'] if read else ''


def restore_or_init(
  runtime: Runtime, run: RunDir, checkpoints: Checkpoints, task: Task, init_from: str | None, group: ProcessGroup
) -> bool:
  """Restores the newest checkpoint; without one, initialises. Returns whether it restored.

  A new run begins with the weights of `init_from`, or of the source that it was begun with.
  """
  group.on_leader(checkpoints.sweep)
  latest = checkpoints.latest()
  if latest is not None:
    where = f'step {latest}'
    if latest == 0 and files.exists(run.file(log_directory.IMPORTED)):  # it has weights alone
      runtime.init()
      shapes = {name: spec.shape for name, spec in runtime.program.weight_specs.items()}
      runtime.load({**runtime.state(), 'weights': checkpoints.restore(0, shapes)})
      where = 'the weights that were imported'
    else:
      resume(runtime, checkpoints, latest)
    ignored = f'; --init_from={init_from} is for new runs and is ignored' if init_from else ''
    group.say(f'going on from {where}{ignored}')
    return True
  runtime.init()
  source = init_from or noted(run)
  if source and not init_from:
    group.say(f'{run.path} has no checkpoint yet and was begun with --init_from={source}, so its weights are taken')
  if source:
    try:
      group.say(take_weights(runtime, source, task))
    except UserError:
      if init_from and group.is_leader:
        files.remove(run.file(log_directory.INIT_FROM))
      raise
  return False


def resume(runtime: Runtime, checkpoints: Checkpoints, step: int) -> None:
  """Loads the whole state of a checkpoint of this run."""
  program = runtime.program
  weights = {name: spec.shape for name, spec in program.weight_specs.items()}
  slots = {name: spec.shape for name, spec in program.slot_specs.items()}
  tensors = checkpoints.restore(step, {'step': (), **weights, **slices.named_slots(slots)})
  runtime.load(
    {'step': tensors['step'], 'weights': {name: tensors[name] for name in weights}, 'slots': slices.slots_of(tensors)}
  )


def take_weights(runtime: Runtime, source: str, task: Task) -> str:
  """Loads every weight that `source` has under the same name and shape; returns which were and were not taken, as text.

  Of a weight whose rows are pieces of another vocabulary, the rows of pieces that both vocabularies have are taken. The
  other rows keep their initial values. A MoE layer begins as the dense feed-forward layer that is in its place there,
  with every expert a copy of it (Komatsuzaki et al., Sparse Upcycling, arXiv 2212.05055), where experts are of its
  kind; shared experts then begin with outputs of 0. Biases of the dense layer are copied if experts have biases
  (expert_bias). With a gate whose weights do not sum to 1 for each token, such as Switch's or expert choice, the layer
  begins as a scaled one. Adapters of the other run are merged into its weights.

  Args:
    runtime: initialised; what is not taken stays as it is. The step stays 0 and the slots empty.
    source: a log directory (its best checkpoint, else its latest), or a checkpoint's directory or prefix in one.
    task: of this run. Weights that mean something else in the other run, such as embeddings of another vocabulary,
      are not taken.
  """
  prefix = find(source)
  specs = runtime.program.model_specs
  stored = {name: shape for name, shape in checkpoint.shapes(prefix).items() if not slices.is_slot(name)}
  other = _task_of(prefix)
  if adapters := {name for name in stored if is_adapter(name)}:
    if not other:
      raise UserError(f'the run around a checkpoint says how its adapters are merged; {prefix} has none: give the run')
    stored = {name: shape for name, shape in stored.items() if name not in adapters}
  load = functools.partial(checkpoint.load, prefix, merge=other and other.config.program().lora)
  foreign = task.foreign_weights(other) if other else {}
  is_foreign = lambda name: name in foreign or name.split('/')[0] in foreign
  fits = lambda name, shape: all(stored.get(n) == s for n, s in checkpoint.by_layer({name: shape}).items())
  taken = {name: spec.shape for name, spec in specs.items() if fits(name, spec.shape) and not is_foreign(name)}
  tables, counts = _shared_rows(runtime, load, stored, foreign)
  copies = _copies_of_dense(load, specs, taken, fits)
  expert, dense = getattr(task.config, 'expert', 'relu'), getattr((other or task).config, 'activation', 'relu')
  other_kind = bool(copies) and expert != dense
  if other_kind:
    copies = {}
  outputs = [name for name in specs if name.endswith('/shared/wo') and name.replace('/shared/wo', '/wo') in copies]
  silent = {name: np.broadcast_to(np.float32(0), specs[name].shape) for name in outputs}
  if not taken:
    raise UserError(
      f'--init_from={source}: no weight of this model has its name and shape in {prefix}; '
      'give a checkpoint of a model that shares some'
    )
  state = runtime.state()
  runtime.load({**state, 'weights': {**state['weights'], **load(taken), **tables, **copies, **silent}})
  lines = [f'--init_from: {len(taken)} of {len(specs)} weights taken from {prefix}']
  if copies:
    lines.append(f'  upcycled: {len(copies)} weights of MoE layers copied from dense layers in their places')
  if silent:
    lines.append(f'  shared experts of {len(silent)} layers begin with outputs of 0')
  if other_kind:
    lines.append(f'  not upcycled: experts are {expert!r}, and the dense layers in their places {dense!r}')
  missing = {name: spec.shape for name, spec in specs.items() if name not in {*taken, *copies, *silent}}
  adapted = runtime.program.adapter_specs
  if adapted and (odd := next((name for name in missing if part(name, 'a') not in adapted), None)):
    raise UserError(
      f'with lora_rank a weight without adapters stays as it begins; {odd} is not in {prefix} and would stay random: '
      'add it to lora_matrices, or train all weights first'
    )
  for name, shape in sorted(checkpoint.by_layer(missing).items()):
    why = 'is not there'
    if name in stored:
      why = f'has shape {stored[name]} there, {shape} here'
    is_gate = is_gate_weight(name.rpartition('/')[2])
    if is_foreign(name) and (name in stored or not is_gate):
      why = 'is of other tasks' if is_gate else 'belongs to another vocabulary'
    if name in counts:
      shared = 'tasks that both gates' if is_gate else 'pieces that both vocabularies'
      why += f', but {counts[name]} of its {missing[name][0]} rows are: those of {shared} have'
    lines.append(f'  not taken: {name} {why}')
  ours = checkpoint.by_layer({name: spec.shape for name, spec in specs.items()})
  copied = checkpoint.by_layer({_in_dense(name): _without_experts(specs[name]) for name in copies})
  unused = sorted(set(stored) - set(ours) - set(copied) - {'step'})
  lines += [f'  not used: {name}' for name in unused]
  return '\n'.join(lines)


def _copies_of_dense(
  load: _Load, specs: Mapping[str, WeightSpec], taken: Collection[str], fits: Callable[[str, tuple], bool]
) -> dict[str, np.ndarray]:
  """Weights of MoE layers where a checkpoint has a dense layer of the same sizes, as views, which take no memory."""
  copies = {}
  for name, spec in specs.items():
    dense, shape = _in_dense(name), _without_experts(spec)
    if name not in taken and dense != name and fits(dense, shape):
      value = load({dense: shape})[dense][...]
      if 'E' in spec.dims:
        value = np.expand_dims(value, spec.dims.index('E'))
      copies[name] = np.broadcast_to(value, spec.shape)
  return copies


def _in_dense(name: str) -> str:
  """The name of a MoE layer's weight in a dense feed-forward layer."""
  return name.replace('/moe/', '/ffn/')


def _without_experts(spec: WeightSpec) -> tuple[int, ...]:
  return tuple(size for size, letter in zip(spec.shape, spec.dims, strict=True) if letter != 'E')


def _task_of(prefix: str) -> Task | None:
  """The task of the run around a checkpoint, if there is one."""
  run = run_around(prefix)
  return task_of(run.load()[1]) if run.exists else None


def run_around(prefix: str) -> RunDir:
  """The log directory around a checkpoint."""
  return RunDir(os.path.dirname(os.path.dirname(os.path.dirname(files.absolute(prefix)))))


def _shared_rows(
  runtime: Runtime,
  load: _Load,
  stored: Mapping[str, tuple[int, ...]],
  rows: Mapping[str, tuple[Sequence[int], Sequence[int]]],
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
  """Initial values with the rows that a checkpoint shares, by weight; and how many these are."""
  program = runtime.program
  tables, counts = {}, {}
  for name, spec in program.model_specs.items():
    ours, theirs = rows.get(name, rows.get(name.split('/')[0], ((), ())))
    same_width = name in stored and spec.dims[0] in 'VP' and stored[name][1:] == spec.shape[1:]
    if same_width and len(ours):
      table = np.array(weights_lib.initialize({name: spec}, program.seed)[name])
      table[ours] = load({name: stored[name]})[name][...][theirs]
      tables[name], counts[name] = table, len(ours)
  return tables, counts


def find(source: str) -> str:
  """The prefix of the checkpoint that a log directory, a checkpoint's directory or a prefix names."""
  source = files.plain(source)
  if files.exists(source + '.index'):
    return source
  if files.exists(os.path.join(source, 'state.index')):
    return os.path.join(source, 'state')
  checkpoints = RunDir(source).checkpoints()
  best = checkpoints.best()
  step = best.step if best else checkpoints.latest()
  if step is None:
    raise UserError(f'there is no checkpoint in {source}: give a log directory, or <logdir>/checkpoints/step_<N>')
  return checkpoints.path(step)
