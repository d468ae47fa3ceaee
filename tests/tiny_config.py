"""Small translation model, one layer a stack, for tests that take a few steps on random ids."""

from typing import Any

from lingvo_moe.config import registry

MODEL = 'mt.cldr.Tiny'
_SIZES = {
  'source_vocab_size': 60,
  'target_vocab_size': 50,
  'batch_tokens': 64,
  'max_length': 16,
  'encoder_layers': 1,
  'decoder_layers': 1,
  'moe_every': 1,
  'num_groups': 2,
}


def make(**changes: Any) -> Any:
  """The configuration, with other values for some fields."""
  return registry.get(MODEL)(**_SIZES | changes)
