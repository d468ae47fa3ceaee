"""Exported model: a folder that `lingvo-moe export --format=litert` wrote, with its settings and graphs."""

import os
from collections.abc import Mapping
from typing import ClassVar

from lingvo_moe.addons.engine import manifest, stages
from lingvo_moe.addons.engine.graph import available_threads
from lingvo_moe.addons.engine.lanes import Lanes
from lingvo_moe.addons.engine.stages import StagedGraph
from lingvo_moe.core.errors import UserError
from lingvo_moe.search.length_norm import LengthNorm
from lingvo_moe.search.repetition import FIELDS, Repetition
from lingvo_moe.storage import files
from lingvo_moe.text.text_model import TextModel


class ExportedModel(TextModel):
  """Model in the folder of an export, of a task that a subclass knows; a TextModel.

  Args:
    path: the folder, whose files are compared with their hashes.
    threads: number of threads; None: as many as there are cores.
  """

  beside: ClassVar[str]  # name of the graph that gives a decoder what it reads

  def __init__(self, path: str, threads: int | None) -> None:
    self.settings = settings = manifest.read(path)  # values of the manifest
    self.path, self.model, self.step = path, settings['model'], settings['step']
    # The manifest has the hashes of all files.
    self.fingerprint = files.sha256(os.path.join(path, manifest.MANIFEST))[:16]
    self.checkpoint = f'{settings["checkpoint"]}; {settings["weights"]} weights'
    self.max_length = settings['max_length']
    self.lanes = Lanes(path, threads or available_threads(), self._check)
    self.graph_width = settings['beam_size']  # of the graph of a beam

  def graphs(self, width: int) -> tuple[str, str]:
    """Names of the graphs for `width` hypotheses: the decoder's, and of the one beside it."""
    return 'single' if width == 1 < self.graph_width else 'decoder', self.beside

  def check_width(self, beam_size: int) -> None:
    """Raises UserError for a beam of more hypotheses than the graphs have."""
    if beam_size > self.graph_width:
      raise UserError(
        f'the graphs of this export have {self.graph_width} hypotheses at most; saw beam_size={beam_size}: export the '
        f'run again with beam_size={beam_size}'
      )

  def _check(self, graphs: Mapping[str, StagedGraph]) -> None:
    for name, width in (('decoder', self.graph_width), ('single', 1)):
      if name in graphs:
        stages.check(self.path, name, graphs[name], graphs[self.beside], width, self.symbols)

  @property
  def beam_size(self) -> int:
    return self.settings['beam_size']

  @property
  def symbols(self) -> int:
    """Number of symbols of the decoder."""
    raise NotImplementedError

  @property
  def length_norm(self) -> LengthNorm:
    return LengthNorm(self.settings['length_norm_alpha'], self.settings['length_norm_k'])

  @property
  def repetition(self) -> Repetition | None:
    return Repetition.of(*map(self.settings.__getitem__, FIELDS))

  def __repr__(self) -> str:
    return f'ExportedModel({self.path!r}, {self.model}, {self.checkpoint})'
