"""Held-out evaluation of an export for the engine; imports no TensorFlow."""

from __future__ import annotations

import types

from lingvo_moe.core import text_model
from lingvo_moe.core.errors import UserError
from lingvo_moe.engine.model import ExportedModel
from lingvo_moe.tasks import task
from lingvo_moe.tasks.mt import held_out


def held_out_job(
  model: ExportedModel, options: task.HeldOutOptions, data_dir: str | None, pairs: str | None
) -> task.HeldOutJob:
  """The decoder's job for an export, on the text of `data_dir`; `pairs`: as of the field, None for those of the run."""
  if not data_dir:
    raise UserError(f'an export has no corpus; saw {model.path}: give its folder as --data_dir')
  settings = model.settings
  own = ','.join('-'.join(pair) for pair in model.pairs())
  names = 'max_length', 'beam_size', 'length_norm_alpha', 'decode_ratio', 'decode_extra'
  config = types.SimpleNamespace(
    **{name: settings[name] for name in names},
    data_dir=data_dir,
    pairs=own if pairs is None else pairs,
    split_files=(),
    dev_lines=0,
    tag_target=settings['tagged'],
  )
  tags = types.SimpleNamespace(tag_id=lambda language: text_model.choose_target(sorted(settings['tags']), language))
  sets = held_out.read(config, options.split, options.max_sentences, tags)
  job = held_out.ScoreJob if options.score else held_out.TranslateJob
  return job(config, sets, model.translator(), held_out.other_targets(sets, model.pairs()))
