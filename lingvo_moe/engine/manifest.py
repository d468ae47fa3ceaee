"""Manifest of an exported model for the engine: what its files are, with their hashes, and how it decodes."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.core import files, json_files
from lingvo_moe.core.errors import UserError

MANIFEST = 'manifest.json'
FORMAT = 'lingvo_moe engine'
VERSION = 2
REQUIREMENTS_FILE = 'requirements.txt'
# All that the engine needs besides this package; setup.py's extra [litert] has the same ai-edge-litert.
REQUIREMENTS = (
  'absl-py>=2.1',
  'ai-edge-litert>=2.3,<3',
  'numpy>=2.0',
  'sentencepiece>=0.2.3',
  'sentencex>=1.0.32,<2',
  'tqdm>=4.66',
)

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
    UserError: there is none, it is of a later version, or a file is missing or was changed.
  """
  path = os.path.join(folder, MANIFEST)
  try:
    manifest = json_files.read(path, 'the manifest of an export', _WAY_OUT, version=json_files.INTEGER)
  except FileNotFoundError:
    raise UserError(f'{folder} is no export for the engine: it has no {MANIFEST}; {_WAY_OUT}') from None
  if manifest.get('format') != FORMAT:
    raise UserError(f'{path} is not the manifest of an export (format {manifest.get("format")!r}): {_WAY_OUT}')
  if manifest['version'] > VERSION:
    raise UserError(
      f'{path} has version {manifest["version"]}, and this version of lingvo_moe reads up to {VERSION}: install the '
      f'version that wrote it, or {_WAY_OUT}'
    )
  json_files.check(manifest, files=json_files.by_name(json_files.TEXT))
  for name, expected in manifest['files'].items():
    own = os.path.join(folder, name)
    if os.path.basename(name) != name or not os.path.isfile(own):
      raise UserError(f'{own}, which {MANIFEST} names, is missing: copy the whole folder, or {_WAY_OUT}')
    if files.sha256(own) != expected:
      raise UserError(f'{own} was changed since it was exported (SHA-256): copy it again, or {_WAY_OUT}')
  return manifest
