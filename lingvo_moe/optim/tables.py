"""Optimizers and learning-rate schedules by the name that a configuration gives them: a class and a line in a table."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lingvo_moe.core.live_names import LiveNames
from lingvo_moe.optim import schedule
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.adam import Adam, AdamW


class Entry(NamedTuple):
  """Class of an optimizer or a schedule, and its arguments."""

  make: Callable[..., Any]
  arguments: Mapping[str, str]  # each with the name of the configuration's field that has its value

  def of(self, config: Any, **values: Any) -> Any:
    """The optimizer or schedule of a configuration, with `values` in place of fields' own; None is left out."""
    arguments = {argument: values.get(name, getattr(config, name)) for argument, name in self.arguments.items()}
    return self.make(**{argument: value for argument, value in arguments.items() if value is not None})


Table = dict[str, Entry]
_WARMUP = {'peak': 'learning_rate', 'warmup': 'warmup_steps'}
_TO_END = {**_WARMUP, 'end': 'max_steps'}
SCHEDULES: Table = {
  'inverse_sqrt': Entry(schedule.InverseSquareRoot, {'rate': 'learning_rate', 'decay_after': 'warmup_steps'}),
  'warmup_inverse_sqrt': Entry(schedule.WarmupInverseSquareRoot, _WARMUP),
  'warmup_linear': Entry(schedule.WarmupLinear, _TO_END),
  'cosine': Entry(schedule.WarmupCosine, {**_TO_END, 'final': 'final_rate'}),
  'wsd': Entry(schedule.WarmupStableDecay, {**_TO_END, 'final': 'final_rate', 'share': 'decay_share'}),
  'constant': Entry(schedule.ConstantRate, {'rate': 'learning_rate'}),
}
OPTIMIZERS: Table = {
  'adafactor': Entry(Adafactor, {'beta2_cap': 'beta2_cap'}),
  'adam': Entry(Adam, {'beta2': 'adam_beta2'}),
  'adamw': Entry(AdamW, {'beta2': 'adam_beta2', 'weight_decay': 'weight_decay'}),
}


@dataclasses.dataclass(frozen=True)
class ThatRead(LiveNames):
  """Names in a table, also of one's own, of which a field of the configuration is an argument."""

  table: Table
  field_name: str

  def holds(self, entry: Entry) -> bool:
    return self.field_name in entry.arguments.values()
