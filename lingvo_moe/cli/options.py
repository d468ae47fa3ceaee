"""Options of a command: frozen dataclasses of values, each field of which is a flag.

>>> class Options(OptionGroup):
...   lines: int = flag(64, 'Lines of a batch.', lower_bound=1)
"""

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, Self

from absl import flags

flags.disclaim_key_flags()  # they are those of the command that defines them

_DEFINE = {
  str: flags.DEFINE_string,
  int: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  bool: flags.DEFINE_bool,
  Sequence[str]: flags.DEFINE_list,
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


@typing.dataclass_transform(frozen_default=True, field_specifiers=(flag,))
class OptionGroup:
  """Base of options; every subclass is made a frozen dataclass."""

  def __init_subclass__(cls):
    dataclasses.dataclass(frozen=True)(cls)

  @classmethod
  def define_flags(cls, module: str | None = None) -> None:
    """Defines the flags, those of base classes too; not done by an import, as commands have flags of the same names.

    `module` is the name of the command's module, whose flags they are in --help; None: that of the caller.
    """
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
      without_none = typing.get_args(types[field.name] | None)[0]
      define = field.metadata['define'] or _DEFINE[without_none]
      default = list(field.default) if isinstance(field.default, tuple) else field.default
      define(field.name, default, module_name=module, **field.metadata['arguments'])

  @classmethod
  def from_flags(cls) -> Self:
    return cls(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(cls)})
