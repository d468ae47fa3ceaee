"""Runs that nobody trained, whose weights are larger than usual, so that translations are not all alike."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from whole_state import WholeState

from lingvo_moe.config import configuration
from lingvo_moe.run.rundir import RunDir

MODEL = 'mt.cldr.Tiny'


def begin(folder: pathlib.Path, corpus: pathlib.Path, dev_losses: Mapping[int, float], **fields: Any) -> RunDir:
  """The run in folder/log, of one layer a stack, with a checkpoint of each step that has a dev loss."""
  run = RunDir(str(folder / 'log'))
  sizes = {'target_vocab_size': 280, 'max_length': 32, 'encoder_layers': 1, 'decoder_layers': 1, 'moe_every': 1}
  config = run.begin(MODEL, configuration.resolve(MODEL, data_dir=str(corpus), **sizes | fields))
  for step, dev_loss in dev_losses.items():
    run.checkpoints().save(state_of(config, step, seed=step))
    run.checkpoints().note_dev_loss(step, dev_loss)
  return run


def state_of(config: Any, step: int, seed: int) -> WholeState:
  """Initial weights as a checkpoint of a step."""
  state = dataclasses.replace(config.program(), seed=seed).init()
  weights = {name: 3.0 * w if name.endswith('table') else w for name, w in state['weights'].items()}
  return WholeState({'step': tf.constant(step, tf.int64), 'weights': weights, 'slots': {}})
