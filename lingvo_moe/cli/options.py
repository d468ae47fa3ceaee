"""Options of a command: a frozen dataclass of values, each field of which is a flag.

>>> @dataclasses.dataclass(frozen=True)
... class Options(options.Options):
...   lines: int = flag(64, 'Lines of a batch.', lower_bound=1)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from absl import flags

flags.disclaim_key_flags()  # they are those of the command that defines them

_DEFINE = {
  'str': flags.DEFINE_string,
  'int': flags.DEFINE_integer,
  'float': flags.DEFINE_float,
  'bool': flags.DEFINE_bool,
  'Sequence[str]': flags.DEFINE_list,
}


def flag(default: Any, about: str, one_of: Sequence[str] = (), repeated: bool = False, **limits: Any) -> Any:
  """A field of options, whose flag is of the field's type.

  Args:
    default: its value.
    about: what --help says.
    one_of: the values that it may have; (): any.
    repeated: whether the flag may be repeated, to give a list.
    **limits: lower_bound, upper_bound or required, as absl has them.
  """
  limits |= {'enum_values': one_of} if one_of else {}
  define = flags.DEFINE_enum if one_of else flags.DEFINE_multi_string if repeated else None
  return dataclasses.field(default=default, metadata={'define': define, 'arguments': {'help': about, **limits}})


class Options:
  """Base of options, whose subclasses are frozen dataclasses."""

  @classmethod
  def define_flags(cls, module: str | None = None) -> None:
    """Defines the flags, those of base classes too; not done by an import, as commands have flags of the same names.

    `module` is the name of the command's module, whose flags they are in --help; None: that of the caller.
    """
    for field in dataclasses.fields(cls):
      define = field.metadata['define'] or _DEFINE[field.type.removesuffix(' | None')]
      define(field.name, field.default, module_name=module, **field.metadata['arguments'])

  @classmethod
  def from_flags(cls) -> Self:
    return cls(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(cls)})
