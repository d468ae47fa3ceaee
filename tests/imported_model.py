"""Models that are imported from the fixtures of tests/data/interop, for tests.

The variable LINGVO_MOE_INTEROP names another folder that tools/interop_fixtures.py made.
"""

import json
import os
import pathlib
import shutil

import numpy as np
import sentencepiece
import tensorflow as tf

from lingvo_moe.addons.interop import families, importing
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.config import configuration
from lingvo_moe.core import weights
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime.local import LocalRuntime

FIXTURES = pathlib.Path(os.environ.get('LINGVO_MOE_INTEROP') or pathlib.Path(__file__).parent / 'data' / 'interop')
TEXT = ['Ein Hund läuft über die Wiese.', 'A dog runs across the meadow.', 'Wo ist der  Bahnhof?', '']


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


def own_run(name, path, **values):
  """A run of a registered model with initial weights, and its runtime."""
  vocab = path / 'vocab'
  vocab.mkdir(parents=True)
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXT * 3), model_prefix=str(vocab / 'source'), vocab_size=80, hard_vocab_limit=False,
    pad_id=0, bos_id=1, eos_id=2, unk_id=3, user_defined_symbols=['<2de>', '<2en>'], minloglevel=2,
  )  # fmt: skip
  model = str(shutil.copy(vocab / 'source.model', vocab / 'pieces.model'))
  size = sentencepiece.SentencePieceProcessor(model_file=model).get_piece_size()
  fields = ('vocab', 'vocab_size') if name.startswith('lm.') else ('source_vocab', 'source_vocab_size')
  both = {} if name.startswith('lm.') else {'target_vocab': model}
  config = configuration.resolve(name, (), (), **dict(zip(fields, (model, size), strict=True)), **both, **values)
  run = RunDir(str(path))
  run.write_config(name, config)
  runtime = LocalRuntime(config.program())
  runtime.init()
  run.checkpoints().save(runtime)
  return run, config
