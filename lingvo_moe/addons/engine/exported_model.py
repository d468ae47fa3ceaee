"""Loading of an export, by LiteRT without TensorFlow."""

from typing import Any

from lingvo_moe.addons.engine import manifest
from lingvo_moe.addons.engine.exported import ExportedModel
from lingvo_moe.addons.engine.exported_generator import ExportedLanguageModel
from lingvo_moe.addons.engine.exported_translator import TranslationModel
from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.search.request import BEAM, SEARCH

# Options that runs have too.
_FIXED = (
  *('model', 'step'),
  *('search', 'sample_temperature', 'top_k', 'top_p', 'sample_seed', 'max_new_tokens'),
)


def load(path: str, threads: int | None = None, **chosen: Any) -> ExportedModel:
  """Loads an export. `chosen` are options of runs, None where not given; those that an export lacks are refused."""
  if threads is not None and not (isinstance(threads, int) and threads > 0):
    raise UserError(f'threads={shown(threads)} is not a whole number from 1 on: leave it out for one on each core')
  make = ExportedLanguageModel if manifest.read(path)['task'] == 'language' else TranslationModel
  model = make(path, threads)
  for name in BEAM.keys() & model.settings.keys():
    if (value := chosen.pop(name, None)) is not None:
      if not BEAM[name].fits(value):
        raise UserError(f'{name} must be {BEAM[name].name}; saw {shown(value)}')
      model.settings[name] = value
  if isinstance(model, TranslationModel) or model.settings['search'] == 'beam':
    model.check_width(model.beam_size)
  if isinstance(model, TranslationModel):
    model.choose_search({name: value for name in SEARCH if (value := chosen.pop(name, None)) is not None})
  fixed = {name: model.settings[name] for name in _FIXED if name in model.settings}
  for name, value in chosen.items():
    if value is not None and name not in fixed:
      raise UserError(f'{name} is for log directories; saw {name}={shown(value)} for the export {path}: leave it out')
    if value is not None and value != fixed[name]:
      raise UserError(
        f'an export has the values that it was made with ({name}={fixed[name]!r}); saw {name}={shown(value)} for '
        f'{path}: leave it out, or export the run again'
      )
  return model
