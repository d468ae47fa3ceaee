"""Export of weights as safetensors: of an imported model in the folder's form that it came in, of any by our names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import numpy as np
import safetensors.numpy

from lingvo_moe.core import files, json_files, log_directory
from lingvo_moe.core.errors import UserError
from lingvo_moe.interop import families
from lingvo_moe.interop.hub_folder import INDEX, TYPES, WHOLE, HubFolder
from lingvo_moe.run import checkpoint
from lingvo_moe.run.rundir import RunDir

_SHARD_BYTES = 2 << 30  # of a file, and of what is held in memory
_TYPES = [[dtype] for dtype in TYPES]
_TENSOR = json_files.Kind(
  'a type and sizes',
  lambda value: isinstance(value, list) and value[:1] in _TYPES and all(type(n) is int and n >= 0 for n in value[1:]),
)

Named = Iterator[tuple[str, np.ndarray]]


def require(run: RunDir) -> None:
  """Raises UserError unless the run was imported, so that it has a form there."""
  if not files.exists(run.file(log_directory.IMPORTED)):
    raise UserError(
      f'a run that was imported goes back to the form that it came in; {run.path} was begun here, and no public class '
      'has its layers: use --format=safetensors for its weights by our names'
    )


def save_hub_folder(folder: str, run: RunDir, step: int) -> None:
  """Writes the model as its own implementation reads it: config.json, tokeniser, weights in the types they came in.

  Import of the folder gives the same checkpoint, where types are float32.
  """
  kind = json_files.by_name(_TENSOR)
  note = json_files.read(run.file(log_directory.IMPORTED), 'what an import wrote', 'import it again', tensors=kind)
  original = HubFolder(run.file(log_directory.ORIGINAL))
  imported = families.convert(original)
  stored = run.checkpoints().restore(step, _shapes(run))
  entries = {entry.theirs: entry for entry in imported.entries}

  def tensors() -> Named:
    for name, (dtype, *shape) in note['tensors'].items():
      if (entry := entries.get(name)) is None:
        continue  # computed there
      weight = np.zeros(shape, np.float32)
      if entry.ours:
        e = entry.expert
        weight = stored[entry.ours][...] if e is None else stored[entry.ours][e : e + 1][0]
        weight = entry.outwards(weight, shape, imported.symbols)
      yield name, np.ascontiguousarray(weight.astype(TYPES[dtype]))

  _save(folder, tensors())
  for name in os.listdir(original.path):
    shutil.copy(original.file(name), folder)


def save_weights(folder: str, run: RunDir, step: int) -> None:
  """Writes the weights under the names that they have in a checkpoint, and config.json."""
  shapes = _shapes(run)
  stored = run.checkpoints().restore(step, shapes)
  _save(folder, ((name, stored[name][...]) for name in shapes))
  shutil.copy(run.config_file, folder)


def _shapes(run: RunDir) -> dict[str, tuple[int, ...]]:
  """Shapes of the weights, by the names that they have in a checkpoint."""
  _, config = run.load()
  return checkpoint.by_layer({name: spec.shape for name, spec in config.program().weight_specs.items()})


def _save(folder: str, tensors: Named) -> None:
  """Writes tensors to one file, or to several of at most _SHARD_BYTES with an index."""
  shards, held = [], {}

  def flush():
    shards.append(list(held))
    name = f'model-{len(shards):05d}.safetensors'
    safetensors.numpy.save_file(held, os.path.join(folder, name), metadata={'format': 'pt'})
    held.clear()

  total = 0
  for name, tensor in tensors:
    if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > _SHARD_BYTES:
      flush()
    held[name] = tensor
    total += tensor.nbytes
  flush()
  if len(shards) == 1:
    os.rename(os.path.join(folder, 'model-00001.safetensors'), os.path.join(folder, WHOLE))
    return
  weight_map = {}
  for number, names in enumerate(shards, 1):
    file = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
    os.rename(os.path.join(folder, f'model-{number:05d}.safetensors'), os.path.join(folder, file))
    weight_map |= dict.fromkeys(names, file)
  index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
  files.write(os.path.join(folder, INDEX), json_files.dump(index, indent=2))
