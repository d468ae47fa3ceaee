"""The form of an imported checkpoint: its public configuration and tokeniser, which runs made of it carry along."""

import dataclasses
import os

from lingvo_moe.config import configuration, fields
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.storage import files, log_directory
from lingvo_moe.tasks.task import TaskConfig

# Fields that change how a model is trained or computed, not the function that it is.
_OF_TRAINING = (
  'activation_dtype aux_loss_weight batch_tokens capacity_factor eval_batch_tokens expert_output_masking '
  'gate_init_scale label_smoothing num_groups router_z_loss_weight second_choice window z_loss_weight'
).split()
_OF_TEXT = ('begin', 'tag_sides', 'tag_target')  # of a translation model: symbols around a text


def keep(run: RunDir, source: RunDir) -> None:
  """Copies the form that a run was imported in to one that has its weights, where the model is the same."""
  if not files.exists(source.file(log_directory.IMPORTED)):
    return
  (_, ours), (_, theirs) = run.load(), source.load()
  fingerprints = configuration.fingerprints(run.config_file) == configuration.fingerprints(source.config_file)
  if fingerprints and is_same_function(ours, theirs):
    names = [os.path.join(log_directory.ORIGINAL, name) for name in files.listdir(source.file(log_directory.ORIGINAL))]
    files.makedirs(run.file(log_directory.ORIGINAL))
    for name in (*names, log_directory.IMPORTED):
      files.write(run.file(name), files.read(source.file(name)))


def free_fields(config: TaskConfig) -> set[str]:
  """Fields that do not change the function that a model is."""
  names = [field.name for field in dataclasses.fields(config)]
  return {*fields.may_change(type(config)), *_OF_TRAINING, *(name for name in names if name.endswith('dropout'))}


def is_same_function(config: TaskConfig, other: TaskConfig) -> bool:
  """Whether models of two configurations compute the same from the same weights at inference."""
  free = {name: getattr(other, name) for name in free_fields(config) if hasattr(other, name)}
  text = [[getattr(c, name, None) or None for name in _OF_TEXT] for c in (config, other)]
  alike = dataclasses.replace(config, **free)
  return text[0] == text[1] and alike.model() == other.model()
