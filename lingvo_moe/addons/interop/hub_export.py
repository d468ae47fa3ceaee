"""Export of weights as safetensors: of an imported model in the folder's form that it came in, of any by our names."""

import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from lingvo_moe.addons.interop import families, importing
from lingvo_moe.addons.interop.hub_folder import INDEX, TYPES, WHOLE, HubFolder
from lingvo_moe.addons.interop.tensor_table import Imported
from lingvo_moe.config import same_function
from lingvo_moe.core.errors import UserError, listed
from lingvo_moe.run import checkpoint
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.storage import files, json_files, log_directory
from lingvo_moe.tasks.task import TaskConfig

_SHARD_BYTES = 2 << 30  # of a file
_PART = checkpoint.PART_BYTES // 4  # elements that are read at once of weights that can be read so
_TYPES = [[dtype] for dtype in TYPES]
_TENSOR = json_files.Kind(
  'a type and sizes',
  lambda value: isinstance(value, list) and value[:1] in _TYPES and all(type(n) is int and n >= 0 for n in value[1:]),
)


def require(run: RunDir) -> None:
  """Raises UserError unless the run has a form there: one that it came in, or a public class that holds its layers."""
  with tempfile.TemporaryDirectory() as folder:
    _write_form(folder, run)


def _write_form(folder: str, run: RunDir) -> tuple[Imported, dict[str, list]]:
  """Writes config.json and the tokeniser; returns what an import makes of them, and types and sizes of the tensors."""
  if files.exists(run.file(log_directory.IMPORTED)):
    kind = json_files.by_name(_TENSOR)
    note = json_files.read(run.file(log_directory.IMPORTED), 'what an import wrote', 'import it again', tensors=kind)
    for name in files.listdir(original := run.file(log_directory.ORIGINAL)):
      files.write(os.path.join(folder, name), files.read(os.path.join(original, name)))
    imported = families.convert(HubFolder(folder), note['tensors'])
    used = {entry.theirs for entry in imported.entries}
    return imported, {name: kind for name, kind in note['tensors'].items() if name in used}  # others are computed there
  _, config = run.load()
  reasons = []
  for architecture, made in families.forms(config):
    for name, content in made.items():
      text = content if isinstance(content, bytes) else json.dumps(content, indent=2, ensure_ascii=False).encode()
      files.write(os.path.join(folder, name), text)
    try:
      imported, same = importing.read(folder, tensors=())[1:]
      if same_function.is_same(config, same):
        return imported, _kinds(imported, same)
      odd = same_function.differing(config, same)
    except UserError as e:
      odd = str(e)
    reasons.append(f'{architecture} has others ({odd})')
    for name in made:
      os.remove(os.path.join(folder, name))
  raise UserError(
    f'a run that was not imported goes out where a public class has its layers; of {run.path}, '
    f'{"; ".join(reasons) or "no class has any"}: use --format=safetensors for its weights by our names'
  )


def _kinds(imported: Imported, config: TaskConfig) -> dict[str, list]:
  """Types and sizes of the tensors of a model of this package."""
  specs = importing.specs_by_layer(config)
  shape = lambda e: e.shape_there(specs[e.ours], imported.symbols) if e.ours else [config.model_dim]
  return {entry.theirs: ['F32', *shape(entry)] for entry in imported.entries}


def save_hub_folder(folder: str, run: RunDir, step: int) -> None:
  """Writes the model as its own implementation reads it: config.json, tokeniser, weights in the types they came in.

  Import of the folder gives the same checkpoint, where types are float32.
  """
  imported, kinds = _write_form(folder, run)
  weights = run.checkpoints().merged(step, run.load()[1])
  entries = {entry.theirs: entry for entry in imported.entries}
  if unread := sorted({*weights} - {entry.ours for entry in imported.entries}):
    raise UserError(f'{run.path} has weights that the class has not ({listed(unread)}): use --format=safetensors')

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
