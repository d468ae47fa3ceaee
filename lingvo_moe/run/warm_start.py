"""First state of a run: its own last checkpoint, or weights of another run (--init_from)."""

from __future__ import annotations

import os

from lingvo_moe.core.errors import UserError
from lingvo_moe.run import checkpoint
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime import pieces
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.tasks.task import TaskConfig
from lingvo_moe.tasks.task import Vocabs


def resume(runtime: Runtime, checkpoints: checkpoint.Checkpoints, step: int) -> None:
  """Loads the whole state of a checkpoint of this run."""
  program = runtime.program
  weights = {name: spec.shape for name, spec in program.weight_specs.items()}
  slots = {name: spec.shape for name, spec in program.slot_specs.items()}
  slots = dict(zip(pieces.slot_names(slots), slots.values(), strict=True))
  tensors = checkpoints.restore(step, {'step': (), **weights, **slots})
  runtime.load(
    {
      'step': tensors['step'],
      'weights': {name: tensors[name] for name in weights},
      'slots': pieces.slots_of(tensors),
    }
  )


def take_weights(runtime: Runtime, source: str, config: TaskConfig, vocabs: Vocabs) -> str:
  """Loads every weight that `source` has under the same name and shape; returns which were and were not taken, as text.

  Args:
    runtime: initialised; what is not taken stays as it is. The step stays 0 and the slots empty.
    source: a log directory (its best checkpoint, else its latest), or a checkpoint's directory or prefix in one.
    config: of this run. Weights that mean something else in the other run, such as embeddings of another vocabulary,
      are not taken.
    vocabs: of this run.
  """
  prefix = find(source)
  specs = runtime.program.weight_specs
  there = {name: shape for name, shape in checkpoint.shapes(prefix).items() if not pieces.is_slot(name)}
  foreign = _foreign_weights(prefix, config, vocabs)
  is_there = lambda name, shape: all(there.get(n) == s for n, s in checkpoint.by_layer({name: shape}).items())
  taken = {
    name: spec.shape for name, spec in specs.items() if is_there(name, spec.shape) and name.split('/')[0] not in foreign
  }
  if not taken:
    raise UserError(
      f'--init_from={source}: no weight of this model has its name and shape in {prefix}; '
      'give a checkpoint of a model that shares some'
    )
  state = runtime.state()
  runtime.load({**state, 'weights': {**state['weights'], **checkpoint.load(prefix, taken)}})
  lines = [f'--init_from: {len(taken)} of {len(specs)} weights taken from {prefix}']
  missing = {name: spec.shape for name, spec in specs.items() if name not in taken}
  for name, shape in sorted(checkpoint.by_layer(missing).items()):
    why = 'is not there'
    if name in there:
      why = f'has shape {there[name]} there, {shape} here'
    if name.split('/')[0] in foreign:
      why = 'belongs to another vocabulary'
    lines.append(f'  not taken: {name} {why}')
  ours = checkpoint.by_layer({name: spec.shape for name, spec in specs.items()})
  unused = sorted(set(there) - set(ours) - {'step'})
  lines += [f'  not used: {name}' for name in unused]
  return '\n'.join(lines)


def _foreign_weights(prefix: str, config: TaskConfig, vocabs: Vocabs) -> set[str]:
  """First parts of names of weights that mean something else there, as far as the run around the checkpoint tells."""
  run = RunDir(os.path.dirname(os.path.dirname(os.path.dirname(prefix))))
  return config.foreign_weights(vocabs, run.load()[1]) if run.exists else set()


def find(source: str) -> str:
  """The prefix of the checkpoint that a log directory, a checkpoint's directory or a prefix names."""
  if os.path.exists(source + '.index'):
    return source
  if os.path.exists(os.path.join(source, 'state.index')):
    return os.path.join(source, 'state')
  checkpoints = RunDir(source).checkpoints()
  best = checkpoints.best()
  step = best[0] if best else checkpoints.latest()
  if step is None:
    raise UserError(f'there is no checkpoint in {source}: give a log directory, or <logdir>/checkpoints/step_<N>')
  return checkpoints.path(step)
