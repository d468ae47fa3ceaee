"""Length of a run, chosen from the size of its corpus: steps of training, of warmup and between evaluations.

Fields of a configuration that are None are chosen when a run begins; it keeps the numbers.
"""

import dataclasses
import math
from typing import Any

from lingvo_moe.core.errors import UserError, plural

POSITIONS = 20_000  # total positions of training = POSITIONS * sqrt(positions of an epoch)
EVALUATIONS = 20
_LEAST, _FEW = 100, 2000  # lines without which no run begins; examples below which they are said to be few
_WAY_OUT = (
  'fine-tune a public model (lingvo-moe import), begin with a run of related text (--init_from), or add text, also '
  'back-translated'
)
FIELDS = ('max_steps', 'eval_every', 'warmup_steps')


def too_few(lines: int) -> str:
  """Why a corpus has too few lines for steps to be chosen, and the way out; '' where it has enough."""
  if lines >= _LEAST:
    return ''
  return (
    f'max_steps is chosen for corpora of at least {_LEAST} lines; saw {lines}, from which no model learns to '
    f'translate: {_WAY_OUT}; or give --max_steps'
  )


def is_open(config: Any) -> bool:
  """Whether a field is left to the corpus."""
  return any(getattr(config, name, 0) is None for name in FIELDS)


def check(lines: int) -> None:
  """UserError if a corpus has too few lines for steps to be chosen."""
  if why := too_few(lines):
    raise UserError(why)


def settled(config: Any, steps_per_epoch: float | None, examples: int) -> tuple[Any, str]:
  """The configuration with numbers in place of None, and a line that says which and why.

  Compute grows with the square root of the corpus: a small one is read more often, until more epochs teach no more.
  """
  if steps_per_epoch is None:
    raise UserError(f'{FIELDS[0]} is chosen for text that has an end, and this has none: give --max_steps and the like')
  epoch = max(steps_per_epoch, 1e-3) * config.batch_tokens
  every = max(1, round(POSITIONS * math.sqrt(epoch) / config.batch_tokens / EVALUATIONS))
  steps = config.max_steps or every * EVALUATIONS
  chosen = {
    'max_steps': every * EVALUATIONS,
    'eval_every': max(1, round(steps / EVALUATIONS)),
    'warmup_steps': min(4000, max(1, steps // 10)),
  }
  chosen = {name: value for name, value in chosen.items() if getattr(config, name) is None}
  values = ', '.join(f'{name}={value}' for name, value in chosen.items())
  why = f'chosen for {plural(examples, "example")}, {steps_per_epoch:,.0f} steps an epoch: {values}'
  if config.max_steps is None and examples < _FEW:
    why += f'. That is little text, and the model will make many mistakes: {_WAY_OUT}'
  return dataclasses.replace(config, **chosen), why
