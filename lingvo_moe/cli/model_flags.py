"""Options that choose a registered model, and give values to its fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lingvo_moe.cli.options import OptionGroup, flag


class SettingOptions(OptionGroup):
  """Option --set."""

  set: Sequence[str] = flag(
    (), 'Value of a field of the model, such as batch_tokens=2048 or remat=block; may be repeated.', repeated=True
  )


class ValueOptions(SettingOptions):
  """Options --set and --gin_bindings."""

  gin_file: ClassVar[Sequence[str]] = ()

  gin_bindings: Sequence[str] = flag(
    (), "A gin binding, such as 'MoE8E.batch_tokens = 2048'; may be repeated.", repeated=True
  )

  def resolve(self, model: str, *settings: str, base: Any = None, **overrides) -> Any:
    """The registered model with the options' values, then those of further settings and `overrides`."""
    from lingvo_moe.config import configuration

    return configuration.resolve(model, self.gin_file, self.gin_bindings, (*self.set, *settings), base, **overrides)


class FileOptions(ValueOptions):
  """Options --set, --gin_bindings and --gin_file."""

  gin_file: Sequence[str] = flag((), 'File of gin bindings; may be repeated.', repeated=True)


class ModelOptions(ValueOptions):
  """Options of a command about one registered model."""

  model: str = flag(None, 'A registered model.', required=True)
