"""Flags --set and --gin_bindings of commands: values of a model's fields."""

from collections.abc import Callable

from absl import flags

flags.disclaim_key_flags()  # they are those of the command that calls define


def define(example: str = 'batch_tokens=2048') -> Callable[[str], list[str]]:
  """Defines the flags; returns a function that gives their bindings for a model's name, once they are parsed."""
  given = flags.DEFINE_multi_string('gin_bindings', [], "gin bindings, e.g. 'MoE8E.ff_dim = 512'; may be repeated.")
  settings = flags.DEFINE_multi_string('set', [], f'Value of a field of the model, such as {example}; may be repeated.')

  def bindings_of(model: str) -> list[str]:
    from lingvo_moe.config import bindings

    return [*given.value, *bindings.from_settings(model, settings.value)]

  return bindings_of
