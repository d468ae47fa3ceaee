"""Forms in which a language model is exported, and what each needs besides weights."""

import dataclasses
import os

from lingvo_moe.addons.export import lm_graphs
from lingvo_moe.models.export_forms import EngineParts, Exports
from lingvo_moe.search.repetition import FIELDS
from lingvo_moe.storage import files
from lingvo_moe.tasks.lm.lm_task import BEAM, GENERATION


class LanguageExports(Exports):
  """Forms of a language model, from a lm_task.LanguageTask."""

  def engine_parts(self) -> EngineParts:
    lm_graphs.require(self.task.config)
    config = dataclasses.replace(self.task.config.for_inference(), dispatch='auto', scan_layers=False)
    values = {name: getattr(config, name) for name in (*GENERATION, *BEAM, *FIELDS)}
    name = 'byte' if config.vocab == 'byte' else os.path.basename(config.vocab)
    contents = {} if config.vocab == 'byte' else {name: files.read(config.vocab)}
    width = config.beam_size if config.search == 'beam' else 1
    settings = {'task': 'language', 'vocab': name, 'max_length': self.task.max_length, **values}
    return EngineParts(lm_graphs.make(config, width), contents, settings)
