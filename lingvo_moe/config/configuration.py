"""Resolving a configuration from a model's name and gin bindings, and saving and loading it."""

import dataclasses
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_moe.config import bindings, fields, registry
from lingvo_moe.config import settings as settings_lib
from lingvo_moe.core.errors import UserError, closest, shown
from lingvo_moe.storage import files, json_files

_SOURCE = json_files.optional(json_files.TEXT)
_said: set[str] = set()  # files of which it was said that their model's code has changed


def resolve(
  name: str,
  gin_files: Sequence[str] = (),
  gin_bindings: Sequence[str] = (),
  settings: Sequence[str] = (),
  base: Any = None,
  **overrides,
) -> Any:
  """The model registered as `name`, with the values of bindings, settings and `overrides` in place of its own.

  gin's global bindings are neither read nor written: those that a program makes by gin.parse_config stay its own.

  Args:
    name: of a registered model.
    gin_files: files of bindings.
    gin_bindings: bindings, which count more.
    settings: values of --set, such as 'batch_tokens=2048', which count more still.
    base: a configuration of that model whose values count in place of the model's own.
    **overrides: values of fields, which count most.

  Raises:
    UserError: for an unknown model or field, a value out of its range, a binding that reaches no field, or a value
      that bindings, settings or the model's own class give to a field, and that has no effect.
  """
  cls = registry.get(name)
  bound = bindings.read(name, registry.registered(), gin_files, gin_bindings)
  given = {**bound, **settings_lib.read(cls, settings)}
  config = _make(name, name, {**given, **overrides}, base)
  others, parent = cls if base is None else base, super(cls, cls)
  own = [f for f in inspect.get_annotations(cls) if base is None and getattr(cls, f) != getattr(parent, f, None)]
  try:
    fields.check_effects(config, [f for f in given if getattr(config, f) != getattr(others, f)])
    fields.check_effects(config, [f for f in own if f not in given], given.keys() | overrides.keys())
  except UserError as e:
    raise UserError(f'{name}: {e}') from None
  return config


def save(
  name: str,
  config: Any,
  path: str,
  fingerprints: Mapping[str, str] | None = None,
  left_open: Mapping[str, Any] | None = None,
) -> None:
  """Writes {'model': name, 'values': every field, 'files': fingerprints} as JSON with a checksum.

  Fingerprints are the SHA-256 of the files that the configuration names, by their names. For a model that is not the
  zoo's, 'source' is that of the file that registered it when this was first written; its path is not kept. 'left_open'
  has what was asked for in the place of values that the run chose: {'capacity_factor': 'auto'}.
  """
  written = {'model': name, 'values': dataclasses.asdict(config), 'files': dict(fingerprints or {})}
  written |= {'left_open': dict(left_open)} if left_open else {}
  source = _read(path, source=_SOURCE).get('source') if files.exists(path) else registry.checksum(name)
  files.write(path, json_files.dump(written | ({'source': source} if source else {}), indent=2))


def load(path: str) -> tuple[str, Any]:
  """(model name, configuration) of a file that `save` wrote."""
  read = _read(path, model=json_files.TEXT, values=json_files.PLAIN_OBJECT, source=_SOURCE)
  name, source = read['model'], read.get('source')
  try:
    cls = registry.get(name)
  except UserError as e:
    raise UserError(f'{path}: {e}') from None
  known = {f.name for f in dataclasses.fields(cls)}
  if source and path not in _said and source != registry.checksum(name):
    _said.add(path)
    print(
      f'{cls.__module__} has changed since {path} was written: the run keeps the values there, which --set changes; '
      'its layers are those of the code as it is',
      file=sys.stderr,
    )
  if unknown := next((field for field in read['values'] if field not in known), None):
    raise UserError(f'{path}: {name} has no field {unknown!r} in this version; {closest(unknown, known)}')
  return name, _make(name, f'{path}: {name}', read['values'])


def left_open(path: str, cls: type) -> dict[str, Any]:
  """What was asked for in the place of values that a run chose; of a run of an earlier version nothing."""
  specs, read = fields.specs(cls), _read(path, left_open=json_files.optional(json_files.PLAIN_OBJECT))
  asked = read.get('left_open') or {}
  return {name: value for name, value in asked.items() if name in specs and value in specs[name].open}


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
  """'field=old, now new' for every field in which configurations differ, but for those that old had yet to settle."""
  changed = lambda name, spec: (
    getattr(old, name) != getattr(new, name) and not (name in ignore or (spec.settled and getattr(old, name) is None))
  )
  names = [name for name, spec in fields.specs(type(old)).items() if changed(name, spec)]
  return [f'{name}={shown(getattr(old, name))}, now {shown(getattr(new, name))}' for name in names]


def _make(name: str, label: str, values: dict[str, Any], base: Any = None) -> Any:
  """A configuration with every field given, so that gin, whose bindings fill in what a call leaves out, adds none."""
  cls = registry.get(name)
  others = cls if base is None else base
  try:
    return cls(**{f.name: getattr(others, f.name) for f in dataclasses.fields(cls)} | values)
  except (UserError, TypeError) as e:
    problem = str(e).splitlines()[0]  # gin adds lines of its own
    raise UserError(
      f'{label}: {problem}' if isinstance(e, UserError) else f'{label} cannot be made: {problem}'
    ) from None
