"""Families of public checkpoints: a file here and a line in this table.

Each has ARCHITECTURES that its config.json may name; convert(folder), the folder's model as a run here, of which
values(config) are those of the fields of a configuration, and entries(config) tensors there and weights here; and
form(ours, models), files of a folder without weights.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from lingvo_moe.core import files
from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.interop import m2m100, marian, mixtral, t5
from lingvo_moe.interop.hub_folder import HubFolder
from lingvo_moe.interop.table import Imported

FAMILIES: tuple[ModuleType, ...] = (marian, m2m100, t5, mixtral)
_VOCABULARIES = ('source_vocab', 'target_vocab', 'vocab')  # fields that name SentencePiece models


def forms(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
  """(architecture, files of a folder without weights) of each family that may hold a model of this configuration."""
  models = {name: files.read(path) for name in _VOCABULARIES if (path := getattr(config, name, '')) not in ('', 'byte')}
  for family in FAMILIES:
    try:
      made = family.form(config, models)
    except (AttributeError, LookupError):  # another task, or no tags
      continue
    yield made['config.json']['architectures'][0], _with_search(made, config)


def _with_search(made: dict[str, Any], config: Any) -> dict[str, Any]:
  """The files with the special symbols of this package, and what search has."""
  symbols = {'pad_token_id': 0, 'bos_token_id': 1, 'decoder_start_token_id': 1, 'eos_token_id': 2}
  symbols |= {name: i for name, i in made['config.json'].items() if name in symbols}
  size = getattr(config, 'source_vocab_size', 0) or config.vocab_size
  forbidden = [[i] for i in (0, 1, *config.masked_symbols)]
  search = symbols | {'num_beams': config.beam_size, 'bad_words_ids': forbidden}
  if config.length_norm_k == 0:
    search['length_penalty'] = config.length_norm_alpha
  return {
    **made,
    'config.json': {**made['config.json'], **symbols, 'vocab_size': size, 'dtype': 'float32'},
    'generation_config.json': search,
  }


def convert(folder: HubFolder) -> Imported:
  """The folder's model as a run here; UserError where no family knows it, or a value that it has."""
  asked = folder.config.get('architectures')
  asked = asked if isinstance(asked, list) and asked else ['none']
  for family in FAMILIES:
    if asked[0] in family.ARCHITECTURES:
      try:
        return family.convert(folder)
      except UserError:
        raise
      except (KeyError, ValueError) as e:
        raise UserError(
          f'{folder.path} is a {asked[0]} with what is not known here ({type(e).__name__}: {e}): another release of it?'
        ) from None
  known = ', '.join(name for family in FAMILIES for name in family.ARCHITECTURES)
  raise UserError(
    f'{folder.file("config.json")} must name an architecture that can be imported ({known}); saw {shown(asked[0])}'
  )
