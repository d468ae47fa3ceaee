"""Manifest of an exported model for the engine: what its files are, with their hashes, and how it decodes."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.core.errors import UserError
from lingvo_moe.search import repetition
from lingvo_moe.search.request import BEAM, SEARCHES
from lingvo_moe.storage import files, json_files
from lingvo_moe.storage.json_files import (
  BOOLEAN,
  INTEGER,
  NUMBER,
  TEXT,
  Kind,
  between,
  by_name,
  list_of,
  one_of,
  optional,
)
from lingvo_moe.vocab.language_tags import SIDES

MANIFEST = 'manifest.json'
FORMAT = 'lingvo_moe engine'
VERSION = 5
REQUIREMENTS_FILE = 'requirements.txt'
# All that the engine needs besides this package; setup.py's extra [litert] has the same ai-edge-litert.
REQUIREMENTS = (
  'absl-py>=2.1',
  'ai-edge-litert>=2.3,<3',
  'numpy>=2.0',
  'sentencepiece>=0.2.3',
  'regex>=2024.4.16',
  'sentencex>=1.0.32,<2',
  'tqdm>=4.66',
)

_MOST = 2**31 - 1
_PAIR = Kind('a pair of strings', lambda value: list_of(TEXT).fits(value) and len(value) == 2)
VALUES = {
  'model': TEXT,
  'step': between(INTEGER, 0, 2**63 - 1),
  'checkpoint': TEXT,
  'weights': one_of('float32', 'int8'),
  'task': one_of('language', 'translation'),
  **{name: BEAM[name] for name in ('beam_size', 'length_norm_alpha', 'early_stopping', *repetition.FIELDS)},
  'length_norm_k': between(NUMBER, 0, 1e6),
  'sample_temperature': between(NUMBER, 0, 1e6),
  'top_k': between(INTEGER, 0, _MOST),
  'top_p': between(NUMBER, 1e-6, 1),
  'sample_seed': between(INTEGER, 0, _MOST),
  'files': by_name(TEXT),
}
# Values of each task besides, and the files that it reads at least.
_OF_TASK = {
  'language': {
    'vocab': TEXT,
    'search': one_of('beam', 'greedy', 'sample'),
    'max_length': between(INTEGER, 0, 10**6),
    'max_new_tokens': between(INTEGER, 1, 10**6),
  },
  'translation': {
    'search': one_of(*SEARCHES),
    'max_length': between(INTEGER, 3, 10**6),
    'mbr_samples': between(INTEGER, 1, 4096),
    **{name: BEAM[name] for name in ('decode_ratio', 'decode_extra')},
    'batch_tokens': between(INTEGER, 1, _MOST),
    'num_experts': optional(between(INTEGER, 0, _MOST)),
    'layers': optional(between(INTEGER, 0, _MOST)),
    'several_sentences': optional(between(NUMBER, 0, 1)),
    'long_line': optional(between(NUMBER, 0, 1e9)),
    'tags': by_name(between(INTEGER, 0, _MOST)),
    'tagged': BOOLEAN,
    'pairs': list_of(_PAIR),
    'gate_pairs': list_of(_PAIR),
    'tag_sides': one_of(*SIDES),
    'begin': between(INTEGER, 0, _MOST),
  },
}
_FILES = {
  'language': ('decoder.tflite', 'reader.tflite'),
  'translation': ('decoder.tflite', 'encoder.tflite', 'source.model', 'target.model'),
}
_WAY_OUT = 'export the run again with lingvo-moe export RUN OUT --format=litert'


def is_export(path: str) -> bool:
  """Whether a folder is an export for the engine, and not a log directory."""
  return os.path.isfile(os.path.join(path, MANIFEST))


def write(folder: str, settings: Mapping[str, Any], names: Sequence[str]) -> None:
  """Writes the manifest of a folder that has these files."""
  hashes = {name: files.sha256(os.path.join(folder, name)) for name in names}
  manifest = {'format': FORMAT, 'version': VERSION, **settings, 'files': hashes}
  files.write(os.path.join(folder, MANIFEST), json_files.dump(manifest, indent=2))


def read(folder: str) -> dict[str, Any]:
  """The manifest of a folder, whose files are all there and unchanged.

  Raises:
    UserError: there is none, it is of another version, a value is not of its kind, or a file is missing or was changed.
  """
  path = os.path.join(folder, MANIFEST)
  try:
    manifest = json_files.read(path, 'the manifest of an export', _WAY_OUT, version=between(INTEGER, 1, _MOST))
  except FileNotFoundError:
    raise UserError(f'{folder} is no export for the engine: it has no {MANIFEST}; {_WAY_OUT}') from None
  if manifest.get('format') != FORMAT:
    raise UserError(f'{path} is not the manifest of an export (format {manifest.get("format")!r:.60}): {_WAY_OUT}')
  if manifest['version'] != VERSION:
    raise UserError(
      f'{path} has version {manifest["version"]}, and this version of lingvo_moe reads {VERSION}: install the '
      f'version that wrote it, or {_WAY_OUT}'
    )
  try:
    json_files.check(manifest, task=VALUES['task'])
    json_files.check(manifest, **VALUES, **_OF_TASK[manifest['task']])
  except ValueError as e:
    raise UserError(f'{path} is not the manifest of an export ({e}): {_WAY_OUT}') from None
  _check_files(folder, manifest)
  return manifest


def _check_files(folder: str, manifest: Mapping[str, Any]) -> None:
  """Raises UserError where a file is missing, was changed, or is none of the export's."""
  is_beam = manifest['beam_size'] > 1 and (manifest['task'] == 'translation' or manifest['search'] == 'beam')
  single = {'single.tflite'} if is_beam else set()
  needed = {
    *_FILES[manifest['task']],
    *single,
    *({manifest['vocab']} - {'byte'} if manifest['task'] == 'language' else ()),
  }
  graphs = {name for name in os.listdir(folder) if name.endswith('.tflite')}
  for name in sorted((needed | graphs) - manifest['files'].keys()):
    file_path = os.path.join(folder, name)
    raise UserError(
      f'{MANIFEST} must name all files of an export; saw none of {file_path}: copy the folder, or {_WAY_OUT}'
    )
  for name, expected in manifest['files'].items():
    file_path = os.path.join(folder, name)
    if os.path.basename(name) != name or not os.path.isfile(file_path):
      raise UserError(f'{file_path}, which {MANIFEST} names, is missing: copy the whole folder, or {_WAY_OUT}')
    if files.sha256(file_path) != expected:
      raise UserError(f'{file_path} was changed since it was exported (SHA-256): copy it again, or {_WAY_OUT}')
