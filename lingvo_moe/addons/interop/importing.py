"""Import of a public checkpoint: makes a log directory of a model's folder, and a folder of such a run.

The run has the configuration, the vocabularies and one checkpoint, of step 0, as any other; and what an export needs:
imported.json, and the configuration and the tokeniser's files of the folder in original/.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.addons.interop import config_keys, families, vocabulary
from lingvo_moe.addons.interop.hub_folder import SETTINGS, TYPES, HubFolder
from lingvo_moe.addons.interop.tensor_table import Imported, Symbols
from lingvo_moe.config import configuration, registry
from lingvo_moe.config import settings as settings_lib
from lingvo_moe.core import errors
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError, listed
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.program import Program
from lingvo_moe.run import checkpoint
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.slices import Slice
from lingvo_moe.search import repetition
from lingvo_moe.storage import files, json_files, log_directory, new_folder
from lingvo_moe.tasks.task import TaskConfig, task_of

_VOCABULARIES = {'source_vocab': 'source.model', 'target_vocab': 'target.model', 'vocab': 'pieces.model'}
# Of generation_config.json: what has its place here without a value being read.
_DONE = re.compile(r'_.*|transformers_version|(pad|bos|sep|forced_eos)_token_id|max_length|use_cache')
_SYMBOLS = ('decoder_start_token_id', 'eos_token_id')  # whose values are those of config.json
_IDS = json_files.list_of(json_files.INTEGER)
_GENERATION = {
  'bad_words_ids': json_files.optional(json_files.list_of(_IDS)),
  'suppress_tokens': json_files.optional(_IDS),
  'num_beams': json_files.optional(config_keys.whole(1, 1000)),
  'length_penalty': json_files.optional(config_keys.number(-math.inf)),
  'early_stopping': json_files.optional(config_keys.one_of(*config_keys.EARLY_STOPPING.values())),
  'repetition_penalty': json_files.optional(config_keys.number(1e-6, repetition.MOST[0])),
  'no_repeat_ngram_size': json_files.optional(config_keys.whole(0, repetition.MOST[1])),
}


def import_folder(path: str, out: str, settings: Sequence[str] = (), origin: str = '') -> tuple[str, TaskConfig]:
  """Makes a log directory of a model's folder, whole or not at all; returns (model name, configuration).

  Memory holds one tensor, or a part of a large table of symbols, and its copy in the order and type that it has here.
  The run notes where the model is from: `origin`, or the folder.

  Raises:
    UserError: `out` exists, or the folder is damaged, incomplete, or of a model that is not known here.
  """
  new_folder.check(out, 'an imported model', '--logdir')
  folder, imported, config = read(path, settings)
  shapes = _shapes(folder, imported, config)
  if unread := ', '.join(imported.unread):
    print(f'{folder.file("config.json")}: not read here, as by the public class: {unread}', file=sys.stderr)
  odd = []
  with new_folder.writing(out) as partial:
    run = RunDir(partial)
    os.makedirs(run.vocab_dir)
    vocabs = {field: os.path.join(run.vocab_dir, _VOCABULARIES[field]) for field in imported.vocabularies}
    for field, vocab in vocabs.items():
      files.write(vocab, imported.vocabularies[field])
    config = configuration.resolve(imported.model, base=config, **vocabs)
    _ = task_of(config).vocabs  # refuses what does not fit
    run.write_config(imported.model, config)
    _write_weights(run, itertools.chain(_slices(folder, imported, shapes, odd), _adapters(config.program())))
    os.makedirs(run.file(log_directory.ORIGINAL))
    for name in (*SETTINGS, *imported.tokeniser):
      if os.path.exists(folder.file(name)):
        shutil.copy(folder.file(name), run.file(log_directory.ORIGINAL))
    note = {'of': origin or os.path.abspath(path), 'architecture': folder.config['architectures'][0]}
    tensors = {name: [info.dtype, *info.shape] for name, info in folder.tensors.items() if info.dtype in TYPES}
    files.write(run.file(log_directory.IMPORTED), json_files.dump({**note, 'tensors': tensors}))
    run.finish(0, 'imported')
  if odd:
    print(f'{path} has weights that are NaN or infinite, and answers may be too: {listed(odd)}', file=sys.stderr)
  return imported.model, config


def read(
  path: str, settings: Sequence[str] = (), tensors: Collection[str] | None = None
) -> tuple[HubFolder, Imported, TaskConfig]:
  """A model's folder, what its family makes of it, and the configuration, without the names of vocabularies.

  `tensors` are the names of those of a folder without weights.
  """
  folder = HubFolder(path)
  imported = families.convert(folder, tensors)
  return folder, imported, _config(folder, imported, settings)


def read_weights(path: str) -> dict[str, np.ndarray]:
  """All weights of a model's folder, by the names that they have in a checkpoint."""
  folder, imported, config = read(path)
  shapes = _shapes(folder, imported, config)
  weights = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
  for part in _slices(folder, imported, shapes, []):
    weights[part.name][tuple(slice(i, i + n) for i, n in zip(part.begin, part.value.shape, strict=True))] = part.value
  return weights


def pieces(path: str) -> list[str]:
  """Source pieces of a model's folder, in the order of ids here."""
  model, *_ = read(path)[1].vocabularies.values()
  return vocabulary.pieces(model)


def _shapes(folder: HubFolder, imported: Imported, config: TaskConfig) -> dict[str, tuple[int, ...]]:
  """Shapes of the weights by the names that they have in a checkpoint, which the folder's tensors fit."""
  specs = specs_by_layer(config)
  _check_tensors(folder, imported, specs)
  return {name: spec.shape for name, spec in specs.items()}


def specs_by_layer(config: TaskConfig) -> dict[str, WeightSpec]:
  """Specifications of the weights by the names that they have in a checkpoint."""
  return weights_lib.flatten(dataclasses.replace(config, scan_layers=False).model().weights())


def _config(folder: HubFolder, imported: Imported, settings: Sequence[str]) -> TaskConfig:
  size = len(imported.symbols.theirs)
  sizes = {field.replace('vocab', 'vocab_size'): size for field in imported.vocabularies}
  search, forbidden = _generation(folder, imported.symbols)
  values = {**imported.values, **sizes, 'masked_symbols': tuple(sorted({*imported.symbols.masked, *forbidden}))}
  chosen = settings_lib.read(registry.get(imported.model), settings)
  values |= dict.fromkeys(imported.vocabularies, '')  # named when they are written
  if odd := next((field for field in chosen if chosen[field] != values.get(field, chosen[field])), None):
    raise UserError(f'{odd} of an imported model is that of its folder; saw --set {odd}={chosen[odd]!r}: leave it out')
  values = {**{name: value for name, value in search.items() if name not in chosen}, **values}
  return configuration.resolve(imported.model, settings=settings, **values)


def _generation(folder: HubFolder, symbols: Symbols) -> tuple[dict[str, Any], list[int]]:
  """Values of generation_config.json by the fields of search, and ids here that it forbids; prints what has no effect.

  Without that file they are those of config.json, as in the public class. Its pad and begin symbol are no part of an
  answer anyway, an end is forced at the limit of length, and the language of a translation forces its first symbol.
  """
  name = 'generation_config.json' if folder.has('generation_config.json') else 'config.json'
  path, generation_config = folder.file(name), folder.json(name, **_GENERATION)
  keys = config_keys.GENERATION if name == 'config.json' else generation_config
  stated = {key: generation_config[key] for key in keys if generation_config.get(key) is not None}
  search = {'length_norm_alpha': stated.pop('length_penalty', 1.0), 'length_norm_k': 0.0}
  if beams := stated.pop('num_beams', 0):
    search['beam_size'] = beams
  if rule := stated.pop('early_stopping', False):  # their default, which may end sooner, is exact here
    search['early_stopping'] = next(ours for ours, theirs in config_keys.EARLY_STOPPING.items() if theirs == rule)
  search |= {name: stated.pop(name) for name in repetition.FIELDS if name in stated}
  same = {**config_keys.GENERATION, **{key: folder.config.get(key) for key in _SYMBOLS}}
  stated = {key: value for key, value in stated.items() if value != same.get(key)}
  words = stated.get('bad_words_ids') or []
  single = {word[0] for word in words if len(word) == 1} - {*symbols.special[:3]}
  if max(map(len, words), default=1) == 1:
    stated.pop('bad_words_ids', None)
  single |= {*(stated.pop('suppress_tokens', None) or ())}
  if unknown := {name: stated[name] for name in stated if stated[name] and not _DONE.fullmatch(name)}:
    print(f'{path}: without effect here: {json.dumps(unknown)}', file=sys.stderr)
  return search, [here for here, there in enumerate(symbols.theirs) if there in single]


def _check_tensors(folder: HubFolder, imported: Imported, specs: Mapping[str, WeightSpec]) -> None:
  """Refuses a tensor that is left over, or of another type, shape or contents than the configuration says.

  Integers that are no weights, such as a version, are passed over.
  """
  used = {entry.theirs: entry for entry in imported.entries}
  copies = {copy: entry.theirs for entry in imported.entries for copy in entry.copies}
  for name, info in folder.tensors.items():
    known = name in used or name in copies or name in imported.computed
    if known and info.dtype not in TYPES:
      raise UserError(f'{name!r} of {folder.path} has type {info.dtype}: types are {", ".join(TYPES)}; convert it')
    if not known and not info.is_integer and not imported.is_unused(name):
      raise UserError(f'{folder.path} has a tensor {name!r} that is not known here: is it of another release?')
    if name in copies:
      _check_copy(folder, name, copies[name])
    if name in imported.computed:
      _check_computed(folder, name, imported.computed[name])
  for name, entry in used.items():
    if not entry.ours:
      continue
    shape, theirs = specs[entry.ours].shape[0 if entry.expert is None else 1 :], folder.tensors[name].shape
    if not entry.fits(theirs, shape, imported.symbols):
      needed = entry.shape_there(specs[entry.ours], imported.symbols)
      raise UserError(
        f'{folder.path}: {name!r} has shape {list(theirs)}, and its configuration asks for {needed}: fetch it again'
      )


def _check_copy(folder: HubFolder, name: str, of: str) -> None:
  """Refuses a tensor that the configuration ties to another one, where it has other values."""
  shape = folder.tensors[of].shape
  parts = checkpoint.blocks(shape, checkpoint.PART_BYTES // 4)
  is_equal = lambda rows: np.array_equal(folder.read(name, rows), folder.read(of, rows), equal_nan=True)
  if folder.tensors[name].shape != shape or not all(is_equal(rows) for rows, *_ in parts):
    raise UserError(
      f'{folder.path}: {name!r} must be {of!r} again, as its configuration ties them; saw other values: fetch it '
      'again, or say which of them is meant (tie_word_embeddings=false, or one tensor taken out)'
    )


def _check_computed(folder: HubFolder, name: str, compute: Callable[[Sequence[int]], np.ndarray]) -> None:
  """Refuses a tensor that the class reads and that is computed here, where it has other values."""
  stated = folder.read(name).astype(np.float32)
  if stated.ndim != 2 or not np.allclose(stated, compute(stated.shape), atol=0.01):  # of float16 and bfloat16 too
    raise UserError(f'{folder.path}: {name!r} must have the values that are computed here; saw others: fetch it again')


def _write_weights(run: RunDir, weights: Iterator[Slice]) -> None:
  prefix = run.checkpoints().path(0)
  os.makedirs(os.path.dirname(prefix))
  try:
    checkpoint.write_parts(prefix, itertools.chain([Slice('step', (), (), np.asarray(0, np.int64))], weights))
  except tf.errors.OpError as e:
    raise UserError(f'{prefix} could not be written ({errors.reason(e)}): make room there') from None


def _adapters(program: Program) -> Iterator[Slice]:
  initial = weights_lib.initialize(program.adapter_specs, program.seed)
  return checkpoint.slices_by_layer(Slice(n, tuple(a.shape), (0,) * a.ndim, a.numpy()) for n, a in initial.items())


def _slices(folder: HubFolder, imported: Imported, shapes, odd: list[str]) -> Iterator[Slice]:
  """The weights, a tensor at a time; a large table of symbols in parts.

  Names of tensors that are not finite are added to `odd`.
  """
  for entry in imported.entries:
    read = functools.partial(_read, folder, entry.theirs, odd)
    if not entry.ours:
      read()
      continue
    shape = shapes[entry.ours]
    if entry.kind == 'symbols' and 4 * math.prod(shape) > checkpoint.PART_BYTES:
      for rows, *rest in checkpoint.blocks(shape, checkpoint.PART_BYTES // 4):
        yield Slice(entry.ours, shape, (rows.start, *(0 for _ in rest)), imported.symbols.inwards(read, rows))
    elif entry.expert is None:
      yield Slice(entry.ours, shape, (0,) * len(shape), entry.inwards(read(), shape, imported.symbols))
    else:
      weight = entry.inwards(read(), shape[1:], imported.symbols)[np.newaxis]
      yield Slice(entry.ours, shape, (entry.expert, *(0,) * (len(shape) - 1)), weight)


def _read(folder: HubFolder, name: str, odd: list[str], rows: slice = slice(None)) -> np.ndarray:
  """Rows of a tensor; its name is added to `odd` where they are not finite."""
  tensor = folder.read(name, rows).astype(np.float32, copy=False)
  if name not in odd and not np.isfinite(tensor).all():
    odd.append(name)
  return tensor
