"""Exported model: a folder that `lingvo-moe export --format=litert` wrote, with its settings and graphs."""

import os
from collections.abc import Sequence

from lingvo_moe.addons.engine import manifest
from lingvo_moe.addons.engine.graph import available_threads
from lingvo_moe.addons.engine.lanes import Lanes
from lingvo_moe.core.length_norm import LengthNorm
from lingvo_moe.storage import files
from lingvo_moe.text.repetition import FIELDS, Repetition
from lingvo_moe.text.text_model import TextModel


class ExportedModel(TextModel):
  """Model in the folder of an export, of a task that a subclass knows; a TextModel.

  Args:
    path: the folder, whose files are compared with their hashes.
    threads: number of threads; None: as many as there are cores.
    graphs: their names; see Lanes.
  """

  def __init__(self, path: str, threads: int | None, graphs: Sequence[str]) -> None:
    self.settings = settings = manifest.read(path)  # values of the manifest
    self.path, self.model, self.step = path, settings['model'], settings['step']
    # The manifest has the hashes of all files.
    self.fingerprint = files.sha256(os.path.join(path, manifest.MANIFEST))[:16]
    self.checkpoint = f'{settings["checkpoint"]}; {settings["weights"]} weights'
    self.beam_size, self.max_length = settings['beam_size'], settings['max_length']
    self.lanes = Lanes(path, graphs, threads or available_threads())

  @property
  def length_norm(self) -> LengthNorm:
    return LengthNorm(self.settings['length_norm_alpha'], self.settings['length_norm_k'])

  @property
  def repetition(self) -> Repetition | None:
    return Repetition.of(*map(self.settings.__getitem__, FIELDS))

  def __repr__(self) -> str:
    return f'ExportedModel({self.path!r}, {self.model}, {self.checkpoint})'
