"""Configuration of an ensemble, whose values are those of its first member."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from lingvo_moe.models.ensemble import Ensemble
from lingvo_moe.program import Program
from lingvo_moe.tasks import task


class EnsembleConfig:
  """Configuration of an ensemble: values are those of the first of its members, the program is that of all."""

  def __init__(self, members: Sequence[task.TaskConfig]) -> None:
    self._members = [dataclasses.replace(member, scan_layers=False, lora_rank=0, freeze='') for member in members]

  def __getattr__(self, name: str) -> Any:
    return getattr(self._members[0], name)

  def for_inference(self, *arguments: int) -> Self:
    return EnsembleConfig([member.for_inference(*arguments) for member in self._members])

  def program(self) -> Program:
    programs = [member.program() for member in self._members]
    return dataclasses.replace(programs[0], model=Ensemble(tuple(program.model for program in programs)))
