"""Values of --set FIELD=VALUE, as Python writes them, each of the type of its field; text needs no quotes."""

import ast
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_moe.config import fields
from lingvo_moe.core.errors import UserError, closest, shown


def read(cls: type, settings: Sequence[str]) -> dict[str, Any]:
  """Values that --set gives to fields of a configuration class; of two for a field the last counts.

  A value that is not of its field's type is left as it was read, for fields.check to refuse.

  Raises:
    UserError: for text that is no setting, a field that the class has not, or quotes and brackets that do not match.
  """
  known, values = [field.name for field in dataclasses.fields(cls)], {}
  for setting in settings:
    name, equals, text = setting.partition('=')
    name, text = name.strip().removeprefix(f'{cls.__name__}.'), text.strip()
    if not equals or not text:
      raise UserError(f'--set gives a field a value, such as --set batch_tokens=2048; saw {shown(setting)}')
    if name not in known:
      raise UserError(f'{cls.__name__} has no field {shown(name)}; {closest(name, known)}')
    value = _literal(text)
    if value is text and text[0] in '\'"([{#%@':
      raise UserError(
        f'--set {name} takes a value as Python writes it, or text, in quotes where it begins with {text[0]}; saw '
        f'{shown(text)}: close quotes and brackets, and use macros in --gin_bindings'
      )
    values[name] = value
    with contextlib.suppress(TypeError, OverflowError):
      values[name] = fields.converted(value, fields.types(cls)[name])
  return values


def _literal(text: str) -> Any:
  """A literal of Python, whose tuples have their brackets; any other text is itself: de-en, or 1,2, or +1, or ..."""
  with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    value = ast.literal_eval(text)
    if value is not ... and text[0] != '+' and (text[0] == '(' or not isinstance(value, tuple)):
      return value
  return text
