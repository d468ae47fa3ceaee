"""Models that are imported from the fixtures of tests/data/interop, for tests.

The variable LINGVO_MOE_INTEROP names another folder that tools/interop_fixtures.py made.
"""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import tensorflow as tf

from lingvo_moe.core import weights
from lingvo_moe.interop import families
from lingvo_moe.interop.hub_folder import HubFolder
from lingvo_moe.run import importing
from lingvo_moe.run.rundir import RunDir

FIXTURES = pathlib.Path(os.environ.get('LINGVO_MOE_INTEROP') or pathlib.Path(__file__).parent / 'data' / 'interop')


class ImportedModel:
  """A fixture's model as it is imported, and what its own implementation computes."""

  def __init__(self, name, out):
    self.name = name
    importing.import_folder(str(FIXTURES / name), str(out))
    self.run = RunDir(str(out))
    _, self.config = self.run.load()
    self.model = self.config.model()
    specs = {name: spec.shape for name, spec in weights.flatten(self.model.weights()).items()}
    stored = self.run.checkpoints().restore(0, specs)
    self.theta = weights.unflatten({name: tf.constant(tensor[...]) for name, tensor in stored.items()})
    self.symbols = families.convert(HubFolder(str(FIXTURES / name))).symbols
    self.here = {there: i for i, there in reversed(list(enumerate(self.symbols.theirs)))}
    self.expected = dict(np.load(FIXTURES / name / 'expected.npz'))
    self.lines = json.loads((FIXTURES / name / 'expected.json').read_text())

  def ids(self, theirs):
    """Ids here of ids there."""
    return np.vectorize(self.here.get)(theirs).astype(np.int32)
