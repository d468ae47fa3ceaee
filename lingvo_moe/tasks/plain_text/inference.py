"""Configuration of a model of plain text at inference, where results do not depend on the number of groups."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
  from lingvo_moe.tasks.plain_text.config import PlainTextConfig
  from lingvo_moe.tasks.task import Runner

_Config = TypeVar('_Config', bound='PlainTextConfig')


def at_inference(config: _Config, runner: Runner, row_tokens: int, batch_tokens: int = 0) -> _Config:
  """The configuration with a group for each device that holds rows, and a batch that has a row of each group.

  Args:
    config: of the run.
    runner: a runtime.
    row_tokens: tokens of a row.
    batch_tokens: tokens of a batch, at least; 0: as configured.
  """
  groups = runner.row_multiple
  tokens = max(batch_tokens or config.eval_batch_tokens or config.batch_tokens, row_tokens * groups)
  return dataclasses.replace(config, num_groups=groups, micro_batches=1, eval_batch_tokens=tokens, batch_tokens=tokens)
