"""The form of an imported checkpoint: its public configuration and tokeniser, which runs made of it carry along."""

import os

from lingvo_moe.config import configuration, same_function
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.storage import files, log_directory


def keep(run: RunDir, source: RunDir) -> None:
  """Copies the form that a run was imported in to one that has its weights, where the model is the same."""
  if not files.exists(source.file(log_directory.IMPORTED)):
    return
  (_, ours), (_, theirs) = run.load(), source.load()
  fingerprints = configuration.fingerprints(run.config_file) == configuration.fingerprints(source.config_file)
  if fingerprints and same_function.is_same(ours, theirs):
    names = [os.path.join(log_directory.ORIGINAL, name) for name in files.listdir(source.file(log_directory.ORIGINAL))]
    files.makedirs(run.file(log_directory.ORIGINAL))
    for name in (*names, log_directory.IMPORTED):
      files.write(run.file(name), files.read(source.file(name)))
