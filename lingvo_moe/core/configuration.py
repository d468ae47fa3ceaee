"""Resolving a configuration from a model's name and gin bindings, and saving and loading it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import gin

from lingvo_moe.core import bindings
from lingvo_moe.core import fields
from lingvo_moe.core import files
from lingvo_moe.core import json_files
from lingvo_moe.core import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import closest
from lingvo_moe.core.errors import shown


def resolve(
  name: str, gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = (), base: Any = None, **overrides
) -> Any:
  """The model registered as `name`, with gin's values, then `overrides`, in place of its own.

  Args:
    name: of a registered model.
    gin_files: files of bindings.
    gin_bindings: bindings, which count more.
    base: a configuration of that model whose values count in place of the model's own.
    **overrides: values of fields, which count most.

  Raises:
    UserError: for an unknown model or field, a value out of its range, or a binding without effect.
  """
  cls = registry.get(name)
  values = bindings.read(name, gin_files, gin_bindings)
  if base is not None:
    return _make(
      cls, name, {**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)}, **values, **overrides}
    )
  gin.clear_config()
  for field, value in values.items():
    gin.bind_parameter(f'{cls.__module__}.{cls.__name__}.{field}', value)
  try:
    return _make(cls, name, overrides)
  finally:
    gin.clear_config()


def save(name: str, config: Any, path: str, fingerprints: Mapping[str, str] | None = None) -> None:
  """Writes {'model': name, 'values': every field, 'files': fingerprints} as JSON with a checksum.

  Args:
    name: of the model.
    config: the configuration.
    path: of the file.
    fingerprints: SHA-256 of the files that the configuration names, by their names.
  """
  written = {'model': name, 'values': dataclasses.asdict(config), 'files': dict(fingerprints or {})}
  files.write(path, json_files.dump(written, indent=2))


def load(path: str) -> tuple[str, Any]:
  """(model name, configuration) of a file that `save` wrote; gin has no say in it."""
  read = _read(path, model=json_files.TEXT, values=json_files.PLAIN_OBJECT)
  name, values = read['model'], read['values']
  gin.clear_config()
  cls = registry.get(name)
  known = {f.name for f in dataclasses.fields(cls)}
  for field in values:
    if field not in known:
      raise UserError(f'{path}: {name} has no field {field!r} in this version; {closest(field, known)}')
  return name, _make(cls, f'{path}: {name}', {k: _as_tuples(v) for k, v in values.items()})


def fingerprints(path: str) -> dict[str, str]:
  """Fingerprints that `save` wrote; none of an earlier version."""
  return _read(path, files=json_files.optional(json_files.by_name(json_files.TEXT))).get('files') or {}


def _read(path: str, **kinds: json_files.Kind) -> dict[str, Any]:
  way_out = 'restore it from a copy, or, where it was edited by hand, remove its line "crc32" and the comma before'
  try:
    return json_files.read(path, 'a configuration written by the trainer', way_out, **kinds)
  except FileNotFoundError:
    raise UserError(
      f'there is no run in {os.path.dirname(path) or "."} (no file {path}): train one there first, '
      'or give the --logdir of another'
    ) from None


def differences(old: Any, new: Any, ignore: Sequence[str] = ()) -> list[str]:
  """'field=old, now new' for every field in which two configurations differ; one that old had yet to settle does not."""
  open_in_old = {name for name, spec in fields.specs(type(old)).items() if spec.settled and getattr(old, name) is None}
  return [
    f'{f.name}={shown(getattr(old, f.name))}, now {shown(getattr(new, f.name))}'
    for f in dataclasses.fields(old)
    if f.name not in open_in_old.union(ignore) and getattr(old, f.name) != getattr(new, f.name)
  ]


def _as_tuples(value):
  return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _make(cls: type, label: str, values: dict[str, Any]) -> Any:
  try:
    return cls(**values)
  except UserError as e:
    raise UserError(f'{label}: {str(e).splitlines()[0]}') from None  # gin adds lines of its own
  except TypeError as e:
    raise UserError(f'{label} cannot be made: {str(e).splitlines()[0]}') from None
