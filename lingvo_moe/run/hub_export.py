"""Export of weights as safetensors: of an imported model in the folder's form that it came in, of any by our names."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from lingvo_moe.core import configuration, files, json_files, log_directory
from lingvo_moe.core.errors import UserError
from lingvo_moe.interop import families
from lingvo_moe.interop.hub_folder import INDEX, TYPES, WHOLE, HubFolder
from lingvo_moe.run import checkpoint
from lingvo_moe.run.rundir import RunDir

_SHARD_BYTES = 2 << 30  # of a file
_PART = checkpoint.PART_BYTES // 4  # elements that are read at once of weights that can be read so
_TYPES = [[dtype] for dtype in TYPES]
_TENSOR = json_files.Kind(
  'a type and sizes',
  lambda value: isinstance(value, list) and value[:1] in _TYPES and all(type(n) is int and n >= 0 for n in value[1:]),
)


def require(run: RunDir) -> None:
  """Raises UserError unless the run was imported, so that it has a form there."""
  if not files.exists(run.file(log_directory.IMPORTED)):
    raise UserError(
      f'a run that was imported goes back to the form that it came in; {run.path} was begun here, and no public class '
      'has its layers: use --format=safetensors for its weights by our names'
    )


def keep_form(run: RunDir, source: RunDir) -> None:
  """Copies the form that a run was imported in to one that has its weights, where the model is the same."""
  if not files.exists(source.file(log_directory.IMPORTED)):
    return
  of_folder = families.convert(HubFolder(source.file(log_directory.ORIGINAL))).values

  def facts(run):
    _, config = run.load()
    shapes = checkpoint.by_layer({name: spec.shape for name, spec in config.program().model_specs.items()})
    values = [getattr(config, name) for name in of_folder if not name.endswith('dropout')]
    return shapes, values, configuration.fingerprints(run.config_file)

  if facts(run) == facts(source):
    names = [os.path.join(log_directory.ORIGINAL, name) for name in files.listdir(source.file(log_directory.ORIGINAL))]
    files.makedirs(run.file(log_directory.ORIGINAL))
    for name in (*names, log_directory.IMPORTED):
      files.write(run.file(name), files.read(source.file(name)))


def save_hub_folder(folder: str, run: RunDir, step: int) -> None:
  """Writes the model as its own implementation reads it: config.json, tokeniser, weights in the types they came in.

  Import of the folder gives the same checkpoint, where types are float32.
  """
  kind = json_files.by_name(_TENSOR)
  note = json_files.read(run.file(log_directory.IMPORTED), 'what an import wrote', 'import it again', tensors=kind)
  original = HubFolder(run.file(log_directory.ORIGINAL))
  imported = families.convert(original)
  weights = run.checkpoints().merged(step, run.load()[1])
  entries = {entry.theirs: entry for entry in imported.entries}

  kinds = {name: kind for name, kind in note['tensors'].items() if name in entries}  # others are computed there

  def read(name: str) -> Iterator[np.ndarray]:
    entry, shape = entries[name], kinds[name][1:]
    if not entry.ours:
      yield np.zeros(shape, np.float32)
    elif entry.kind == 'symbols':
      size = imported.symbols.size
      for rows, *_ in checkpoint.blocks((size, math.prod(shape) // size), _PART):
        yield imported.symbols.outwards(weights[entry.ours].__getitem__, rows)
    else:
      e = entry.expert
      weight = weights[entry.ours][...] if e is None else weights[entry.ours][e : e + 1][0]
      yield entry.outwards(weight, shape, imported.symbols)

  _save(folder, kinds, read)
  for name in os.listdir(original.path):
    shutil.copy(original.file(name), folder)


def save_weights(folder: str, run: RunDir, step: int) -> None:
  """Writes the weights under the names that they have in a checkpoint, and config.json."""
  weights = run.checkpoints().merged(step, run.load()[1])
  read = lambda name: map(weights[name].__getitem__, checkpoint.blocks(weights[name].shape, _PART))
  _save(folder, {name: ('F32', *stored.shape) for name, stored in weights.items()}, read)
  shutil.copy(run.config_file, folder)


def _save(folder: str, kinds: Mapping[str, Sequence], read: Callable[[str], Iterable[np.ndarray]]) -> None:
  """Writes tensors, one after the other, to a file, or to several of at most _SHARD_BYTES with an index.

  Args:
    folder: path of a folder that is there.
    kinds: by name, the type that safetensors calls so, and the sizes.
    read: function that gives a tensor by name, in parts that follow each other.
  """
  size = lambda name: np.dtype(TYPES[kinds[name][0]]).itemsize * math.prod(kinds[name][1:])
  shards, filled = [[]], 0
  for name in sorted(kinds, key=lambda name: kinds[name][0] != 'F32'):  # wide types first, so that all are aligned
    if filled and filled + size(name) > _SHARD_BYTES:
      shards, filled = [*shards, []], 0
    shards[-1].append(name)
    filled += size(name)
  several = len(shards) > 1
  weight_map = {}
  for number, names in enumerate(shards, 1):
    file = f'model-{number:05d}-of-{len(shards):05d}.safetensors' if several else WHOLE
    ends = [0, *itertools.accumulate(map(size, names))]
    header = {'__metadata__': {'format': 'pt'}}
    for name, offsets in zip(names, itertools.pairwise(ends), strict=True):
      header[name] = {'dtype': kinds[name][0], 'shape': kinds[name][1:], 'data_offsets': offsets}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(os.path.join(folder, file), 'wb') as f:
      f.write(len(text).to_bytes(8, 'little') + text)
      for name in names:
        for part in read(name):
          part.astype(TYPES[kinds[name][0]], copy=False).tofile(f)
    weight_map |= dict.fromkeys(names, file)
  if several:
    index = {'metadata': {'total_size': sum(map(size, kinds))}, 'weight_map': weight_map}
    files.write(os.path.join(folder, INDEX), json_files.dump(index, indent=2))
