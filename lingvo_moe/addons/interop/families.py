"""Families of public checkpoints: a file here and a line in this table.

Each has CLASSES, the keys of every architecture that its config.json may name; TOKENISER, the files of its tokeniser;
convert(folder, config), the folder's model as a run here, given the values of these keys, of which values(config) are
those of the fields of a configuration, and entries(config) tensors there and weights here; and form(ours, models),
files of a folder without weights. `config` has besides these keys the names of the folder's tensors, 'tensors', and
whether transformers 5 or later wrote it, 'is_of_5'.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

from lingvo_moe.addons.interop import m2m100, marian, mixtral, t5, vocabulary
from lingvo_moe.addons.interop.config_keys import EARLY_STOPPING
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.addons.interop.tensor_table import Imported, TensorEntry
from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.search.repetition import FIELDS
from lingvo_moe.storage import files

FAMILIES: tuple[ModuleType, ...] = (marian, m2m100, t5, mixtral)
_BY_CLASS = {name: (family, keys) for family in FAMILIES for name, keys in family.CLASSES.items()}
_VOCABULARIES = ('source_vocab', 'target_vocab', 'vocab')  # fields that name SentencePiece models


def forms(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
  """(architecture, files of a folder without weights) of each family that may hold a model of this configuration."""
  models = {name: files.read(path) for name in _VOCABULARIES if (path := getattr(config, name, '')) not in ('', 'byte')}
  for form in [family.form for family in FAMILIES]:
    try:
      made = form(config, models)
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
  search['early_stopping'] = EARLY_STOPPING[config.early_stopping]
  if config.length_norm_k == 0:
    search['length_penalty'] = config.length_norm_alpha
  if config.repetition:
    search |= {name: getattr(config, name) for name in FIELDS}
  return {
    **made,
    'config.json': {**made['config.json'], **symbols, 'vocab_size': size, 'dtype': 'float32'},
    'generation_config.json': search,
  }


def convert(folder: HubFolder, tensors: Collection[str] | None = None) -> Imported:
  """The folder's model as a run here.

  Args:
    folder: the folder.
    tensors: names of the tensors of a folder without weights; None: it has them.

  Raises:
    UserError: no family knows the model, or a value that it has; with weights, a tensor is not there.
  """
  asked, family, keys = _family(folder)
  config = keys.resolve(folder.file('config.json'), folder.config)
  names = folder.tensors if tensors is None else tensors
  is_of_5 = re.match(r'[5-9]\.', str(folder.config.get('transformers_version')))
  config |= {'model_type': keys.model_type, 'tensors': names, 'is_of_5': bool(is_of_5)}
  keys.check_tokenizer(folder.file('tokenizer_config.json'), vocabulary.settings(folder))
  try:
    if tensors is None:
      _check_tensors(folder, (entry.named(names) for entry in family.entries(config)), config['vocab_size'])
    imported = family.convert(folder, config)
  except UserError:
    raise
  except (KeyError, ValueError) as e:
    raise UserError(
      f'{folder.path} is a {asked} with what is not known here ({type(e).__name__}: {e}): another release of it?'
    ) from None
  entries = [entry.named(names) for entry in imported.entries]
  return imported._replace(entries=entries, unread=keys.unread(folder.config))


def tokeniser(folder: HubFolder) -> tuple[str, ...]:
  """Files of the tokeniser that the folder's family reads, of which a folder need not have all."""
  return _family(folder)[1].TOKENISER


def _family(folder: HubFolder) -> tuple[str, ModuleType, Any]:
  """Architecture that config.json names, its family and its keys; UserError where no family knows it."""
  asked = folder.config.get('architectures')
  asked = asked[0] if isinstance(asked, list) and asked else asked
  if not isinstance(asked, str) or asked not in _BY_CLASS:
    raise UserError(
      f'{folder.file("config.json")} must name an architecture that can be imported ({", ".join(_BY_CLASS)}); saw '
      f'{shown(asked)}'
    )
  return asked, *_BY_CLASS[asked]


def _check_tensors(folder: HubFolder, entries: Iterable[TensorEntry], vocab_size: int) -> None:
  """Refuses a folder without a tensor, or with more or fewer symbols in one, than its configuration asks for.

  Goes before all that takes time or memory by the sizes that a configuration states.
  """
  for entry in entries:
    if entry.theirs not in folder.tensors:
      raise UserError(f'{folder.path} has no tensor {entry.theirs!r}, which its configuration asks for: fetch it again')
    shape = folder.tensors[entry.theirs].shape
    if entry.kind == 'symbols' and vocab_size not in shape:
      raise UserError(
        f'{folder.path}: {entry.theirs!r} has shape {list(shape)}, and its configuration asks for '
        f'vocab_size={vocab_size}: fetch it again'
      )
